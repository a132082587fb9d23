"""ctypes wrappers of the CPU kernels in cpu.c, built by a C compiler at first use into a per-user cache."""

import struct
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.kernels.build import FUNCTIONS, load
from outpace.kernels.build import available as available
from outpace.kernels.build import built as built
from outpace.kernels.build import why_not as why_not

KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 3}
MXFP4 = 2
BLOCKS_KIND = {"MXFP4": 4, "Q8_0": 5, "Q4_0": 6, "Q4_K": 7, "Q5_K": 8, "Q6_K": 9}  # as GGUF files hold them
STYLES = ("gpt_oss", "silu")

# Each C function takes the address of one struct, packed here: ctypes would spend 0.1 us on every argument.
# The layouts are the structs of cpu.c in their order; q is an address or an int64, d a double.
LINEAR = struct.Struct("10q").pack
NORM = struct.Struct("5qd3q").pack
NORM_BACK = struct.Struct("6qd3q").pack
GATES = struct.Struct("7q2dq").pack
ROPE = struct.Struct("7qd5q").pack
ATTEND = struct.Struct("31qdq").pack
ROUTE = struct.Struct("14q").pack
MOE = struct.Struct("27q2dq").pack
ANGLES = struct.Struct("2qd4q").pack
TURN = struct.Struct("9qdq").pack
ARGMAX = struct.Struct("5q").pack
PACKED = struct.Struct("5q").pack
EXPAND = struct.Struct("6q").pack
BLOCKS = struct.Struct("24qdq").pack


class _Library:
    """Holds the C functions; the first one asked for loads them all, later ones are plain attributes."""

    def __getattr__(self, name: str) -> Any:
        library, why = load()
        if library is None:
            raise RuntimeError(f"CPU kernels are not available: {why}")
        for each in FUNCTIONS:
            setattr(self, each, getattr(library, each))
        return self.__dict__[name]


_c = _Library()
_threads = torch.get_num_threads
_empty = torch.empty


def _of(tensor: Tensor | None) -> tuple[int, int]:
    """Address and kind of a tensor that may be absent."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), KIND[tensor.dtype])


class Quantised(Protocol):
    """Rows in a format of BLOCKS_KIND: `data` uint8 [..., N, bytes of a row], `shape` [..., N, K]."""

    data: Tensor
    format: str

    @property
    def shape(self) -> tuple[int, ...]: ...


Matrix = Tensor | Quantised


def _matrix(w: Matrix) -> tuple[int, int]:
    """Address and kind of a weight."""
    if isinstance(w, Tensor):
        assert w.is_contiguous()
        return w.data_ptr(), KIND[w.dtype]
    assert w.data.is_contiguous()
    return w.data.data_ptr(), BLOCKS_KIND[w.format]


def linear(x: Tensor, w: Matrix, bias: Tensor | None = None) -> Tensor:
    """x [M, K] @ w [N, K].T + bias [N] -> [M, N]."""
    m, k = x.shape
    n, columns = w.shape
    assert columns == k and x.is_contiguous()
    y = _empty(m, n)
    b, b_kind = (0, 0) if bias is None else (bias.data_ptr(), KIND[bias.dtype])
    data, kind = _matrix(w)
    _c.linear(LINEAR(x.data_ptr(), data, kind, b, b_kind, y.data_ptr(), m, n, k, _threads()))
    return y


def expand(w: Quantised) -> Tensor:
    """Blocks [..., N, K] -> float32 of that shape, exactly what their format means."""
    *_, k = w.shape
    y = _empty(*w.shape)
    data, kind = _matrix(w)
    _c.expand_rows(EXPAND(data, y.data_ptr(), kind, y.numel() // k, k, _threads()))
    return y


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * w over the last dimension of x [M, C], float32 or bfloat16."""
    m, c = x.shape
    assert x.is_contiguous() and w.is_contiguous()
    y = torch.empty_like(x)
    kinds = KIND[x.dtype], KIND[w.dtype]
    _c.rms_norm(NORM(x.data_ptr(), w.data_ptr(), y.data_ptr(), *kinds, eps, m, c, _threads()))
    return y


