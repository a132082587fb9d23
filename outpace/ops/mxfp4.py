"""The MXFP4 number format: blocks of 32 E2M1 values under one E8M0 scale (OCP MX v1.0)."""

import torch
from torch import Tensor

from outpace.kernels import bindings
from outpace.kernels.bindings import use_kernel

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32
SCALE_BIAS = 127


def unpack(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """blocks uint8 [..., G, 16], scales uint8 [..., G] -> [..., G*32].

    Safetensors order: two values a byte, low nibble first, value = E2M1 * 2^(scale-127). Exact in
    float32 and in bfloat16.
    """
    if dtype == torch.float32 and use_kernel(blocks):
        return bindings.unpack_mxfp4(blocks.contiguous(), scales.contiguous())
    return reference_unpack(blocks, scales, dtype)


def reference_unpack(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """By arithmetic, not by tables, which would be copied to a GPU in every step."""
    exact = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3).to(torch.int8)  # [..., G*32]
    code = nibbles & 7
    twice = code + (code - 4).clamp(min=0) + 2 * (code - 6).clamp(min=0)  # 2 * E2M1[code]
    values = torch.where(nibbles > 7, -0.5, 0.5).to(exact) * twice
    powers = torch.exp2(scales.double() - SCALE_BIAS).float().to(exact)  # of two, however exp2 rounds
    return (values.unflatten(-1, (-1, BLOCK)) * powers[..., None]).flatten(-2).to(dtype)


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K], K a multiple of 32 -> (blocks uint8 [..., K/32, 16], scales uint8 [..., K/32]).

    The scale is the smallest power of two under which the largest value does not exceed 6 by more
    than rounding; values round to the nearest E2M1, ties to the even code.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"MXFP4 packs rows of a multiple of {BLOCK} values, not {weight.shape[-1]}")
    groups, exponent = _scaled(weight)
    codes = _nearest(groups.abs()) | ((groups < 0).to(torch.uint8) << 3)
    pairs = codes.unflatten(-1, (BLOCK // 2, 2))
    blocks = pairs[..., 0] | (pairs[..., 1] << 4)
    return blocks, (exponent + SCALE_BIAS).to(torch.uint8)


def from_ggml(data: Tensor) -> tuple[Tensor, Tensor]:
    """GGUF's MXFP4 rows, uint8 [..., G*17] -> (blocks [..., G, 16], scales [..., G]) of safetensors.

    A GGUF block is its scale and 16 bytes where the low nibbles are values 0..15 and where the high ones
    16..31. The scale byte is the same: ggml's table is doubled and its bias is 128.
    """
    groups = data.unflatten(-1, (-1, BLOCK // 2 + 1))
    codes = torch.cat((groups[..., 1:] & 15, groups[..., 1:] >> 4), dim=-1)  # in the order of the values
    return codes[..., ::2] | (codes[..., 1::2] << 4), groups[..., 0].contiguous()


def to_ggml(blocks: Tensor, scales: Tensor) -> Tensor:
    """The other way."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., G, 32]
    halves = codes[..., : BLOCK // 2] | (codes[..., BLOCK // 2 :] << 4)
    return torch.cat((scales[..., None], halves), dim=-1).flatten(-2)


def fake_quantize(weight: Tensor) -> Tensor:
    """What `unpack(*pack(weight))` gives, with the gradient passed straight through."""
    with torch.no_grad():
        groups, exponent = _scaled(weight)
        size = groups.abs()
        step = 0.5 + 0.5 * (size >= 2) + (size >= 4)  # of E2M1; ties to the even multiple are the even codes
        rounded = torch.round(groups / step).mul_(step).clamp_(-E2M1[-1], E2M1[-1])
        rounded = torch.ldexp(rounded, exponent[..., None]).flatten(-2).to(weight.dtype)
    return weight + (rounded - weight).detach()


def _scaled(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1)
    # 7 = 6 plus half a step: what lies below still rounds to 6 with no more error than its neighbours
    exponent = torch.log2(largest.clamp(min=2.0**-120) / 7).ceil().clamp(-SCALE_BIAS + 1, 126)
    exponent = exponent.to(torch.int32)
    return torch.ldexp(groups, -exponent[..., None]), exponent


def _nearest(magnitude: Tensor) -> Tensor:
    """Index into E2M1, uint8. Midpoints go to the even code."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=magnitude.device)
    upper = torch.bucketize(magnitude, midpoints, right=False)
    tie_up = torch.bucketize(magnitude, midpoints, right=True)
    return torch.where((tie_up != upper) & (upper % 2 == 1), tie_up, upper).to(torch.uint8)
