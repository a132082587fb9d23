"""Attention of many small blocks, each over its own row's context and over itself: a draft's training."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.kernels import draft_bindings
from outpace.kernels.bindings import use_kernel


@dataclass(frozen=True)
class Layout:
    """R rows of text and A blocks, packed: row i owns the blocks first[i] .. first[i+1] and the context keys
    context[i] .. context[i+1]. Block b sees the first seen[b] keys of that context, and all of itself."""

    first: Tensor  # [R+1] int64
    context: Tensor  # [R+1] int64
    seen: Tensor  # [A] int64
    block: int  # B, queries of a block

    def allowed(self, row: int, window: int) -> Tensor:
        """[n, S] bool: which of the row's S context keys the n queries of its blocks see. A window hides what
        lies that far behind a query's own position, seen[b] + its place in the block."""
        seen = self.seen[int(self.first[row]) : int(self.first[row + 1])].repeat_interleave(self.block)
        keys = torch.arange(int(self.context[row + 1] - self.context[row]), device=seen.device)
        position = seen + torch.arange(len(seen), device=seen.device) % self.block
        near = keys > position[:, None] - window if window else True
        return (keys < seen[:, None]) & near

    def own(self, window: int, causal: bool) -> Tensor:
        """[B, B] bool: which slots of its block each slot sees: all, or where blocks are causal itself and
        the earlier ones within the window."""
        slot = torch.arange(self.block, device=self.seen.device)
        behind = slot[:, None] - slot
        if not causal:
            return behind >= -self.block
        return (behind >= 0) & (behind < window) if window else behind >= 0

    def grid(self, window: int = 0, causal: bool = False) -> Tensor:
        """[A*B, S + A*B] bool, as one dense mask over all contexts and then all blocks."""
        A, S = len(self.seen), int(self.context[-1])
        result = torch.zeros(A * self.block, S + A * self.block, dtype=torch.bool, device=self.seen.device)
        for row in range(len(self.first) - 1):
            queries = slice(int(self.first[row]) * self.block, int(self.first[row + 1]) * self.block)
            result[queries, int(self.context[row]) : int(self.context[row + 1])] = self.allowed(row, window)
        owner = torch.arange(A * self.block, device=result.device) // self.block
        result[:, S:] = (owner[:, None] == owner) & self.own(window, causal).repeat(A, A)
        return result


def block_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    layout: Layout,
    window: int,
    scale: float,
    causal: bool = False,
) -> Tensor:
    """q [N,H,D], k and v [N,K,D] of N = A*B packed block rows; context_k and context_v [S,K,D] -> [N,H*D].
    `causal`: a slot sees none of its block behind it.

    Through the kernel no mask and no scores outlive a tile; elsewhere through the plain reference.
    """
    if use_kernel(q, backward=True):
        tensors = (x.contiguous() for x in (q, k, v, context_k, context_v))
        out: Tensor = _Blocks.apply(*tensors, layout, window, causal, scale)  # type: ignore[no-untyped-call]
        return out
    return reference_block_attend(q, k, v, context_k, context_v, layout, window, scale, causal)


def reference_block_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    layout: Layout,
    window: int,
    scale: float,
    causal: bool = False,
) -> Tensor:
    """Row by row with all its scores, [H, n, S + B]."""
    (H, D), K, B = q.shape[1:], k.shape[1], layout.block
    items = []
    for row in range(len(layout.first) - 1):
        mine = slice(int(layout.first[row]) * B, int(layout.first[row + 1]) * B)
        theirs = slice(int(layout.context[row]), int(layout.context[row + 1]))
        blocks = q[mine].float().reshape(-1, B, K, H // K, D)
        own_k, own_v = (x[mine].float().reshape(-1, B, K, D) for x in (k, v))
        far = torch.einsum("abkgd,skd->kgabs", blocks, context_k[theirs].float()) * scale
        allowed = layout.allowed(row, window).to(q.device).view(far.shape[2:])
        near = torch.einsum("abkgd,ackd->kgabc", blocks, own_k) * scale
        near = near.masked_fill(~layout.own(window, causal).to(q.device), -torch.inf)
        weights = torch.cat((far.masked_fill(~allowed, -torch.inf), near), dim=-1).softmax(-1)
        far, near = weights.split((far.shape[-1], B), dim=-1)
        out = torch.einsum("kgabs,skd->abkgd", far, context_v[theirs].float())
        items.append((out + torch.einsum("kgabc,ackd->abkgd", near, own_v)).reshape(-1, H * D))
    return torch.cat(items).to(q.dtype)


class _Blocks(torch.autograd.Function):
    """The backward forms the weights again, as exp(score - lse)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *inputs, layout, window, causal, scale = args
        ctx.rules = (layout.first, layout.context, layout.seen), layout.block, window, causal, scale
        out, lse = draft_bindings.blocks(tuple(inputs), ctx.rules)
        ctx.save_for_backward(*inputs, out, lse)
        return out.to(inputs[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        result = draft_bindings.blocks_backward(tuple(inputs), ctx.rules, out, lse, grad.contiguous())
        return *result, None, None, None, None
