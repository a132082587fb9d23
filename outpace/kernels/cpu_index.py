"""The ctypes wrapper of cpu_index.c."""

import struct

import torch
from torch import Tensor

from outpace.kernels.cpu import _c, _empty, _threads

SCORE = struct.Struct("13q").pack
CHOOSE = struct.Struct("16q").pack
MOST_HEADS = 64


def scores(q: Tensor, w: Tensor, keys: Tensor, start: Tensor, seen: int, chain: bool) -> Tensor:
    """q [B, T, H, D], w [B, T, H], keys [B, S, D] of which the first `seen` may count, start [B] int64 -> sum
    over heads of w max(q . k, 0), [B, T, seen] float32; undefined for keys that no query looks at: those from
    start on, or in a chain after the query."""
    b, t, h, d = q.shape
    assert q.is_contiguous() and w.is_contiguous() and keys.stride()[1:] == (d, 1) and seen <= keys.shape[1]
    assert d % 8 == 0 and d <= 256 and h <= MOST_HEADS
    assert q.dtype == w.dtype == keys.dtype == torch.float32
    y = _empty(b, t, seen)
    tensors = q.data_ptr(), w.data_ptr(), keys.data_ptr(), start.data_ptr(), y.data_ptr()
    _c.index_scores(SCORE(*tensors, keys.stride(0), b, t, h, d, seen, chain, _threads()))
    return y


def choose(
    scores: Tensor,
    start: Tensor,
    counts: Tensor,
    wanted: Tensor,
    width: int,
    sinks: int,
    recent: int,
    tree: Tensor | None,
    depth: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `cache.index.choose`: -> lists [B, T, width] int64, ascending, and how many of each count [B, T];
    -1 where scores are not finite."""
    b, t, s = scores.shape
    u = t if tree is None else tree.shape[2]
    given = (scores, start, counts, wanted) if tree is None else (scores, start, counts, wanted, tree, depth)
    assert all(x is not None and x.is_contiguous() for x in given)
    lists, many = _empty(b, t, width, dtype=torch.int64), _empty(b, t, dtype=torch.int64)
    trees, depths = (0, 0) if tree is None or depth is None else (tree.data_ptr(), depth.data_ptr())
    tensors = scores.data_ptr(), start.data_ptr(), counts.data_ptr(), trees, depths
    made = wanted.data_ptr(), lists.data_ptr(), many.data_ptr()
    _c.choose(CHOOSE(*tensors, *made, b, t, u, s, width, sinks, recent, _threads()))
    return lists, many
