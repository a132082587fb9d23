"""What the context suite measures over: caches full of random numbers, a target with latents and an index."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.kv.base import KVCache
from outpace.kv.partial import PartialCache, PartialConfig
from outpace.kv.topk import TopKConfig
from outpace.models.decoder import Decoder
from outpace.models.indexer import Indexer
from outpace.ops.sampling import seeded
from outpace.retrofit.dsa import attach_index, detach_index
from outpace.retrofit.mla import Basis, attach, detach


@dataclass(frozen=True, kw_only=True)
class Retrofits:
    """Those of random weights. `latent`: numbers of a token, as a share of keys and values."""

    latent: float
    index_heads: int
    index_dim: int
    keep: TopKConfig
    seed: int


@dataclass(frozen=True)
class Space:
    """`near`: partial KV of a full cache; `latents`: the same text in latents; `keys` of an index by layer,
    the same for both."""

    target: Decoder
    near: PartialCache
    latents: KVCache
    keys: dict[int, Tensor]
    keep: TopKConfig

    @property
    def full(self) -> KVCache:
        return self.near.full

    def switch(self, mla: bool, dsa: bool) -> KVCache:
        """The target, and the cache that goes with it."""
        self.target.use_mla_kv(mla)
        self.target.use_dsa(dsa)
        cache = self.latents if mla else self.full
        for layer, keys in self.keys.items():
            memory = cache.layers[layer]
            memory.keys, memory.keep_few = (keys, self.keep) if dsa else (None, None)
        return cache

    def grow(self, context: int) -> None:
        """What fills the caches is there already."""
        for cache in (self.full, self.latents):
            cache.advance(cache.begin(context - cache.lengths[0]))


def filled(target: Decoder, length: int, headroom: int, partial: PartialConfig, seed: int) -> Space:
    """Of a target with latents and an index. `room`: columns of partial KV's buffer."""
    made = []
    for mla in (False, True):
        target.use_mla_kv(mla)
        made.append(target.make_cache(1, length, slack=headroom, index=True))
        rng = seeded(seed)
        for x in (x for memory in made[-1].layers for x in memory.parts):
            x.copy_(torch.randn(x.shape[1:], generator=rng)[None])
    full, latents = made
    keys = {layer: k for layer, memory in enumerate(full.layers) if (k := memory.keys) is not None}
    result = Space(target, PartialCache(full, partial, headroom), latents, keys, target.config.dsa_keep)
    for mla in (True, False):
        result.switch(mla, False)
    return result


@contextmanager
def retrofitted(target: Decoder, wanted: Retrofits) -> Iterator[None]:
    """Inside, the target has latents and an index; afterwards it is as it was."""
    config = target.config
    if not config.mla_ranks:
        random_latents(target, wanted.latent)
    if not config.dsa_layers:
        attach_index(target, random_indexes(target, wanted), wanted.keep)
    try:
        yield
    finally:
        target.use_dsa(config.use_dsa)
        target.use_mla_kv(config.use_mla_kv)
        if not config.dsa_layers:
            detach_index(target)
        if not config.mla_ranks:
            detach(target)


def random_latents(target: Decoder, share: float) -> None:
    """For each layer with full attention, in place: the first directions of keys and values."""
    config = target.config
    n = 2 * config.num_kv_heads * config.head_dim
    eye, zeros = torch.eye(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    bases = dict.fromkeys(config.full_layers, Basis(eye, eye, zeros, zeros))
    attach(target, bases, dict.fromkeys(bases, max(1, round(share * n))))


def random_indexes(target: Decoder, wanted: Retrofits) -> dict[int, Indexer]:
    """One for each layer with full attention."""
    config, rng = target.config, seeded(wanted.seed, 1)
    made = {}
    for layer in config.full_layers:
        indexer = Indexer(config.hidden_size, wanted.index_heads, wanted.index_dim)
        with torch.no_grad():
            for p in indexer.proj.parameters():
                p.copy_(torch.randn(p.shape, generator=rng) * config.hidden_size**-0.5)
        made[layer] = indexer.to(target.device)
    return made


def kv_bytes(target: Decoder, context: int, seen: int) -> int:
    """Of a context: `seen` tokens in layers with full attention, a window's in the others."""
    config = target.config
    windows = [config.window(i) for i in range(config.num_layers)]
    tokens = [min(w, context) if w else seen for w in windows]
    return target.dtype.itemsize * sum(config.kv_numbers(i) * n for i, n in enumerate(tokens))
