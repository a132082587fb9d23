"""A target through CUDA graphs: a step of each shape is captured once, and replayed over static buffers."""

import weakref
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from outpace.kv.base import KVCache
from outpace.kv.metadata import FEW, StepMetadata
from outpace.kv.tree import Tree
from outpace.models.config import ModelConfig
from outpace.models.decoder import Decoder, Output
from outpace.models.static_step import StaticStep, Step, bucket

MOST_FREE = 4  # buffers that are kept, with their graphs, for the next cache of their size
LENGTH = 4096  # of a deterministic target's caches, at least

Outputs = TypeVar("Outputs", bound=tuple[Tensor | None, ...])


class Capture(Protocol):
    """`run` recorded -> its outputs, tensors or None, always the same ones; and what forms them again."""

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]: ...


class CUDAGraphs:
    """See `Capture`: graphs of one pool of memory."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # libraries allocate their workspaces at the first call, which no graph may
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = run()
        return out, graph.replay


def reruns(run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
    """The same where there are no graphs: `run` again over the same buffers, its outputs copied to the first
    ones."""
    out = run()

    def replay() -> None:
        for mine, new in zip(out, run(), strict=True):
            if mine is not None and new is not None:
                mine.copy_(new)

    return out, replay


class GraphStep:
    """One shape: every row of the buffers appends at most `width` tokens."""

    def __init__(self, static: StaticStep, rows: int, width: int, tree: bool, capture: Capture) -> None:
        device = static.model.device
        self.tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        # no tokens to append: what is captured changes nothing that is remembered
        self.numbers = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.parents = torch.zeros_like(self.tokens) if tree else None
        starts, counts = self.numbers
        self.out, self.replay = capture(lambda: static(self.tokens, starts, counts, self.parents))

    def run(self, tokens: Tensor, step: StepMetadata, rows: Sequence[int]) -> Step:
        """tokens [B,T] of the sequences in `rows` -> copies of their part of the outputs."""
        (R, _), T = self.tokens.shape, tokens.shape[1]
        starts, counts = [0] * R, [0] * R
        for row, start, count in zip(rows, step.start, step.counts, strict=True):
            starts[row], counts[row] = start, count
        self.numbers.copy_(torch.tensor((starts, counts)), non_blocking=True)
        whole = list(rows) == list(range(R))
        index = slice(None) if whole else torch.tensor(rows, device=tokens.device)
        self.tokens[index, :T] = tokens
        if self.parents is not None and step.tree is not None:
            self.parents[index, :T] = step.tree.parents
        self.replay()

        def mine(x: Tensor) -> Tensor:
            return x[:, :T].clone() if whole else x[index, :T]

        aux = None if self.out.aux is None else torch.stack([mine(x) for x in self.out.aux])
        return Step(mine(self.out.hidden), mine(self.out.logits), mine(self.out.best), aux)


class GraphBuffers:
    """Keys and values of one size, and the graphs that were captured over them: one cache at a time has
    them."""

    def __init__(self, cache: KVCache, size: tuple[int, int, int, int]) -> None:
        self.cache, self.size = cache, size
        self.steps: dict[tuple[int, bool, tuple[int, ...]], GraphStep] = {}
        self.rounds: dict[Any, Any] = {}  # by draft: see `decode/device_rounds.py`


class GraphCache(KVCache):
    """Over `buffers`, emptied. Rows of sequences that end stay where they are: no tensor becomes another."""

    def __init__(self, buffers: GraphBuffers) -> None:
        vars(self).update(vars(buffers.cache))
        self.buffers, self.lengths, self.last_start = buffers, [0] * self.batch, [0] * self.batch
        self.rounds = buffers.rounds
        self.kept_from = {size: [0] * self.batch for size in self.kept_from}
        self.layers = [copy(memory) for memory in self.layers]
        for part in (part for memory in self.layers for part in memory.parts):
            part.zero_()

    @property
    def whole(self) -> bool:
        """Whether all that is remembered lies in `buffers`."""
        return all(memory.plain and not memory.record_queries for memory in self.layers)

    def select(self, batch_indices: list[int]) -> None:
        if self.whole:
            self.rows = self.rows or tuple(range(self.batch))
        super().select(batch_indices)


class GraphTarget:
    """`decoder` for the decoding loop: its short steps over a cache are graphs, all else runs by modules.

    Steps are padded to the next power of two of tokens, caches to one of four lengths between two powers of
    two; rows of a cache that no sequence has are computed, too. `deterministic`: steps of up to FEW tokens
    are padded to FEW, and caches are as long with a draft as without, so that the rows of a verify pass and
    of one-token steps go through the same kernels. `capture`: by default CUDA's graphs on a GPU, else reruns.
    """

    def __init__(
        self, decoder: Decoder, *, deterministic: bool = False, capture: Capture | None = None
    ) -> None:
        self.decoder, self.device, self.deterministic = decoder, decoder.device, deterministic
        self.capture = capture or (CUDAGraphs() if self.device.type == "cuda" else reruns)
        self.free: list[GraphBuffers] = []
        self.captured = 0  # graphs so far

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @torch.inference_mode(False)  # buffers outlive the generation that asked first
    def make_cache(
        self, batch: int, length: int, slack: int = 1, offset: int = 0, index: bool = False
    ) -> KVCache:
        """As `Decoder.make_cache`; the cache of a target with latent KV or an index has no graphs."""
        if self.deterministic:
            # the loop asks for a slack of 1 without a draft, else for the draft's block, in the length too
            length = max(length + FEW - (slack if slack > 1 else 0), LENGTH)
            slack = max(slack, FEW)
        some = max(bucket(length) // 8, 64)
        size = batch, -(-length // some) * some, bucket(slack), offset
        buffers = next((buffers for buffers in self.free if buffers.size == size), None)
        if buffers is not None:
            self.free.remove(buffers)
        else:
            made = self.decoder.make_cache(*size, index)
            if not all(memory.plain for memory in made.layers):
                return made
            buffers = GraphBuffers(made, size)
        cache = GraphCache(buffers)
        weakref.finalize(cache.layers[0], self._give_back, buffers)
        return cache

    def _give_back(self, buffers: GraphBuffers) -> None:
        self.free = [*self.free, buffers][-MOST_FREE:]

    def precompile(
        self,
        batch: int,
        length: int,
        slack: int = 1,
        aux: Sequence[int] = (),
        most: int = FEW,
        tree: bool = False,
    ) -> None:
        """Every graph that decoding `batch` sequences in a cache of this length needs, in steps of `most`
        tokens at most: the largest first, in the memory of which the others lie."""
        cache, width = self.make_cache(batch, length, slack), self.width(most)
        while width and isinstance(cache, GraphCache):
            self._step(cache, width, tree, tuple(aux))
            width = 0 if self.deterministic else width // 2

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., C] -> [..., V]."""
        return self.decoder.logits(hidden)

    def __call__(
        self,
        tokens: Tensor,
        cache: KVCache,
        *,
        counts: list[int] | None = None,
        tree: Tree | None = None,
        aux: Sequence[int] = (),
        logits: bool = False,
    ) -> Output:
        """As `Decoder.forward`. Raises ValueError for a tree that a deterministic target has no step for."""
        T = tokens.shape[1]
        if not isinstance(cache, GraphCache) or not self._covers(cache, T, tree):
            if self.deterministic and tree is not None:
                raise ValueError(
                    f"deterministic steps take trees of at most {FEW} nodes, not {T}: fewer draft tokens"
                )
            out: Output = self.decoder(tokens, cache, counts=counts, tree=tree, aux=aux, logits=logits)
            return out
        opened = cache.begin(T, counts, tree=tree)
        step = self._step(cache, self.width(T), tree is not None, tuple(aux))
        with torch.no_grad():
            got = step.run(tokens, opened, cache.rows or range(cache.batch))
        cache.advance(opened)
        return Output(got.hidden, got.aux, [], got.logits if logits else None, got.best)

    def _covers(self, cache: GraphCache, T: int, tree: Tree | None) -> bool:
        """Few tokens, and of a tree none that a ring would overwrite at once: see `LayerCache.append`."""
        if not cache.whole or (T > FEW and (tree is None or self.deterministic)):
            return False
        ring = min((m.size - m.window + 1 for m in cache.layers if m.window), default=cache.length)
        return tree is None or (not tree.held and self.width(T) <= ring)

    def width(self, T: int) -> int:
        """Tokens of the step that a step of T is padded to."""
        return FEW if self.deterministic else bucket(T)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _step(self, cache: GraphCache, width: int, tree: bool, aux: tuple[int, ...]) -> GraphStep:
        steps, key = cache.buffers.steps, (width, tree, aux)
        if key not in steps:
            static = StaticStep(self.decoder, cache.buffers.cache, aux)
            steps[key] = GraphStep(static, cache.buffers.cache.batch, width, tree, self.capture)
            self.captured += 1
        return steps[key]
