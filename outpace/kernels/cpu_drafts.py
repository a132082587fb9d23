"""ctypes wrappers of the CPU kernels in cpu_drafts.c: convolution in blocks, the largest few, the walk."""

import struct

import torch
from torch import Tensor

from outpace.kernels.cpu import KIND, _c, _empty, _threads

# the structs of cpu_drafts.c in their order
CONV = struct.Struct("16q").pack
TOP = struct.Struct("8q").pack
WALK = struct.Struct("15q").pack

MOST_CANDIDATES = 64
MOST_TAPS = 16


def block_conv(x: Tensor, base: Tensor, delta: Tensor, block: int, side: int) -> Tensor:
    """x [M, C], base [taps, C], delta [M, sides, taps, groups], of which `side` counts -> [M, C]."""
    out = torch.empty_like(x)
    _c.block_conv(pack_conv(x, base, delta, block, side, None, out, None, None))
    return out


def block_conv_backward(
    dy: Tensor, x: Tensor, base: Tensor, delta: Tensor, block: int, side: int
) -> tuple[Tensor, Tensor, Tensor]:
    """-> the gradients of x [M, C], of base [taps, C] float32, and of delta's side [M, taps, groups]."""
    dx, d_base = torch.empty_like(x), _empty(*base.shape)
    d_delta = delta.new_empty(len(x), *delta.shape[2:])
    _c.block_conv_backward(pack_conv(x, base, delta, block, side, dy, dx, d_delta, d_base))
    return dx, d_base, d_delta


def pack_conv(
    x: Tensor,
    base: Tensor,
    delta: Tensor,
    block: int,
    side: int,
    dy: Tensor | None,
    out: Tensor,
    d_delta: Tensor | None,
    d_base: Tensor | None,
) -> bytes:
    m, c = x.shape
    _, sides, taps, groups = delta.shape
    assert x.is_contiguous() and base.is_contiguous() and delta.is_contiguous() and delta.dtype == x.dtype
    assert m % block == 0 and c % groups == 0 and taps <= MOST_TAPS
    assert dy is None or (dy.is_contiguous() and dy.dtype == x.dtype)
    first = delta.data_ptr() + side * taps * groups * delta.element_size()
    given = x.data_ptr(), first, base.data_ptr(), 0 if dy is None else dy.data_ptr()
    kinds = KIND[x.dtype], KIND[base.dtype]
    made = (0 if t is None else t.data_ptr() for t in (d_delta, d_base))
    return CONV(
        *given,
        *kinds,
        out.data_ptr(),
        *made,
        m,
        block,
        c,
        taps,
        c // groups,
        sides * taps * groups,
        _threads(),
    )


def top(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, N] float32 -> the k <= N largest of each row, falling, the first among equals first: ids [M, k]
    int64 and values [M, k]; and the rows' log-sum-exp [M]."""
    m, n = x.shape
    assert x.is_contiguous() and 1 <= k <= min(n, MOST_CANDIDATES)
    ids, values, lse = _empty(m, k, dtype=torch.int64), _empty(m, k), _empty(m)
    made = ids.data_ptr(), values.data_ptr(), lse.data_ptr()
    _c.top(TOP(x.data_ptr(), *made, m, n, k, _threads()))
    return ids, values, lse


def walk(
    last: Tensor, ids: Tensor, values: Tensor, lse: Tensor, h: Tensor, before: Tensor, after: Tensor
) -> tuple[Tensor, Tensor]:
    """last [M] int64, candidates ids [M, n, k] int64 with their logits `values`, rows' log-sum-exp [M, n], h
    [M, n, r] float32, codebooks `before` and `after` [V, r] -> the chosen ids [M, n] int64, and how likely
    each was [M, n]."""
    m, n, k = ids.shape
    r = h.shape[-1]
    tensors = last, ids, values, lse, h, before, after
    assert all(t.is_contiguous() for t in tensors) and before.dtype == after.dtype and k <= MOST_CANDIDATES
    out, sure = _empty(m, n, dtype=torch.int64), _empty(m, n)
    given = *(t.data_ptr() for t in tensors), KIND[before.dtype]
    _c.walk(WALK(*given, out.data_ptr(), sure.data_ptr(), m, n, k, r, _threads()))
    return out, sure
