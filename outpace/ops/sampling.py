"""Logits -> probabilities -> token; every draw takes its generator."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kernels import cpu
from outpace.ops.fast import kernel


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 cut nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature {self.temperature} is below 0")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} is below 0 (0 cuts nothing)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is outside (0, 1]")


def seeded(*numbers: int) -> torch.Generator:
    """A generator that depends on nothing but the numbers: step n of a resumed run draws what step n
    of an unbroken one would have drawn."""
    state = 0
    for n in numbers:
        state = (state * 1_000_003 + n + 1) % (2**63 - 25)
    return torch.Generator().manual_seed(state)


def probabilities(logits: Tensor, how: Sampling) -> Tensor:
    """[..., V] -> [..., V] float32, after temperature, then top-k, then top-p (temperature > 0)."""
    scaled = logits.float() / how.temperature
    if how.top_k and how.top_k < scaled.shape[-1]:
        kth = scaled.topk(how.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    p = scaled.softmax(-1)
    if how.top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # the first token always stays
        kept = torch.zeros_like(p).scatter(-1, index, ordered.masked_fill(before >= how.top_p, 0))
        p = kept / kept.sum(-1, keepdim=True)
    return p


def greedy(logits: Tensor) -> Tensor:
    """[..., V] -> [...] int64: the first of the largest."""
    if kernel(logits) and logits.is_contiguous():
        return cpu.argmax(logits.view(-1, logits.shape[-1])).view(logits.shape[:-1])
    return logits.argmax(-1)


def sample(logits: Tensor, how: Sampling, rng: torch.Generator | None) -> Tensor:
    """[..., V] -> [...] int64: the argmax at temperature 0, else one draw per row."""
    if how.temperature == 0:
        return greedy(logits)
    p = probabilities(logits, how)
    return torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=rng).reshape(logits.shape[:-1])
