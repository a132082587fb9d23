"""A step of fixed shapes for a compiler: lengths, counts and the tree are contents of tensors."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from outpace.kv.base import KVCache, LayerCache
from outpace.kv.metadata import StepMetadata
from outpace.kv.tree import Tree
from outpace.models.decoder import Decoder


def bucket(n: int) -> int:
    """The next power of two: sizes that an executor pads to, so that few shapes cover all."""
    return 1 << (n - 1).bit_length()


def memories_of(cache: KVCache) -> dict[str, Tensor]:
    """Keys and values of every layer by the names of a static step's buffers: k0, v0, k1, .."""
    return {f"{part}{i}": getattr(m, part) for i, m in enumerate(cache.layers) for part in "kv"}


class Step(NamedTuple):
    """hidden [B,T,C], logits [B,T,V], best [B,T] int64 (their argmax), aux [n,B,T,C] or None."""

    hidden: Tensor
    logits: Tensor
    best: Tensor
    aux: Tensor | None


class StaticStep(nn.Module):
    """`Decoder.forward` over a cache as torch.export, torch.compile and CUDA graphs want it: every shape is
    fixed by batch, T and the positions of the tree, no number is read on the host, and keys and values are
    buffers that are written in place. Its modules and memories are those of `model` and `cache`.

    Raises ValueError for a cache that chooses or expands what it holds (an index, latent KV).
    """

    def __init__(self, model: Decoder, cache: KVCache, aux: Sequence[int] = ()) -> None:
        super().__init__()
        for i, memory in enumerate(cache.layers):
            if not memory.plain:
                raise ValueError(
                    f"layer {i} has an index or latent KV, and a static step has none: use_dsa(False) and "
                    "use_mla_kv(False) before make_cache"
                )
        for name, held in memories_of(cache).items():
            self.register_buffer(name, held, persistent=False)
        self.model, self.offset, self.aux = model, cache.offset, tuple(aux)
        self.kinds = [copy.copy(memory) for memory in cache.layers]

    def forward(self, tokens: Tensor, start: Tensor, counts: Tensor, parents: Tensor | None = None) -> Step:
        """tokens [B,T], T at most `kv.metadata.FEW` for a chain; row b appends its first counts[b] after
        start[b] remembered ones; with parents [B,T] they are a tree. int64, all of them. The caller checks
        what `KVCache.begin` does, and keeps the lengths."""
        tree = None if parents is None else Tree(parents)
        T, device = tokens.shape[1], tokens.device
        step = StepMetadata((), (), T, device, tree=tree, on_device=(start, counts))
        hidden, aux = self.model.walk(tokens, step.positions + self.offset, self._memories(), step, self.aux)
        logits = self.model.logits(hidden)
        return Step(hidden, logits, logits.argmax(-1), aux)

    def _memories(self) -> list[LayerCache]:
        for i, memory in enumerate(self.kinds):
            memory.k, memory.v = getattr(self, f"k{i}"), getattr(self, f"v{i}")
        return self.kinds
