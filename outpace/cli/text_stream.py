"""One text continued and streamed, with what it cost: what `outpace generate` prints."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from outpace.decode.controller import Controller
from outpace.decode.generate import generate
from outpace.decode.partial import Partial
from outpace.decode.request import Request
from outpace.decode.trace import Trace
from outpace.drafts.base import Draft
from outpace.models.decoder import Decoder
from outpace.ops.sampling import generator
from outpace.text.chat_format import ChatFormat, ChatPart
from outpace.text.messages import FINAL

Read = Callable[[int], str]  # a token -> what it adds to the text that people see


@dataclass(frozen=True, kw_only=True)
class Candidate:
    token: int
    text: str
    logit: float


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """`round_seconds`: from one step's tokens to the next one's. `top`: for each token the largest logits
    it was chosen from, largest first; empty where they were not asked for."""

    text: str
    tokens: list[int]
    prompt_tokens: int
    trace: Trace
    first_token_seconds: float
    round_seconds: list[float]
    top: list[list[Candidate]] = field(default_factory=list)

    @property
    def decode_seconds(self) -> float:
        return sum(s for part, s in self.trace.seconds.items() if part != "prefill")

    @property
    def tokens_per_s(self) -> float:
        """After the first token, which the prefill gave."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0

    def round_time(self, share: float) -> float:
        """The time in seconds that a `share` of the steps stayed within: 0.5 for the median."""
        ordered = sorted(self.round_seconds)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0

    def as_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "tau": round(self.trace.tau, 4),
            "accept_rate": round(self.trace.accept_rate, 4),
            "rounds": self.trace.rounds,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "first_token_seconds": round(self.first_token_seconds, 5),
            "seconds": {k: round(v, 5) for k, v in self.trace.seconds.items()},
        }
        values |= self.trace.partial_as_json()
        if self.trace.predicted:
            values["predicted"] = {
                "tokens_per_s": round(self.trace.predicted_tokens_per_s, 2),
                "error": round(self.trace.prediction_error, 4),
            }
        if self.top:
            values["top_logits"] = [
                [{"token": c.token, "text": c.text, "logit": round(c.logit, 4)} for c in candidates]
                for candidates in self.top
            ]
        return values

    def timing(self) -> dict[str, float]:
        """Seconds, and tokens per second."""
        mean = sum(self.round_seconds) / len(self.round_seconds) if self.round_seconds else 0.0
        times = {
            "prefill": self.trace.seconds["prefill"],
            "first_token": self.first_token_seconds,
            "round_mean": mean,
            "round_p50": self.round_time(0.5),
            "round_p95": self.round_time(0.95),
        }
        return {k: round(v, 6) for k, v in times.items()} | {"tokens_per_s": round(self.tokens_per_s, 2)}

    def summary(self) -> str:
        seconds = ", ".join(f"{k} {v * 1e3:.0f} ms" for k, v in self.trace.seconds.items())
        return (
            f"{self.prompt_tokens} + {len(self.tokens)} tokens, {self.tokens_per_s:.0f} tokens/s, "
            f"tau {self.trace.tau:.2f} over {self.trace.rounds} rounds, "
            f"first token after {self.first_token_seconds * 1e3:.0f} ms ({seconds})"
            + self._partial()
            + self._predicted()
        )

    def _partial(self) -> str:
        if not self.trace.provisional:
            return ""
        kept, passed = self.trace.confirmed
        return f"; partial KV: {self.trace.partial_forwards} forwards, {kept} of {passed} tokens confirmed"

    def _predicted(self) -> str:
        if not self.trace.predicted:
            return ""
        rate, error = self.trace.predicted_tokens_per_s, self.trace.prediction_error
        return f"; {rate:.0f} tokens/s predicted, {error:+.0%} from measured"


class Largest:
    """The K largest logits of every token. A step's logits come before its tokens, of which some may not
    be kept."""

    def __init__(self, k: int, tokenizer: Tokenizer) -> None:
        """Raises ValueError for less than one."""
        if k < 1:
            raise ValueError(f"top_logits {k}: ask for at least 1")
        self.k, self.tokenizer = k, tokenizer
        self.candidates: list[list[Candidate]] = []

    def __call__(self, row: int, logits: Tensor) -> None:
        """logits [n, V] of the next n tokens."""
        values, ids = logits.float().topk(min(self.k, logits.shape[-1]))
        for tokens, sizes in zip(ids.tolist(), values.tolist(), strict=True):
            self.candidates.append(
                [
                    Candidate(token=t, text=self.tokenizer.decode([t], skip_special_tokens=False), logit=x)
                    for t, x in zip(tokens, sizes, strict=True)
                ]
            )

    def keep(self, tokens: int) -> None:
        del self.candidates[tokens:]


