"""The chat loop: with a scripted target, with small real ones, and as a user types it."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from questions import QUESTION
from rich.console import Console

import outpace
from outpace.api import Model, SamplingParams
from outpace.cli.chat import ChatSession, Screen, run
from outpace.cli.generate import answer_note
from outpace.cli.main import main
from outpace.decode import ahead, native_rounds
from outpace.decode.reuse import PrefixCache
from outpace.drafts.lookup import NGram
from outpace.models.decoder import Output
from outpace.models.load import build, named_tensors
from outpace.models.save import save_target
from outpace.text.harmony_parser import HarmonyChat
from outpace.text.messages import System
from outpace.text.tokenizer import encode, read_tokenizer, train_bpe

TOKENIZER = read_tokenizer(Path(outpace.__file__).parent / "embedded" / "target")
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FIRST = THOUGHT + "<|channel|>final<|message|>größe 🙂<|return|>"
SECOND = "<|channel|>final<|message|>two<|return|>"
CALL = '<|channel|>commentary to=functions.x <|constrain|>json<|message|>{"a": 1}<|call|>'


class Scripted:
    """A target where the next tokens are written, one text for every generation; keeps the prompts it saw.
    After `interrupt` tokens of the output, someone presses Ctrl-C."""

    def __init__(self, *answers, interrupt=None, positions=4096):
        self.answers = [encode(TOKENIZER, answer) for answer in answers]
        self.prompts = []
        self.interrupt = interrupt
        self.config = SimpleNamespace(
            vocab_size=TOKENIZER.get_vocab_size(), max_position_embeddings=positions
        )
        self.device, self.group = torch.device("cpu"), None

    def make_cache(self, batch, length, **more):
        self.prompts.append([])
        self.at = 0
        return SimpleNamespace(lengths=[0] * batch, rounds=None)

    def __call__(self, tokens, cache, *, counts=None, tree=None, aux=(), logits=False):
        if self.at == 0:
            self.prompts[-1] += tokens[0, : counts[0]].tolist()
        hidden = torch.zeros(*tokens.shape, 1)
        return Output(hidden, None, logits=self.logits(hidden) if logits else None)

    def logits(self, hidden):
        if self.at == self.interrupt:
            self.interrupt = None
            raise KeyboardInterrupt
        answer = self.answers[len(self.prompts) - 1]
        logits = torch.zeros(*hidden.shape[:-1], self.config.vocab_size)
        logits[..., answer[self.at]] = 1
        self.at += 1
        return logits


def session(target, **request):
    harmony_chat = HarmonyChat(TOKENIZER, System(reasoning="low"))
    sampling = SamplingParams(**({"max_tokens": 100} | request))
    model = Model(name="scripted", target=target, tokenizer=TOKENIZER)
    return ChatSession(model, harmony_chat, sampling, torch.Generator())


def chat(target, *lines, forgiving=True, terminal=False, **request):
    """-> what a person reads on standard output, and next to it; the turns; the session."""
    texts = io.StringIO(), io.StringIO()
    out, aside = (Console(file=text, width=200, force_terminal=terminal, no_color=True) for text in texts)
    screen, turns, held = Screen(out, aside), [], session(target, **request)

    def speak(of):
        turns.append(of.answer(screen.part))
        screen.line_end()
        if note := answer_note(turns[-1]):
            screen.note(note)

    run(held, lines, speak, screen, forgiving=forgiving)
    return texts[0].getvalue(), texts[1].getvalue(), turns, held


def shown(prompt):
    return TOKENIZER.decode(prompt, skip_special_tokens=False)


def test_two_turns():
    target = Scripted(FIRST, SECOND)
    out, aside, turns, _ = chat(target, "one", "", "two?")
    assert out == "größe 🙂\ntwo\n" and aside == "hm\n"
    assert [turn.text for turn in turns] == ["größe 🙂", "two"]
    assert all(turn.finish_reason == "stop" and answer_note(turn) is None for turn in turns)
    assert shown(target.prompts[0]).endswith("<|start|>user<|message|>one<|end|><|start|>assistant")
    assert shown(target.prompts[1]).endswith(
        "<|start|>user<|message|>one<|end|><|start|>assistant<|channel|>final<|message|>größe 🙂<|end|>"
        "<|start|>user<|message|>two?<|end|><|start|>assistant"
    )


def test_a_terminal_gets_everything():
    out, aside, _, _ = chat(Scripted(FIRST), "one", terminal=True)
    dimmed, answer = out.splitlines()
    assert aside == "" and dimmed == "\x1b[2mh\x1b[0m\x1b[2mm\x1b[0m" and answer == "größe 🙂"


def test_control_characters_do_not_reach_a_terminal():
    message = "<|channel|>final<|message|>a\x1b[2Jb\x07\x9bc\td<|return|>"
    out, _, turns, _ = chat(Scripted(message), "one", terminal=True)
    assert out == "a\u241b[2Jb\u2407\ufffdc\td\n" and turns[0].text == "a\x1b[2Jb\x07\x9bc\td"
    out, _, _, _ = chat(Scripted(message), "one")  # a file gets what was stated
    assert out == "a\x1b[2Jb\x07\x9bc\td\n"


def test_a_call_and_its_result():
    target = Scripted(CALL, SECOND)
    out, aside, turns, _ = chat(target, "one", "/tool 7 degrees")
    assert out == "two\n"
    assert aside.splitlines() == [
        '-> functions.x {"a": 1}',
        "(functions.x is called: /tool TEXT gives it the result)",
    ]
    assert [part.to for part in turns[0].parts] == ["functions.x"]
    assert "to=assistant<|channel|>commentary<|message|>7 degrees<|end|>" in shown(target.prompts[1])


def test_commands():
    target = Scripted(FIRST, SECOND)
    out, aside, turns, _ = chat(
        target, "one", "/reset", "/help", "/nothing", "/tool 7", "//slash", "/quit", "never"
    )
    assert len(turns) == 2 and out == "größe 🙂\ntwo\n"
    assert "one" not in shown(target.prompts[1]) and "<|message|>/slash<|end|>" in shown(target.prompts[1])
    assert "conversation starts over" in aside and "/reset starts over" in aside
    assert "/nothing is no command" in aside and "no call waits for a result" in aside
    with pytest.raises(ValueError, match="/nothing is no command"):
        chat(Scripted(), "/nothing", forgiving=False)


def test_ctrl_c_stops_the_answer_and_keeps_the_chat():
    target = Scripted(FIRST, SECOND, interrupt=9)
    out, aside, turns, _ = chat(target, "one", "two?")
    assert turns[0].finish_reason == "abort" and len(turns[0].tokens) == 9
    assert "(stopped)" in aside and out.endswith("two\n")
    assert "one" in shown(target.prompts[1])
    stopped = Scripted(FIRST, interrupt=0)
    assert chat(stopped, "one")[2][0].tokens == []


def test_answers_that_are_cut_off_say_so():
    _, aside, turns, _ = chat(Scripted(FIRST), "one", max_tokens=4)
    assert aside.endswith("(no answer (analysis), cut off after 4 tokens: allow more with --max-tokens)\n")
    assert turns[0].finish_reason == "length"
    length = len(encode(TOKENIZER, FIRST))
    out, aside, _, _ = chat(Scripted(FIRST), "one", max_tokens=length - 1)
    assert out == "größe 🙂\n" and f"(cut off after {length - 1} tokens" in aside


def test_answers_without_the_format_are_shown_but_are_no_answers():
    out, aside, turns, _ = chat(Scripted("plain words<|return|>"), "one")
    assert out == "" and turns[0].text == ""
    assert aside == "plain words\n(no answer (other), which is not the model's format)\n"


def test_a_chat_that_outgrows_the_model():
    prompt = len(session(Scripted()).chat.prompt())
    _, aside, turns, held = chat(Scripted(SECOND, positions=prompt + 20), "one", "x " * 100, max_tokens=100)
    assert [turn.text for turn in turns] == ["two"]
    assert "this model's positions end at" in aside and "(/reset)" in aside
    # the question that could not be asked is gone
    assert held.chat.conversation.messages[-1].content == "two"


def test_with_a_real_target():
    """It is cut off in its analysis, with a draft or without."""
    model, answers = outpace.load("default"), []
    for draft in (None, NGram()):
        harmony_chat = HarmonyChat(model.tokenizer, System())
        sampling = SamplingParams(max_tokens=12)
        held = ChatSession(model, harmony_chat, sampling, torch.Generator().manual_seed(0), draft)
        harmony_chat.add_user("What is 4012 + 599?")
        parts = []
        turn = held.answer(parts.append)
        assert len(turn.tokens) == 12 and turn.finish_reason == "length"
        assert {part.kind for part in parts} == {"analysis"}
        assert "".join(part.text for part in parts) == "".join(part.text for part in turn.parts)
        answers.append(turn.tokens)
    assert answers[0] == answers[1]


def command(monkeypatch, capsys, *arguments, stdin=""):
    monkeypatch.setattr("sys.argv", ["outpace", *map(str, arguments)])
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    with pytest.raises(SystemExit) as ended:
        main()
    given = capsys.readouterr()
    return ended.value.code, given.out, given.err


def test_chat_as_json(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "chat", "-m", "hi", "-m", "/ho", "-n", 6, "--json")
    turns = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(turns) == 2
    assert all(len(turn["tokens"]) == 6 and turn["answer"] == "" for turn in turns)
    again = command(
        monkeypatch, capsys, "chat", "-n", 6, "--json", "--draft", "none", stdin="hi\n//ho\n/quit\n"
    )[1]
    assert [json.loads(line)["tokens"] for line in again.splitlines()] == [turn["tokens"] for turn in turns]


def test_chat_in_the_raw_and_with_everything_set(monkeypatch, capsys, tmp_path):
    (tmp_path / "tools.json").write_text('[{"name": "get"}]')
    options = (
        "--system",
        "Be brief.",
        "--tools",
        tmp_path / "tools.json",
        "--date",
        "2025-06-28",
        "--timing",
    )
    code, out, err = command(
        monkeypatch,
        capsys,
        "chat",
        "-m",
        "-",
        "-n",
        6,
        "--raw",
        "--reasoning",
        "high",
        *options,
        stdin="a\nb\n",
    )
    assert code == 0 and out.strip() and "loaded in" in err and "tokens/s, tau" in err


def test_a_part_of_the_model(monkeypatch, capsys):
    options = ("chat", "-m", "hi", "-n", 6, "--json", "--draft", "none")
    whole, part = (
        json.loads(command(monkeypatch, capsys, *options, *more)[1])["tokens"]
        for more in ((), ("--layers", 2))
    )
    assert whole != part


def test_partial_kv_in_a_chat(monkeypatch, capsys):
    options = ("chat", "-m", "x = 1\n" * 40, "-n", 24, "--json")
    few = (
        "--kv-budget",
        24,
        *(x for s in ("n_window_blocks=1", "n_sink_blocks=1") for x in ("--kv-budget-set", s)),
    )
    plain = json.loads(command(monkeypatch, capsys, *options, "--draft", "none")[1])
    data = json.loads(command(monkeypatch, capsys, *options, *few, "--kv-budget-set", "block_size=4")[1])
    assert data["tokens"] == plain["tokens"] and data["partial"]["passed"] >= data["partial"]["confirmed"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "x", "--kv-budget-lossy"), "go with --kv-budget TOKENS"),
        (("no/such",), "no/such is not there"),
        (("-m", " "), "--message: it is empty"),
        (("-m", "x", "--reasoning", "hard"), "reasoning 'hard': known are low, medium, high"),
        (("-m", "x", "-n", 0), "max_new_tokens 0"),
        (("-m", "x", "--tools", "none.json"), "none.json"),
    ],
)
def test_errors_of_chat(monkeypatch, capsys, arguments, message):
    code, _, err = command(monkeypatch, capsys, "chat", *arguments)
    assert code == 2 and message in " ".join(err.split()) and "Traceback" not in err


def test_typed_lines_and_blocks(monkeypatch):
    from outpace.cli.chat import _typed

    typed = iter(["one", KeyboardInterrupt, '"""', "two", "", "three", '"""', "four", EOFError])

    def read(prompt):
        line = next(typed)
        if not isinstance(line, str):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    assert list(_typed()) == ["one", "two\n\nthree", "four"]


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "conversations.jsonl"
    values = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    path.write_text(json.dumps(values) + "\n" + json.dumps(values | {"reasoning": "high"}) + "\n")
    return path


def test_rows_are_shown(monkeypatch, capsys, chats):
    code, out, _ = command(monkeypatch, capsys, "rows", "default", chats)
    assert code == 0 and "line 1, turn 0" in out and "line 2" not in out
    assert "<|start|>assistant\u27e6<|channel|>final<|message|>4<|return|>\u27e7" in out
    assert "2 conversations, 2 rows" in out


def test_rows_as_json(monkeypatch, capsys, chats):
    _, out, _ = command(monkeypatch, capsys, "rows", "default", chats, "--json", "--date", "2025-06-28")
    items = [json.loads(line) for line in out.splitlines()]
    assert [row["line"] for row in items] == [1, 2]
    assert all(len(row["ids"]) == len(row["mask"]) and set(row["mask"]) == {0, 1} for row in items)
    assert "Reasoning: high" in TOKENIZER.decode(items[1]["ids"]) and "2025-06-28" in TOKENIZER.decode(
        items[0]["ids"]
    )
    _, out, _ = command(monkeypatch, capsys, "rows", "default", chats, "--json", "--show", 1)
    assert len(out.splitlines()) == 1


def test_errors_of_rows(monkeypatch, capsys, tmp_path):
    code, _, err = command(monkeypatch, capsys, "rows", "default", tmp_path / "no.jsonl")
    assert code == 2 and "no.jsonl" in err
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user"}]}')
    code, _, err = command(monkeypatch, capsys, "rows", "default", tmp_path / "bad.jsonl")
    assert code == 2 and "bad.jsonl, line 1: messages[0].content" in " ".join(err.split())


def test_help_has_examples(monkeypatch, capsys):
    for name in ("chat", "rows"):
        code, out, _ = command(monkeypatch, capsys, name, "--help")
        assert code == 0 and f"outpace {name}" in " ".join(out.split())


def test_a_model_with_a_chat_template(monkeypatch, capsys, tmp_path):
    """A small random Qwen3: its answer is noise, its prompt is its template's."""
    tokenizer = train_bpe(["some words of a chat " * 9], 280)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    model = build(tiny.config("qwen3", vocab_size=tokenizer.get_vocab_size()))
    tiny.randomise(named_tensors(model))
    save_target(model, tmp_path)
    without_harmony = json.loads(tokenizer.to_str().replace("<|channel|>", "<|other|>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(without_harmony))
    options = ("chat", tmp_path, "-m", "hi", "-n", 7, "--system", "Be brief.", "--json")
    code, _, err = command(monkeypatch, capsys, *options)
    assert code == 2 and "neither Harmony's tokens nor a chat template" in " ".join(err.split())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    )
    code, out, _ = command(monkeypatch, capsys, *options)
    data = json.loads(out)
    asked = "<|im_start|>system Be brief.<|im_end|><|im_start|>user hi<|im_end|><|im_start|>"
    assert code == 0 and data["prompt_tokens"] == len(encode(tokenizer, asked))
    assert len(data["tokens"]) <= 7 and all(part["kind"] == "final" for part in data["parts"])


QUESTIONS = (
    "What is 4012 + 599?", QUESTION, "What is 12 * 31?", "Spell this word backwards: netof", QUESTION, "Why?"
)  # fmt: skip


@pytest.mark.parametrize("draft", ["none", "ngram", "dflash"])
def test_a_chat_that_remembers_answers_as_one_that_reads_all_again(draft, monkeypatch):
    """Over turns, a reset, and Ctrl-C in the middle of an answer."""
    monkeypatch.setattr(ahead, "SECONDS", 1e3)  # as many steps in a call, however long they take
    monkeypatch.setattr(native_rounds, "SECONDS", 1e-9)  # and one round
    model = outpace.load()
    bound = outpace.load_draft(draft, model)
    sampling = SamplingParams(max_tokens=40, prefill_chunk=64)
    chats = [HarmonyChat(TOKENIZER, System()) for _ in range(2)]
    sessions = [
        ChatSession(model, chats.pop(), sampling, torch.Generator(), bound, {}, memory)
        for memory in (PrefixCache(model.target, bound), None)
    ]
    cached = []
    for turn, text in enumerate(QUESTIONS):
        seen = []

        def stop(token):
            seen.append(token)  # noqa: B023
            if turn in (1, 4) and len(seen) == 15:  # noqa: B023
                raise KeyboardInterrupt

        outputs = []
        for chat_session in sessions:
            if turn == 3:
                chat_session.chat.reset()
            seen.clear()
            chat_session.add_user(text)
            outputs.append(chat_session.answer(lambda part: None, stop))
        remembered, fresh = outputs
        assert remembered.tokens == fresh.tokens and remembered.parts == fresh.parts
        assert remembered.trace.accepted == fresh.trace.accepted
        assert (remembered.finish_reason == "abort") == (turn in (1, 4)) and fresh.trace.reused == 0
        cached.append((remembered.trace.reused, remembered.prompt_tokens))
    # all but the last answer's place and the new question, or after a reset what no message changes
    assert cached[0][0] == 0 and all(reused > 20 for reused, _ in cached[1:])
    assert cached[2][0] > cached[1][0] > cached[3][0]
