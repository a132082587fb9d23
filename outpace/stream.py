"""One text continued and streamed, with what it cost: what `outpace generate` prints."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from outpace.chat.tokenizer import encode
from outpace.decode import plain, speculative
from outpace.decode.request import Request
from outpace.decode.trace import Trace
from outpace.drafts.proposal import Draft
from outpace.models.decoder import Decoder


@dataclass(frozen=True)
class Streamed:
    text: str
    tokens: list[int]
    prompt_tokens: int
    trace: Trace
    first_token_seconds: float

    @property
    def decode_seconds(self) -> float:
        return sum(s for part, s in self.trace.seconds.items() if part != "prefill")

    @property
    def tokens_per_s(self) -> float:
        """After the first token, which the prefill gave."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
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

    def summary(self) -> str:
        seconds = ", ".join(f"{k} {v * 1e3:.0f} ms" for k, v in self.trace.seconds.items())
        return (
            f"{self.prompt_tokens} + {len(self.tokens)} tokens, {self.tokens_per_s:.0f} tokens/s, "
            f"tau {self.trace.tau:.2f} over {self.trace.rounds} rounds, "
            f"first token after {self.first_token_seconds * 1e3:.0f} ms ({seconds})"
        )


def run(
    target: Decoder,
    draft: Draft | None,
    tokenizer: Tokenizer,
    text: str,
    request: Request,
    seed: int,
    write: Callable[[str], None],
) -> Streamed:
    """`write` receives each piece of text as soon as its bytes are whole characters."""
    ids = encode(tokenizer, text)
    decoder = DecodeStream(skip_special_tokens=True)
    pieces: list[str] = []
    first: list[float] = []
    began = time.perf_counter()

    def on_tokens(row: int, tokens: list[int]) -> None:
        if not first:
            first.append(time.perf_counter() - began)
        for token in tokens:
            piece = decoder.step(tokenizer, token)
            if piece:
                pieces.append(piece)
                write(piece)

    rng = torch.Generator().manual_seed(seed)
    if draft is None:
        done = plain.generate(target, [ids], request, rng=rng, on_tokens=on_tokens)
    else:
        done = speculative.generate(target, draft, [ids], request, rng=rng, on_tokens=on_tokens)
    return Streamed("".join(pieces), done.tokens[0], len(ids), done.trace, first[0])
