"""DSA-lite: a layer's index, which states for every query what of the past is worth looking at.

    q = x W_q + b_q    [H, D]    k = x W_k + b_k    [D]    w = (x W_w + b_w) / sqrt(H D)    [H]
    I[t, s] = sum_j w[t, j] max(q[t, j] . k[s], 0)

DeepSeek-V3.2's lightning indexer, fed with the attention's input. Dimension i pairs with i + D/2, as in the
attention, and each pair turns with one of the attention's own frequencies: which one is part of the weights.
"""

import torch
from torch import Tensor, nn

from outpace.kv.topk import Index
from outpace.models.blocks import Linear
from outpace.ops.rope import rotate

MOST_HEADS = 16


def usual_heads(heads: int) -> int:
    """Of an index where none are asked for: as many as the attention's `heads`, or a divisor of up to 16."""
    return max(h for h in range(1, MOST_HEADS + 1) if heads % h == 0)


class Indexer(nn.Module):
    def __init__(self, hidden: int, heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.proj = Linear(hidden, heads * dim + dim + heads, True)  # q, k, w
        self.frequencies = nn.Parameter(torch.zeros(dim // 2), requires_grad=False)  # whole numbers

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Index:
        """x [B,T,C], cos and sin [B,T,D/2] of the attention."""
        H, D = self.heads, self.dim
        turned, w = self.proj(x).split(((H + 1) * D, H), dim=-1)
        at = self.frequencies.long()
        tables = (table.index_select(-1, at) for table in (cos, sin))
        turned = rotate(turned.unflatten(-1, (H + 1, D)).contiguous(), *tables)
        return Index(turned[:, :, :H], turned[:, :, H], w * (H * D) ** -0.5)
