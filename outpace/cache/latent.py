"""A memory of latents: one low-rank row per token, keys and values made of it when they are looked at."""

from typing import Protocol

import torch
from torch import Tensor

from outpace.cache.index import Index
from outpace.cache.kv import Memory
from outpace.cache.step import Step, View


class Expand(Protocol):
    def __call__(
        self, rows: Tensor, cos: Tensor, sin: Tensor, head: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """rows [..., n, W], cos and sin [n, D/2] of their positions -> k and v [..., K, n, D], rotated; with
        `head`, of that kv head alone, K = 1."""
        ...


class LatentMemory(Memory):
    """Of one full-attention layer: rows [B, 1, S, W] and one trash slot, W far less than 2 K D. What a
    forward looks at is expanded for it, layer by layer, and given up again.

    `cos`, `sin` [S, D/2]: of every index. New columns come expanded, since those of a tree stand at their
    depth.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        size: int,
        head_dim: int,
        width: int,
        expand: Expand,
        tables: tuple[Tensor, Tensor],
        **kind: object,
    ) -> None:
        super().__init__(batch, 1, size, width, 0, **kind)
        self.v = self.k[..., :0]
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.expand, self.tables = expand, tables

    def append(
        self,
        k: Tensor,
        v: Tensor,
        step: Step,
        q: Tensor | None = None,
        rows: Tensor | None = None,
        index: Index | None = None,
    ) -> View:
        assert rows is not None, "a latent memory keeps rows [B, T, W]"
        self.hear(q, step, index)
        self._write(rows[:, None], rows[:, None, :, :0], step)
        lists = self._choose(index, step)
        if lists is not None:
            return self._few(k, v, step, *lists)
        past = max(step.start) + step.held
        if not past:
            return View(k.contiguous(), v.contiguous(), step)
        (B, K, T, D) = k.shape
        seen = k.new_zeros(B, K, past + T, D), k.new_zeros(B, K, past + T, D)
        for whole, old, new in zip(seen, self._expanded(self.k[:, 0], 0, past), (k, v), strict=True):
            whole[:, :, :past] = old
            for b, start in enumerate(step.start):
                whole[b, :, start + step.held : start + step.held + T] = new[b]
        return View(*seen, step)

    def _few(self, k: Tensor, v: Tensor, step: Step, lists: Tensor, many: Tensor) -> View:
        """Of the tokens that any query of a row looks at: they alone are expanded, and counted anew."""
        B, _, N = lists.shape
        at = torch.where(torch.arange(N, device=lists.device) < many[..., None], lists, self.size)
        wanted = torch.zeros(B, self.size + 1, dtype=torch.bool, device=lists.device)
        wanted = wanted.scatter(1, at.flatten(1), True)
        wanted[:, self.size] = False
        used = int(wanted.sum(1).max())
        token = (~wanted).to(torch.uint8).argsort(dim=1, stable=True)[:, :used]  # [B, used] ascending
        slot = wanted.cumsum(1) - 1  # of each token
        cos, sin = (table[token.clamp(max=len(table) - 1)] for table in self.tables)
        rows = self.k[:, 0].gather(1, token[..., None].expand(-1, -1, self.k.shape[3]))
        seen = self.expand(rows, cos, sin)
        trash = torch.where(step.real, slot.gather(1, step.storage.clamp(max=self.size)), used)
        padded = []
        for old, new in zip(seen, (k, v), strict=True):
            whole = torch.nn.functional.pad(old, (0, 0, 0, 1))
            whole.transpose(1, 2)[step.rows, trash] = new.transpose(1, 2)
            padded.append(whole[:, :, :used])
        return View(padded[0], padded[1], step, lists=(slot.gather(1, at.flatten(1)).view_as(lists), many))

    def read(self, b: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        return self._expanded(self.k[b, 0], begin, end)

    def pick(self, b: int, index: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.tables
        rows = self.k[b, 0]
        found = [self.expand(rows[at], cos[at], sin[at], head) for head, at in enumerate(index)]
        k, v = (torch.cat(parts) for parts in zip(*found, strict=True))
        return k, v

    def _expanded(self, rows: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """rows [..., S, W]"""
        cos, sin = (table[begin:end] for table in self.tables)
        return self.expand(rows[..., begin:end, :], cos, sin)
