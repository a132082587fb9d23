"""rms_norm and the two gated activations (SiLU, gpt-oss clamped), with their gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels import bindings
from outpace.kernels.bindings import use_kernel

ALPHA = 1.702  # of gpt-oss's gate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., C], weight [C] -> [..., C]; statistics in float32, result in x's dtype."""
    if use_kernel(x):
        return bindings.rms_norm(_rows(x), weight, eps).view(x.shape)
    if use_kernel(x, backward=True) and weight.dtype == torch.float32:
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]
    return reference_rms_norm(x, weight, eps)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2F], gate in the first half -> [..., F]: silu(gate) * up."""
    if use_kernel(gate_up):
        return _halved(bindings.gated(_rows(gate_up), None, 1.0), gate_up)
    if use_kernel(gate_up, backward=True):
        return _Gated.apply(gate_up, None, 1.0)  # type: ignore[no-any-return, no-untyped-call]
    return reference_silu_mul(gate_up)


def reference_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """gpt-oss: [..., 2F] with gate in the even and up in the odd columns -> [..., F]."""
    if use_kernel(gate_up):
        return _halved(bindings.gated(_rows(gate_up), limit, ALPHA), gate_up)
    if use_kernel(gate_up, backward=True):
        return _Gated.apply(gate_up, limit, ALPHA)  # type: ignore[no-any-return, no-untyped-call]
    return reference_clamped_swiglu(gate_up, limit)


def reference_clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _halved(y: Tensor, gate_up: Tensor) -> Tensor:
    return y.view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


class _RMSNorm(torch.autograd.Function):
    """One pass forward and one back, where torch on a CPU makes ten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return bindings.rms_norm(_rows(x), weight, eps).view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dx, dw = bindings.rms_norm_backward(_rows(dy), _rows(x), weight, ctx.eps)
        return dx.view(x.shape), dw, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, limit: float | None, alpha: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.rules = limit, alpha
        return _halved(bindings.gated(_rows(gate_up), limit, alpha), gate_up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        return bindings.gated_backward(_rows(dy), _rows(gate_up), *ctx.rules).view(gate_up.shape), None, None
