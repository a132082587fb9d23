"""ctypes bindings of the C kernels, and the predicate that decides where they run.

Those of drafts are in draft_bindings.py.
"""

import os
from collections.abc import Sequence
from ctypes import addressof, c_int64
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.kernels.build import available as available
from outpace.kernels.build import bfloat16 as bfloat16
from outpace.kernels.build import built as built
from outpace.kernels.build import load
from outpace.kernels.build import tiles as tiles
from outpace.kernels.build import why_not as why_not
from outpace.kernels.layouts import kernels, packers, sources

KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 3}
MXFP4 = 2
BLOCKS_KIND = {"MXFP4": 4, "Q8_0": 5, "Q4_0": 6, "Q4_K": 7, "Q5_K": 8, "Q6_K": 9}  # as GGUF files hold them
STYLES = ("gpt_oss", "silu")
PLAIN = (Tensor, torch.nn.Parameter)
PANEL = 16  # numbers of a key that `latent_keys_` multiplies at once
# CUDA builds of torch bring it along; it takes a while to import, and on a CPU only its interpreter runs
TRITON = find_spec("triton") is not None and (
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
)
MOST_INDEX_HEADS, MOST_HEAD_DIM, MOST_CANDIDATES = 64, 256, 64


def captured(x: Tensor) -> bool:
    """Whether a compiler records what is done to x: torch's own, or one that x is a subclass for, such as
    torchax. Its numbers are nowhere to be read then."""
    return torch.compiler.is_compiling() or type(x) not in PLAIN


def use_kernel(x: Tensor, *, backward: bool = False, stored: bool = False) -> bool:
    """True where a C kernel takes `x`: the kernels are built, x lies on a CPU, and is an integer tensor or a
    float32 one while no gradient is recorded. With `backward`, the kernel has a backward pass: x may be
    bfloat16 and record a gradient. With `stored`, x may be a cache's: of bfloat16 or float16, too. A
    compiler that captures a step sees torch's operators.
    """
    if captured(x):
        return False
    if x.is_floating_point():
        if backward:
            fits = x.dtype in (torch.float32, torch.bfloat16)
        else:
            known = KIND if stored else (torch.float32,)
            fits = x.dtype in known and not torch.is_grad_enabled()
        if not fits:
            return False
    return x.device.type == "cpu" and available()


def use_triton(x: Tensor) -> bool:
    """True where a Triton kernel takes `x`: on a GPU, or on one without contents, while no gradient of it is
    recorded and no compiler captures it."""
    trained = torch.is_grad_enabled() and x.requires_grad
    return TRITON and x.device.type in ("cuda", "meta") and not captured(x) and not trained


class _Library:
    """Attributes are the C functions, and by the name of the struct that each takes the function that packs
    its fields, in the order of the typedef: `_c.argmax(_c.Largest(x, y, M, N, threads))`. (ctypes would spend
    0.1 us on every argument.) The first access loads them all, later ones are plain attributes."""

    def __getattr__(self, name: str) -> Any:
        library, reason = load()
        if library is None:
            raise RuntimeError(f"CPU kernels are not available: {reason}")
        for function in kernels(sources()):
            setattr(self, function, getattr(library, function))
        for struct_name, packer in packers(sources()).items():
            setattr(self, struct_name, packer.pack)
        return self.__dict__[name]


_c = _Library()
_threads = torch.get_num_threads
_empty = torch.empty


def _address(tensor: Tensor | None) -> int:
    """0 for a tensor that is absent."""
    return 0 if tensor is None else tensor.data_ptr()


def _address_and_kind(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), KIND[tensor.dtype])


class Quantised(Protocol):
    """Rows in a format of BLOCKS_KIND: `data` uint8 [..., N, bytes of a row], `shape` [..., N, K]."""

    data: Tensor
    format: str

    @property
    def shape(self) -> tuple[int, ...]: ...


Matrix = Tensor | Quantised
Packed = tuple[Tensor, Tensor]  # MXFP4 of safetensors: blocks uint8 [..., G, 16], scales uint8 [..., G]
Experts = Matrix | Packed  # [E, N, K]


