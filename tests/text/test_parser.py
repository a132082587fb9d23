"""Harmony read back token by token: the reference's texts, characters in pieces, cut and broken output."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from talks import TOKENIZER, TOKENS, analysis, call, conversations, final, golden, ids_of, result, user

from outpace.text.harmony import HarmonyTokens, Mark, prompt_ids
from outpace.text.harmony_parser import HarmonyParser, Parsed, answer
from outpace.text.messages import Conversation, Message
from outpace.text.tokenizer import train_bpe

END, RETURN, CALL = Mark.END, Mark.RETURN, Mark.CALL
BYTE = {
    TOKENS.text_bytes(i): i
    for i in range(TOKENIZER.get_vocab_size())
    if len(TOKENS.text_bytes(i) or b"") == 1
}


def parse(ids, role=None, strict=False):
    parser = HarmonyParser(TOKENS, role=role, strict=strict)
    parser.feed_all(ids)
    return parser.finish()


def read(text, role="assistant", strict=False):
    return parse(ids_of(text), role, strict)


def messages(parsed):
    return [p.message for p in parsed]


def one_byte_each(ids):
    """The same bytes in the smallest tokens."""
    return [
        small
        for i in ids
        for small in (
            [i] if TOKENS.text_bytes(i) is None else [BYTE[bytes([b])] for b in TOKENS.text_bytes(i)]
        )
    ]


def test_the_references_stream():
    parsed = read(golden("test_streamable_parser.txt"), strict=True)
    thought, search, output = messages(parsed)
    assert thought.channel == "analysis" and thought.content.startswith('User asks "Who is')
    assert search == call(
        "browser.search",
        '{"query": "current US president July 2025", "topn": 10, "source": "news"}',
        content_type="code",
        constrained=False,
    )
    assert output == result("browser.search", '{"result": "https://openai.com/"}')
    assert [p.end for p in parsed] == [END, CALL, END] and not any(p.errors for p in parsed)


def test_the_references_tool_message():
    (parsed,) = read(golden("test_tool_response_parsing.txt"), role=None, strict=True)
    assert parsed.message == result("browser.search", '{"result": "https://openai.com/"} ')
    assert not parsed.finished


@given(conversations())
def test_what_was_rendered_is_read_back(conversation):
    ids = prompt_ids(conversation, TOKENIZER, drop_analysis=False, generation_prompt=False)
    parsed = parse(ids, strict=True)
    settings = len(parsed) - len(conversation.messages)
    assert settings == (conversation.system is not None) + (conversation.developer is not None)
    assert tuple(messages(parsed[settings:])) == conversation.messages
    assert [p.end for p in parsed] == [CALL if p.message.is_call else END for p in parsed]
    if not any(m.role == "assistant" and m.channel is None for m in conversation.messages):
        ids = prompt_ids(
            conversation, TOKENIZER, drop_analysis=False, generation_prompt=False, recipient_in="channel"
        )
        assert parse(ids, strict=True) == parsed


@given(conversations())
def test_how_the_bytes_are_cut_into_tokens_does_not_matter(conversation):
    ids = prompt_ids(conversation, TOKENIZER, drop_analysis=False)
    assert parse(one_byte_each(ids)) == parse(ids)


@given(
    st.lists(st.integers(0, 9) | st.integers(0, TOKENIZER.get_vocab_size() + 3), max_size=60), st.booleans()
)
def test_nothing_raises_and_no_tag_gets_out(ids, prompted):
    """Whatever a model generates: deltas are the content, message for message, and hold no special token.
    Only a message that is cut off before its text has none."""
    parser = HarmonyParser(TOKENS, role="assistant" if prompted else None)
    texts = {}
    for delta in parser.feed_all(ids):
        texts[delta.index] = texts.get(delta.index, "") + delta.text
    complete = len(parser.messages)
    parsed = parser.finish()
    for i, p in enumerate(parsed):
        if i < complete or "a message without <|message|>" not in p.errors:
            assert p.message.content == (texts.pop(i) if i < complete else texts.pop(i, ""))
    assert texts == {} and len(parsed) <= complete + 1
    plain = b"".join(TOKENS.text_bytes(i) or b"" for i in ids)
    special = [mark for mark in [*Mark, "<|endoftext|>", "<|MASK|>"] if mark.encode() not in plain]
    shown = "".join(
        " ".join(filter(None, (p.message.content, p.message.channel, p.message.name))) for p in parsed
    )
    assert not any(mark in shown for mark in special)
    assert parser.finish() == parsed


@given(st.lists(st.integers(0, 9) | st.integers(0, TOKENIZER.get_vocab_size()), max_size=40), st.booleans())
def test_strict_reads_the_same_or_refuses(ids, prompted):
    role = "assistant" if prompted else None
    try:
        strict = parse(ids, role, strict=True)
    except ValueError as error:
        assert str(error).startswith("token ")
    else:
        assert strict == parse(ids, role) and not any(p.errors for p in strict)


@given(st.lists(st.binary(min_size=1, max_size=6), max_size=12), st.booleans())
def test_characters_in_pieces(pieces, closed):
    """Deltas are whole characters; what can be none becomes U+FFFD; half a one at the cut is left out."""
    raw = b"".join(pieces)
    ids = ids_of("<|channel|>final<|message|>") + [BYTE[bytes([b])] for b in raw]
    parser = HarmonyParser(TOKENS)
    deltas = parser.feed_all(ids + ([TOKENS.ids[RETURN]] if closed else []))
    (parsed,) = parser.finish()
    assert "".join(d.text for d in deltas) == parsed.message.content
    whole = raw.decode("utf-8", "replace")
    left_out = whole.removeprefix(parsed.message.content)
    assert parsed.message.content + left_out == whole
    assert left_out == "" if closed else left_out in ["\ufffd" * n for n in range(4)]


def test_a_character_comes_when_it_is_whole():
    parser = HarmonyParser(TOKENS)
    parser.feed_all(ids_of("<|channel|>final<|message|>"))
    deltas = [parser.feed(BYTE[bytes([b])]) for b in "a🙂".encode()]
    assert [d and d.text for d in deltas] == ["a", None, None, None, "🙂"]
    assert parser.feed(BYTE[b"\xf0"]) is None
    assert parser.feed(BYTE[b"x"]).text == "\ufffdx"
    assert parser.feed(BYTE[b"\xc3"]) is None
    assert parser.feed(TOKENS.ids[RETURN]).text == "\ufffd"
    assert answer(parser.finish()) == "a🙂\ufffdx\ufffd"


def test_the_state_while_reading():
    parser = HarmonyParser(TOKENS)
    assert parser.header is None
    parser.feed_all(ids_of(" to=functions.x<|channel|>commentary <|constrain|>json"))
    assert parser.header is None and parser.content == ""
    parser.feed_all(ids_of('<|message|>{"a":'))
    assert parser.header == call("functions.x", "") and parser.content == '{"a":'
    assert parser.messages == []
    assert parser.finish() == [Parsed(message=call("functions.x", '{"a":'), end=None)]
    assert parser.header is None


HEADERS = [
    (" to=functions.x<|channel|>commentary <|constrain|>json", call("functions.x", "")),
    ("<|channel|>commentary to=functions.x <|constrain|>json", call("functions.x", "")),
    ("<|channel|>commentary to=functions.x<|constrain|>json", call("functions.x", "")),
    ("<|channel|>commentary functions.x<|constrain|>json", call("functions.x", "")),
    (" to=functions.x<|channel|>commentary json", call("functions.x", "", constrained=False)),
    ("<|channel|>commentary to=functions.x json", call("functions.x", "", constrained=False)),
    (
        "<|channel|>analysis to=python code",
        call("python", "", channel="analysis", content_type="code", constrained=False),
    ),
    ("<|channel|>final <|constrain|>json", final("", content_type="json", constrained=True)),
    ("<|channel|>final json", final("", content_type="json")),
    ("<|channel|>final", final("")),
    ("<|channel|> final ", final("")),
    ("assistant<|channel|>final", final("")),
    ("<|start|>assistant<|channel|>final", final("")),
    (":bob<|channel|>final", final("", content_type=":bob")),
    ("<|end|><|start|>assistant:bob<|channel|>final", final("", name="bob")),
    ("<|end|><|start|>user", user("")),
    ("<|end|><|start|>functions.x", Message(role="tool", name="functions.x", content="")),
    ("<|end|><|start|>functions.x to=assistant<|channel|>commentary", result("functions.x", "")),
    ("<|end|><|start|>lookup to=assistant<|channel|>commentary", result("lookup", "")),
]


@pytest.mark.parametrize(("header", "message"), HEADERS)
def test_headers_as_models_write_them(header, message):
    (parsed,) = read(header + "<|message|>hi<|end|>")
    assert parsed.message == replace(message, content="hi")
    assert parsed.errors == () and parsed.end is END


BROKEN = [
    # plain text: no header ever came, so nothing states that it is an answer
    ("hello", [("assistant", None, "hello", None)], "a message without <|message|>"),
    ("I refuse<|end|>", [("assistant", None, "I refuse", END)], "a message without <|message|>"),
    (
        "<|channel|>analysis I refuse<|end|>",
        [("assistant", "analysis", "I refuse", END)],
        "without <|message|>",
    ),
    ("<|channel|>fin", [("assistant", "fin", "", None)], "without <|message|>"),
    ("<|end|><|start|>user hi there<|end|>", [("user", None, "hi there", END)], "without <|message|>"),
    # the end of one message, or the beginning of the next, was forgotten
    (
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|return|>",
        [("assistant", "analysis", "a", None), ("assistant", "final", "b", RETURN)],
        "<|channel|> inside a message that has no end",
    ),
    (
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b<|return|>",
        [("assistant", "analysis", "a", None), ("assistant", "final", "b", RETURN)],
        "<|start|> inside a message that has no end",
    ),
    (
        "<|channel|>analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b<|return|>",
        [("assistant", "analysis", "a", END), ("assistant", "final", "b", RETURN)],
        "a message without <|start|>",
    ),
    (
        "<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b<|return|>",
        [("assistant", "analysis", "a", END), ("assistant", "final", "b", RETURN)],
        "a message without a role",
    ),
    # tokens where they mean nothing
    (
        "<|channel|>final<|message|>a<|message|>b<|return|>",
        [("assistant", "final", "ab", RETURN)],
        "<|message|> inside",
    ),
    (
        "<|channel|>final<|message|>a<|constrain|>b<|end|>",
        [("assistant", "final", "ab", END)],
        "<|constrain|> inside",
    ),
    ("<|channel|>final<|message|>a<|MASK|>b<|end|>", [("assistant", "final", "ab", END)], "is not text"),
    ("<|channel|>final<|MASK|><|message|>a<|end|>", [("assistant", "final", "a", END)], "is not text"),
    (
        "<|channel|>final<|message|>a<|endoftext|>",
        [("assistant", "final", "a", None)],
        "<|endoftext|> inside",
    ),
    ("<|channel|><|message|>a<|end|>", [("assistant", None, "a", END)], "<|channel|> without a name"),
    (
        "<|channel|>final<|channel|>analysis<|message|>a<|end|>",
        [("assistant", "final", "a", END)],
        "a second <|channel|>",
    ),
    (
        "<|channel|>final<|constrain|><|message|>a<|end|>",
        [("assistant", "final", "a", END)],
        "without a type",
    ),
    (
        "<|channel|>final to=<|message|>a<|end|>",
        [("assistant", "final", "a", END)],
        "to= without a recipient",
    ),
    (
        "<|channel|>final x y z<|message|>a<|end|>",
        [("assistant", "final", "a", END)],
        "unknown words in a header: 'y z'",
    ),
    ("<|end|><|start|>robot<|message|>a<|end|>", [("tool", None, "a", END)], "'robot' is not a role"),
    ("<|end|><|start|>user:<|message|>a<|end|>", [("user", None, "a", END)], "user: without a name"),
    ("<|end|><|start|><|message|>a<|end|>", [("assistant", None, "a", END)], "a message without a role"),
]


@pytest.mark.parametrize(("text", "wanted", "error"), BROKEN)
def test_broken_output_is_kept_and_marked(text, wanted, error):
    parsed = read(text)
    assert [(p.message.role, p.message.channel, p.message.content, p.end) for p in parsed] == wanted
    assert any(error in e for p in parsed for e in p.errors)
    with pytest.raises(ValueError, match=r"^token \d+: "):
        read(text, strict=True)


@pytest.mark.parametrize(
    "text", ["<|return|>", "<|end|><|end|>", "<|start|>", "", "<|start|>assistant<|end|> ", " "]
)
def test_nothing_was_generated(text):
    assert messages(read(text)) in ([], [Message(role="assistant", content="")])


@pytest.mark.parametrize("cut", range(1, 40))
def test_output_cut_anywhere(cut):
    """A cut never loses text, never invents a channel, and is always marked."""
    ids = ids_of(
        "<|channel|>analysis<|message|>thinking of it<|end|>"
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4<|return|>"
    )
    parsed = parse(ids[:cut], "assistant")
    whole = parse(ids, "assistant")
    for p, w in zip(parsed, whole, strict=False):
        assert w.message.content.startswith(p.message.content)
        assert p == w or not p.finished
    assert answer(parsed) in answer(whole)
    assert answer(whole) == "2 + 2 = 4"


def test_answers_are_the_final_channel_alone():
    value = (
        analysis("a"),
        Message(role="assistant", channel="commentary", content="b"),
        call("functions.x"),
        final("c"),
    )
    ids = prompt_ids(Conversation(messages=value), TOKENIZER, drop_analysis=False, generation_prompt=False)
    assert answer(parse(ids)) == "c"
    assert answer(read("no format at all")) == ""


def test_a_small_vocabulary_will_do():
    """Ids are looked up by name: gpt-oss has them elsewhere."""
    tokens = HarmonyTokens(train_bpe(["to=functions " * 50], 277))
    parser = HarmonyParser(tokens)
    parser.feed_all(tokens.encode(["", Mark.CHANNEL, "final", Mark.MESSAGE, "<|end|> 🙂", Mark.RETURN]))
    assert answer(parser.finish()) == "<|end|> 🙂"
