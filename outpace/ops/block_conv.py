"""Grouped dynamic causal convolution within short blocks, with its gradients (DFlash 2)."""

from typing import Any

import torch
from torch import Tensor

from outpace.kernels import draft_bindings
from outpace.kernels.bindings import use_kernel


def block_conv(x: Tensor, base: Tensor, delta: Tensor, side: int) -> Tensor:
    """x [..., B, C] in blocks of B rows, base [taps, C], delta [..., B, sides, taps, G] -> like x, with
    d = delta[..., side, :, :]:

        y[i, c] = sum_t (base[t, c] + d[i, t, c // (C/G)]) * x[i-t, c],  nothing where i - t < 0

    A tap never reaches into another block. Summed in float32, result in x's dtype.
    """
    if use_kernel(x, backward=True) and delta.dtype == x.dtype:
        if not torch.is_grad_enabled():
            return _forward(x, base, delta, side)
        if base.dtype == torch.float32:
            out: Tensor = _BlockConv.apply(x, base, delta, side)  # type: ignore[no-untyped-call]
            return out
    return reference_block_conv(x, base, delta, side)


def reference_block_conv(x: Tensor, base: Tensor, delta: Tensor, side: int) -> Tensor:
    grouped = x.float().unflatten(-1, (delta.shape[-1], -1))  # [..., B, G, C/G]
    result = torch.zeros_like(grouped)
    for t in range(len(base)):
        taken = base[t].float().view(grouped.shape[-2:]) + delta[..., side, t, :, None].float()
        earlier = grouped.narrow(-3, 0, max(0, x.shape[-2] - t))
        gap = torch.zeros_like(grouped.narrow(-3, 0, min(t, x.shape[-2])))
        result = result + taken * torch.cat((gap, earlier), dim=-3)
    return result.flatten(-2).to(x.dtype)


def _forward(x: Tensor, base: Tensor, delta: Tensor, side: int) -> Tensor:
    rows, coefficients = x.reshape(-1, x.shape[-1]), delta.reshape(-1, *delta.shape[-3:])
    return draft_bindings.block_conv(rows, base, coefficients, x.shape[-2], side).view(x.shape)


class _BlockConv(torch.autograd.Function):
    """One pass forward and one back, where torch makes a dozen each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Tensor, delta: Tensor, side: int) -> Tensor:
        ctx.save_for_backward(x, base, delta)
        ctx.side = side
        return _forward(x, base, delta, side)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, base, delta = ctx.saved_tensors
        above, rows = (t.reshape(-1, x.shape[-1]).contiguous() for t in (dy, x))
        coefficients = delta.reshape(-1, *delta.shape[-3:])
        block, side = x.shape[-2], ctx.side
        dx, d_base, d_one = draft_bindings.block_conv_backward(above, rows, base, coefficients, block, side)
        d_delta = torch.zeros_like(coefficients)
        d_delta[:, ctx.side] = d_one
        return dx.view(x.shape), d_base, d_delta.view(delta.shape), None
