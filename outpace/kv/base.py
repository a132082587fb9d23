"""The contract of what a model remembers: append, view, rewind, commit, nbytes; dense and window memories."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.kernels.program import pack_rings
from outpace.kv.metadata import FEW, KVView, StepMetadata
from outpace.kv.moves import Moves, Pairs, kept_rows
from outpace.kv.topk import Index, Lists, TopKConfig, choose
from outpace.kv.tree import Tree

LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class RecordedQueries:
    """The queries of a forward: q [B,T,H,D], of each row the first counts [B]; and the index's, if any."""

    q: Tensor
    counts: tuple[int, ...]
    index: Index | None = None

    def select(self, batch_indices: list[int]) -> "RecordedQueries":
        index = self.index
        if index is not None:
            index = Index(index.q[batch_indices], index.k[batch_indices], index.w[batch_indices])
        return RecordedQueries(self.q[batch_indices], tuple(self.counts[b] for b in batch_indices), index)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """From a cache line's beginning; of a host's memory by none of torch's threads: unless this package was
    imported before torch, they spin on the cores that the next steps need."""
    if torch.device(device).type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    room = np.zeros(size + LINE, np.uint8)
    begin = -room.ctypes.data % LINE
    return torch.from_numpy(room[begin : begin + size]).view(dtype).view(*shape)


