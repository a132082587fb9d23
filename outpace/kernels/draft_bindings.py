"""ctypes bindings of the C kernels of drafts alone: candidates, block convolutions, blocks, suffixes."""

from ctypes import addressof, c_double, c_int64
from typing import Any

import torch
from torch import Tensor

from outpace.kernels.bindings import KIND, MOST_CANDIDATES, _address, _c, _empty, _threads

MOST_TAPS = 16
MOST_CONTEXTS, MOST_SAMPLES, MOST_RECENT, MOST_BRANCH = 8, 64, 16, 16


Noise = tuple[Tensor, Tensor]  # keys [M, n] int64 and temperatures [M], 0 for a row without noise


def walk(inputs: tuple[Tensor, ...], noise: Noise | None = None) -> tuple[Tensor, Tensor]:
    """inputs: last [M] int64, candidates ids [M, n, k] int64 with their logits [M, n, k], rows' log-sum-exp
    [M, n], h [M, n, r] float32, codebooks before and after [V, r] -> the chosen ids [M, n] int64, and the
    probability of each place's best [M, n]."""
    m, n, _ = inputs[1].shape
    out, confidence = _empty(m, n, dtype=torch.int64), _empty(m, n)
    _c.walk(pack_walk(inputs, out, confidence, noise))
    return out, confidence


def pack_walk(inputs: tuple[Tensor, ...], out: Tensor, confidence: Tensor, noise: Noise | None = None) -> Any:
    """`inputs`: those of `walk`."""
    _, ids, _, _, h, before, after = inputs
    keys, temperature = noise or (None, None)
    if keys is not None and temperature is not None:
        assert keys.is_contiguous() and keys.dtype == torch.int64 and keys.shape == out.shape
        assert temperature.is_contiguous() and temperature.dtype == torch.float32
    (m, n, k), r = ids.shape, h.shape[-1]
    assert all(t.is_contiguous() for t in inputs) and before.dtype == after.dtype and k <= MOST_CANDIDATES
    given = *(t.data_ptr() for t in inputs), KIND[before.dtype]
    outputs = out.data_ptr(), confidence.data_ptr(), _address(keys), _address(temperature)
    return _c.Walk(*given, *outputs, m, n, k, r, _threads())


def pack_paths(
    inputs: tuple[Tensor, ...],
    books: tuple[Tensor, Tensor, Tensor] | None,
    tokens: Tensor,
    parents: Tensor,
    counts: Tensor,
    reach: Tensor,
) -> Any:
    """inputs: last [M] int64, candidates ids [M, n, k] int64 with their logits [M, n, k], falling, and rows'
    log-sum-exp [M, n]; books: h [M, n, r] float32 and codebooks before and after [V, r] -> tokens, parents
    [M, nodes] int64, counts [M] int64 and reach [M, nodes]."""
    (m, n, k), nodes, h = inputs[1].shape, tokens.shape[1], books and books[0]
    outputs = tokens, parents, counts, reach
    assert all(t.is_contiguous() for t in (*inputs, *(books or ()), *outputs)) and k <= MOST_CANDIDATES
    assert books is None or books[1].dtype == books[2].dtype
    given = *(t.data_ptr() for t in inputs), *map(_address, books or (None, None, None))
    kind, r = (0, 0) if books is None or h is None else (KIND[books[1].dtype], h.shape[-1])
    return _c.Paths(*given, kind, *(t.data_ptr() for t in outputs), m, n, k, r, nodes, _threads())


def block_conv(x: Tensor, base: Tensor, delta: Tensor, block: int, side: int) -> Tensor:
    """x [M, C], base [taps, C], delta [M, sides, taps, groups], of which `side` counts -> [M, C]."""
    out = torch.empty_like(x)
    _c.block_conv(pack_conv(x, base, delta, block, side, out))
    return out


def block_conv_backward(
    dy: Tensor, x: Tensor, base: Tensor, delta: Tensor, block: int, side: int
) -> tuple[Tensor, Tensor, Tensor]:
    """-> the gradients of x [M, C], of base [taps, C] float32, and of delta's side [M, taps, groups]."""
    dx, d_base = torch.empty_like(x), _empty(*base.shape)
    d_delta = delta.new_empty(len(x), *delta.shape[2:])
    _c.block_conv_backward(pack_conv(x, base, delta, block, side, dx, dy, d_delta, d_base))
    return dx, d_base, d_delta


