"""Partial KV (SpecPV, arXiv 2512.02337): of a full-attention layer the first tokens, some blocks, the last.

    sink | retrieval | window | buffer
    `-- static_size, from the full cache --'   `-- tokens the full cache has not seen

The full cache stays whole and is where truth lies; this one is small, and may be nearer to the processor.
Layers with a sliding window are shared: they are small as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from outpace.kv.base import KVCache, LayerCache, RecordedQueries, moves_of
from outpace.kv.metadata import KVView, StepMetadata
from outpace.kv.moves import Pairs
from outpace.kv.topk import Index, reference_scores
from outpace.kv.tree import Tree

# q [T, H, D] of one sequence, low and high [K, n, D] of its blocks -> [T, H, n] float32: higher is looked at
# first. Query head h reads kv head h // (H/K).
Score = Callable[[Tensor, Tensor, Tensor], Tensor]


def extremes(k: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """k [K, n * block_size, D] -> low, high [K, n, D]: per block and dimension the least and the greatest."""
    blocks = k.unflatten(1, (-1, block_size))
    return blocks.amin(2), blocks.amax(2)


def minmax(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """SpecPV as published (arXiv 2512.02337, section 3): max(q . K_max, q . K_min). No bound of anything."""
    return torch.maximum(_dot(q, low), _dot(q, high))


def quest(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Quest's (arXiv 2406.10774, section 3.3): sum_d max(q_d K_min,d, q_d K_max,d), which no key of the block
    exceeds."""
    return _dot(q.clamp(min=0), high) + _dot(q.clamp(max=0), low)


