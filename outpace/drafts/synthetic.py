"""A draft that is right as often as it is told: the cost of speculation where no draft has been trained.

As llama.cpp's --spec-synth-rates. Acceptance is an input here, never a result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from outpace.drafts.base import Draft, Proposal, RewindableSession
from outpace.drafts.sampler import DraftSampler


@dataclass(frozen=True, eq=False)
class Synthetic:
    """Proposes what the target is going to say, draft token i with probability rates[i] where those before it
    are right, and else a wrong one. `texts`: of each row the prompt and what follows. `inner`: a draft that
    runs for its cost alone, with its tokens replaced; None: drafting is free.

    Raises ValueError for rates outside 0 .. 1, and for an `inner` of another block size."""

    texts: Sequence[Sequence[int]]
    rates: tuple[float, ...]
    vocab_size: int
    seed: int = 1
    inner: Draft | None = None

    def __post_init__(self) -> None:
        check_rates(self.rates)
        if self.inner is not None and self.inner.block_size != self.block_size:
            raise ValueError(
                f"{len(self.rates)} rates are of blocks of {self.block_size}, and the draft that runs has "
                f"blocks of {self.inner.block_size}"
            )

    @property
    def block_size(self) -> int:
        return len(self.rates) + 1

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return () if self.inner is None else self.inner.target_layer_ids

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> "SyntheticSession":
        if batch != len(self.texts):
            raise ValueError(f"{batch} rows, and what the target says is known of {len(self.texts)}")
        inner = None if self.inner is None else self.inner.begin(batch, length, offset, slack)
        return SyntheticSession(self, inner)


class SyntheticSession:
    def __init__(self, draft: Synthetic, inner: RewindableSession | None) -> None:
        self.draft, self.inner = draft, inner
        self.texts = list(draft.texts)
        self.lengths = [0] * len(self.texts)
        self.rng = torch.Generator().manual_seed(draft.seed)

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if self.inner is not None:
            self.inner.observe(tokens, aux, counts)

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        if self.inner is not None:
            self.inner.propose(last, width, sampler)
        guesses = [self._guess(b, token, width) for b, token in enumerate(last.tolist())]
        counts = [len(guess) for guess in guesses]
        padded = [guess + [0] * (max(counts) - len(guess)) for guess in guesses]
        return Proposal(torch.tensor(padded, device=last.device), counts)

    def _guess(self, row: int, last: int, width: int) -> list[int]:
        """`last` and up to width - 1 tokens: right ones up to the first that is drawn to be wrong."""
        text, begin = self.texts[row], self.lengths[row]
        if begin < len(text) and text[begin] != last:
            raise ValueError(f"row {row} says another token at {begin} than the text that is known of it")
        ahead = list(text[begin + 1 : begin + width])
        drawn = torch.rand(len(ahead), generator=self.rng).tolist()
        for i, (chance, rate) in enumerate(zip(drawn, self.draft.rates, strict=False)):
            if chance >= rate:
                ahead[i:] = [(token + 1) % self.draft.vocab_size for token in ahead[i:]]
                break
        return [last, *ahead]

    def rewind(self, lengths: list[int]) -> None:
        self.lengths = list(lengths)
        if self.inner is not None:
            self.inner.rewind(lengths)

    def select(self, batch_indices: list[int]) -> None:
        self.texts = [self.texts[b] for b in batch_indices]
        self.lengths = [self.lengths[b] for b in batch_indices]
        if self.inner is not None:
            self.inner.select(batch_indices)


def check_rates(rates: Sequence[float]) -> None:
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"rates {list(rates)}: one of each draft token, each from 0 to 1")


def tau_of(rates: Sequence[float]) -> float:
    """Tokens a step that these rates give, the bonus token included."""
    return 1 + sum(accumulate(rates, mul))


def rates_of(tau: float, block_size: int) -> tuple[float, ...]:
    """The one rate at all positions that gives `tau` tokens a step in blocks of `block_size`, root included.
    Raises ValueError for a tau that no rate gives."""
    if not 1 <= tau <= block_size:
        raise ValueError(f"tau {tau}: a step in blocks of {block_size} gives 1 to {block_size} tokens")
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if tau_of([rate] * (block_size - 1)) < tau else (low, rate)
    return (high,) * (block_size - 1)
