"""linear(x, w, b): weights in their stored precision, arithmetic in x's."""

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., C] @ weight [N, C]^T (+ bias [N]) -> [..., N], computed in x's dtype."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
