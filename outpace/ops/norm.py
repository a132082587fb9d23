"""rms_norm and the two gated activations (SiLU, gpt-oss clamped)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels import cpu
from outpace.ops.fast import few


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., C], weight [C] -> [..., C]; statistics in float32, result in x's dtype."""
    if few(x):
        return cpu.rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps).view(x.shape)
    return reference_rms_norm(x, weight, eps)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2F], gate in the first half -> [..., F]: silu(gate) * up."""
    if few(gate_up):
        width = gate_up.shape[-1]
        return cpu.silu_mul(gate_up.reshape(-1, width).contiguous()).view(*gate_up.shape[:-1], width // 2)
    return reference_silu_mul(gate_up)


def reference_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float = 1.702) -> Tensor:
    """gpt-oss: [..., 2F] with gate in the even and up in the odd columns -> [..., F]."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)
