"""Answers as OpenAI's JSON: choices, chunks of a stream, usage, and what speculation did."""

import secrets
import time
from collections.abc import Sequence as Rows
from typing import Any

from outpace.api import Model, StreamPiece
from outpace.serve.answer import Answer, TokenLogprob
from outpace.text.chat_format import CALL, ChatPart
from outpace.text.messages import ANALYSIS, FINAL

JsonObject = dict[str, Any]
NAMESPACE = "functions."


def head(kind: str, prefix: str, model: str) -> JsonObject:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def error(message: str, kind: str = "invalid_request_error", param: str | None = None) -> JsonObject:
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def usage(answers: Rows[Answer], prompts: int) -> JsonObject:
    """`prompts`: of the answers, how many begin another prompt; the rest are further choices of one."""
    sequences = [answer.sequence for answer in answers if answer.sequence is not None]
    each = len(sequences) // max(prompts, 1)
    prompt = sum(len(s.prompt) for s in sequences[::each])
    generated = sum(len(s.tokens) for s in sequences)
    accepted = sum(s.accepted for s in sequences)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(s.reused for s in sequences[::each])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(s.drafted for s in sequences) - accepted,
        },
    }


def measured(answers: Rows[Answer]) -> JsonObject:
    """llama-server's `timings` and vLLM's `metrics`, of all choices together."""
    sequences = [answer.sequence for answer in answers if answer.sequence is not None]
    first = [s.times for s in sequences if "first" in s.times]
    prompt_s = sum(t["first"] - t["admitted"] for t in first)
    decode_s = sum(t.get("ended", time.perf_counter()) - t["first"] for t in first)
    tokens, rounds = sum(len(s.tokens) for s in sequences), sum(s.rounds for s in sequences)
    drafted, accepted = sum(s.drafted for s in sequences), sum(s.accepted for s in sequences)
    after_first = tokens - len(first)
    return {
        "timings": {
            "prompt_n": sum(len(s.prompt) - s.reused for s in sequences),
            "prompt_ms": round(1e3 * prompt_s, 3),
            "predicted_n": tokens,
            "predicted_ms": round(1e3 * decode_s, 3),
            "predicted_per_second": round(after_first / decode_s, 2) if decode_s else 0.0,
            "draft_n": drafted,
            "draft_n_accepted": accepted,
        },
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": round(1 + accepted / rounds, 4) if rounds else 0.0,
                "draft_acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
                "num_spec_steps": rounds,
                "num_draft_tokens": drafted,
                "num_accepted_draft_tokens": accepted,
            }
        },
    }


def finish_of(answer: Answer) -> str:
    """The reason of a whole answer: of a chat, "tool_calls" where it ended with one."""
    calls = any(piece.part is not None and piece.part.kind == CALL for piece in answer.seen)
    return "tool_calls" if calls and answer.row.finish == "stop" else (answer.row.finish or "stop")


def message(answer: Answer) -> JsonObject:
    """Of a chat, whole: what the deltas of a stream add up to."""
    deltas, content, reasoning, calls = Deltas(), "", "", list[JsonObject]()
    for delta in map(deltas.of, answer.seen):
        content += delta.get("content", "")
        reasoning += delta.get("reasoning", "")
        for made in delta.get("tool_calls", ()):
            if made.pop("index") == len(calls):
                calls.append(made)
            else:
                calls[-1]["function"]["arguments"] += made["function"]["arguments"]
    values = {"role": "assistant", "content": content or None, "reasoning": reasoning or None}
    return values | ({"tool_calls": calls} if calls else {})


def call(part: ChatPart, arguments: str) -> JsonObject:
    function = {"name": (part.to or "").removeprefix(NAMESPACE), "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class Deltas:
    """Of one choice of a streamed chat: each piece as what it adds to the message."""

    def __init__(self) -> None:
        self.calls: list[int] = []  # the parts that are calls

    def of(self, piece: StreamPiece) -> JsonObject:
        part, content, delta = piece.part, piece.text, dict[str, Any]()
        if part is not None and part.kind == CALL:
            delta = self._call(part)
        elif part is not None and part.kind == ANALYSIS:
            delta = {"reasoning": part.text} if part.text else {}
        elif part is not None and part.kind != FINAL:
            content += part.text
        return delta | ({"content": content} if content else {})

    def _call(self, part: ChatPart) -> JsonObject:
        begins = part.index not in self.calls
        if begins:
            self.calls.append(part.index)
        if not begins and not part.text:
            return {}
        values = call(part, part.text) if begins else {"function": {"arguments": part.text}}
        return {"tool_calls": [{"index": self.calls.index(part.index), **values}]}


def chat_logprobs(model: Model, scores: Rows[TokenLogprob]) -> JsonObject:
    def one(token: int, value: float) -> JsonObject:
        text = model.tokenizer.decode([token], skip_special_tokens=False)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    return {"content": [one(s.token, s.logprob) | {"top_logprobs": [one(*t) for t in s.top]} for s in scores]}


def text_logprobs(model: Model, scores: Rows[TokenLogprob]) -> JsonObject:
    def text(token: int) -> str:
        return model.tokenizer.decode([token], skip_special_tokens=False)

    return {
        "tokens": [text(s.token) for s in scores],
        "token_logprobs": [s.logprob for s in scores],
        "top_logprobs": [{text(token): value for token, value in s.top} for s in scores],
    }