def rms_norm_backward(dy: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of rms_norm: dy and x [M, C], w [C] float32 -> dx like x, dw [C] float32."""
    m, c = x.shape
    assert x.is_contiguous() and dy.is_contiguous() and dy.dtype == x.dtype and w.dtype == torch.float32
    dx, dw = torch.empty_like(x), _empty(c)
    tensors = (x.data_ptr(), w.data_ptr(), dy.data_ptr(), dx.data_ptr(), dw.data_ptr())
    _c.rms_norm_backward(NORM_BACK(*tensors, KIND[x.dtype], eps, m, c, _threads()))
    return dx, dw


def rope_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    n_heads: int,
    n_kv: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Rotates the query and key heads of qkv [M, (H + 2K) * D] in place, after a norm per head if given."""
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    (q, q_kind), (k, k_kind) = _of(q_norm), _of(k_norm)
    address, m = qkv.data_ptr(), len(qkv)
    table, sines = cos.data_ptr(), sin.data_ptr()
    _c.rope(ROPE(address, table, sines, q, k, q_kind, k_kind, eps, m, n_heads, n_kv, head_dim, _threads()))
    return qkv


def turn_heads(x: Tensor, cos: Tensor, sin: Tensor, turned: int, sign: float = 1.0) -> Tensor:
    """x [M, H, D] float32 or bfloat16, cos and sin [M, D/2] -> a copy where the first `turned` heads are
    rotated; sign -1 rotates back."""
    m, h, d = x.shape
    assert x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and cos.shape == (m, d // 2)
    y = torch.empty_like(x)
    tensors = x.data_ptr(), y.data_ptr(), cos.data_ptr(), sin.data_ptr()
    _c.turn_heads(TURN(*tensors, KIND[x.dtype], m, h, turned, d, sign, _threads()))
    return y


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    window: int,
    sinks: Tensor | None,
    scale: float,
    tree: Tensor | None = None,
    depth: Tensor | None = None,
    both_ways: bool = False,
    first: Tensor | None = None,
    lists: tuple[Tensor, Tensor] | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """q [B, T, H, D] over rings k, v [B, K, S, D] that hold start [B] tokens and these T -> [B, T, H * D].
    Values may have another number Dv of dimensions, and be one head's [B, 1, S, Dv] for all.
    Token i lies at slot (i - first [B]) % S; without `first`, at i % S.

    New token t is at p = start + t and sees storage indices max(0, p - window + 1)..p (window 0: all of
    them); with both_ways, also all the new ones. With tree [B, T, U] bool and depth [B, T] int64 it is
    at start + depth, and sees of the U tokens after the first `start` those that tree names: of its ancestors
    and itself, those in its window. With lists, storage indices [B, T, N] and how many of them count [B, T],
    both int64, each new token sees those and nothing else is read. `seen` [B, T, H] is written: the share of
    the weights that does not fall on the sink.
    """
    b, t, h, d = q.shape
    _, kv, s, _ = k.shape
    u = t if tree is None else tree.shape[2]
    q_b, q_t, q_h, q_1 = q.stride()
    k_b, k_h, k_s, k_1 = k.stride()
    v_b, v_h, v_s, v_1 = v.stride()
    v_h = v_h if v.shape[1] == kv else 0
    assert q_h == k_s == d and q_1 == k_1 == v_1 == 1 and v.shape[1] in (1, kv) and v.shape[2] >= s
    assert h <= 64 * kv and d <= 256 and d % 8 == 0
    assert tree is None or (tree.is_contiguous() and depth is not None and depth.is_contiguous())
    dv = v.shape[3]
    y = _empty(b, t, h * dv)
    sink, kind = (0, 0) if sinks is None else (sinks.data_ptr(), KIND[sinks.dtype])
    trees, depths = (0, 0) if tree is None or depth is None else (tree.data_ptr(), depth.data_ptr())
    begins = start.data_ptr(), 0 if first is None else first.data_ptr()
    index, many, n = 0, 0, 0
    if lists is not None:
        assert not window and all(x.is_contiguous() and x.dtype == torch.int64 for x in lists)
        index, many, n = lists[0].data_ptr(), lists[1].data_ptr(), lists[0].shape[2]
    share = 0 if seen is None else seen.data_ptr()
    assert seen is None or (seen.is_contiguous() and seen.shape == (b, t, h))
    looked = sink, kind, index, many, y.data_ptr(), share
    tensors = q.data_ptr(), k.data_ptr(), v.data_ptr(), *begins, trees, depths, *looked
    sizes = q_b, q_t, k_b, k_h, v_b, v_h, v_s, b, t, u, n, h, kv, d, dv, s, window, both_ways
    _c.attend(ATTEND(*tensors, *sizes, scale, _threads()))
    return y


def route(
    x: Tensor, w: Tensor, b: Tensor | None, k: int, softmax_first: bool, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """The k largest of x [M, C] @ w [E, C].T + b [E] -> index int64 [M, k], weight [M, k], sorted."""
    m, c = x.shape
    e = len(w)
    assert x.is_contiguous() and w.is_contiguous() and k <= e
    index, weight = _empty(m, k, dtype=torch.int64), _empty(m, k)
    bias, kind = _of(b)
    tensors = x.data_ptr(), w.data_ptr(), KIND[w.dtype], bias, kind, index.data_ptr(), weight.data_ptr()
    _c.route(ROUTE(*tensors, m, e, c, k, softmax_first, renormalise, _threads()))
    return index, weight


Packed = tuple[Tensor, Tensor]  # MXFP4 of safetensors: blocks uint8 [..., G, 16], scales uint8 [..., G]
Experts = Matrix | Packed  # [E, N, K]


def _experts(w: Experts, bias: Tensor | None, first: int = 0) -> tuple[int, int, int, int, int]:
    """Weights from row `first` of the first expert on."""
    b, kind = (0, 0) if bias is None else (bias.data_ptr() + first * bias.element_size(), KIND[bias.dtype])
    if isinstance(w, tuple):
        blocks, scales = w
        skipped = first * scales.shape[-1] if first else 0
        return blocks.data_ptr() + 16 * skipped, scales.data_ptr() + skipped, MXFP4, b, kind
    data, format = _matrix(w)
    row = w.shape[-1] * w.element_size() if isinstance(w, Tensor) else w.data.shape[-1]
    return data + first * row, 0, format, b, kind


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
) -> Tensor:
    """x [M, C] through its experts idx [M, k], weighed and summed -> [M, C].

    up [E, 2F, C] and down [E, C, F] are float32, bfloat16, float16, MXFP4 pairs or GGUF blocks. style
    "gpt_oss": rows of up are gate and up in turn, clamped; "silu": all gates, then all ups. Where `gate` is
    given, it holds the gates and up the ups, both [E, F, C].
    """
    m, c = x.shape
    e, _, f = (down[0].shape[0], 0, down[1].shape[-1] * 32) if isinstance(down, tuple) else down.shape
    assert x.is_contiguous() and idx.is_contiguous() and weight.is_contiguous() and style in STYLES
    y = _empty(m, c)
    clamped = style == "gpt_oss"
    interleaved = clamped and gate is None
    gates = _experts(up, up_bias) if gate is None else _experts(gate, gate_bias)
    ups = _experts(up, up_bias, f if gate is None and not interleaved else 0)
    apart = f if gate is not None else 2 * f
    experts = *gates, *ups, *_experts(down, down_bias)
    sizes = y.data_ptr(), m, c, f, e, idx.shape[1], apart, interleaved, clamped
    scales = limit, alpha if clamped else 1.0
    _c.moe(MOE(x.data_ptr(), idx.data_ptr(), weight.data_ptr(), *experts, *sizes, *scales, _threads()))
    return y


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [..., G, 16], scales uint8 [..., G] -> float32 [..., G * 32]."""
    assert blocks.is_contiguous() and scales.is_contiguous() and blocks.shape[-1] == 16
    y = _empty(*scales.shape[:-1], scales.shape[-1] * 32)
    _c.unpack_mxfp4(PACKED(blocks.data_ptr(), scales.data_ptr(), y.data_ptr(), scales.numel(), _threads()))
    return y


def gated(gate_up: Tensor, limit: float | None, alpha: float) -> Tensor:
    """gate_up [M, 2F], float32 or bfloat16 -> [M, F]: gate * sigmoid(alpha * gate) * up.

    With a limit, gate and up are in turn, are clamped, and up + 1 takes the place of up; without one
    the gates are the first half.
    """
    y = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    _c.gated(_gates(gate_up, None, y, limit, alpha))
    return y


def gated_backward(dy: Tensor, gate_up: Tensor, limit: float | None, alpha: float) -> Tensor:
    """Gradient of gated: dy [M, F], gate_up [M, 2F] -> [M, 2F]."""
    assert dy.is_contiguous() and dy.dtype == gate_up.dtype
    out = torch.empty_like(gate_up)
    _c.gated_backward(_gates(gate_up, dy, out, limit, alpha))
    return out


def _gates(x: Tensor, dy: Tensor | None, out: Tensor, limit: float | None, alpha: float) -> bytes:
    assert x.is_contiguous()
    tensors = x.data_ptr(), 0 if dy is None else dy.data_ptr(), out.data_ptr(), KIND[x.dtype]
    sizes = len(x), x.shape[1] // 2, limit is not None
    return GATES(*tensors, *sizes, limit or 0.0, alpha, _threads())


def angles(positions: Tensor, inv: Tensor, concentration: float) -> tuple[Tensor, Tensor]:
    """positions [M] int64, inv [n] float64 -> cos and sin of their products [M, n], times concentration."""
    assert positions.is_contiguous() and positions.dtype == torch.int64
    assert inv.is_contiguous() and inv.dtype == torch.float64
    m, half = len(positions), len(inv)
    cos, sin = _empty(m, half), _empty(m, half)
    tables = cos.data_ptr(), sin.data_ptr()
    _c.angles(ANGLES(positions.data_ptr(), inv.data_ptr(), concentration, *tables, m, half))
    return cos, sin


def argmax(x: Tensor) -> Tensor:
    """x [M, N] -> the place of each row's largest value, the first among equals, [M] int64."""
    assert x.is_contiguous() and x.shape[1]
    y = _empty(len(x), dtype=torch.int64)
    _c.argmax(ARGMAX(x.data_ptr(), y.data_ptr(), *x.shape, _threads()))
    return y


Inputs = tuple[Tensor, ...]  # q [N, H, D], k and v [N, K, D], context_k and context_v [S, K, D], of one dtype
# first [R+1], context [R+1] and seen [A] of ops.blocks.Layout; the length of a block, the window, whether a
# slot hides what follows it, the scale
Blocks = tuple[tuple[Tensor, Tensor, Tensor], int, int, bool, float]


def blocks(inputs: Inputs, how: Blocks) -> tuple[Tensor, Tensor]:
    """-> out [N, H * D] and the log-sum-exp of every query's scores [N, H], both float32; inputs float32 or
    bfloat16."""
    n, h, d = inputs[0].shape
    out, lse = _empty(n, h * d), _empty(n, h)
    _c.blocks(_blocks(inputs, how, out, lse, ()))
    return out, lse


def blocks_backward(inputs: Inputs, how: Blocks, out: Tensor, lse: Tensor, grad: Tensor) -> Inputs:
    """grad [N, H * D] of out -> the gradients of the inputs, each like its own."""
    result = tuple(map(torch.empty_like, inputs))
    _c.blocks(_blocks(inputs, how, out, lse, (grad, *result)))
    return result


def _blocks(inputs: Inputs, how: Blocks, out: Tensor, lse: Tensor, gradients: Inputs) -> bytes:
    q, k, _, context_k, _ = inputs
    ranges, block, window, causal, scale = how
    first, context, seen = ranges
    assert all(x.is_contiguous() and x.dtype == q.dtype for x in (*inputs, *gradients))
    assert len(seen) * block == len(q) and int(first[-1]) == len(seen) and int(context[-1]) == len(context_k)
    given = *(x.data_ptr() for x in inputs), KIND[q.dtype], *(x.data_ptr() for x in ranges)
    made = [x.data_ptr() for x in (out, lse, *gradients)] + [0] * (0 if gradients else 6)
    sizes = len(first) - 1, block, q.shape[1], k.shape[1], q.shape[2], window, causal
    return BLOCKS(*given, *made, *sizes, scale, _threads())
