"""Answers as OpenAI's JSON, of tokens that are written here: calls, reasoning, text before a call."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import outpace
from outpace.api import Model, OutputRow, SamplingParams
from outpace.loading import open_chat
from outpace.serve import wire
from outpace.text.tokenizer import encode, read_tokenizer

TOKENIZER = read_tokenizer(Path(outpace.__file__).parent / "embedded" / "target")
THOUGHT = "<|channel|>analysis<|message|>hm, größe 🙂<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_x <|constrain|>json<|message|>{"a": "é"}<|call|>'
ANSWER = "<|channel|>final<|message|>größe 🙂 is two<|return|>"


def answered(text, stop=()):
    """-> the answer as the server has it, and its pieces."""
    config = SimpleNamespace(eos_token_ids=(), vocab_size=TOKENIZER.get_vocab_size())
    model = Model(name="x", target=SimpleNamespace(config=config), tokenizer=TOKENIZER)  # type: ignore[arg-type]
    chat = open_chat("x", TOKENIZER, frozenset(), messages=[{"role": "user", "content": "two?"}])
    sampling = SamplingParams(max_tokens=100, stop=stop)
    row = OutputRow(model, chat.prompt(), sampling, chat)
    row.stop = sampling.request(chat.stop).stop
    tokens = encode(TOKENIZER, text)
    for i in range(0, len(tokens), 3):
        if row.finish is None:
            row.add(tokens[i : i + 3])
    return SimpleNamespace(row=row, parts=None, sequence=None), row.take()


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