def recent(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The later the better, whoever asks."""
    T, H, _ = q.shape
    return torch.arange(low.shape[1], dtype=torch.float32, device=q.device).expand(T, H, -1)


def worst(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """What Quest wants least: deliberately bad, for proving that no text depends on the choice."""
    return -quest(q, low, high)


def _dot(q: Tensor, keys: Tensor) -> Tensor:
    """q [T, H, D], keys [K, n, D] -> [T, H, n] float32."""
    T, H, D = q.shape
    grouped = q.float().reshape(T, keys.shape[0], -1, D)
    return torch.einsum("tkgd,knd->tkgn", grouped, keys.float()).reshape(T, H, -1)


SELECTORS: dict[str, Score] = {"quest": quest, "minmax": minmax, "recent": recent, "worst": worst}


def rank(scores: Tensor, kv_heads: int, reduce: str) -> Tensor:
    """[T, H, n] -> [K, n]: the mean over the query heads of a kv head, of the queries' mean or best."""
    each = scores.amax(0) if reduce == "max" else scores.mean(0)
    return each.unflatten(0, (kv_heads, -1)).mean(1)


REDUCE = ("mean", "max")
INDEX = "index"  # a target's own (kv/topk.py): what its best token is worth to a query


@dataclass(frozen=True, kw_only=True)
class PartialConfig:
    """How much is kept, in blocks of `block_size` tokens, and how the retrieved ones are chosen. The names
    and the defaults are the paper's. Raises ValueError for sizes that leave nothing to look at."""

    block_size: int = 16
    n_sink_blocks: int = 2
    n_retrieval_blocks: int = 256
    n_window_blocks: int = 8
    n_spec_tokens_buf: int = 20  # tokens accepted on partial KV before a pass with the full cache
    selector: str = "quest"  # one of SELECTORS, or INDEX
    reduce: str = "mean"  # over the queries of the last full forward: one of REDUCE

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), int(not field.name.startswith(("n_sink", "n_retr")))
            if isinstance(value, int) and value < least:
                raise ValueError(f"partial KV: {field.name} {value}: it must be at least {least}")
        for name, known in (("selector", (*SELECTORS, INDEX)), ("reduce", REDUCE)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"partial KV: {name} {getattr(self, name)!r}: it must be one of {', '.join(known)}"
                )

    @classmethod
    def within(cls, tokens: int, **others: Any) -> "PartialConfig":
        """Of a sequence `tokens` are kept, the buffer not counted: as many retrieved blocks as fit.
        Raises ValueError where sinks and window alone take more."""
        bare = cls(**others, n_retrieval_blocks=0)
        blocks = tokens // bare.block_size - bare.n_sink_blocks - bare.n_window_blocks
        if blocks < 0:
            raise ValueError(
                f"partial KV of {tokens} tokens: sinks and window alone are {bare.static_size}; give as many"
            )
        return replace(bare, n_retrieval_blocks=blocks)

    @property
    def sink_size(self) -> int:
        return self.n_sink_blocks * self.block_size

    @property
    def retrieval_size(self) -> int:
        return self.n_retrieval_blocks * self.block_size

    @property
    def window_size(self) -> int:
        return self.n_window_blocks * self.block_size

    @property
    def static_size(self) -> int:
        """Up to here a sequence is kept whole."""
        return self.sink_size + self.retrieval_size + self.window_size

    def buffer_size(self, block: int) -> int:
        """For proposals of up to `block` positions."""
        return self.n_spec_tokens_buf + block

    def total_budget(self, block: int) -> int:
        return self.static_size + self.buffer_size(block)

    def window_start(self, length: int) -> int:
        """Where the window of a sequence longer than `static_size` begins: at a block's edge, so that what
        lies before it is whole blocks."""
        return -(-(length - self.window_size) // self.block_size) * self.block_size


@dataclass(frozen=True)
class PartialStep(StepMetadata):
    """A step of the text, and `near`, the same tokens as a partial memory counts them."""

    near: StepMetadata | None = None


class PartialLayerCache(LayerCache):
    """Of one full-attention layer: static_size + room tokens, and the extremes of every block of `full`."""

    def __init__(self, full: LayerCache, config: PartialConfig, headroom: int, device: torch.device) -> None:
        B, K, D = len(full.k), full.kv_heads, full.head_dim
        super().__init__(B, K, config.static_size + headroom, D, 0, dtype=full.k.dtype, device=device)
        self.full, self.config = full, config
        full.record_queries = True
        shape = (B, K, full.size // config.block_size, D)
        self.low, self.high = (torch.zeros(shape, dtype=full.k.dtype, device=full.k.device) for _ in "lh")

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.low.nbytes + self.high.nbytes

    def append(
        self,
        k: Tensor,
        v: Tensor,
        step: StepMetadata,
        q: Tensor | None = None,
        rows: Tensor | None = None,
        index: Index | None = None,
    ) -> KVView:
        assert isinstance(step, PartialStep) and step.near is not None, (
            "a partial memory has its own counting"
        )
        return super().append(k, v, step.near)

    def select(self, batch_indices: list[int]) -> None:
        super().select(batch_indices)
        self.low, self.high = self.low[batch_indices], self.high[batch_indices]

    def summarise(self, b: int, begin: int, end: int) -> None:
        """The full memory's blocks begin .. end - 1 of row b."""
        size = self.config.block_size
        if begin < end:
            keys, _ = self.full.read(b, begin * size, end * size)
            self.low[b, :, begin:end], self.high[b, :, begin:end] = extremes(keys, size)

    def fill(self, b: int, length: int) -> None:
        """Row b again, from the first `length` tokens of the full memory."""
        config = self.config
        if length <= config.static_size:
            self._copy(b, 0, 0, length)
            return
        sink, start = config.sink_size, config.window_start(length)
        self._copy(b, 0, 0, sink)
        chosen = self.choose(b, config.n_sink_blocks, start // config.block_size)
        offset = torch.arange(config.block_size, device=chosen.device)
        index = (chosen[:, :, None] * config.block_size + offset).flatten(1)
        kept = slice(sink, sink + config.retrieval_size)
        self.k[b, :, kept], self.v[b, :, kept] = self.full.pick(b, index)
        self._copy(b, sink + config.retrieval_size, start, length)

    def choose(self, b: int, first: int, end: int) -> Tensor:
        """-> [K, n_retrieval_blocks] int64, the blocks of row b among first .. end - 1 that the last queries
        want most, ascending, each kv head its own; the latest ones where nobody has asked."""
        low, high = self.low[b, :, first:end], self.high[b, :, first:end]
        K, count = low.shape[0], self.config.n_retrieval_blocks
        asked = self.full.recorded
        real = 0 if asked is None else asked.counts[b]
        if asked is None or not real:
            return torch.arange(end - count, end, device=low.device).expand(K, -1)
        if self.config.selector == INDEX:
            scores = self._by_index(asked, b, real, first, end).expand(-1, K, -1)
        else:
            scores = SELECTORS[self.config.selector](asked.q[b, :real].to(low.device), low, high)
        best = rank(scores, K, self.config.reduce).topk(count, dim=1).indices
        return first + best.sort(dim=1).values

    def _by_index(self, asked: RecordedQueries, b: int, real: int, first: int, end: int) -> Tensor:
        """[T, 1, n]: of each block the best token's score."""
        keys, index, size = self.full.keys, asked.index, self.config.block_size
        assert keys is not None and index is not None, "a cache made with an index"
        part = keys[b : b + 1, 0, first * size : end * size].float()
        scores = reference_scores(index.q[b : b + 1, :real].float(), index.w[b : b + 1, :real].float(), part)
        return scores[0].unflatten(-1, (-1, size)).amax(-1)[:, None]

    def _copy(self, b: int, slot: int, begin: int, end: int) -> None:
        slots = slice(slot, slot + end - begin)
        self.k[b, :, slots], self.v[b, :, slots] = self.full.read(b, begin, end)


class PartialCache(KVCache):
    """What a target looks at while it proposes for itself. `lengths` runs ahead of the full cache's by the
    buffered tokens; `refresh` forgets these and chooses again.

    `room`: positions the buffer has. The full cache must have as much slack, since its window layers take the
    buffered tokens too; they are overwritten there when the full cache goes on.
    """

    def __init__(self, full: KVCache, config: PartialConfig, space: int) -> None:
        assert space <= full.slack, f"{space} buffered positions, and the windows can take back {full.slack}"
        super().__init__(
            full.batch, full.length, full.slack, (), 1, 1, offset=full.offset, device=full.device
        )
        self.full, self.config, self.headroom = full, config, space
        self.layers = [
            memory if window else PartialLayerCache(memory, config, space, self.device)
            for memory, window in zip(full.layers, full.windows, strict=True)
        ]
        full.epoch += 1  # it records queries from now on
        self.static = [0] * full.batch  # tokens of the first three segments
        self.summarised = [0] * full.batch  # blocks
        self.lengths = list(full.lengths)

    @property
    def partials(self) -> list[PartialLayerCache]:
        return [memory for memory in self.layers if isinstance(memory, PartialLayerCache)]

    @property
    def nbytes(self) -> int:
        """What it takes next to the full cache."""
        return sum(memory.nbytes for memory in self.partials)

    @property
    def buffered(self) -> list[int]:
        return [n - m for n, m in zip(self.lengths, self.full.lengths, strict=True)]

    def refresh(self) -> None:
        """Forget what is buffered, and choose for every row from all that the full cache holds."""
        config, self.lengths = self.config, list(self.full.lengths)
        for b, n in enumerate(self.lengths):
            blocks = n // config.block_size
            for memory in self.partials:
                memory.summarise(b, self.summarised[b], blocks)
                memory.fill(b, n)
            self.summarised[b] = blocks
            self.static[b] = n
            if n > config.static_size:
                self.static[b] = config.sink_size + config.retrieval_size + n - config.window_start(n)
            assert self.static[b] <= config.static_size, "a row within its budget"

    def begin(
        self,
        T: int,
        counts: list[int] | None = None,
        *,
        both_ways: bool = False,
        tree: Tree | None = None,
    ) -> PartialStep:
        step = super().begin(T, counts, both_ways=both_ways, tree=tree)
        assert not step.held, "a tree of one forward"
        for n, count in zip(self.buffered, step.counts, strict=True):
            assert 0 <= n <= self.headroom - count, (
                f"{n} and {count} more; the buffer has {self.headroom} positions"
            )
        near = StepMetadata(tuple(self._near(step.start)), step.counts, T, self.device, both_ways, tree)
        return PartialStep(step.start, step.counts, T, self.device, both_ways, tree, near)

    def select(self, batch_indices: list[int]) -> None:
        """After the full cache has kept them."""
        self.epoch += 1
        for memory in self.partials:
            memory.select(batch_indices)
        self.lengths, self.last_start, self.static, self.summarised = (
            [of[b] for b in batch_indices]
            for of in (self.lengths, self.last_start, self.static, self.summarised)
        )

    def _near(self, start: tuple[int, ...] | list[int]) -> list[int]:
        return [s + n - m for s, n, m in zip(self.static, start, self.full.lengths, strict=True)]

    def _check_rewind(self, b: int, n: int) -> None:
        if not self.full.lengths[b] <= n <= self.lengths[b]:
            raise ValueError(
                f"sequence {b}: of {self.lengths[b]} tokens the first {self.full.lengths[b]} are the full "
                f"cache's; it cannot be rewound to {n}"
            )

    def _move(self, pairs: Pairs) -> None:
        shared = [memory for memory in self.layers if not isinstance(memory, PartialLayerCache)]
        if shared:
            moves_of(shared)(self.last_start, pairs)
        moves_of(self.partials)(self._near(self.last_start), pairs)