def reader(tokenizer: Tokenizer, prompt: list[int]) -> Read:
    """The text as it grows, each piece as soon as its bytes are whole characters. It follows the prompt: in
    SentencePiece vocabularies a text's first token would lose its space."""
    decoder = DecodeStream(skip_special_tokens=True)
    for token in prompt[-8:]:  # more than any character has tokens
        decoder.step(tokenizer, token)
    return lambda token: decoder.step(tokenizer, token) or ""


def answer_reader(chat_format: ChatFormat) -> Read:
    """The answer alone: no thoughts, no calls. `talk.prompt` comes before."""

    def read(token: int) -> str:
        part = chat_format.feed(token)
        return part.text if part is not None and part.kind == FINAL else ""

    return read


def no_answer(parts: list[ChatPart], tokens: int) -> str | None:
    """What to say where nothing of the final channel came; None where something did."""
    if any(part.kind == FINAL and part.text for part in parts):
        return None
    kinds = ", ".join(dict.fromkeys(part.kind for part in parts)) or "none of it in the model's format"
    return f"no answer in {tokens} tokens ({kinds}): allow more with -n, or look with outpace chat --raw"


def top_lines(streamed: Streamed) -> str:
    """One line a token: itself, then the largest logits and the tokens they belong to."""
    lines = []
    for i, (token, candidates) in enumerate(zip(streamed.tokens, streamed.top, strict=True)):
        chosen = next((repr(c.text) for c in candidates if c.token == token), f"<{token}>")
        others = "  ".join(f"{c.logit:.3f} {c.text!r}" for c in candidates)
        lines.append(f"{i:4d} {chosen:16s} {others}")
    return "\n".join(lines)


def timing_table(load_seconds: float, first: Streamed, warm: Streamed) -> Table:
    """The first run, which reads weights from disk and warms up everything, next to the second."""
    table = Table(title=f"loaded in {load_seconds:.2f} s", title_justify="left")
    for column in ("", "first run", "warm run"):
        table.add_column(column, justify="right" if column else "left")
    names = {
        "prefill": f"prefill of {first.prompt_tokens} tokens",
        "first_token": "time to first token",
        "round_mean": "a round, mean",
        "round_p50": "a round, p50",
        "round_p95": "a round, p95",
    }
    ours, theirs = first.timing(), warm.timing()
    for key, name in names.items():
        table.add_row(name, f"{ours[key] * 1e3:.2f} ms", f"{theirs[key] * 1e3:.2f} ms")
    table.add_row("tokens/s", f"{ours['tokens_per_s']:.1f}", f"{theirs['tokens_per_s']:.1f}")
    return table


def run(
    target: Decoder,
    draft: Draft | None,
    prompt: list[int],
    read: Read,
    request: Request,
    seed: int,
    write: Callable[[str], None],
    largest: Largest | None = None,
    controller: Controller | None = None,
    partial: Partial | None = None,
) -> Streamed:
    """`write` receives each piece of text that `read` makes of the tokens, when it comes."""
    pieces: list[str] = []
    times: list[float] = []
    began = time.perf_counter()

    def on_tokens(row: int, tokens: list[int]) -> None:
        times.append(time.perf_counter())
        for token in tokens:
            if piece := read(token):
                pieces.append(piece)
                write(piece)

    rng = generator(seed, target.device)
    if draft is None:
        done = generate(target, [prompt], request, rng=rng, on_tokens=on_tokens, on_logits=largest)
    else:
        done = generate(
            target,
            [prompt],
            request,
            draft,
            controller=controller,
            partial=partial,
            rng=rng,
            on_tokens=on_tokens,
            on_logits=largest,
        )
    if largest is not None:
        largest.keep(len(done.tokens[0]))
    return Streamed(
        text="".join(pieces),
        tokens=done.tokens[0],
        prompt_tokens=len(prompt),
        trace=done.trace,
        first_token_seconds=times[0] - began,
        round_seconds=[b - a for a, b in pairwise(times)],
        top=largest.candidates if largest is not None else [],
    )
