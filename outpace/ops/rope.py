"""Rotary tables: plain, llama-3 and YaRN; angles in float64, cos and sin handed out in float32."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.kernels import bindings
from outpace.kernels.bindings import use_kernel
from outpace.ops.norm import rms_norm


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """The rope part of a config.json, in our terms. `kind` is "default", "linear", "llama3", "yarn", or
    "factors" (GGUF's form of llama3: what each frequency is divided by)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    factors: tuple[float, ...] = ()

    @property
    def concentration(self) -> float:
        """What cos and sin are multiplied by (YaRN's 0.1 ln(factor) + 1; 1 elsewhere)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[D/2] float64."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    inv = rope.theta**-exponent
    if rope.kind == "linear":
        return inv / rope.factor
    if rope.kind == "factors":
        return inv / torch.tensor(rope.factors, dtype=torch.float64, device="cpu")
    if rope.kind == "yarn":
        keep = 1 - _yarn_ramp(rope, head_dim)
        return inv / rope.factor * (1 - keep) + inv * keep
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / inv
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = ((rope.original_max_position / wavelength - low) / (high - low)).clamp(0, 1)
        return inv / rope.factor * (1 - smooth) + inv * smooth
    return inv


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> Tensor:
    """0 where a dimension turns fast enough to be kept, 1 where it is wholly interpolated (YaRN, 18-20)."""

    def dimension(rotations: float) -> float:
        full_turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim / 2 * math.log(full_turns) / math.log(rope.theta)

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
    return ((index - low) / (high - low)).clamp(0, 1)


def rope_tables(positions: Tensor, inv: Tensor, concentration: float) -> tuple[Tensor, Tensor]:
    """positions [...] integer, inv [D/2] float64 -> cos, sin [..., D/2] float32, concentration included.

    Angles are formed in float64: at position 131,072 a bfloat16 angle is noise and a float32 one is
    off by up to 0.008 rad.
    """
    if use_kernel(positions):
        tables = bindings.angles(positions.reshape(-1).contiguous(), inv, concentration)
        return tables[0].view(*positions.shape, -1), tables[1].view(*positions.shape, -1)
    angles = positions.to(torch.float64)[..., None] * inv
    return (angles.cos() * concentration).float(), (angles.sin() * concentration).float()


def rotate_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [B,T,(H+2K)*D], cos and sin [B,T,D/2] -> q [B,T,H,D], k and v [B,T,K,D].

    Queries and keys are rotated; where `norms` (q weight [D], k weight [D], eps) is given, each head is
    first normalised: q/k norm comes before the rotation. `qkv` may be overwritten.
    """
    D = 2 * cos.shape[-1]
    if use_kernel(qkv):
        flat = qkv.view(-1, qkv.shape[-1])
        angles = cos.reshape(-1, D // 2), sin.reshape(-1, D // 2)
        bindings.rope_(flat, *angles, heads, kv_heads, D, *(norms or ()))
        q, k, v = qkv.unflatten(-1, (-1, D)).split((heads, kv_heads, kv_heads), dim=2)
        return q, k, v
    split = heads, kv_heads, kv_heads
    if norms is None and (qkv.is_cuda or use_kernel(qkv, backward=True)):
        whole = qkv.unflatten(-1, (-1, D))
        rotated: Tensor = _Rotated.apply(whole, cos, sin, heads + kv_heads)  # type: ignore[no-untyped-call]
        q, k, v = rotated.split(split, dim=2)
        return q, k, v
    q, k, v = qkv.unflatten(-1, (-1, D)).split(split, dim=2)
    if norms is not None:
        q, k = rms_norm(q, norms[0], norms[2]), rms_norm(k, norms[1], norms[2])
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves: x [B, T, H, D], cos and sin [B, T, D/2]; dimension i pairs with i + D/2."""
    if x.is_cuda or use_kernel(x, backward=True):
        return _Rotated.apply(x, cos, sin, x.shape[2])  # type: ignore[no-any-return, no-untyped-call]
    return reference_rotate(x, cos, sin)


def reference_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, :, None], sin[:, :, None]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class _Rotated(torch.autograd.Function):
    """The first `rotated` heads of x [B, T, H, D] rotated, in one pass; the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.rotated = rotated
        return _rotate(x, cos, sin, rotated, 1.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, sin, ctx.rotated, -1.0), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rotated: int, sign: float) -> Tensor:
    B, T, _, D = x.shape
    if not use_kernel(x, backward=True):
        cos, sin = cos[:, :, None], sign * sin[:, :, None]
        a, b = x[:, :, :rotated].float().chunk(2, dim=-1)
        out = x.clone()
        out[:, :, :rotated, : D // 2] = torch.addcmul(a * cos, b, sin, value=-1)
        out[:, :, :rotated, D // 2 :] = torch.addcmul(b * cos, a, sin)
        return out
    cos, sin = (a.expand(B, T, -1).reshape(-1, D // 2).contiguous() for a in (cos, sin))
    rows = x.reshape(B * T, *x.shape[2:]).contiguous()
    return bindings.rotate_heads(rows, cos, sin, rotated, sign).view(x.shape)
