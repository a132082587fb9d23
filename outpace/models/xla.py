"""A target through XLA, for TPUs: torchax makes the static step a JAX function, and jax.jit a program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
import torchax
from torch import Tensor, nn
from torchax.interop import jax_view, torch_view

from outpace.kv.base import KVCache
from outpace.kv.metadata import FEW
from outpace.kv.tree import Tree
from outpace.models.decoder import Decoder, Output
from outpace.models.static_step import StaticStep, bucket, memories_of

jax.config.update("jax_enable_x64", True)  # tokens, starts and slots are int64


class XLACache(KVCache):
    """Lengths on the host, keys and values in XLA's memory."""

    def __init__(self, cache: KVCache, environment: Any, rounds: dict[Any, Any]) -> None:
        vars(self).update(vars(cache))
        self.environment, self.rounds = environment, rounds

    def select(self, batch_indices: list[int]) -> None:
        with self.environment:
            super().select(batch_indices)


class XLATarget:
    """`model` for the decoding loop, its weights and its caches in XLA's memory; chains alone, no trees.

    A program serves every length and count of one shape: prompts and proposals are padded to the next power
    of two, caches too. A step gives its keys and values away and gets them back: XLA writes them in place.
    """

    def __init__(self, model: Decoder) -> None:
        self.decoder, self.config, self.device = model, model.config, torch.device("cpu")
        self.environment = torchax.default_env()
        self.functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.rounds: dict[tuple[Any, ...], dict[Any, Any]] = {}  # by size of cache
        self.made: list[Any] = []
        self.fixed = self.moved(dict([*model.named_parameters("model"), *model.named_buffers("model")]))

    @property
    def programs(self) -> int:
        """How many were compiled."""
        return sum(function._cache_size() for function in self.made)

    def make_cache(
        self, batch: int, length: int, slack: int = 1, offset: int = 0, index: bool = False
    ) -> KVCache:
        """As `Decoder.make_cache`. Raises ValueError for targets with latent KV or an index."""
        cache = self.decoder.make_cache(batch, bucket(length), bucket(slack), offset, index)
        StaticStep(self.decoder, cache)  # refuses
        for memory in cache.layers:
            memory.k, memory.v = self.moved({"k": memory.k, "v": memory.v}).values()
        return XLACache(cache, self.environment, self.rounds.setdefault((batch, *_size(cache)), {}))

    def precompile(
        self, batch: int, length: int, slack: int = 1, aux: Sequence[int] = (), most: int = FEW
    ) -> None:
        """Every program that decoding `batch` sequences in a cache of this length needs, in steps of `most`
        tokens at most; when one ends before the others, those left are another batch."""
        tokens = 1
        while tokens <= most:
            cache = self.make_cache(batch, max(length, tokens), slack)
            self(torch.zeros(batch, tokens, dtype=torch.int64), cache, aux=aux)
            tokens *= 2

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., C] -> [..., V], on the host."""
        return self.decoder.logits(hidden)

    @torch.inference_mode(False)  # in which torch hands torchax operators whole that it knows in parts
    @torch.no_grad()
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
        """As `Decoder.forward`; what it returns is on the host. Raises ValueError for a tree, and for more
        tokens than one step takes: `Request.prefill_chunk` says how many."""
        B, T = tokens.shape
        if tree is not None or T > FEW:
            raise ValueError(f"a step through XLA takes a chain of at most {FEW} tokens, no tree")
        width = bucket(T)
        step = cache.begin(width, [T] * B if counts is None else counts)
        padded = torch.nn.functional.pad(tokens, (0, width - T))
        inputs = self.moved({"tokens": padded, "start": step.starts, "counts": step.counts_tensor})
        key = tuple(aux), *_size(cache)
        if key not in self.functions:
            self.functions[key] = self.program(StaticStep(self.decoder, cache, aux))
        values, written = self.run(self.functions[key], self.fixed, memories_of(cache), inputs)
        for i, memory in enumerate(cache.layers):
            memory.k, memory.v = written[f"k{i}"], written[f"v{i}"]
        cache.advance(step)
        hidden, scores, best, kept = (None if x is None else torch.tensor(x) for x in self.read(values))
        assert hidden is not None and scores is not None and best is not None
        kept = None if kept is None else kept[:, :, :T]
        return Output(hidden[:, :T], kept, [], scores[:, :T] if logits else None, best[:, :T])

    def program(self, module: nn.Module) -> Callable[..., Any]:
        """`module` as a function of its weights, the buffers that it writes, and inputs -> its outputs, and
        the buffers written: see `run`."""

        def step(fixed: dict[str, Tensor], written: dict[str, Tensor], inputs: dict[str, Tensor]) -> Any:
            out = torch.func.functional_call(module, fixed | written, kwargs=inputs)
            return tuple(out), written

        self.made.append(jax.jit(jax_view(step), donate_argnums=(1,)))
        function: Callable[..., Any] = self.made[-1]
        return function

    @torch.inference_mode(False)  # in which torch hands torchax operators whole that it knows in parts
    @torch.no_grad()
    def run(
        self,
        program: Callable[..., Any],
        fixed: dict[str, Tensor],
        written: dict[str, Tensor],
        inputs: dict[str, Tensor],
    ) -> tuple[Any, dict[str, Tensor]]:
        """Starts a program, which takes `written` for good -> its outputs, which `read` waits for, and what
        it wrote."""
        values, after = program(*map(jax_view, (fixed, written, inputs)))
        return values, torch_view(after)

    def read(self, values: Any) -> Any:
        """The outputs of a program as arrays of the host."""
        return jax.device_get(values)

    def moved(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """In XLA's memory."""
        with self.environment:
            return {name: x.detach().to("jax") for name, x in tensors.items()}


def _size(cache: KVCache) -> tuple[Any, ...]:
    return cache.offset, tuple((memory.size, memory.window) for memory in cache.layers)
