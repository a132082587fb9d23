"""Training rows: the mask decoded is what the assistant stated, per turn as the model would have seen it."""

import json

import pytest
from hypothesis import given
from talks import TOKENIZER, TOKENS, analysis, call, conversations, final, result, text_of, user

from outpace.text import sft_rows as rows_module
from outpace.text.harmony import Mark, prompt_ids
from outpace.text.harmony_parser import HarmonyParser
from outpace.text.messages import Conversation, Developer, Message, System
from outpace.text.sft_rows import TrainingRow, read_conversations, read_rows, rows

PREAMBLE = Message(role="assistant", channel="commentary", content="I look.")
TALK = Conversation(
    system=System(reasoning="low"),
    developer=Developer(instructions="Be brief."),
    messages=(
        user("one"),
        analysis("first"),
        final("1"),
        user("two"),
        analysis("need it"),
        PREAMBLE,
        call("functions.x", '{"a": 1}'),
        result("functions.x", "7 <|return|>"),
        analysis("have it"),
        final("2"),
        user("three"),
    ),
)


def notes(row, supervised=True):
    """The text the mask selects, or the rest."""
    return [text_of(ids) for own, ids in row.spans() if own is supervised]


def test_a_row_for_every_turn():
    first, second = rows(TALK, TOKENS)
    assert (first.turn, second.turn) == (0, 1)
    assert notes(first) == [
        "<|channel|>analysis<|message|>first<|end|><|start|>assistant<|channel|>final<|message|>1<|return|>"
    ]
    calling, answering = notes(second)
    assert calling == (
        "<|channel|>analysis<|message|>need it<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.x<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    assert answering == (
        "<|channel|>analysis<|message|>have it<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>"
    )
    # the first turn is history now: no thoughts, and <|end|> where it once stopped
    assert "first" not in text_of(second.ids)
    assert "<|start|>assistant<|channel|>final<|message|>1<|end|><|start|>user" in notes(second, False)[0]
    assert notes(second, False)[1] == (
        "<|start|>functions.x to=assistant<|channel|>commentary<|message|>7 <|return|><|end|>"
        "<|start|>assistant"
    )


def test_every_prompt_is_the_one_the_model_would_get():
    """Each stretch the assistant generates at once begins where `prompt_ids` of the history ends."""
    result = rows(TALK, TOKENS)
    for row, at, length in ((result[0], 0, 1), (result[1], 0, 4), (result[1], 1, 8)):
        history = Conversation(system=TALK.system, developer=TALK.developer, messages=TALK.messages[:length])
        prompt = prompt_ids(history, TOKENIZER)
        begins = [i for i in range(1, len(row.ids)) if row.mask[i] and not row.mask[i - 1]]
        assert row.ids[: begins[at]] == prompt


def test_stop_tokens_are_learned_where_the_model_stops():
    stops = [TOKENS.ids[Mark.RETURN], TOKENS.ids[Mark.CALL]]
    for row in rows(TALK, TOKENS):
        for i, token in enumerate(row.ids):
            if token in stops:
                assert row.mask[i]
            if token == TOKENS.ids[Mark.START] and row.mask[i]:  # it goes on by itself, after <|end|>
                assert row.ids[i - 1] == TOKENS.ids[Mark.END] and row.mask[i - 1]
    assert sum(row.ids.count(t) for row in rows(TALK, TOKENS) for t in stops) == 3


def test_turns_without_an_answer():
    cut = Conversation(messages=(user("x"), analysis("hm"), call("functions.x")))
    (row,) = rows(cut, TOKENS)
    assert notes(row)[0].endswith("{}<|call|>")
    (row,) = rows(Conversation(messages=(user("x"), analysis("hm"))), TOKENS)
    assert notes(row) == ["<|channel|>analysis<|message|>hm<|end|>"]
    assert rows(Conversation(messages=(user("x"),)), TOKENS) == []
    assert rows(Conversation(), TOKENS) == []


def test_calls_in_a_row_are_prompted_each():
    """The model stops at a call: what follows one begins with a prompt of its own."""
    (row,) = rows(Conversation(messages=(user("x"), call("functions.a"), call("functions.b"))), TOKENS)
    assert [t.split("<|channel|>")[0] for t in notes(row)] == [" to=functions.a", " to=functions.b"]