def _matrix(w: Matrix) -> tuple[int, int]:
    """Address and kind of a weight."""
    if isinstance(w, Tensor):
        assert w.is_contiguous()
        return w.data_ptr(), KIND[w.dtype]
    assert w.data.is_contiguous()
    return w.data.data_ptr(), BLOCKS_KIND[w.format]


def linear(x: Tensor, w: Matrix, bias: Tensor | None = None, rounded: bool = False) -> Tensor:
    """x [M, K] @ w [N, K].T + bias [N] -> [M, N]. `rounded`: x to bfloat16,
    where w is in bfloat16 or MXFP4."""
    y = _empty(x.shape[0], w.shape[0])
    _c.linear(pack_linear(x, w, bias, y, rounded))
    return y


def pack_linear(x: Tensor, w: Matrix, bias: Tensor | None, y: Tensor, rounded: bool) -> Any:
    """y [M, N], its rows may lie apart."""
    (m, k), (n, columns) = x.shape, w.shape
    apart, one = y.stride()
    assert columns == k and x.is_contiguous() and y.shape == (m, n) and one == 1
    data, kind = _matrix(w)
    tensors = x.data_ptr(), data, kind, *_address_and_kind(bias), y.data_ptr()
    return _c.Linear(*tensors, m, n, k, apart, rounded, _threads())


