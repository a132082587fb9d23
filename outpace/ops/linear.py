"""linear(x, w, b): weights in their stored precision, arithmetic in x's."""

import torch.nn.functional as F
from torch import Tensor

from outpace.kernels import cpu
from outpace.ops.fast import few


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., C] @ weight [N, C]^T (+ bias [N]) -> [..., N], computed in x's dtype.

    Through the kernel, each row's result does not depend on how many rows travel with it.
    """
    if few(x):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return cpu.linear(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])
    return reference_linear(x, weight, bias)


def reference_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
