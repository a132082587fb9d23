"""Cached attention on a GPU by Triton: it reads what a row remembers, not all that it may come to."""

import triton
import triton.language as tl
from torch import Tensor

QUERIES = 16  # (token, head) pairs of a tile, which share a kv head: the least that tensor cores take
KEYS = 64  # of a round
HEAD_DIMS = 16, 32, 64, 128, 256


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    counts: Tensor,
    held: int,
    window: int,
    sinks: Tensor | None,
    scale: float,
    *,
    first: Tensor | None = None,
    both_ways: bool = False,
    tree: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """q [B,T,H,D], k and v [B,K,S,D] as in the `KVView` of a step, `tree` the depth [B,T] of its nodes and
    what each sees of the tree [B,T,U] -> [B,T,H*D].

    A row's sums are formed in one order, whatever the step has besides: keys that it does not see add 0.
    """
    (B, T, H, D), (K, S) = q.shape, k.shape[1:3]
    out = q.new_empty(B, T, H * D)
    if q.is_meta:  # a plan of memory
        return out
    depth, sees = tree or (None, None)
    attention[triton.cdiv(T * H // K, QUERIES), K, B](
        q, k, v, out, start, counts, sinks, first, depth, sees,
        T, H // K, S, held, window, scale, 0 if sees is None else sees.shape[2],
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        SINKS=sinks is not None, FIRST=first is not None, TREE=tree is not None, BOTH=both_ways,
        BM=QUERIES, BN=KEYS, D=D,
    )  # fmt: skip
    return out


@triton.jit
def attention(
    q, k, v, out, starts, counts, sinks, first, depth, sees,
    T, G, S, held, window, scale, U,
    qb, qt, qh, kb, kh, ks, vb, vh, vs,
    SINKS: tl.constexpr, FIRST: tl.constexpr, TREE: tl.constexpr, BOTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One tile: BM pairs of a token and a head, which read kv head `program_id(1)` of row `program_id(2)`."""
    kv, b, d = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.arange(0, D)
    pair = tl.program_id(0) * BM + tl.arange(0, BM)
    t, head, real = pair // G, kv * G + pair % G, pair < T * G
    start = tl.load(starts + b)
    last = start + held + tl.load(counts + b) - 1
    query = start + held + t  # where it is remembered
    place = query  # where it is in its text
    if TREE:
        place = start + tl.load(depth + b * T + t, mask=real, other=0)
    rows = tl.load(q + b * qb + t[:, None] * qt + head[:, None] * qh + d, mask=real[:, None], other=0.0)
    most = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if SINKS:
        most = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        total += 1.0
    acc = tl.zeros((BM, D), tl.float32)
    end = tl.minimum(S, last + 1)
    offset = 0
    if FIRST:
        end, offset = S, tl.load(first + b)
    for begin in range(0, end, BN):
        slot = begin + tl.arange(0, BN)
        index = last - ((last - slot - offset) % S + S) % S  # of the token that lies there
        inside = (slot < end) & (index >= 0)
        if TREE:
            column = index - start
            near = (window == 0) | (index[None, :] > place[:, None] - window)
            node = inside & (column >= 0) & (column < U)
            family = tl.load(
                sees + (b * T + t[:, None]) * U + column[None, :], mask=real[:, None] & node, other=0
            )
            seen = (inside & (column < 0))[None, :] & near | (family != 0)
        else:
            near = (window == 0) | (index[None, :] > query[:, None] - window)
            if BOTH:
                seen = (inside & (index < start + T))[None, :] & (near | (index >= start)[None, :])
            else:
                seen = inside[None, :] & (index[None, :] <= query[:, None]) & near
        keys = tl.load(k + b * kb + kv * kh + slot[:, None] * ks + d, mask=inside[:, None], other=0.0)
        values = tl.load(v + b * vb + kv * vh + slot[:, None] * vs + d, mask=inside[:, None], other=0.0)
        keys, values = keys.to(rows.dtype), values.to(rows.dtype)
        scores = tl.dot(rows, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        less, weights = tl.exp(most - larger), tl.exp(scores - larger[:, None])
        total = total * less + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * less[:, None], input_precision="ieee")
        most = larger
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # a row of padding may see nothing
    place = out + (b * T + t[:, None]) * tl.num_programs(1) * G * D + head[:, None] * D + d
    tl.store(place, acc.to(out.dtype.element_ty), mask=real[:, None])