def expand(w: Quantised) -> Tensor:
    """Blocks [..., N, K] -> float32 of that shape, exactly what their format means."""
    *_, k = w.shape
    y = _empty(*w.shape)
    _c.expand_rows(_c.Expand(w.data.data_ptr(), y.data_ptr(), _matrix(w)[1], y.numel() // k, k, _threads()))
    return y


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [..., G, 16], scales uint8 [..., G] -> float32 [..., G * 32]."""
    assert blocks.is_contiguous() and scales.is_contiguous() and blocks.shape[-1] == 16
    y = _empty(*scales.shape[:-1], scales.shape[-1] * 32)
    tensors = blocks.data_ptr(), scales.data_ptr(), y.data_ptr()
    _c.unpack_mxfp4(_c.Packed(*tensors, scales.numel(), _threads()))
    return y


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * w over the last dimension of x [M, C], float32 or bfloat16."""
    y = torch.empty_like(x)
    _c.rms_norm(pack_norm(x, w, eps, y))
    return y


def pack_norm(x: Tensor, w: Tensor, eps: float, y: Tensor) -> Any:
    """y: like x, or columns of something wider."""
    assert x.is_contiguous() and w.is_contiguous() and y.stride(1) == 1 and y.shape == x.shape
    kinds = KIND[x.dtype], KIND[w.dtype]
    return _c.Norm(x.data_ptr(), w.data_ptr(), y.data_ptr(), *kinds, eps, *x.shape, y.stride(0), _threads())


def rms_norm_backward(dy: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of rms_norm: dy and x [M, C], w [C] float32 -> dx like x, dw [C] float32."""
    m, c = x.shape
    assert x.is_contiguous() and dy.is_contiguous() and dy.dtype == x.dtype and w.dtype == torch.float32
    dx, dw = torch.empty_like(x), _empty(c)
    tensors = (t.data_ptr() for t in (x, w, dy, dx, dw))
    _c.rms_norm_backward(_c.NormBack(*tensors, KIND[x.dtype], eps, m, c, _threads()))
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
    norms = None if q_norm is None or k_norm is None else (q_norm, k_norm, eps)
    _c.rope(pack_rope(qkv, cos, sin, n_heads, n_kv, head_dim, norms))
    return qkv


HeadNorms = tuple[Tensor, Tensor, float]  # weights [D] of queries and keys, eps


def pack_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, head_dim: int, norms: HeadNorms | None
) -> Any:
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    (q, q_kind), (k, k_kind) = _address_and_kind(q_norm), _address_and_kind(k_norm)
    tensors = qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), q, k, q_kind, k_kind
    return _c.Rope(*tensors, eps, len(qkv), heads, kv_heads, head_dim, _threads())


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, rotated: int, sign: float = 1.0) -> Tensor:
    """x [M, H, D] float32 or bfloat16, cos and sin [M, D/2] -> a copy where the first `rotated` heads are
    rotated; sign -1 rotates back."""
    m, h, d = x.shape
    assert x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and cos.shape == (m, d // 2)
    y = torch.empty_like(x)
    tensors = x.data_ptr(), y.data_ptr(), cos.data_ptr(), sin.data_ptr()
    _c.turn_heads(_c.Turn(*tensors, KIND[x.dtype], m, h, rotated, d, sign, _threads()))
    return y


def angles(positions: Tensor, inv: Tensor, concentration: float) -> tuple[Tensor, Tensor]:
    """positions [M] int64, inv [n] float64 -> cos and sin of their products [M, n], times concentration."""
    cos, sin = _empty(len(positions), len(inv)), _empty(len(positions), len(inv))
    _c.angles(pack_angles(positions, inv, concentration, cos, sin))
    return cos, sin


def pack_angles(positions: Tensor, inv: Tensor, concentration: float, cos: Tensor, sin: Tensor) -> Any:
    assert positions.is_contiguous() and positions.dtype == torch.int64
    assert inv.is_contiguous() and inv.dtype == torch.float64
    tables = cos.data_ptr(), sin.data_ptr()
    sizes = len(positions), len(inv), _threads()
    return _c.Angles(positions.data_ptr(), inv.data_ptr(), concentration, *tables, *sizes)


def attend(q: Tensor, k: Tensor, v: Tensor, start: Tensor, *rules: Any, **more: Any) -> Tensor:
    """q [B, T, H, D] -> [B, T, H * Dv]; see `pack_attend`."""
    y = _empty(*q.shape[:2], q.shape[2] * v.shape[3])
    _c.attend(pack_attend(q, k, v, start, y, *rules, **more))
    return y


def pack_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    y: Tensor,
    window: int,
    sinks: Tensor | None,
    scale: float,
    tree: Tensor | None = None,
    depth: Tensor | None = None,
    both_ways: bool = False,
    *,
    first: Tensor | None = None,
    lists: tuple[Tensor, Tensor] | None = None,
    kv_share: Tensor | None = None,
    ring: int = 0,
    rows: Tensor | None = None,
) -> Any:
    """q [B, T, H, D] float32 over rings k, v [B, K, S, D], float32, bfloat16 or float16, that hold start [B]
    tokens and these T -> y [B, T, H * Dv]. Values may have another number Dv of dimensions, and be one
    head's [B, 1, S, Dv] for all. Token i lies at slot (i - first [B]) % S; without `first`, at i % S.

    New token t is at p = start + t and sees storage indices max(0, p - window + 1)..p (window 0: all of
    them); with both_ways, also all the new ones. With tree [B, T, U] bool and depth [B, T] int64 it is
    at start + depth, and sees of the U tokens after the first `start` those that tree names: of its ancestors
    and itself, those in its window. With lists, storage indices [B, T, N] and their counts [B, T],
    both int64, each new token sees those and nothing else is read. `kv_share` [B, T, H] is written: the sum
    of the weights of the keys, which is 1 minus the weight of the sink. `ring`: the address of an entry of
    `program.Rings`, which says where k and v are when the kernel runs; `rows` [B] int64: which of its rows
    each sequence has.
    """
    b, t, h, d = q.shape
    _, kv, s, _ = k.shape
    u = t if tree is None else tree.shape[2]
    q_b, q_t, q_h, q_1 = q.stride()
    y_b, y_t, y_1 = y.stride()
    k_b, k_h, k_s, k_1 = k.stride()
    v_b, v_h, v_s, v_1 = v.stride()
    v_h = v_h if v.shape[1] == kv else 0
    assert q_h == k_s == d and q_1 == k_1 == v_1 == 1 and v.shape[1] in (1, kv) and v.shape[2] >= s
    assert h <= 64 * kv and d <= MOST_HEAD_DIM and d % 8 == 0 and k.dtype == v.dtype
    assert tree is None or (tree.is_contiguous() and depth is not None and depth.is_contiguous())
    dv = v.shape[3]
    assert y.shape == (b, t, h * dv) and y_t == h * dv and y_1 == 1
    sink, sink_kind = (0, 0) if sinks is None else (sinks.data_ptr(), KIND[sinks.dtype])
    index, counts, n = 0, 0, 0
    if lists is not None:
        assert not window and all(x.is_contiguous() and x.dtype == torch.int64 for x in lists)
        index, counts, n = lists[0].data_ptr(), lists[1].data_ptr(), lists[0].shape[2]
    assert kv_share is None or (kv_share.is_contiguous() and kv_share.shape == (b, t, h))
    tensors = q.data_ptr(), k.data_ptr(), v.data_ptr(), start.data_ptr(), _address(first)
    rules = _address(tree), 0 if tree is None else _address(depth), sink, sink_kind, index, counts
    strides = q_b, q_t, k_b, k_h, v_b, v_h, v_s, y_b
    sizes = b, t, u, n, h, kv, d, dv, s, window, both_ways, KIND[k.dtype]
    outputs = y.data_ptr(), _address(kv_share)
    return _c.Attend(*tensors, *rules, *outputs, *strides, *sizes, scale, _threads(), ring, _address(rows))


def route(
    x: Tensor, w: Tensor, b: Tensor | None, k: int, softmax_first: bool, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """The k largest of x [M, C] @ w [E, C].T + b [E] -> index int64 [M, k], weight [M, k], sorted."""
    index, weight = _empty(len(x), k, dtype=torch.int64), _empty(len(x), k)
    _c.route(pack_route(x, w, b, index, weight, softmax_first, renormalise))
    return index, weight


def pack_route(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    index: Tensor,
    weight: Tensor,
    softmax_first: bool,
    renormalise: bool,
) -> Any:
    (m, c), e, k = x.shape, len(w), index.shape[1]
    assert x.is_contiguous() and w.is_contiguous() and k <= e
    tensors = x.data_ptr(), w.data_ptr(), KIND[w.dtype], *_address_and_kind(b), index.data_ptr()
    return _c.Route(*tensors, weight.data_ptr(), m, e, c, k, softmax_first, renormalise, _threads())


def gated(gate_up: Tensor, limit: float | None, alpha: float) -> Tensor:
    """gate_up [M, 2F], float32 or bfloat16 -> [M, F]: gate * sigmoid(alpha * gate) * up.

    With a limit, gate and up alternate, are clamped, and up + 1 takes the place of up; without one
    the gates are the first half.
    """
    y = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    _c.gated(pack_gates(gate_up, None, y, limit, alpha))
    return y


def gated_backward(dy: Tensor, gate_up: Tensor, limit: float | None, alpha: float) -> Tensor:
    """Gradient of gated: dy [M, F], gate_up [M, 2F] -> [M, 2F]."""
    assert dy.is_contiguous() and dy.dtype == gate_up.dtype
    out = torch.empty_like(gate_up)
    _c.gated_backward(pack_gates(gate_up, dy, out, limit, alpha))
    return out


def sequences(
    inputs: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, ends: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """q [N,H,D], k and v [N,K,D] bfloat16, D a multiple of 64, of sequences end to end, `ends` [R+1] int64;
    sinks [H] float32 -> out [N,H,D] bfloat16, and the logarithms of the denominators [N,H] float32."""
    out, lse = torch.empty_like(inputs[0]), torch.empty(inputs[0].shape[:2])
    _c.sequences(
        _pack_sequences((*inputs, sinks, ends, None, out, lse, None, None, None, None), window, scale)
    )
    return out, lse


def sequences_backward(
    inputs: tuple[Tensor, Tensor, Tensor],
    ends: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """grad [N,H,D] of out -> those of q, k and v, and rowsum(grad * out) [N,H] float32."""
    inner, (dq, dk, dv) = torch.empty_like(lse), map(torch.empty_like, inputs)
    _c.sequences(_pack_sequences((*inputs, None, ends, grad, out, lse, inner, dq, dk, dv), window, scale))
    return dq, dk, dv, inner


def _pack_sequences(tensors: tuple[Tensor | None, ...], window: int, scale: float) -> Any:
    q, k, _, _, ends, *_ = tensors
    assert q is not None and k is not None and ends is not None and ends.dtype == torch.int64
    assert q.dtype == torch.bfloat16 and all(x is None or x.is_contiguous() for x in tensors)
    sizes = len(ends) - 1, q.shape[1], k.shape[1], q.shape[2], window
    return _c.Sequences(*map(_address, tensors), *sizes, scale, _threads())


def pack_gates(x: Tensor, dy: Tensor | None, out: Tensor, limit: float | None, alpha: float) -> Any:
    assert x.is_contiguous()
    tensors = x.data_ptr(), _address(dy), out.data_ptr(), KIND[x.dtype]
    sizes = len(x), x.shape[1] // 2, limit is not None
    return _c.Gates(*tensors, *sizes, limit or 0.0, alpha, _threads())


def argmax(x: Tensor) -> Tensor:
    """x [M, N] -> the index of each row's largest value, the first among equals, [M] int64."""
    assert x.is_contiguous() and x.shape[1]
    y = _empty(len(x), dtype=torch.int64)
    _c.argmax(_c.Largest(x.data_ptr(), y.data_ptr(), 0, *x.shape, _threads()))
    return y


def drawn(x: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """x [M, N] float32, keys [M] int64 -> the index of the largest of x / temperature + noise in each row,
    [M] int64: a draw from the softmax."""
    assert x.is_contiguous() and keys.is_contiguous() and keys.dtype == torch.int64 and len(keys) == len(x)
    y = _empty(len(x), dtype=torch.int64)
    _c.drawn(_c.Draw(x.data_ptr(), keys.data_ptr(), y.data_ptr(), *x.shape, _threads(), temperature))
    return y


def place_keys(key: int, streams: Tensor, places: Tensor) -> Tensor:
    """A key for each place of a stream: int64 of one shape -> int64 of that shape."""
    assert streams.is_contiguous() and places.is_contiguous() and streams.shape == places.shape
    assert streams.dtype == places.dtype == torch.int64
    y = torch.empty_like(places)
    _c.place_keys(_c.PlaceKeys(streams.data_ptr(), places.data_ptr(), y.data_ptr(), key, y.numel()))
    return y


def perturb(x: Tensor, keys: Tensor) -> Tensor:
    """x [M, N] float32, keys [M] int64 -> x + noise, a function of the row's key and the column."""
    assert x.is_contiguous() and keys.is_contiguous() and keys.dtype == torch.int64 and len(keys) == len(x)
    y = torch.empty_like(x)
    _c.perturb(_c.Noise(x.data_ptr(), keys.data_ptr(), y.data_ptr(), *x.shape, _threads()))
    return y


def top(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, N] float32 -> the k <= N largest of each row, falling, the first among equals first: ids [M, k]
    int64 and values [M, k]; and the rows' log-sum-exp [M]."""
    m = len(x)
    ids, values, lse = _empty(m, k, dtype=torch.int64), _empty(m, k), _empty(m)
    _c.top(pack_top(x, ids, values, lse))
    return ids, values, lse


def pack_top(x: Tensor, ids: Tensor, values: Tensor, lse: Tensor) -> Any:
    (m, n), k = x.shape, ids.shape[1]
    assert x.is_contiguous() and 1 <= k <= min(n, MOST_CANDIDATES)
    tensors = x.data_ptr(), ids.data_ptr(), values.data_ptr(), lse.data_ptr()
    return _c.Top(*tensors, m, n, k, _threads())


class Memories:
    """Tensors [B, K, S + 1, D] of one dtype, S of each its own, as `move` reads them."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        first = caches[0]
        self.B, self.K, _, D = first.shape
        assert all(m.is_contiguous() and m.dtype == first.dtype for m in caches)
        assert all(m.shape[:2] == first.shape[:2] and m.shape[3] == D for m in caches)
        numbers = [x for m in caches for x in (m.data_ptr(), m.shape[2] - 1)]
        self.table, self.count = (c_int64 * len(numbers))(*numbers), len(caches)
        self.row_bytes = D * first.element_size()


def move(memories: Memories, source: Sequence[int], target: Sequence[int]) -> None:
    """source, target, row after row of B: indices of tokens, each in slot index % S, or -1 in both for none.
    In place."""
    count, B = len(source), memories.B
    indices = (c_int64 * count)(*source), (c_int64 * count)(*target)
    pointers = addressof(memories.table), *map(addressof, indices)
    _c.move(_c.Moves(*pointers, memories.count, B, memories.K, count // B, memories.row_bytes))


def index_scores(q: Tensor, w: Tensor, keys: Tensor, start: Tensor, seen: int, chain: bool) -> Tensor:
    """q [B, T, H, D], w [B, T, H], keys [B, S, D] of which the first `seen` may count, start [B] int64 -> sum
    over heads of w max(q . k, 0), [B, T, seen] float32; undefined for keys that no query looks at: those from
    start on, or in a chain after the query."""
    b, t, h, d = q.shape
    assert q.is_contiguous() and w.is_contiguous() and keys.stride()[1:] == (d, 1) and seen <= keys.shape[1]
    assert d % 8 == 0 and d <= MOST_HEAD_DIM and h <= MOST_INDEX_HEADS
    assert q.dtype == w.dtype == keys.dtype == torch.float32
    y = _empty(b, t, seen)
    tensors = q.data_ptr(), w.data_ptr(), keys.data_ptr(), start.data_ptr(), y.data_ptr()
    _c.index_scores(_c.Score(*tensors, keys.stride(0), b, t, h, d, seen, chain, _threads()))
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
    """See `kv.topk.choose`: -> lists [B, T, width] int64, ascending, and the length of each [B, T]; -1
    where scores are not finite."""
    b, t, s = scores.shape
    u = t if tree is None else tree.shape[2]
    for x in (scores, start, counts, wanted, tree, depth):
        assert x is None or x.is_contiguous()
    assert (tree is None) == (depth is None)
    lists, lengths = _empty(b, t, width, dtype=torch.int64), _empty(b, t, dtype=torch.int64)
    tensors = scores.data_ptr(), start.data_ptr(), counts.data_ptr(), _address(tree), _address(depth)
    outputs = wanted.data_ptr(), lists.data_ptr(), lengths.data_ptr()
    _c.choose(_c.Choose(*tensors, *outputs, b, t, u, s, width, sinks, recent, _threads()))
    return lists, lengths


def latent_keys_(
    y: Tensor, rows: Tensor, w: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None
) -> None:
    """Writes y [B, K, n, D], a part of more tokens: rows [B, n, R ..] @ W + bias, W [R, K * D] as w
    [K * D / P, R, P]; each head times the number behind the R and gain [D] where that is given, rotated by
    cos and sin [B or 1, n, D / 2]; all float32. A token's key does not depend on how many there are."""
    b, k, n, d = y.shape
    panels, r, p = w.shape
    assert rows.shape[:2] == (b, n) and rows.shape[2] >= r + (k if gain is not None else 0)
    assert panels * p == k * d and p in (8, PANEL) and d % p == 0 and d % 8 == 0 and d <= MOST_HEAD_DIM
    assert y.stride()[2:] == (d, 1) and rows.stride(2) == 1
    assert all(t.is_contiguous() for t in (w, bias, cos, sin))
    assert cos.shape == sin.shape and cos.shape[1:] == (n, d // 2) and len(cos) in (1, b)
    t_b = 0 if len(cos) == 1 else n * (d // 2)
    tensors = (t.data_ptr() for t in (rows, w, bias, cos, sin))
    strides = rows.stride(0), rows.stride(1), t_b, y.stride(0), y.stride(1)
    sizes = b, n, r, k, d, p, gain is not None
    _c.latent_keys(_c.Unfold(*tensors, _address(gain), y.data_ptr(), *strides, *sizes, _threads()))
