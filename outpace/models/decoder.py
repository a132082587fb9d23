"""The walk every architecture shares: embedding, blocks, final norm, head, and the aux states on the way."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outpace.checkpoint.base import Checkpoint
from outpace.kv.base import KVCache, LayerCache
from outpace.kv.latent import LatentCache
from outpace.kv.metadata import FEW, StepMetadata
from outpace.kv.tree import Tree
from outpace.models.attention import Attention, DecoderBlock
from outpace.models.blocks import Embedding, Linear, RMSNorm, use_activation_dtype
from outpace.models.config import ModelConfig
from outpace.models.latent import LatentMaps
from outpace.models.native_step import (
    NativeSteps,
    Steps,
    joined,
    native_step,
    row_groups,
    spread,
    step_sizes,
    stop_ids,
)
from outpace.models.native_step import Output as Output
from outpace.ops.attention import Packed
from outpace.ops.dispatch import Draws
from outpace.ops.linear import linear
from outpace.ops.quant import Weight, dense
from outpace.ops.ranks import Group
from outpace.ops.rope import inverse_frequencies, rope_tables


class Target(Protocol):
    """What the decoding loop asks of a target: a `Decoder`, or one that an executor runs (`GraphTarget`,
    `XLATarget`). `decoder` is what drafts read: its modules and weights."""

    @property
    def decoder(self) -> "Decoder": ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    def make_cache(
        self, batch: int, length: int, slack: int = 1, offset: int = 0, index: bool = False
    ) -> KVCache: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As `Decoder.forward` over a cache: tokens, cache; counts, tree, aux, logits -> `Output`."""


