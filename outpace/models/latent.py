"""MLA-lite: one layer's keys and values through one latent c, beside the projections it was made from.

    c = x W_c + b_c                    what is remembered, [R]
    k = c W_k_lat + b_k                before rotary positions, and before q/k norm where there is one
    v = c W_v_lat + b_v

Keys are rotated when they are read: the rotation depends on the position and cannot be folded into a factor
of q (TransMLA, arXiv 2502.07864, section 3). Qwen3's k norm divides by the key's root mean square, which is
no linear function of c: 1 / rms of the exact key is remembered behind it, one number per kv head.
"""

import torch
from torch import Tensor, nn

from outpace.models.blocks import Linear, RMSNorm
from outpace.models.config import ModelConfig
from outpace.ops.fast import MOST_ROWS
from outpace.ops.linear import linear
from outpace.ops.rope import rotate


class Latent(nn.Module):
    def __init__(self, config: ModelConfig, rank: int) -> None:
        super().__init__()
        self.kv_heads, self.head_dim, self.rank = config.num_kv_heads, config.head_dim, rank
        kv = self.kv_heads * self.head_dim
        self.down = Linear(config.hidden_size, rank, True)
        self.k_up = Linear(rank, kv, True)
        self.v_up = Linear(rank, kv, True)
        self.normed = config.qk_norm

    def rows(self, x: Tensor, k: Tensor, eps: float) -> Tensor:
        """x [B,T,C], the attention's input, and k [B,T,K*D], the exact keys before any norm -> what is
        remembered, [B,T,W]."""
        c: Tensor = self.down(x)
        if not self.normed:
            return c
        # means as a product, whose rows do not depend on how many there are
        of_heads = torch.eye(self.kv_heads, device=k.device).repeat_interleave(self.head_dim, 1)
        mean = linear(k.float().square(), of_heads / self.head_dim)
        return torch.cat((c, (mean + eps).rsqrt().to(c.dtype)), dim=-1)

    def expand(
        self, rows: Tensor, cos: Tensor, sin: Tensor, norm: RMSNorm | None, head: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """rows [..., n, W], cos and sin [n, D/2] or [..., n, D/2] -> k, rotated, and v [..., K, n, D]; with
        `head`, of that kv head alone. `norm`: the layer's k norm, whose weight is applied here.

        A row's result does not depend on how many rows come with it."""
        D, n = self.head_dim, rows.shape[-2]
        flat = rows.reshape(-1, rows.shape[-1])
        c, inverse = flat[:, : self.rank], flat[:, self.rank :]
        k, v = (_up(part, c, head, D).unflatten(-1, (-1, D)) for part in (self.k_up, self.v_up))
        if norm is not None:
            inverse = inverse if head is None else inverse[:, head : head + 1]
            k = k * inverse[..., None] * norm.weight.to(k.dtype)
        shape = (-1, n, *k.shape[1:])
        cos, sin = (t if t.dim() == 3 else t[None] for t in (cos, sin))
        k = rotate(k.reshape(shape).contiguous(), cos, sin)
        turned = (t.transpose(1, 2) for t in (k, v.reshape(shape)))
        k, v = (t.reshape(*rows.shape[:-2], *t.shape[1:]) for t in turned)
        return k, v


def _up(part: Linear, c: Tensor, head: int | None, D: int) -> Tensor:
    whole, bias = part.weight, part.bias
    assert isinstance(whole, Tensor) and bias is not None
    rows = slice(None) if head is None else slice(head * D, (head + 1) * D)
    pieces = c.split(MOST_ROWS) if len(c) > MOST_ROWS and not torch.is_grad_enabled() else (c,)
    return torch.cat([linear(piece, whole[rows], bias[rows]) for piece in pieces])
