"""Answers as OpenAI's JSON, of tokens that are written here or random: whole, in deltas, in events."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import outpace
from outpace.api import Model, OutputRow, SamplingParams
from outpace.loading import open_chat
from outpace.serve import wire
from outpace.serve.responses import ResponsesBody, Writer
from outpace.serve.stream import joined
from outpace.text.harmony_parser import HarmonyChat
from outpace.text.tokenizer import encode, read_tokenizer

TOKENIZER = read_tokenizer(Path(outpace.__file__).parent / "embedded" / "target")
THOUGHT = "<|channel|>analysis<|message|>hm, größe 🙂<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_x <|constrain|>json<|message|>{"a": "é"}<|call|>'
ANSWER = "<|channel|>final<|message|>größe 🙂 is two<|return|>"


def answered(text, stop=()):
    """-> the answer as the server has it, and its pieces. `text`: or its tokens."""
    config = SimpleNamespace(eos_token_ids=(), vocab_size=TOKENIZER.get_vocab_size())
    model = Model(name="x", target=SimpleNamespace(config=config), tokenizer=TOKENIZER)  # type: ignore[arg-type]
    chat = open_chat("x", TOKENIZER, frozenset(), messages=[{"role": "user", "content": "two?"}])
    sampling = SamplingParams(max_tokens=100, stop=stop)
    row = OutputRow(model, chat.prompt(), sampling, chat)
    row.stop = sampling.request(chat.stop).stop
    tokens = encode(TOKENIZER, text) if isinstance(text, str) else text
    for i in range(0, len(tokens), 3):
        if row.finish is None:
            row.add(tokens[i : i + 3])
    pieces = row.take()
    return SimpleNamespace(row=row, seen=pieces, index=0, sequence=None), pieces


def together(pieces):
    """A message as a client puts it together from deltas."""
    deltas = wire.Deltas()
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for piece in pieces:
        delta = json.loads(json.dumps(deltas.of(piece)))
        for key in ("content", "reasoning"):
            message[key] += delta.get(key, "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert call["type"] == "function" and call["id"].startswith("call_")
                message["tool_calls"].append(call["function"])
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("text", [THOUGHT + ANSWER, ANSWER, THOUGHT + CALL, THOUGHT + PREAMBLE + CALL])
def test_a_message_whole_and_in_deltas(text):
    answer, pieces = answered(text)
    message, streamed = wire.message(answer), together(pieces)
    assert message["reasoning"] == ("hm, größe 🙂" if THOUGHT in text else None)
    content = "I look it up." if PREAMBLE in text else "größe 🙂 is two" if ANSWER in text else None
    assert message["content"] == content and streamed["content"] == (content or "")
    assert streamed["reasoning"] == (message["reasoning"] or "")
    calls = [call["function"] for call in message.get("tool_calls", [])]
    wanted = [{"name": "get_x", "arguments": '{"a": "é"}'}] if CALL in text else []
    assert calls == streamed["tool_calls"] == wanted
    assert wire.finish_of(answer) == ("tool_calls" if wanted else "stop")


def test_a_stop_string_is_no_part_of_the_content():
    answer, pieces = answered(THOUGHT + ANSWER, stop=" is")
    assert wire.message(answer)["content"] == together(pieces)["content"] == "größe 🙂"
    assert wire.finish_of(answer) == "stop"


def test_a_stop_string_does_not_span_two_messages():
    first = "<|channel|>final<|message|>no ST<|end|><|start|>assistant"
    answer, pieces = answered(first + "<|channel|>final<|message|>OP is here<|return|>", stop="STOP")
    assert wire.message(answer)["content"] == together(pieces)["content"] == "no STOP is here"


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("a plain text", "a plain text", "", []),
        ("<|channel|>final no mark<|end|>", "no mark", "", []),
        (THOUGHT.removesuffix("<|start|>assistant") + "after it<|return|>", "after it", "hm, größe 🙂", []),
        (THOUGHT + "<|channel|>commentary", "", "hm, größe 🙂", []),
        (THOUGHT + CALL.replace('{"a": "é"}', ""), "", "hm, größe 🙂", [{"name": "get_x", "arguments": ""}]),
        (ANSWER.replace("return", "end") + "<|start|>assistant more<|end|>", "größe 🙂 is twomore", "", []),
    ],
)
def test_text_outside_of_messages_is_streamed_as_the_whole_answer_has_it(text, content, reasoning, calls):
    answer, pieces = answered(encode(TOKENIZER, text)[:99])
    if answer.row.finish is None:  # it is cut off here
        answer.row.sampling = SamplingParams(max_tokens=len(answer.row.tokens) + 1)
        answer.row.add(encode(TOKENIZER, " ")[:1])
        pieces += answer.row.take()
    message, streamed = wire.message(answer), together(pieces)
    assert streamed == {"content": content, "reasoning": reasoning, "tool_calls": calls}
    assert (message["content"] or "", message["reasoning"] or "") == (content, reasoning)
    assert [call["function"] for call in message.get("tool_calls", [])] == calls


FRAGMENTS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>") * 3, "<|call|>", "<|return|>", "<|constrain|>",
    *("assistant", "final", "analysis", "commentary") * 2, "user", " to=functions.f", "json", "größe 🙂",
    " two words", "ST", "O", "P",
)  # fmt: skip
ORDERLY = (THOUGHT, PREAMBLE, CALL, ANSWER, ANSWER.replace("<|return|>", "<|end|>"))


@pytest.mark.parametrize("stop", [(), ("STOP", "words")])
def test_what_is_streamed_of_any_tokens_adds_up_to_the_whole_answer(stop):
    """Of random marks and texts, some with missing tokens: the messages as the parser has them at the end."""
    kinds = set()
    for seed in range(250):
        rng = random.Random(seed)
        text = "".join(rng.choice(FRAGMENTS if rng.random() < 0.8 else ORDERLY) for _ in range(25))
        tokens = [token for token in encode(TOKENIZER, text) if rng.random() < 0.98][: rng.randint(1, 100)]
        answer, pieces = answered(tokens, stop)
        if answer.row.finish is None:
            answer.row.sampling = SamplingParams(max_tokens=len(tokens) + 1, stop=stop)
            answer.row.add([tokens[-1]])
            pieces += answer.row.take()
        message, streamed = wire.message(answer), together(pieces)
        assert streamed["content"] == (message["content"] or "")
        assert streamed["reasoning"] == (message["reasoning"] or "")
        assert streamed["tool_calls"] == [call["function"] for call in message.get("tool_calls", [])]
        cuts = sorted(rng.choices(range(len(pieces) + 1), k=4))
        some = [
            [(answer, p, []) for p in pieces[a:b]] for a, b in zip([0, *cuts], [*cuts, None], strict=True)
        ]
        assert together([piece for part in some for _, piece, _ in joined(part)]) == streamed
        kinds |= _check_by_the_parser(answer.row.tokens, streamed, pieces, stop)
    assert kinds == {"analysis", "commentary", "final", "call", "other"}


def _check_by_the_parser(tokens, streamed, pieces, stop):
    """-> the kinds of messages there are, unless a stop string cut one."""
    chat = HarmonyChat(TOKENIZER)
    for token in tokens:
        chat.feed(token)
    parts = chat.end()
    if any(string in part.text for string in stop for part in parts if part.kind == "final"):
        return set()
    texts = [p.text for p in parts if p.kind in ("commentary", "final", "other")]
    assert streamed["content"] == "".join(texts)
    assert streamed["reasoning"] == "".join(p.text for p in parts if p.kind == "analysis")
    calls = [(p.to.removeprefix("functions."), p.text) for p in parts if p.kind == "call"]
    assert [(call["name"], call["arguments"]) for call in streamed["tool_calls"]] == calls
    if stop:  # which responses have no field for
        return {p.kind for p in parts}
    writer = Writer(ResponsesBody(input="x"), "m")
    for piece in pieces:
        list(writer.add(piece))
    items = writer.response["output"]
    assert [item["content"][0]["text"] for item in items if item["type"] == "message"] == [
        *filter(None, texts)
    ]
    assert [item["arguments"] for item in items if item["type"] == "function_call"] == [c[1] for c in calls]
    return {p.kind for p in parts}
