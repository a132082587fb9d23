"""What a block of keys is worth to a query, proposed from the block's extremes alone.

Letters as everywhere; a block is `block_size` tokens that are together, n blocks in a row. Keys are as they
are remembered, rotated.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# q [T, H, D] of one sequence, low and high [K, n, D] of its blocks -> [T, H, n] float32: higher is looked at
# first. Query head h reads kv head h // (H/K).
Score = Callable[[Tensor, Tensor, Tensor], Tensor]


def extremes(k: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """k [K, n * block_size, D] -> low, high [K, n, D]: per block and dimension the least and the greatest."""
    blocks = k.unflatten(1, (-1, block_size))
    return blocks.amin(2), blocks.amax(2)


def minmax(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """SpecPV as published (arXiv 2512.02337, section 3): max(q . K_max, q . K_min). No bound of anything."""
    return torch.maximum(_dot(q, low), _dot(q, high))


def quest(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Quest's (arXiv 2406.10774, section 3.3): sum_d max(q_d K_min,d, q_d K_max,d), which no key of the block
    exceeds."""
    return _dot(q.clamp(min=0), high) + _dot(q.clamp(max=0), low)


def recent(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The later the better, whoever asks."""
    T, H, _ = q.shape
    return torch.arange(low.shape[1], dtype=torch.float32, device=q.device).expand(T, H, -1)


def worst(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """What Quest wants least: deliberately bad, for proving that no text depends on the choice."""
    return -quest(q, low, high)


def _dot(q: Tensor, keys: Tensor) -> Tensor:
    """q [T, H, D], keys [K, n, D] -> [T, H, n] float32."""
    T, H, D = q.shape
    grouped = q.float().reshape(T, keys.shape[0], -1, D)
    return torch.einsum("tkgd,knd->tkgn", grouped, keys.float()).reshape(T, H, -1)


SELECTORS: dict[str, Score] = {"quest": quest, "minmax": minmax, "recent": recent, "worst": worst}


def rank(scores: Tensor, kv_heads: int, reduce: str) -> Tensor:
    """[T, H, n] -> [K, n]: the mean over the query heads of a kv head, of the queries' mean or best."""
    each = scores.amax(0) if reduce == "max" else scores.mean(0)
    return each.unflatten(0, (kv_heads, -1)).mean(1)
