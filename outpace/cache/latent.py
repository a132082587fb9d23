"""A memory of latents: one low-rank row per token, keys and values made of it when they are looked at."""

from typing import Protocol

import torch
from torch import Tensor

from outpace.cache.kv import Memory, Step, View


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
        self, k: Tensor, v: Tensor, step: Step, q: Tensor | None = None, rows: Tensor | None = None
    ) -> View:
        assert rows is not None, "a latent memory keeps rows [B, T, W]"
        self.hear(q, step)
        self._write(rows[:, None], rows[:, None, :, :0], step)
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
