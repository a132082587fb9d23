"""New tokens that branch: who follows whom, who sees whom, and how deep each is."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kv.lazy import lazy


@dataclass(frozen=True)
class Tree:
    """parents [B, U] int64: the position of each node's parent, a smaller one; a node that is its own parent
    is a root, as position 0 is, and so is every position of padding.

    The first `held` positions were appended by earlier forwards of the same tree, which grows level by level
    behind the verified tokens; the T = U - held others are new. What is appended and never advanced is
    forgotten.
    """

    parents: Tensor
    held: int = 0

    def __post_init__(self) -> None:
        assert self.parents.dim() == 2 and self.parents.dtype == torch.int64, "parents [B, U] int64"
        assert 0 <= self.held < self.parents.shape[1], "a tree has new positions"

    def part(self, rows: list[int], nodes: int) -> "Tree":
        """The first nodes of these rows, of a tree that is new as a whole."""
        assert not self.held
        return Tree(self.parents[rows, :nodes])

    @lazy
    def depth(self) -> Tensor:
        """[B, T] int64, 0 at a root."""
        return self._all[1][:, self.held :].contiguous()

    @lazy
    def sees(self) -> Tensor:
        """[B, T, U] bool: which nodes each new one descends from, itself included."""
        return self._all[0][:, self.held :].contiguous()

    def within(self, window: int) -> Tensor:
        """`sees`, without what lies `window` generations back or more; 0 is no window."""
        if not window or window >= self.parents.shape[1]:
            return self.sees
        if window not in self._near:
            behind = self.depth[:, :, None] - self._all[1][:, None]
            self._near[window] = self.sees & (behind < window)
        return self._near[window]

    @lazy
    def _near(self) -> dict[int, Tensor]:
        return {}

    @lazy
    def _all(self) -> tuple[Tensor, Tensor]:
        """sees [B, U, U] and depth [B, U] of all positions. Python is the faster way on a CPU; elsewhere it
        would be a wait for the device, and a compiler does not know the numbers."""
        on_host = self.parents.device.type == "cpu" and not torch.compiler.is_compiling()
        return _by_rows(self.parents) if on_host else _by_doubling(self.parents)


def _by_rows(parents: Tensor) -> tuple[Tensor, Tensor]:
    """A node sees itself and what its parent sees, which is the parent's row of the mask."""
    B, U = parents.shape
    sees, depth, row = bytearray(B * U * U), [], 0
    for family in parents.tolist():
        first, deep = row, [0] * U
        for column, parent in enumerate(family):
            assert 0 <= parent <= column, (
                f"position {column} has parent {parent}: a parent is before its child"
            )
            if parent < column:
                above = first + parent * U
                sees[row : row + column] = sees[above : above + column]
                deep[column] = deep[parent] + 1
            sees[row + column] = 1
            row += U
        depth.append(deep)
    return torch.frombuffer(sees, dtype=torch.bool).view(B, U, U), torch.tensor(depth)


def _by_doubling(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Without looking at the numbers: 1, 2, 4, .. generations at once."""
    B, U = parents.shape
    column = torch.arange(U, device=parents.device)
    sees, above = (column[:, None] == column).repeat(B, 1, 1), parents
    for _ in range((U - 1).bit_length()):
        sees |= sees.gather(1, above[:, :, None].expand(-1, -1, U))
        above = above.gather(1, above)
    return sees, sees.sum(2) - 1


def depths(parents: Sequence[int]) -> list[int]:
    """`Tree.depth` of one row, on the host: parents by position -> depth by position; padding, its own
    parent, is at the root's."""
    items = [0]
    for i in range(1, len(parents)):
        items.append(0 if parents[i] == i else items[parents[i]] + 1)
    return items
