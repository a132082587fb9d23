"""MLA-lite: one layer's keys and values through one latent c, next to the projections it was made from.

    c = x W_c + b_c                    what is remembered, [R]
    k = c W_k_lat + b_k                before rotary positions, and before q/k norm where there is one
    v = c W_v_lat + b_v

Keys are rotated when they are read: the rotation depends on the position and cannot be folded into a factor
of q (TransMLA, arXiv 2502.07864, section 3). Qwen3's k norm divides by the key's root mean square, which is
no linear function of c: 1 / rms of the exact key is remembered behind it, one number per kv head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outpace.models.blocks import Linear, RMSNorm
from outpace.models.config import ModelConfig
from outpace.ops.dispatch import use_kernel
from outpace.ops.latent import keys_, panels
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
        self._panels: tuple[tuple[int, ...], Tensor, Tensor] | None = None

    def rows(self, x: Tensor, k: Tensor, eps: float) -> Tensor:
        """x [B,T,C], the attention's input, and k [B,T,K*D], the exact keys before any norm -> what is
        remembered, [B,T,W]."""
        c: Tensor = self.down(x)
        if not self.normed:
            return c
        # means as a product; its rows do not depend on how many there are
        of_heads = torch.eye(self.kv_heads, device=k.device).repeat_interleave(self.head_dim, 1)
        mean = linear(k.float().square(), of_heads / self.head_dim)
        return torch.cat((c, (mean + eps).rsqrt().to(c.dtype)), dim=-1)

    def expand(
        self, rows: Tensor, cos: Tensor, sin: Tensor, norm: RMSNorm | None, head: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """rows [..., n, W], cos and sin [n, D/2] or [..., n, D/2] -> k, rotated, and v [..., K, n, D]; with
        `head`, of that kv head alone. `norm`: the layer's k norm; its weight is applied here.

        A row's result does not depend on how many rows come with it."""
        D, n = self.head_dim, rows.shape[-2]
        flat = rows.reshape(-1, rows.shape[-1])
        c, inverse = flat[:, : self.rank], flat[:, self.rank :]
        v = _up(self.v_up, c, head, D).reshape(*rows.shape[:-2], n, -1, D).transpose(-3, -2)
        if head is None and D % 8 == 0 and use_kernel(rows):
            made = rows.new_empty(*rows.shape[:-2], self.kv_heads, n, D)
            self.keys_(made.view(-1, *made.shape[-3:]), rows.view(-1, *rows.shape[-2:]), cos, sin, norm)
            return made, v
        k = _up(self.k_up, c, head, D).unflatten(-1, (-1, D))
        if norm is not None:
            inverse = inverse if head is None else inverse[:, head : head + 1]
            k = k * inverse[..., None] * norm.weight.to(k.dtype)
        shape = (-1, n, *k.shape[1:])
        cos, sin = (t if t.dim() == 3 else t[None] for t in (cos, sin))
        k = rotate(k.reshape(shape).contiguous(), cos, sin).transpose(1, 2)
        return k.reshape(*rows.shape[:-2], *k.shape[1:]), v

    def keys_(self, out: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, norm: RMSNorm | None) -> None:
        """The keys of `expand` by the kernel, written to out [B, K, n, D]; rows [B, n, W]."""
        gain = None if norm is None else norm.weight.float().contiguous()
        cos, sin = (t[None] if t.dim() == 2 else t for t in (cos, sin))
        keys_(out, rows, *self._key_panels(), cos, sin, gain)

    def _key_panels(self) -> tuple[Tensor, Tensor]:
        """W_k_lat and b_k, float32, as the kernel reads them; formed again when they have changed."""
        weight, bias = self.k_up.weight, self.k_up.bias
        assert isinstance(weight, Tensor) and bias is not None
        versions = (0 if t.is_inference() else t._version for t in (weight, bias))
        now = weight.data_ptr(), *versions
        if self._panels is None or self._panels[0] != now:
            self._panels = now, panels(weight, self.head_dim), bias.detach().float().contiguous()
        return self._panels[1:]

    def values(self, value: Tensor, seen: Tensor) -> Tensor:
        """See `cache.latent.Maps`. A row's result does not depend on how many come with it."""
        (B, T, H, R), K, D = value.shape, self.kv_heads, self.head_dim
        whole, bias = self.v_up.weight, self.v_up.bias
        assert isinstance(whole, Tensor) and bias is not None
        of_heads = value.unflatten(2, (K, -1)).movedim(2, 0).reshape(K, -1, R)
        made = torch.stack([linear(c, w, None) for c, w in zip(of_heads, whole.split(D), strict=True)])
        out = made.view(K, B, T, -1, D).movedim(0, 2).reshape(B, T, H, D)
        each = bias.view(K, 1, D).expand(-1, H // K, -1).reshape(H, D)
        return (out + seen[..., None] * each).flatten(2)


@dataclass(frozen=True)
class LatentMaps:
    """A layer's `cache.latent.Maps`: its latent and its k norm."""

    latent: Latent
    norm: RMSNorm | None

    @property
    def rank(self) -> int:
        return self.latent.rank

    def expand(
        self, rows: Tensor, cos: Tensor, sin: Tensor, head: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.latent.expand(rows, cos, sin, self.norm, head)

    def keys_(self, out: Tensor, rows: Tensor, cos: Tensor, sin: Tensor) -> None:
        self.latent.keys_(out, rows, cos, sin, self.norm)

    def values(self, value: Tensor, seen: Tensor) -> Tensor:
        return self.latent.values(value, seen)


def _up(part: Linear, c: Tensor, head: int | None, D: int) -> Tensor:
    whole, bias = part.weight, part.bias
    assert isinstance(whole, Tensor) and bias is not None
    rows = slice(None) if head is None else slice(head * D, (head + 1) * D)
    return linear(c, whole[rows], bias[rows])
