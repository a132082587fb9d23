"""A memory of latents: one low-rank row per token, keys and values made of it when they are looked at."""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels.bindings import use_kernel
from outpace.kv.base import LayerCache
from outpace.kv.metadata import FEW, KVView, StepMetadata
from outpace.kv.topk import Index


class LatentProjection(Protocol):
    """What a layer makes of its latents. rows [..., n, W], cos and sin [n, D/2] of their positions, or of all
    but the last of these shapes [..., n, D/2]."""

    @property
    def rank(self) -> int:
        """R: values are made of the first R numbers of a row."""
        ...

    def expand(
        self, rows: Tensor, cos: Tensor, sin: Tensor, head: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """k, rotated, and v [..., K, n, D]; with `head`, of that kv head alone, K = 1."""
        ...

    def keys_(self, out: Tensor, rows: Tensor, cos: Tensor, sin: Tensor) -> None:
        """The first of `expand` by the kernel, written to out [B, K, n, D]; rows [B, n, W]. A row's key does
        not depend on how many rows come with it."""
        ...

    def values(self, value: Tensor, seen: Tensor) -> Tensor:
        """Weighted sums of latents [B,T,H,R], and what the weights add up to [B,T,H] -> the same sums of
        values [B,T,H*D]: W_v_lat follows attention and not the other way step."""
        ...


class LatentCache(LayerCache):
    """Of one full-attention layer: rows [B, 1, S, W] and one trash slot, W far less than 2 K D. What a
    forward looks at is expanded for it, layer by layer, and given up again.

    `cos`, `sin` [S, D/2]: of every index. New positions come expanded, since those of a tree are at their
    depth.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        size: int,
        head_dim: int,
        width: int,
        maps: LatentProjection,
        tables: tuple[Tensor, Tensor],
        **kind: object,
    ) -> None:
        super().__init__(batch, 1, size, width, 0, **kind)
        self.v = self.k[..., :0]
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.maps, self.tables = maps, tables

    def append(
        self,
        k: Tensor,
        v: Tensor,
        step: StepMetadata,
        q: Tensor | None = None,
        rows: Tensor | None = None,
        index: Index | None = None,
    ) -> KVView:
        assert rows is not None, "a latent memory keeps rows [B, T, W]"
        self.record(q, step, index)
        self._write(rows[:, None], rows[:, None, :, :0], step)
        lists = self._choose(index, step)
        if lists is not None:
            return self._few(k, v, step, *lists)
        past = max(step.start) + step.held
        old: tuple[Any, ...] = self.k[:, 0, :past], *(table[:past] for table in self.tables)
        if self._late(k, step):
            held = self.k[:, :, : past + step.T, : self.maps.rank]
            keys = k.new_empty(*k.shape[:2], past + step.T, k.shape[3])
            self.maps.keys_(keys[:, :, :past], *old)
            return KVView(self._with_new(keys, k, step), held, step, values=self.maps.values)
        if not past:
            return KVView(k.contiguous(), v.contiguous(), step)
        past_k, past_v = self.maps.expand(*old)
        return KVView(self._joined(past_k, k, step), self._joined(past_v, v, step), step)

    def _late(self, k: Tensor, step: StepMetadata) -> bool:
        """Whether attention can sum latents, and values be made of the sums: where a kernel runs it."""
        short = step.T <= FEW or step.tree is not None
        return short and self.head_dim % 8 == 0 and use_kernel(k)

    def _joined(self, old: Tensor, new: Tensor, step: StepMetadata) -> Tensor:
        """old [B,K,n,D] and new [B,K,T,D] -> [B,K,n+T,D], each new one at its index."""
        return self._with_new(F.pad(old, (0, 0, 0, step.T)), new, step)

    def _with_new(self, whole: Tensor, new: Tensor, step: StepMetadata) -> Tensor:
        for b, start in enumerate(step.start):
            whole[b, :, start + step.held : start + step.held + step.T] = new[b]
        return whole

    def _few(self, k: Tensor, v: Tensor, step: StepMetadata, lists: Tensor, lengths: Tensor) -> KVView:
        """Of the tokens that any query of a row looks at: they alone are expanded, and counted again."""
        B, _, N = lists.shape
        at = torch.where(torch.arange(N, device=lists.device) < lengths[..., None], lists, self.size)
        wanted = torch.zeros(B, self.size + 1, dtype=torch.bool, device=lists.device)
        wanted = wanted.scatter(1, at.flatten(1), True)
        wanted[:, self.size] = False
        if B == 1:
            token = wanted[0].nonzero().T  # [B, used] ascending
        else:
            used = int(wanted.sum(1).max())
            token = (~wanted).to(torch.uint8).argsort(dim=1, stable=True)[:, :used]
        used, slot = token.shape[1], wanted.cumsum(1) - 1  # slot: of each token
        cos, sin = (table[token.clamp(max=len(table) - 1)] for table in self.tables)
        rows = torch.stack([self.k[b, 0].index_select(0, at) for b, at in enumerate(token)])
        place = torch.where(step.real, slot.gather(1, step.storage.clamp(max=self.size)), used)
        counted = slot.gather(1, at.flatten(1)).view_as(lists), lengths

        def put(whole: Tensor, new: Tensor) -> Tensor:
            whole.transpose(1, 2)[step.rows, place] = new.transpose(1, 2)
            return whole[:, :, :used]

        if self._late(k, step):
            held = rows[:, None, :, : self.maps.rank]
            keys = k.new_empty(B, k.shape[1], used + 1, k.shape[3])
            self.maps.keys_(keys[:, :, :used], rows, cos, sin)
            return KVView(put(keys, k), held, step, lists=counted, values=self.maps.values)
        past_k, past_v = self.maps.expand(rows, cos, sin)
        past_k, past_v = (F.pad(x, (0, 0, 0, 1)) for x in (past_k, past_v))
        return KVView(put(past_k, k), put(past_v, v), step, lists=counted)

    def read(self, b: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        cos, sin = (table[begin:end] for table in self.tables)
        return self.maps.expand(self.k[b, 0, begin:end], cos, sin)

    def pick(self, b: int, index: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.tables
        rows = self.k[b, 0]
        items = [self.maps.expand(rows[at], cos[at], sin[at], head) for head, at in enumerate(index)]
        k, v = (torch.cat(parts) for parts in zip(*items, strict=True))
        return k, v
