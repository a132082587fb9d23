"""Token by token against the answer; a difference is excused by a tie alone, and ties are counted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outpace.decode.acceptance import SamplingState, coupled, key_of
from outpace.decode.request import Request
from outpace.models.decoder import Decoder
from outpace.ops import sampling as noise

TIE = 1e-4  # largest distance, in float32 logits, between two tokens that rounding may swap


@dataclass(frozen=True, kw_only=True)
class LosslessCheck:
    """checked: tokens compared, the first difference of a row included; what follows it has another
    prefix and is not comparable."""

    checked: int = 0
    violations: int = 0
    ties: int = 0

    def __add__(self, other: "LosslessCheck") -> "LosslessCheck":
        return LosslessCheck(
            checked=self.checked + other.checked,
            violations=self.violations + other.violations,
            ties=self.ties + other.ties,
        )


@contextmanager
def in_float32(target: Decoder) -> Iterator[None]:
    """The target computes in float32 inside, whatever it is set to."""
    was = target.dtype
    target.dtype = torch.float32
    try:
        yield
    finally:
        target.dtype = was


@torch.inference_mode()
def is_tie(target: Decoder, prefix: Sequence[int], a: int, b: int, offset: int = 0) -> bool:
    """After `prefix`, do the logits of both tokens lie within TIE of the largest one, in float32?"""
    with in_float32(target):
        hidden = target(torch.tensor([list(prefix)], device=target.device), offset=offset).hidden
        logits = target.logits(hidden[0, -1])
    return bool(logits.max() - torch.minimum(logits[a], logits[b]) <= TIE)


def first_difference(tokens: list[int], answer: list[int]) -> int | None:
    pairs = enumerate(zip(tokens, answer, strict=False))
    return next((i for i, (ours, theirs) in pairs if ours != theirs), None)


def same(tokens: list[int], answer: list[int]) -> LosslessCheck:
    """One row that nothing excuses. A different count is a violation."""
    i = first_difference(tokens, answer)
    if i is not None:
        return LosslessCheck(checked=i + 1, violations=1)
    return LosslessCheck(checked=min(len(tokens), len(answer)), violations=int(len(tokens) != len(answer)))


def compare(
    target: Decoder, prompt: Sequence[int], tokens: list[int], answer: list[int], offset: int = 0
) -> LosslessCheck:
    """One row's `tokens` against `answer` (autoregressive decoding's). A different count is a violation."""
    i = first_difference(tokens, answer)
    if i is not None and is_tie(target, [*prompt, *answer[:i]], tokens[i], answer[i], offset):
        return LosslessCheck(checked=i + 1, ties=1)
    return same(tokens, answer)


@torch.inference_mode()
def compare_coupled(
    target: Decoder,
    prompt: Sequence[int],
    tokens: list[int],
    answer: list[int],
    request: Request,
    rng: torch.Generator,
    row: int,
) -> LosslessCheck:
    """The `tokens` of row `row` against `answer`, autoregressive decoding's; `rng` as the generations got
    it, freshly seeded. The first difference is a tie if both tokens' scores, in float32, the noise added,
    lie within TIE / temperature of the largest, and neither was cut; else a violation."""
    i = first_difference(tokens, answer)
    if i is None:
        return same(tokens, answer)
    text, how = [*prompt, *answer[:i]], request.sampling
    with in_float32(target):
        hidden = target(torch.tensor([text], device=target.device), offset=request.offset).hidden
        logits = target.logits(hidden[:, -1])
    state = SamplingState(how, [prompt])
    state.seen(logits)
    if i:
        state.add([answer[:i]])
    seen = state.seen(logits)
    stream = torch.tensor([(request.streams or range(row + 1))[row]], device=logits.device)
    keys = noise.keys(key_of(rng), stream, torch.full_like(stream, i))
    scores = coupled(logits, how, seen, keys)[0]
    lower = torch.minimum(scores[tokens[i]], scores[answer[i]])
    tie = bool(scores.max() - lower <= TIE / how.temperature)
    return LosslessCheck(checked=i + 1, violations=int(not tie), ties=int(tie))