def pack_conv(
    x: Tensor,
    base: Tensor,
    delta: Tensor,
    block: int,
    side: int,
    out: Tensor,
    dy: Tensor | None = None,
    d_delta: Tensor | None = None,
    d_base: Tensor | None = None,
) -> Any:
    m, c = x.shape
    _, sides, taps, groups = delta.shape
    assert x.is_contiguous() and base.is_contiguous() and delta.is_contiguous() and delta.dtype == x.dtype
    assert m % block == 0 and c % groups == 0 and taps <= MOST_TAPS
    assert dy is None or (dy.is_contiguous() and dy.dtype == x.dtype)
    first = delta.data_ptr() + side * taps * groups * delta.element_size()
    inputs = x.data_ptr(), first, base.data_ptr(), _address(dy), KIND[x.dtype], KIND[base.dtype]
    outputs = out.data_ptr(), _address(d_delta), _address(d_base)
    return _c.Conv(*inputs, *outputs, m, block, c, taps, c // groups, sides * taps * groups, _threads())


Inputs = tuple[Tensor, ...]  # q [N, H, D], k and v [N, K, D], context_k and context_v [S, K, D], of one dtype
# first [R+1], context [R+1] and seen [A] of ops.blocks.Layout; the length of a block, the window, whether a
# query does not see the later ones of its block, the scale
BlockRules = tuple[tuple[Tensor, Tensor, Tensor], int, int, bool, float]


def blocks(inputs: Inputs, rules: BlockRules) -> tuple[Tensor, Tensor]:
    """-> out [N, H * D] and the log-sum-exp of every query's scores [N, H], both float32; inputs float32 or
    bfloat16."""
    n, h, d = inputs[0].shape
    out, lse = _empty(n, h * d), _empty(n, h)
    _c.blocks(_pack_blocks(inputs, rules, out, lse, ()))
    return out, lse


def blocks_backward(inputs: Inputs, rules: BlockRules, out: Tensor, lse: Tensor, grad: Tensor) -> Inputs:
    """grad [N, H * D] of out -> the gradients of the inputs, each like its own."""
    result = tuple(map(torch.empty_like, inputs))
    _c.blocks(_pack_blocks(inputs, rules, out, lse, (grad, *result)))
    return result


def _pack_blocks(inputs: Inputs, rules: BlockRules, out: Tensor, lse: Tensor, gradients: Inputs) -> Any:
    q, k, _, context_k, _ = inputs
    ranges, block, window, causal, scale = rules
    first, context, seen = ranges
    assert all(x.is_contiguous() and x.dtype == q.dtype for x in (*inputs, *gradients))
    assert len(seen) * block == len(q) and int(first[-1]) == len(seen) and int(context[-1]) == len(context_k)
    tensors = *(x.data_ptr() for x in inputs), KIND[q.dtype], *(x.data_ptr() for x in ranges)
    outputs = [x.data_ptr() for x in (out, lse, *gradients)] + [0] * (0 if gradients else 6)
    sizes = len(first) - 1, block, q.shape[1], k.shape[1], q.shape[2], window, causal
    return _c.Blocks(*tensors, *outputs, *sizes, scale, _threads())


def grow(
    text: Tensor,
    order: Tensor,
    history: Tensor,
    nodes: int,
    *,
    contexts: tuple[int, ...],
    samples: int,
    recent: int,
    branch: int,
    deepest: int,
    doubt: float,
    own_doubt: float,
    enough: float,
) -> tuple[list[int], list[int], list[float]]:
    """text, order [n] int32, `order` sorts the suffixes of text; history [m] int32; contexts descending ->
    tokens, parents and path probabilities."""
    assert text.dtype == order.dtype == history.dtype == torch.int32 and len(text) == len(order)
    assert text.is_contiguous() and order.is_contiguous() and history.is_contiguous()
    assert 2 * len(contexts) <= MOST_CONTEXTS and list(contexts) == sorted(contexts, reverse=True)
    assert samples <= MOST_SAMPLES and recent <= MOST_RECENT and branch <= MOST_BRANCH
    # a few numbers: cheaper as C arrays than as tensors
    lengths, count = (c_int64 * len(contexts))(*contexts), c_int64()
    tokens, parents, reach = (c_int64 * nodes)(), (c_int64 * nodes)(), (c_double * nodes)()
    inputs = *(t.data_ptr() for t in (text, order, history)), addressof(lengths)
    sizes = len(text), len(history), len(contexts), nodes, samples, recent, branch, deepest
    outputs = (addressof(part) for part in (tokens, parents, reach, count))
    _c.grow(_c.Grow(*inputs, *sizes, doubt, own_doubt, enough, *outputs))
    n = count.value
    return tokens[:n], parents[:n], reach[:n]
