"""An EAGLE-3 in native calls: its layers over some pairs, and a whole chain of draft tokens.

`Eagle3.forward` and `Eagle3Session._chain` say what is computed; here is the same to the bit, over static
buffers, for one size of batch and step.
"""

import ctypes
from threading import Lock

import torch
from torch import Tensor

from outpace.drafts.eagle3 import Eagle3, Eagle3Layer
from outpace.drafts.native import whole
from outpace.kv.base import KVCache
from outpace.kv.metadata import StepMetadata
from outpace.models.blocks import MLP, Linear
from outpace.models.decoder import Decoder
from outpace.ops.dispatch import Program, Rings


class _Layers:
    """The layers' calls from `embeds` and `feature` [M,C] to `hidden` [B,T,C], for a program to repeat."""

    def __init__(self, draft: Eagle3, offset: int, B: int, T: int) -> None:
        c, M = draft.config, B * T
        heads = c.num_heads + 2 * c.num_kv_heads
        self.draft, self.offset, self.rings = draft, offset, Rings(c.num_layers)
        self.program = Program(draft.rounded)
        self.counts, self.positions = (torch.full(size, T) for size in ((B,), (B, T)))
        self.rows = torch.arange(B)
        self.embeds, self.feature = torch.empty(M, c.hidden_size), torch.empty(M, c.hidden_size)
        self.hidden = torch.empty(B, T, c.hidden_size)
        self.x, self.read = self.hidden.view(M, -1), torch.empty(M, 2 * c.hidden_size)
        self.normed, self.y = torch.empty(M, c.hidden_size), torch.empty(M, c.hidden_size)
        self.cos, self.sin = torch.empty(M, c.head_dim // 2), torch.empty(M, c.head_dim // 2)
        self.qkv = torch.empty(B, T, heads * c.head_dim)
        self.attended = torch.empty(B, T, c.num_heads * c.head_dim)
        self.gate_up, self.act = torch.empty(M, 2 * c.intermediate_size), torch.empty(M, c.intermediate_size)

    def record(self, start: Tensor, held: int = 0, tree: tuple[Tensor, Tensor] | None = None) -> None:
        """Behind start [B] remembered tokens, and `held` nodes of a tree; `tree`: what the new ones see and
        their depths."""
        draft, program = self.draft, self.program
        sees, depth = (None, None) if tree is None else tree
        program.places(start, depth, held, self.offset, self.positions)
        concentration = draft.config.rope.concentration
        program.angles(self.positions.view(-1), draft.inv, concentration, self.cos, self.sin)
        for i, layer in enumerate(draft.layers):
            assert isinstance(layer, Eagle3Layer)
            self._qkv(layer)
            self._attention(layer, self.rings.address(i), start, held, sees, depth)
            self._mlp(layer)

    def linear(self, x: Tensor, layer: Linear, y: Tensor) -> None:
        self.program.linear(x, whole(layer.weight), layer.bias, y)

    def _qkv(self, layer: Eagle3Layer) -> None:
        program, norm, own, qkv = self.program, layer.input_layernorm, layer.hidden_norm, self.qkv
        if own is None:
            program.rms_norm(self.x, norm.weight, norm.eps, self.normed)
            self.linear(self.normed, layer.qkv_proj, qkv.view(len(self.x), -1))
            return
        of_embeds, of_feature = self.read.chunk(2, dim=1)
        program.rms_norm(self.embeds, norm.weight, norm.eps, of_embeds)
        program.rms_norm(self.feature, own.weight, own.eps, of_feature)
        if layer.norm_before_residual:
            program.rms_norm(self.feature, own.weight, own.eps, self.x)
        else:
            program.copy(self.feature, self.x)
        self.linear(self.read, layer.qkv_proj, qkv.view(len(self.x), -1))

    def _attention(
        self,
        layer: Eagle3Layer,
        ring: int,
        start: Tensor,
        held: int,
        sees: Tensor | None,
        depth: Tensor | None,
    ) -> None:
        program, c, M = self.program, self.draft.config, len(self.x)
        H, K, D = c.num_heads, c.num_kv_heads, c.head_dim
        program.rope(self.qkv.view(M, -1), self.cos, self.sin, H, K, None)
        program.append(self.qkv, ring, start, self.counts, H, K, held, self.rows)
        q = self.qkv.unflatten(-1, (-1, D))[:, :, :H]
        rules = c.sliding_window, None, D**-0.5, sees, depth
        program.attend(q, ring, K, start, self.attended, *rules, rows=self.rows)
        self.linear(self.attended.view(M, -1), layer.o_proj, self.y)
        program.add(self.y, self.x)

    def _mlp(self, layer: Eagle3Layer) -> None:
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        assert isinstance(mlp, MLP)
        self.program.rms_norm(self.x, norm.weight, norm.eps, self.normed)
        self.linear(self.normed, mlp.gate_up_proj, self.gate_up)
        self.program.gated(self.gate_up, self.act)
        self.linear(self.act, mlp.down_proj, self.y)
        self.program.add(self.y, self.x)


class NativeLayers:
    """B rows of T pairs of a token and a feature, behind what a cache holds; with `tree` they are nodes of
    one whose first `held` nodes earlier steps have appended. Rotary positions begin at `offset`."""

    def __init__(self, draft: Eagle3, offset: int, B: int, T: int, held: int, tree: bool) -> None:
        self.lock, self.start = Lock(), torch.zeros(B, dtype=torch.int64)
        self.layers, nodes = _Layers(draft, offset, B, T), held + T
        self.parents: Tensor | None = None
        sees_and_depth = None
        if tree:
            self.parents, self.orphans = torch.zeros(B, nodes, dtype=torch.int64), ctypes.c_int64()
            sees, depth = torch.empty(B, T, nodes, dtype=torch.bool), torch.zeros(B, T, dtype=torch.int64)
            window = draft.config.sliding_window
            self.layers.program.family(self.parents, held, window, sees, depth, self.orphans)
            sees_and_depth = sees, depth
        self.layers.record(self.start, held, sees_and_depth)

    def run(self, embeds: Tensor, feature: Tensor, step: StepMetadata, cache: KVCache) -> Tensor:
        """embeds and feature [B,T,C] -> hidden [B,T,C]; the keys and values are appended."""
        layers = self.layers
        with self.lock:
            layers.rings.point_to(cache.rings)
            layers.embeds.view(embeds.shape).copy_(embeds)
            layers.feature.view(feature.shape).copy_(feature)
            layers.counts.copy_(step.counts_tensor)
            layers.rows.copy_(step.rows[:, 0])
            self.start.copy_(step.starts)
            if self.parents is not None:
                assert step.tree is not None
                self.parents.copy_(step.tree.parents)
            layers.program.run()
            return layers.hidden.clone()


class NativeChain:
    """`depth` greedy draft tokens after each of B rows, in one call."""

    def __init__(
        self, draft: Eagle3, target: Decoder, ids: Tensor | None, offset: int, B: int, depth: int
    ) -> None:
        self.lock, self.layers = Lock(), _Layers(draft, offset, B, 1)
        self.after = torch.arange(depth)[:, None]
        self.starts = torch.zeros(depth, B, dtype=torch.int64)
        layers, program, c = self.layers, self.layers.program, draft.config
        embedding = target.embed_tokens if draft.embed_tokens is None else draft.embed_tokens
        head = whole(target.head if draft.lm_head is None else draft.lm_head.weight)
        self.logits = torch.empty(depth, B, c.draft_vocab_size)
        self.tokens, rows = (torch.zeros(depth, B, dtype=torch.int64) for _ in range(2))
        odd = ctypes.c_int64()  # what is not finite is found in the logits
        for at in range(depth):
            program.rms_norm(layers.x, draft.norm.weight, draft.norm.eps, layers.normed)
            program.linear(layers.normed, head, None, self.logits[at])
            if ids is None:
                program.argmax(self.logits[at], self.tokens[at], odd)
            else:
                program.argmax(self.logits[at], rows[at], odd)
                program.gather(ids, rows[at], self.tokens[at])
            if at + 1 < depth:
                program.embed(self.tokens[at], whole(embedding.weight), layers.embeds, odd)
                program.copy(layers.normed if c.norm_output else layers.x, layers.feature)
                layers.record(self.starts[at])

    def run(self, hidden: Tensor, lengths: list[int], cache: KVCache) -> tuple[Tensor, Tensor]:
        """hidden [B,1,C] of the newest pairs, at the end of `lengths` -> logits [B,depth,N], tokens
        [B,depth]; what the cache gets is behind those lengths."""
        with self.lock:
            self.layers.rings.point_to(cache.rings)
            self.layers.hidden.copy_(hidden)
            self.layers.rows.copy_(torch.tensor(cache.rows or range(len(lengths))))
            torch.add(torch.tensor(lengths), self.after, out=self.starts)
            self.layers.program.run()
            return self.logits.transpose(0, 1).clone(), self.tokens.t().clone()