class Decoder(nn.Module):
    """A target. Built from a config and its blocks; see `gpt_oss.py`, `llama.py`, `qwen3_moe.py`."""

    def __init__(self, config: ModelConfig, blocks: list[DecoderBlock]) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.dtype = torch.float32  # of what lies between layers; weights stay as stored
        # of what meets weights, see `use_activation_dtype`; None: as `dtype`
        self.activation_dtype: torch.dtype | None = None
        # keys and values are rounded to it where the next caches remember them, latents and an index's keys
        # are not; None: to the dtype of activations
        self.kv_cache_dtype: torch.dtype | None = None
        self.inv = inverse_frequencies(config.rope, config.head_dim)
        # cached steps as one native call, see native_step.py; False where hooks must see them
        self.native = True
        self.native_steps = NativeSteps()
        # of a part of a target (tensor_parallel.py): the processes with the others, and what it is a part of
        self.group: Group | None = None
        self.checkpoint: Checkpoint | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: native steps point at the weights of this one."""
        return self.__dict__ | {"native_steps": NativeSteps()}

    def _apply(self, fn: Any, recurse: bool = True) -> "Decoder":
        self.native_steps.clear()  # the weights become other tensors
        super()._apply(fn, recurse)
        self.inv = self.inv.to(self.device)  # float64, whatever the weights become
        return self

    @property
    def decoder(self) -> "Decoder":
        return self

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def kv_cache_dtype_name(self) -> str:
        return str(self.kv_cache_dtype or self.dtype).removeprefix("torch.")

    @property
    def activation_dtype_name(self) -> str:
        return str(self.activation_dtype or self.dtype).removeprefix("torch.")

    @property
    def head(self) -> Weight:
        """[V, C], as the checkpoint holds it."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def dense_head(self) -> Tensor:
        """[V, C] as one tensor, for losses; GGUF's blocks are unpacked again at every call."""
        return self.head if isinstance(self.head, Tensor) else dense(self.head)

    def make_cache(
        self, batch: int, length: int, slack: int = 1, offset: int = 0, index: bool = False
    ) -> KVCache:
        """Space for `length` tokens a sequence; `slack` >= the longest proposal that may be rewound. With
        `index` the keys of a layer's index are remembered though attention does without it. Raises ValueError
        where there is none."""
        config = self.config
        if self.device.type == "cpu":
            slack = max(slack, min(FEW, config.sliding_window // 2))  # what a ring takes of a prompt at once
        cache = KVCache(
            batch,
            length,
            slack,
            tuple(config.window(i) for i in range(config.num_layers)),
            self.attentions[0].kv_heads,
            config.head_dim,
            offset=offset,
            dtype=self.kv_cache_dtype or self.dtype,
            device=self.device,
            own=self._latent_memories(batch, length, offset),
        )
        if index and not config.dsa_layers:
            raise ValueError("this target has no index to choose by: see outpace retrofit dsa")
        for layer in config.dsa_layers if config.use_dsa or index else ():
            keep = config.dsa_keep if config.use_dsa else None
            cache.layers[layer].index_by(config.dsa_index_dim, keep, self.dtype)
        return cache

    @property
    def attentions(self) -> list[Attention]:
        return [block.self_attn for block in self.layers if isinstance(block, DecoderBlock)]

    def _latent_memories(self, batch: int, length: int, offset: int) -> dict[int, LayerCache]:
        values: dict[int, LayerCache] = {}
        if not self.config.use_mla_kv:
            return values
        config, positions = self.config, torch.arange(offset, offset + length, device=self.device)
        tables = self.rope(positions)
        for layer, attention in enumerate(self.attentions):
            if attention.latent is not None:
                sizes = batch, config.num_kv_heads, length, config.head_dim, config.kv_numbers(layer)
                maps = LatentMaps(attention.latent, attention.k_norm)
                own = LatentCache(*sizes, maps, tables, dtype=self.dtype, device=self.device)
                values[layer] = own
        return values

    def use_activation_dtype(self, dtype: torch.dtype) -> None:
        """Of what products with the weights multiply, see `blocks.use_activation_dtype`."""
        use_activation_dtype(self, dtype)
        self.activation_dtype = dtype
        self.native_steps.clear()

    def use_mla_kv(self, on: bool) -> None:
        """Whether layers that have a latent remember it, from the next cache on; off, the target is the
        one it was made from. Raises ValueError where no layer has one."""
        if not self.config.mla_ranks:
            raise ValueError("this target has no latent KV to switch: see outpace retrofit mla")
        for attention in self.attentions:
            attention.use_latent = on
        self.config = replace(self.config, use_mla_kv=on)

    def use_dsa(self, on: bool) -> None:
        """Whether layers that have an index look only at what it chooses, from the next cache on; off, the
        target is the one it was made from. Raises ValueError where no layer has one."""
        if not self.config.dsa_layers:
            raise ValueError("this target has no sparse attention to switch: see outpace retrofit dsa")
        for attention in self.attentions:
            attention.use_index = on
        self.config = replace(self.config, use_dsa=on)

    def embed(self, tokens: Tensor) -> Tensor:
        """[B,T] -> [B,T,C] in the compute dtype."""
        embedded: Tensor = self.embed_tokens(tokens, self.dtype)
        return embedded

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B,T] -> cos, sin [B,T,D/2] float32."""
        return rope_tables(positions, self.inv.to(positions.device), self.config.rope.concentration)

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        *,
        counts: list[int] | None = None,
        tree: Tree | None = None,
        aux: Sequence[int] = (),
        offset: int = 0,
        routing: bool = False,
        logits: bool = False,
        packed: Packed | None = None,
    ) -> Output:
        """tokens [B,T] int64. With a cache, row b appends its first counts[b] (default T) tokens to it;
        without one, the T tokens are whole sequences that begin at position `offset`, or with `packed`
        several ones end to end in one row.

        `aux`: ids of the layers whose output is wanted; "layer l" is the output of block l, which
        transformers calls hidden_states[l+1]. With `routing` and `logits` the output has those.
        """
        B, T = tokens.shape
        step = None if cache is None else cache.begin(T, counts, tree=tree)
        if self.native and cache is not None and step is not None and not routing:
            groups = row_groups(self, cache, step)
            if groups:
                return self._in_groups(groups, tokens, cache, step, aux, logits)
            sizes = [T] if tree is not None else step_sizes(self, cache, T)
            if len(sizes) > 1:
                return self._in_steps(sizes, tokens, cache, step, aux, logits)
            native = native_step(self, cache, step, aux, logits)
            if native is not None:
                output = native.run(tokens, step, cache)
                cache.advance(step)
                return output
        if packed is not None:
            assert cache is None, "sequences that lie end to end are remembered by no cache"
            positions = packed.positions
        elif cache is None or step is None:
            positions = torch.arange(offset, offset + T, device=tokens.device).expand(B, -1)
        else:
            positions = step.positions + cache.offset
        routed: list[Tensor] | None = [] if routing else None
        memories = None if cache is None else cache.layers
        hidden, kept = self.walk(tokens, positions, memories, step, aux, routed, packed)
        if cache is not None and step is not None:
            cache.advance(step)
        return Output(hidden, kept, routed or [], self.logits(hidden) if logits else None)

    def run_ahead(
        self,
        last: Tensor,
        cache: KVCache,
        most: int,
        stop: Iterable[int] = (),
        aux: Sequence[int] = (),
        draws: Draws | None = None,
    ) -> Steps | None:
        """Up to `most` steps after `last` [B] in one native call, each over the token that the one before it
        chose, the argmax or what `draws` says; fewer where every row has met a token of `stop`. The cache
        gets `last` and the new tokens but the newest, with the bits of single steps. None where a step is no
        native call. Raises ValueError where they would outgrow the cache."""
        cache.check_room([most] * cache.batch)
        step = cache.begin(1)
        native = native_step(self, cache, step, aux, True) if self.native else None
        if native is None or row_groups(self, cache, step):
            return None
        done = native.run_ahead(last, step, cache, most, stop_ids(frozenset(stop)), draws)
        if done is not None:
            cache.extend([done.tokens.shape[1]] * cache.batch)
        return done

    def _in_groups(
        self,
        groups: list[list[int]],
        tokens: Tensor,
        cache: KVCache,
        step: StepMetadata,
        aux: Sequence[int],
        logits: bool,
    ) -> Output:
        """The forward of a wide batch, some rows at a time: a token has the bits of any other company."""
        outs = []
        for rows in groups:
            counts = [step.counts[b] for b in rows]
            part, width, tree = cache.part(rows), max(counts), step.tree
            nodes = None if tree is None else tree.part(rows, width)
            some = tokens[rows, :width]
            outs.append(self.forward(some, part, counts=counts, tree=nodes, aux=aux, logits=logits))
        cache.advance(step)
        return spread(outs, groups, *tokens.shape)

    def _in_steps(
        self,
        sizes: list[int],
        tokens: Tensor,
        cache: KVCache,
        step: StepMetadata,
        aux: Sequence[int],
        logits: bool,
    ) -> Output:
        """The forward of a long chain in several of these sizes: a token has the bits of any other chunks."""
        outs, begin = [], 0
        for size in sizes:
            some = [min(max(n - begin, 0), size) for n in step.counts]
            part = tokens[:, begin : begin + size]
            outs.append(self.forward(part, cache, counts=some, aux=aux, logits=logits))
            begin += size
        cache.last_start = list(step.start)
        return joined(outs)

    def walk(
        self,
        tokens: Tensor,
        positions: Tensor,
        memories: Sequence[LayerCache] | None,
        step: StepMetadata | None,
        aux: Sequence[int] = (),
        routed: list[Tensor] | None = None,
        packed: Packed | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """tokens, positions [B,T] -> hidden [B,T,C] and aux [n,B,T,C] of an `Output`, by the modules."""
        cos, sin = self.rope(positions)
        x = self.embed(tokens)
        kept = {}
        for i, block in enumerate(self.layers):
            x = block(x, cos, sin, None if memories is None else memories[i], step, routed, packed)
            if i in aux:
                kept[i] = x
        return self.norm(x), torch.stack([kept[i] for i in aux]) if aux else None

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., C] -> [..., V]."""
        return linear(hidden, self.head, rounded=self.activation_dtype == torch.bfloat16)
