"""linear(x, w, b): weights in their stored precision, arithmetic in x's."""

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels import bindings
from outpace.kernels.bindings import use_kernel
from outpace.ops.quant import Joined, Quant, Weight, dense, round_activations

PIECE = 2**25  # weights of another precision are converted so many at a time: a head may have 600 million


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, rounded: bool = False) -> Tensor:
    """x [..., C] @ weight [N, C]^T (+ bias [N]) -> [..., N], computed in x's dtype; `rounded`: with x rounded
    to bfloat16, see `round_activations`.

    Through the kernel, each row's result does not depend on how many rows travel with it.
    """
    if isinstance(weight, Joined):
        biases = [None] * len(weight.rows) if bias is None else bias.split(weight.rows)
        parts = zip(weight.parts, biases, strict=True)
        return torch.cat([linear(x, w, b, rounded) for w, b in parts], dim=-1)
    if use_kernel(x):
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return bindings.linear(flat, weight, bias, rounded).view(*x.shape[:-1], weight.shape[0])
    return reference_linear(round_activations(x, weight) if rounded else x, weight, bias)


def reference_linear(x: Tensor, weight: Tensor | Quant, bias: Tensor | None = None) -> Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    if isinstance(weight, Tensor) and weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    N, C = weight.shape
    if N * C <= PIECE:
        return F.linear(x, dense(weight, x.dtype), bias)
    step = max(PIECE // C, 1)
    pieces = [F.linear(x, dense(weight[i : i + step], x.dtype)) for i in range(0, N, step)]
    whole = torch.cat(pieces, dim=-1)
    return whole if bias is None else whole + bias