def test_what_shall_not_be_learned_is_context():
    conversation = Conversation(
        messages=(
            user("x"),
            analysis("bad", supervised=False),
            final("good"),
            user("y"),
            final("no", supervised=False),
        )
    )
    (row,) = rows(conversation, TOKENS)
    assert notes(row) == ["<|start|>assistant<|channel|>final<|message|>good<|return|>"]
    assert "bad<|end|>" in notes(row, False)[0]


def test_recipients_beside_the_channel():
    row = rows(TALK, TOKENS, recipient_in="channel")[1]
    assert (
        "<|start|>assistant<|channel|>commentary to=functions.x <|constrain|>json<|message|>" in notes(row)[0]
    )


@given(conversations())
def test_the_mask_is_what_the_assistant_generated(conversation):
    """Read back by the parser, the supervised tokens are the assistant's messages, each once."""
    items = []
    for row in rows(conversation, TOKENS):
        assert not row.mask[0]
        for own, ids in row.spans():
            if own:
                parser = HarmonyParser(TOKENS, strict=True)
                parser.feed_all(ids)
                items += [p.message for p in parser.finish() if p.finished]
            else:
                assert TOKENS.ids[Mark.RETURN] not in ids
    assert items == [m for m in conversation.messages if m.role == "assistant"]


def write(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return path


ASKED, SAID = {"role": "user", "content": "größe?"}, {"role": "assistant", "content": "1 🙂"}


def test_a_file_of_conversations(tmp_path):
    path = write(
        tmp_path / "talks.jsonl", {"messages": [ASKED, SAID]}, "", [ASKED], {"messages": [ASKED, SAID] * 2}
    )
    assert [line for line, _ in read_conversations(path)] == [1, 3, 4]
    items = list(read_rows(path, TOKENS, system=System()))
    assert [(row.line, row.turn) for row in items] == [(1, 0), (4, 0), (4, 1)]
    assert all("Knowledge cutoff" in text_of(row.ids) for row in items)
    assert items[0].as_json() == {
        "line": 1,
        "turn": 0,
        "ids": items[0].ids,
        "mask": [int(m) for m in items[0].mask],
    }
    marked = tmp_path / "bom.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert list(read_rows(marked, TOKENS, system=System())) == items


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes at character 2"),
        ("[" * 100_000, "JSON nested too deeply"),
        ('{"messages": 3}', "a conversation is a JSON object with a list of `messages`"),
        ('[{"role": "user"}]', "messages[0].content: there is no text"),
        (r'[{"role": "user", "content": "\ud83d"}]', r"'\ud83d' is half of a surrogate pair"),
        ('[{"role": "user", "content": ' + "9" * 5000 + "}]", "Exceeds the limit"),
    ],
)
def test_errors_name_the_line(tmp_path, line, message):
    path = write(tmp_path / "talks.jsonl", [ASKED], line)
    with pytest.raises(ValueError) as error:
        list(read_rows(path, TOKENS))
    assert str(error.value).startswith(f"{path}, line 2: {message}")


def test_whole_surrogate_pairs_are_characters(tmp_path):
    path = write(tmp_path / "talks.jsonl", r'[{"role": "assistant", "content": "\ud83d\ude42"}]')
    assert "🙂" in notes(next(read_rows(path, TOKENS)))[0]


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_bytes(b'[{"role": "user", "content": "\xff"}]')
    with pytest.raises(ValueError, match=r"line 1: .* can't decode byte 0xff"):
        list(read_conversations(path))


def test_lines_of_any_length_take_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "LONGEST_LINE", 100)
    path = write(tmp_path / "talks.jsonl", [ASKED], "x" * 101)
    with pytest.raises(ValueError, match="line 2: longer than 100 bytes: write one conversation per line"):
        list(read_conversations(path))


def test_a_rows_spans_are_the_row():
    row = TrainingRow(ids=[1, 2, 3, 4], mask=[False, True, True, False], turn=0)
    assert list(row.spans()) == [(False, [1]), (True, [2, 3]), (False, [4])]
    assert list(TrainingRow(ids=[], mask=[], turn=0).spans()) == []