class LayerCache:
    """One layer's keys and values, [B, K, S, D] and one trash slot for padding.

    Dense when S is the longest sequence, a ring when it is window + slack.
    """

    def __init__(self, batch: int, kv_heads: int, size: int, head_dim: int, window: int, **kind: Any) -> None:
        shape = (batch, kv_heads, size + 1, head_dim)
        self.k, self.v = zeros(shape, **kind), zeros(shape, **kind)
        self.size = size
        self.window = window  # 0: dense
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.record_queries = False  # keep the queries of every append: what a partial view is chosen by
        self.recorded: RecordedQueries | None = None
        self.keys: Tensor | None = None  # of an index [B, 1, S and a trash slot, D]: see `index_by`
        self.top_k_config: TopKConfig | None = None

    def index_by(self, dim: int, keep: TopKConfig | None, dtype: torch.dtype) -> None:
        """Remember an index's key [dim] with each token; with `keep`, queries see what it chooses alone."""
        assert not self.window, "a window is small as it is"
        B, _, slots, _ = self.k.shape
        self.keys = zeros((B, 1, slots, dim), dtype, self.k.device)
        self.top_k_config = keep

    @property
    def room(self) -> int:
        """How many tokens are appended at once and overwrite none that one of them sees."""
        return self.size - self.window + 1 if self.window else self.size

    @property
    def plain(self) -> bool:
        """Whether keys and values of every token are remembered, and nothing else."""
        return type(self) is LayerCache and self.keys is None

    @property
    def parts(self) -> list[Tensor]:
        """What is remembered of a token: it is written, moved and given up together."""
        return [self.k, self.v] if self.keys is None else [self.k, self.v, self.keys]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def append(
        self,
        k: Tensor,
        v: Tensor,
        step: StepMetadata,
        q: Tensor | None = None,
        rows: Tensor | None = None,
        index: Index | None = None,
    ) -> KVView:
        """k, v [B,K,T,D] -> everything the T queries may see, themselves included. q [B,T,H,D], the queries,
        where who asks may matter; rows [B,T,W], what k and v were made of, where that is remembered; index,
        where it chooses."""
        self.record(q, step, index)
        lists = self._choose(index, step)
        k, v = k.to(self.k.dtype), v.to(self.v.dtype)  # what is seen is what is remembered
        fits = step.held + step.T <= self.room
        if not self.window or (fits and (step.T <= FEW or step.tree is not None)):
            self._write(k, v, step)
            k, v = (step.of_memory(x)[:, :, : self.size] for x in (self.k, self.v))
            return KVView(k, v, step, lists=lists)
        assert not step.held, (
            "a ring where the slack is below a whole tree has overwritten the tree's context"
        )
        past_index = step.starts[:, None] + torch.arange(1 - self.window, 0, device=k.device)
        past_k, past_v = (self._read(x, past_index) for x in (self.k, self.v))
        self._write(k, v, step)
        both = torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)
        return KVView(*both, step, step.starts + (1 - self.window))

    def record(self, q: Tensor | None, step: StepMetadata, index: Index | None = None) -> None:
        if self.record_queries and q is not None:
            self.recorded = RecordedQueries(q, step.counts, index)

    def read(self, b: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """k, v [K, n, D] of row b's tokens begin .. end - 1; not of a ring."""
        return self.k[b, :, begin:end], self.v[b, :, begin:end]

    def pick(self, b: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """index [K, n] int64 -> k, v [K, n, D] of row b's tokens, each kv head its own; not of a ring."""
        k, v = (
            torch.stack([x[b, h].index_select(0, at) for h, at in enumerate(index)]) for x in (self.k, self.v)
        )
        return k, v

    def _choose(self, index: Index | None, step: StepMetadata) -> Lists | None:
        if index is None or self.keys is None:
            return None
        self._put(self.keys, index.k[:, None], step)
        if self.top_k_config is None:
            return None
        return choose(index, self.keys[:, 0, : self.size], step.query_positions, self.top_k_config)

    def _write(self, k: Tensor, v: Tensor, step: StepMetadata) -> None:
        self._put(self.k, k, step)
        self._put(self.v, v, step)

    def _put(self, whole: Tensor, new: Tensor, step: StepMetadata) -> None:
        T = step.T
        if len(step.start) == 1 and step.counts[0] == T:
            slot = (step.start[0] + step.held) % self.size
            if slot + T <= self.size:
                row = step.cache_rows[0] if step.cache_rows else 0
                whole[row : row + 1, :, slot : slot + T] = new
                return
        heads = torch.arange(whole.shape[1], device=whole.device)[:, None]
        # not through a transposed view: XLA has no views to write through
        whole[step.rows[:, None], heads, step.slots(self.size)[:, None]] = new

    def _read(self, x: Tensor, index: Tensor) -> Tensor:
        row = torch.arange(index.shape[0], device=x.device)[:, None]
        return x.transpose(1, 2)[row, index % self.size].transpose(1, 2)

    def select(self, batch_indices: list[int]) -> None:
        self.k, self.v = (kept_rows(x, batch_indices) for x in (self.k, self.v))
        if self.keys is not None:
            self.keys = kept_rows(self.keys, batch_indices)
        if self.recorded is not None:
            self.recorded = self.recorded.select(batch_indices)


class KVCache:
    """One memory per layer and one length per sequence. K and V always move together, in all layers.

    `length` bounds every sequence, `slack` bounds what a rewind may take back where a ring has wrapped.
    `offset` shifts rotary positions: the text is treated as if it began there.
    """

    def __init__(
        self,
        batch: int,
        length: int,
        slack: int,
        windows: tuple[int, ...],
        kv_heads: int,
        head_dim: int,
        *,
        offset: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        own: Mapping[int, LayerCache] | None = None,
    ) -> None:
        """`own`: memories of layers that remember something else than keys and values. `dtype`: of the keys
        and values, which are rounded to it when they are appended."""
        if min(batch, length, slack) < 1:
            raise ValueError(
                f"a cache needs batch, length and slack of at least 1, not {batch}, {length}, {slack}"
            )
        self.length, self.slack, self.offset, self.windows = length, slack, offset, windows
        self.device = torch.device(device)
        self.room = length  # of the smallest ring
        self.rounds: dict[Any, Any] | None = None  # by draft: see decode/device_rounds.py
        self.lengths = [0] * batch
        self.last_start = [0] * batch
        self.rows: tuple[int, ...] = ()  # of the memories, one of each sequence; empty: its number
        # per ring size and sequence: the first index where the key has not been overwritten
        self.kept_from: dict[int, list[int]] = {}
        self.epoch = 0  # changes when the memories become other tensors, or remember something else
        self._packed: Packed | None = None
        self.layers: list[LayerCache] = []
        for layer, window in enumerate(windows):
            if own and layer in own:
                self.layers.append(own[layer])
                continue
            ring = bool(window) and window + slack < length
            size = window + slack if ring else length
            if ring:
                self.kept_from[size], self.room = [0] * batch, min(self.room, slack + 1)
            self.layers.append(
                LayerCache(
                    batch,
                    kv_heads,
                    size,
                    head_dim,
                    window if ring else 0,
                    dtype=dtype,
                    device=device,
                )
            )

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.layers)

    @property
    def rings(self) -> bytes:
        """Where all layers' keys and values are, for a program's `Rings`; of `module_layers` nowhere."""
        packed = self._of_kernels()
        if packed.rings is None:
            packed.rings = pack_rings(
                None if i in packed.module_layers else (memory.k, memory.v)
                for i, memory in enumerate(self.layers)
            )
        return packed.rings

    @property
    def module_layers(self) -> tuple[int, ...]:
        """The layers whose attention no program computes: their memories are not plain, or record queries."""
        return self._of_kernels().module_layers

    def _of_kernels(self) -> "Packed":
        if self._packed is None or self._packed.epoch != self.epoch:
            others = (i for i, m in enumerate(self.layers) if m.record_queries or not m.plain)
            self._packed = Packed(self.epoch, tuple(others))
        return self._packed

    @property
    def _moves(self) -> Moves:
        packed = self._of_kernels()
        if packed.moves is None:
            packed.moves = moves_of(self.layers)
        return packed.moves

    def begin(
        self,
        T: int,
        counts: list[int] | None = None,
        *,
        both_ways: bool = False,
        tree: Tree | None = None,
    ) -> StepMetadata:
        """Open a forward of T positions; `counts` is how many of each row are real (default: all). Of a
        tree they are the positions after those it holds.

        Raises ValueError when a row would outgrow the cache.
        """
        counts = counts if counts is not None else [T] * self.batch
        held = 0 if tree is None else tree.held
        if tree is not None:
            assert tree.parents.shape == (self.batch, held + T), "a tree of this batch and these positions"
            assert not both_ways, "nodes of a tree see their ancestors"
        self.check_room([held + c for c in counts])
        return StepMetadata(
            tuple(self.lengths), tuple(counts), T, self.device, both_ways, tree, cache_rows=self.rows
        )

    def check_room(self, counts: list[int]) -> None:
        """Raises ValueError where counts[b] more tokens of row b do not fit."""
        for b, (n, c) in enumerate(zip(self.lengths, counts, strict=True)):
            if n + c > self.length:
                raise ValueError(
                    f"sequence {b} holds {n} tokens and {c} more do not fit a cache made for "
                    f"{self.length}: make it with a larger length"
                )

    def of(self, rows: Sequence[int], lengths: Sequence[int]) -> "KVCache":
        """The sequences in these rows of the memories, which hold `lengths` tokens, as a cache of their own:
        it writes to the same memories, and who made it keeps the lengths.

        Raises ValueError where a layer remembers something else than all keys and values."""
        if self.kept_from or not all(memory.plain for memory in self.layers):
            raise ValueError(
                "only a cache of whole keys and values can be shared by sequences that come and go"
            )
        self._of_kernels()  # once for all of them
        own = copy(self)
        own.rows, own.lengths, own.last_start = tuple(rows), list(lengths), list(lengths)
        return own

    def part(self, batch_indices: list[int]) -> "KVCache":
        """These sequences, as a cache over the same memories for one forward, after which this one has to
        advance, too. Of plain memories, that a native step reads."""
        own = copy(self)
        every = self.rows or range(self.batch)
        own.rows = tuple(every[b] for b in batch_indices)
        own.lengths = [self.lengths[b] for b in batch_indices]
        own.last_start = list(own.lengths)
        own.kept_from = {size: [kept[b] for b in batch_indices] for size, kept in self.kept_from.items()}
        return own

    def advance(self, step: StepMetadata) -> None:
        """Close a forward: the appended tokens are now cached."""
        assert not step.held, "a tree that grew over several forwards is forgotten, not remembered"
        self.lengths = list(step.start)
        self.extend(step.counts)

    def extend(self, counts: Sequence[int]) -> None:
        """counts[b] more tokens of row b are cached."""
        self.last_start = list(self.lengths)
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]
        for size, kept in self.kept_from.items():
            self.kept_from[size] = [max(k, n - size) for k, n in zip(kept, self.lengths, strict=True)]

    def select(self, batch_indices: list[int]) -> None:
        """Keep only these batch indices, in this order: finished rows cost nothing more."""
        if self.rows:
            self.rows = tuple(self.rows[b] for b in batch_indices)
        else:
            self.epoch += 1
            for memory in self.layers:
                memory.select(batch_indices)
        self.lengths = [self.lengths[b] for b in batch_indices]
        self.last_start = [self.last_start[b] for b in batch_indices]
        self.kept_from = {size: [kept[b] for b in batch_indices] for size, kept in self.kept_from.items()}

    def rewind(self, lengths: list[int]) -> None:
        """Forget everything from `lengths[b]` on. Raises ValueError, and changes nothing, where a ring
        has already overwritten what the next query would need, or where a length lies ahead."""
        for b, n in enumerate(lengths):
            self._check_rewind(b, n)
        self.lengths = list(lengths)
        for kept in self.kept_from.values():
            for b, n in enumerate(lengths):
                kept[b] = min(kept[b], n)  # nothing of the old text is left to be lost

    def _check_rewind(self, b: int, n: int) -> None:
        now = self.lengths[b]
        if not 0 <= n <= now:
            raise ValueError(f"sequence {b} holds {now} tokens: it cannot be rewound to {n}")
        for i, memory in enumerate(self.layers):
            if not memory.window:
                continue
            kept, first = self.kept_from[memory.size][b], max(0, n - memory.window + 1)
            if first < min(kept, n):
                raise ValueError(
                    f"sequence {b} cannot be rewound from {now} to {n}: the window ring of layer {i} "
                    f"keeps {self.slack} tokens of slack; make the cache with slack >= "
                    f"{self.slack + kept - first}"
                )

    def copy(self, source: int, target: int, count: int) -> None:
        """The first `count` tokens of a row of the memories to another row; of plain ones, as `of` asks."""
        for memory in self.layers:
            for part in memory.parts:
                part[target, :, :count] = part[source, :, :count]

    def commit(self, path: list[list[int]]) -> None:
        """Keep, of the tokens the last forward appended, the positions `path[b]` in that order.

        Position i of the path becomes the i-th token after the old length. A leading run 0, 1, 2, ..
        stays where it is, so a chain costs nothing but a rewind.

        Raises ValueError, and changes nothing, for a position that was not appended or is named twice,
        and where a ring holds too little: to move a position, or for the rewind.
        """
        counts = [now - start for start, now in zip(self.last_start, self.lengths, strict=True)]
        if path == [list(range(count)) for count in counts]:
            return  # all are kept, where they are
        moves: list[tuple[list[int], list[int]]] = []  # positions: from, to
        for b, columns in enumerate(path):
            start, appended = self.last_start[b], counts[b]
            if any(not 0 <= c < appended for c in columns) or len(set(columns)) != len(columns):
                raise ValueError(
                    f"sequence {b}: path {columns} does not pick from the {appended} tokens of the last "
                    "forward, each at most once"
                )
            moved = [(c, i) for i, c in enumerate(columns) if c != i]
            kept = max((k[b] for k in self.kept_from.values()), default=0)
            if any(start + min(pair) < kept for pair in moved):
                raise ValueError(
                    f"sequence {b}: path {columns} moves tokens that a window ring has overwritten; make "
                    f"the cache with slack >= {appended}"
                )
            self._check_rewind(b, start + len(columns))
            moves.append(([c for c, _ in moved], [i for _, i in moved]))
        if any(source for source, _ in moves):
            self._move(moves)
        self.rewind([s + len(c) for s, c in zip(self.last_start, path, strict=True)])

    def _move(self, pairs: Pairs) -> None:
        """Positions of the last forward."""
        start = self.last_start
        if self.rows:
            of_row = dict(zip(self.rows, zip(start, pairs, strict=True), strict=True))
            every = [of_row.get(row, (0, ([], []))) for row in range(len(self.layers[0].k))]
            start, pairs = [begin for begin, _ in every], [pair for _, pair in every]
        self._moves(start, pairs)


@dataclass
class Packed:
    """Of a cache's memories, as of an `epoch`: what kernels read, see `KVCache`."""

    epoch: int
    module_layers: tuple[int, ...]
    rings: bytes | None = None  # formed where a program runs, as is `moves` where tokens move
    moves: Moves | None = None


def moves_of(memories: Sequence[LayerCache]) -> Moves:
    """All that is remembered of a token together."""
    return Moves([x for memory in memories for x in memory.parts if x.shape[3]])
