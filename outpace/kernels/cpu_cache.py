"""The ctypes wrapper of cpu_cache.c."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.kernels.cpu import _c

MOVES = struct.Struct("8q").pack


def move(memories: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    """memories [B, K, S + 1, D], of one dtype, S of each its own; source, target [B, n] int64: indices of
    tokens, each in slot index % S, or -1 in both for none. In place."""
    first = memories[0]
    B, K, _, D = first.shape
    assert source.is_contiguous() and target.is_contiguous() and source.shape == target.shape
    assert all(m.is_contiguous() and m.dtype == first.dtype and m.shape[:2] == (B, K) for m in memories)
    items = [x for m in memories for x in (m.data_ptr(), m.shape[2] - 1)]
    places = torch.tensor(items, dtype=torch.int64)
    given = places.data_ptr(), source.data_ptr(), target.data_ptr()
    _c.move(MOVES(*given, len(memories), B, K, source.shape[1], D * first.element_size()))
