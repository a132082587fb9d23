"""ctypes bindings of the kernel of a layer's experts, and the copies that it multiplies in whole numbers."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.kernels.bindings import KIND, MXFP4, STYLES, Experts, _c, _matrix, _threads
from outpace.kernels.build import pairs, whole

WHOLE = 10  # kind of a copy
MOST_INTERLEAVED = 64 << 20  # bytes of a matrix of which a second copy is kept


def _experts(w: Experts, bias: Tensor | None, copy: Tensor | None, first: int = 0) -> tuple[int, ...]:
    """Weights from row `first` of the first expert on; `copy`: see `interleaved`."""
    b, kind = (0, 0) if bias is None else (bias.data_ptr() + first * bias.element_size(), KIND[bias.dtype])
    if copy is not None:
        return copy.data_ptr() + first // 16 * copy.stride(0), 0, WHOLE, b, kind
    if isinstance(w, tuple):
        blocks, scales = w
        skipped = first * scales.shape[-1] if first else 0
        return blocks.data_ptr() + 16 * skipped, scales.data_ptr() + skipped, MXFP4, b, kind
    data, format = _matrix(w)
    row = w.shape[-1] * w.element_size() if isinstance(w, Tensor) else w.data.shape[-1]
    return data + first * row, 0, format, b, kind


def interleaved(*matrices: Experts, rounded: bool = False) -> Sequence[Tensor | None]:
    """Copies of MXFP4 matrices for products in whole numbers (cpu_whole.c), uint8 [E * N / 16, K / 32 * 272];
    None each where one of them has no such copy. A copy is kept with its matrix and made again where that was
    changed in place."""
    if not whole() or (rounded and pairs()):
        return [None] * len(matrices)
    copies = list[Tensor | None]()
    for w in matrices:
        *shape, groups = _shape(w)
        parts = w if isinstance(w, tuple) else (w.data,)
        if not groups or shape[-1] % 16 or parts[0].nbytes > MOST_INTERLEAVED or not parts[0].is_contiguous():
            return [None] * len(matrices)
        versions = [None if part.is_inference() else part._version for part in parts]
        made, copy = getattr(parts[0], "interleaved", (None, None))
        if made != versions:
            rows = math.prod(shape)
            if copy is None:  # programs that were packed hold its address
                copy = torch.empty(rows // 16, groups * 272, dtype=torch.uint8)
            data, scales, kind, _, _ = _experts(w, None, None)
            _c.interleave(_c.Interleave(data, scales, copy.data_ptr(), kind, rows, groups * 32, _threads()))
            parts[0].interleaved = versions, copy  # type: ignore[attr-defined]
        copies.append(copy)
    return copies


def _shape(w: Experts) -> tuple[int, ...]:
    """E, N and groups of 32 of an MXFP4 matrix; no groups of another."""
    if isinstance(w, tuple):
        return tuple(w[1].shape)
    return *w.shape[:-1], w.shape[-1] // 32 if getattr(w, "format", "") == "MXFP4" else 0


def moe(
    x: Tensor,
    idx: Tensor,
    weight: Tensor,
    up: Experts,
    up_bias: Tensor | None,
    down: Experts,
    down_bias: Tensor | None,
    style: str,
    limit: float = 7.0,
    alpha: float = 1.702,
    gate: Experts | None = None,
    gate_bias: Tensor | None = None,
    rounded: bool = False,
) -> Tensor:
    """x [M, C] through its experts idx [M, k], weighed and summed -> [M, C].

    up [E, 2F, C] and down [E, C, F] are float32, bfloat16, float16, MXFP4 pairs or GGUF blocks. style
    "gpt_oss": rows of up alternate gate and up, clamped; "silu": all gates, then all ups. Where `gate` is
    given, it holds the gates and up the ups, both [E, F, C]. `rounded`: what meets the weights to bfloat16,
    where all of them are in bfloat16 or MXFP4.
    """
    y = torch.empty_like(x)
    rules = style, limit, alpha, gate, gate_bias
    _c.moe(pack_moe(x, idx, weight, y, up, up_bias, down, down_bias, *rules, rounded=rounded))
    return y


def pack_moe(
    x: Tensor,
    idx: Tensor,
    weight: Tensor,
    y: Tensor,
    up: Experts,
    up_bias: Tensor | None,
    down: Experts,
    down_bias: Tensor | None,
    style: str,
    limit: float,
    alpha: float,
    gate: Experts | None,
    gate_bias: Tensor | None,
    *,
    rounded: bool,
) -> Any:
    m, c = x.shape
    e, _, f = (down[0].shape[0], 0, down[1].shape[-1] * 32) if isinstance(down, tuple) else down.shape
    assert x.is_contiguous() and idx.is_contiguous() and weight.is_contiguous() and style in STYLES
    assert y.is_contiguous() and y.shape == x.shape
    clamped = style == "gpt_oss"
    in_turn = clamped and gate is None
    gates_of, bias_of = (up, up_bias) if gate is None else (gate, gate_bias)
    gate_copy, up_copy, down_copy = interleaved(gates_of, up, down, rounded=rounded)
    gates = _experts(gates_of, bias_of, gate_copy)
    ups = _experts(up, up_bias, up_copy, f if gate is None and not in_turn else 0)
    rows = f if gate is not None else 2 * f  # of an expert in the matrix of its gates
    experts = *gates, *ups, *_experts(down, down_bias, down_copy)
    sizes = y.data_ptr(), m, c, f, e, idx.shape[1], rows, in_turn, clamped
    scales = limit, alpha if clamped else 1.0
    tensors = x.data_ptr(), idx.data_ptr(), weight.data_ptr()
    return _c.Moe(*tensors, *experts, *sizes, *scales, rounded, _threads())
