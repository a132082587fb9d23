"""What one forward adds to a memory, and what its queries may look at."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.kv.lazy import lazy
from outpace.kv.topk import Lists, QueryPositions
from outpace.kv.tree import Tree

FEW = 64  # new tokens of a row: up to here order costs nothing, above keys are in the order of the text


@dataclass(frozen=True)
class StepMetadata:
    """The tokens one forward adds: row b appends counts[b] of its T positions after start[b] remembered ones.

    The positions past counts[b] are padding: nobody sees them and they are not remembered.
    `both_ways` lets every new token see every other (a draft's block) instead of only earlier ones; with a
    `tree`, it sees its ancestors. A node is remembered by its position and is at its depth; the nodes that
    the tree holds from earlier forwards lie between start[b] and the new ones.
    `on_device`: start and counts [B] int64 of a step whose shapes alone are known on the host; `start` and
    `counts` are empty then. `cache_rows`: which rows of the memories the sequences have; empty: the first.
    """

    start: tuple[int, ...]
    counts: tuple[int, ...]
    T: int
    device: torch.device
    both_ways: bool = False
    tree: Tree | None = None
    on_device: tuple[Tensor, Tensor] | None = field(default=None, kw_only=True)
    cache_rows: tuple[int, ...] = field(default=(), kw_only=True)

    @lazy
    def starts(self) -> Tensor:
        """[B] int64, `start` as a tensor."""
        return self.on_device[0] if self.on_device else torch.tensor(self.start, device=self.device)

    @property
    def held(self) -> int:
        return 0 if self.tree is None else self.tree.held

    @lazy
    def storage(self) -> Tensor:
        """[B, T] the index at which each new token is remembered."""
        return self.starts[:, None] + torch.arange(self.held, self.held + self.T, device=self.device)

    @property
    def positions(self) -> Tensor:
        """[B, T] where each new token is in its text."""
        return self.storage if self.tree is None else self.starts[:, None] + self.tree.depth

    @lazy
    def rows(self) -> Tensor:
        """[B, 1] the row of the memories that each sequence has."""
        if self.cache_rows:
            return torch.tensor(self.cache_rows, device=self.device)[:, None]
        return torch.arange(len(self.starts), device=self.device)[:, None]

    def of_memory(self, x: Tensor) -> Tensor:
        """x [R, ...] of all rows of a memory -> [B, ...], those of the sequences."""
        if not self.cache_rows:
            return x
        if len(self.cache_rows) == 1:
            return x[self.cache_rows[0]][None]
        return x[self.rows[:, 0]]

    @lazy
    def _slots(self) -> dict[int, Tensor]:
        return {}

    def slots(self, size: int) -> Tensor:
        """[B, T]: where each new token lies in a memory of `size` slots; `size` itself, the trash slot, for
        padding and for what a ring would overwrite at once. Formed once for all layers of that size."""
        if size not in self._slots:
            column = torch.arange(self.T, device=self.device)
            first = self.counts_tensor[:, None] - size
            kept = self.real & (column >= first)
            self._slots[size] = torch.where(kept, self.storage % size, size)
        return self._slots[size]

    @lazy
    def real(self) -> Tensor:
        """[B, T] False at padding."""
        return torch.arange(self.T, device=self.device) < self.counts_tensor[:, None]

    @lazy
    def counts_tensor(self) -> Tensor:
        """[B] int64, `counts` as a tensor."""
        return self.on_device[1] if self.on_device else torch.tensor(self.counts, device=self.device)

    @lazy
    def query_positions(self) -> QueryPositions:
        """The same, as an index asks for it."""
        return QueryPositions(self.starts, self.counts_tensor, self.T, self.tree, max(self.start) + self.T)


@dataclass(frozen=True)
class KVView:
    """What the queries of a step may look at: k, v [B,K,S,D], where the token of storage index j lies at slot
    (j - first[b]) % S; `first` [B] int64, None for 0 in every row, as in a memory itself. With `lists`, slots
    of k and v, each query sees those alone."""

    k: Tensor
    v: Tensor
    step: StepMetadata
    first: Tensor | None = None
    lists: Lists | None = None
    values: Callable[[Tensor, Tensor], Tensor] | None = None  # v is one head's latents: see cache.latent.Maps

    def allowed(self, window: int) -> Tensor:
        """[B, T, S] bool."""
        if self.lists is not None:
            return self._listed(*self.lists)
        step, index = self.step, self.index()
        if step.tree is not None:
            return self._allowed_in_tree(index, step, step.tree, window)
        index = index[:, None]
        query = step.storage[:, :, None]
        start = step.starts[:, None, None]
        end = (start + step.T - 1).expand_as(query) if step.both_ways else query
        seen = (index >= 0) & (index <= end)
        if not window:
            return seen
        near = index > query - window
        return seen & (near | (index >= start) if step.both_ways else near)

    def _listed(self, lists: Tensor, lengths: Tensor) -> Tensor:
        S, (B, T, N) = self.k.shape[2], lists.shape
        at = torch.where(torch.arange(N, device=lists.device) < lengths[..., None], lists, S)
        return torch.zeros(B, T, S + 1, dtype=torch.bool, device=lists.device).scatter(2, at, True)[..., :S]

    def _allowed_in_tree(self, index: Tensor, step: StepMetadata, tree: Tree, window: int) -> Tensor:
        """A window counts depth: what was verified is as far behind a node as it was behind its path."""
        column = index - step.starts[:, None]
        past = ((index >= 0) & (column < 0))[:, None]
        if window:
            past = past & (index[:, None] > step.positions[:, :, None] - window)
        U = tree.parents.shape[1]
        inside = (column >= 0) & (column < U)
        at = column.clamp(0, U - 1)[:, None].expand(-1, step.T, -1)
        return past | (inside[:, None] & tree.within(window).gather(2, at))

    def index(self) -> Tensor:
        """[B, S] which token lies in each slot; negative where none does."""
        step, slot = self.step, torch.arange(self.k.shape[2], device=self.k.device)
        last = step.starts[:, None] + step.held + step.counts_tensor[:, None] - 1
        if self.first is not None:
            slot = slot + self.first[:, None]
        return last - (last - slot) % self.k.shape[2]
