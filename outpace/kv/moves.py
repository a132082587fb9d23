"""Tokens of a cache moved within every layer's memory at once: what the accepted path of a tree asks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.kernels import bindings
from outpace.kernels.bindings import use_kernel


def move(memories: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    """memories [B, K, S + 1, D], S of each its own; source, target [B, n] int64: indices of tokens, which lie
    in slot index % S, or -1 in both for none. In place; all sources are read before a target is written."""
    if use_kernel(source):
        bindings.move(memories, source, target)
    else:
        reference_move(memories, source, target)


def reference_move(memories: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    lines: dict[int, list[Tensor]] = {}  # formed once for all memories of a size
    for memory in memories:
        slots = memory.shape[2]
        if slots not in lines:
            lines[slots] = [_lines(memory, index) for index in (source, target)]
        flat, (before, after) = memory.view(-1, memory.shape[-1]), lines[slots]
        flat.index_copy_(0, after, flat.index_select(0, before))


def _lines(memory: Tensor, index: Tensor) -> Tensor:
    """Indices [B, n] -> lines [B * K * n] of the memory as [B * K * (S + 1), D]; -1: the trash slot."""
    B, K, slots, _ = memory.shape
    slot = torch.where(index >= 0, index % (slots - 1), slots - 1)
    head = torch.arange(B * K, device=index.device).view(B, K, 1) * slots
    return (head + slot[:, None]).flatten()


def kept_rows(memory: Tensor, rows: list[int]) -> Tensor:
    """These rows of a memory [B, ...], in this order: within it, where none is overwritten before it is read
    and a copy of all would take longer than a step."""
    moved = [(i, row) for i, row in enumerate(rows) if i != row]
    if type(memory) is not Tensor or any(i in rows[i + 1 :] for i, _ in moved):
        return memory[rows]  # XLA's have no views to write to
    for i, row in moved:
        memory[i] = memory[row]
    return memory[: len(rows)]
