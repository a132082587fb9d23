"""Tokens of a cache moved within every layer's memory at once: what the accepted path of a tree asks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.kernels import bindings
from outpace.kernels.bindings import captured

Pairs = Sequence[tuple[list[int], list[int]]]  # of each row: positions of tokens, from and to


class Moves:
    """Of the memories [B, K, S + 1, D] of a cache, S, K and D each its own; packed once for the kernel. A
    token of index i lies in slot i % S."""

    def __init__(self, memories: Sequence[Tensor]) -> None:
        alike: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        for x in memories:
            alike.setdefault((x.shape[1], x.shape[3], x.dtype), []).append(x)
        self.groups = list(alike.values())
        self.device = memories[0].device
        self.tables: list[bindings.Memories] | None = None
        if self.device.type == "cpu" and not captured(memories[0]) and bindings.available():
            self.tables = [bindings.Memories(group) for group in self.groups]

    def __call__(self, start: Sequence[int], pairs: Pairs) -> None:
        """In place; all sources are read before a target is written. Positions are those after the row's
        `start` [B]."""
        n = max(len(source) for source, _ in pairs)
        source, target = list[int](), list[int]()
        for begin, pair in zip(start, pairs, strict=True):
            for indices, positions in zip((source, target), pair, strict=True):
                indices += [begin + x for x in positions] + [-1] * (n - len(positions))
        if self.tables is not None:
            for table in self.tables:
                bindings.move(table, source, target)
            return
        at = torch.tensor((source, target), device=self.device).view(2, len(pairs), n)
        for group in self.groups:
            reference_move(group, *at)


def reference_move(memories: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    """source, target [B, n] int64: indices of tokens, or -1 in both for none."""
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
