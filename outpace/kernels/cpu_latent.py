"""The ctypes wrapper of cpu_latent.c."""

import struct

from torch import Tensor

from outpace.kernels.cpu import _c, _threads

PANEL = 16  # numbers of a key that are multiplied at once
KEYS = struct.Struct("20q").pack


def keys_(
    y: Tensor, rows: Tensor, w: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None
) -> None:
    """Writes y [B, K, n, D], a part of more tokens: rows [B, n, R ..] @ W + bias, W [R, K * D] as w
    [K * D / P, R, P]; each head times the number behind the R and gain [D] where that is given, rotated by
    cos and sin [B or 1, n, D / 2]; all float32. A token's key does not depend on how many there are."""
    b, k, n, d = y.shape
    panels, r, p = w.shape
    assert rows.shape[:2] == (b, n) and rows.shape[2] >= r + (k if gain is not None else 0)
    assert (
        panels * p == k * d
        and p in (8, PANEL)
        and d % p == 0
        and w.is_contiguous()
        and bias.is_contiguous()
        and d % 8 == 0
        and d <= 256
    )
    assert y.stride()[2:] == (d, 1) and rows.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
    assert cos.shape == sin.shape and cos.shape[1:] == (n, d // 2) and len(cos) in (1, b)
    t_b = 0 if len(cos) == 1 else n * (d // 2)
    given = rows.data_ptr(), w.data_ptr(), bias.data_ptr(), cos.data_ptr(), sin.data_ptr()
    gains = 0 if gain is None else gain.data_ptr()
    strides = rows.stride(0), rows.stride(1), t_b, y.stride(0), y.stride(1)
    _c.latent_keys(
        KEYS(*given, gains, y.data_ptr(), *strides, b, n, r, k, d, p, gain is not None, _threads())
    )
