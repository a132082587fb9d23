"""Products of experts on a GPU by Triton: MXFP4 weights stay packed, and are unpacked in registers."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # (token, choice) pairs of a tile: the least that tensor cores take
DEPTH = 256  # values of the inner sum a round
COLUMNS = 64  # of the outputs of a tile


class Tiles(NamedTuple):
    """Pairs in the order of their experts, cut into tiles of one expert each; made without asking the host,
    which knows how many there are at most."""

    order: Tensor  # int64 [P]: where a pair stands in [M, k]
    experts: Tensor  # int64 [T]: of a tile; the number of experts behind the last one
    first: Tensor  # int64 [T]: place in `order`
    end: Tensor  # int64 [T]: behind the expert's last pair

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> "Tiles":
        """chosen int64 [M,k] -> the tiles of its pairs."""
        pairs = chosen.flatten()
        known = torch.arange(experts, device=chosen.device)
        ends = (pairs[:, None] == known).sum(0).cumsum(0)
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        tiles = (ends - starts + ROWS - 1) // ROWS
        behind = tiles.cumsum(0)
        own = torch.arange(min(len(pairs), experts) + len(pairs) // ROWS, device=chosen.device)
        which = torch.searchsorted(behind, own, right=True)
        e = which.clamp(max=experts - 1)
        first = starts[e] + (own - behind[e] + tiles[e]) * ROWS
        return cls(pairs.argsort(stable=True), which, first, ends[e])


def up_product(
    x: Tensor,
    blocks: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    k: int,
    swiglu: tuple[float, float] | None = None,
) -> Tensor:
    """x [M,K], blocks uint8 [E,N,K/32,16], scales uint8 [E,N,K/32], bias [E,N] -> [M*k,N] as tiled.

    With `swiglu`, the limit and alpha of gpt-oss's clamped SwiGLU over interleaved rows: [M*k,N/2].
    """
    return _product(x, blocks, scales, bias, tiles, None, k, swiglu)


def down_product(
    h: Tensor, blocks: Tensor, scales: Tensor, bias: Tensor | None, tiles: Tiles, weights: Tensor
) -> Tensor:
    """h [M*k,K] as tiled, weights [M,k] float32 -> [M,N], the weighed sum of a token's choices.

    A row's sums are formed in one order, whatever surrounds it, so that a verified row has the bits of
    autoregressive decoding.
    """
    M, k = weights.shape
    return _product(h, blocks, scales, bias, tiles, weights, k, None).view(M, k, -1).sum(1)


def _product(
    x: Tensor,
    blocks: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    weights: Tensor | None,
    k: int,
    swiglu: tuple[float, float] | None,
) -> Tensor:
    experts, N, G = scales.shape
    out = x.new_empty(len(tiles.order), N if swiglu is None else N // 2)
    if x.is_meta:  # a plan of memory
        return out
    product[len(tiles.experts), triton.cdiv(N, COLUMNS)](
        x, blocks, scales, bias, weights, out, *tiles, experts, N, G, k, *(swiglu or (0.0, 0.0)),
        UP=weights is None, BIAS=bias is not None, SWIGLU=swiglu is not None,
        BM=ROWS, BN=COLUMNS, BK=DEPTH,
    )  # fmt: skip
    return out


@triton.jit
def product(
    x, blocks, scales, bias, weights, out, order, tile_expert, tile_first, tile_end,
    experts, N, G, k, limit, alpha,
    UP: tl.constexpr, BIAS: tl.constexpr, SWIGLU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile: BM pairs of one expert by BN rows of its matrix. See `up_product` and `down_product`."""
    e = tl.load(tile_expert + tl.program_id(0))
    if e >= experts:
        return
    places = tl.load(tile_first + tl.program_id(0)) + tl.arange(0, BM)
    here = places < tl.load(tile_end + tl.program_id(0))
    pairs = tl.load(order + places, mask=here, other=0)
    rows = pairs // k if UP else places
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    matrix = e * N + n.to(tl.int64)
    acc = tl.zeros((BM, BN), tl.float32)
    values, byte, group = tl.arange(0, BK), tl.arange(0, BK // 2), tl.arange(0, BK // 32)
    for g in range(0, G, BK // 32):
        mask = (n < N)[:, None] & (g + byte // 16 < G)
        packed = tl.load(blocks + matrix[:, None] * G * 16 + g * 16 + byte, mask=mask, other=0).to(tl.int32)
        mask = (n < N)[:, None] & (g + group < G)
        powers = tl.load(scales + matrix[:, None] * G + g + group, mask=mask, other=0).to(tl.int32)
        # 2^-127 is no normal number: its bits are not those of an exponent alone
        powers = tl.where(powers == 0, 1 << 22, powers << 23).to(tl.float32, bitcast=True)
        powers = tl.reshape(tl.broadcast_to(powers[:, :, None], (BN, BK // 32, 16)), (BN, BK // 2))
        mask = here[:, None] & (g + values // 32 < G)
        part = tl.load(x + rows[:, None] * G * 32 + g * 32 + values, mask=mask, other=0.0)
        low, high = tl.split(tl.reshape(part, (BM, BK // 2, 2)))
        acc = tl.dot(low, tl.trans((e2m1(packed & 15) * powers).to(low.dtype)), acc, input_precision="ieee")
        acc = tl.dot(high, tl.trans((e2m1(packed >> 4) * powers).to(low.dtype)), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + matrix, mask=n < N, other=0.0).to(tl.float32)
    if SWIGLU:
        gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        acc = gate / (1 + tl.exp(-alpha * gate)) * (up + 1)
        n, N = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2), N // 2
    if not UP:
        acc *= tl.load(weights + pairs, mask=here, other=0.0)[:, None]
        places = pairs
    tl.store(out + places[:, None] * N + n, acc.to(out.dtype.element_ty), mask=here[:, None] & (n < N))


@triton.jit
def e2m1(code):
    """int32 0..15 -> the float32 values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and theirs below 0."""
    magnitude = code & 7
    bits = tl.where(magnitude < 2, magnitude * (126 << 23), (magnitude << 22) + (126 << 23))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)
