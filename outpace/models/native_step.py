"""One step of a target as one native call: the modules' forward, recorded as a `Program` over static buffers.

`Decoder.forward` says what is computed; here is the same to the bit, for one size of batch and step. A step
that a program does not cover (`native_step` returns None) runs through the modules.
"""

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from outpace.kv.base import KVCache, LayerCache
from outpace.kv.metadata import FEW, StepMetadata
from outpace.models.attention import Attention, DecoderBlock
from outpace.models.blocks import MLP, Embedding, Experts, Linear, RMSNorm
from outpace.models.config import ModelConfig
from outpace.ops.dispatch import MOST_ROWS, Program, use_kernel
from outpace.ops.moe import MOST_TOKENS
from outpace.ops.norm import ALPHA
from outpace.ops.quant import Joined


class Layers(Protocol):
    """What a step runs of a `Decoder`."""

    config: ModelConfig
    embed_tokens: Embedding
    layers: nn.ModuleList
    norm: RMSNorm
    inv: Tensor  # [D/2] float64


class NativeStep:
    """B rows of T tokens over `cache`. Its buffers are made once; `run` copies the inputs into them."""

    def __init__(self, model: Layers, cache: KVCache, step: StepMetadata, aux: Sequence[int]) -> None:
        c, (B, T) = model.config, (len(step.start), step.T)
        self.step, self.cache, M, C, D = step, cache, B * T, c.hidden_size, c.head_dim
        self.tokens = torch.zeros(M, dtype=torch.int64)
        self.starts, self.counts = (
            (ctypes.c_int64 * B)(),
            (ctypes.c_int64 * B)(),
        )  # cheaper to set than tensors
        self.start_tensor, self.counts_tensor = (
            torch.frombuffer(numbers, dtype=torch.int64) for numbers in (self.starts, self.counts)
        )
        self.masks: dict[int, Tensor] = {}  # by window [B, T, U]
        self.depth = None if step.tree is None else torch.zeros(B, T, dtype=torch.int64)
        self.x, self.normed, self.y = (torch.empty(M, C) for _ in range(3))
        self.cos, self.sin = torch.empty(M, D // 2), torch.empty(M, D // 2)
        self.qkv = torch.empty(M, (c.num_heads + 2 * c.num_kv_heads) * D)
        self.attended = torch.empty(B, T, c.num_heads * D)
        self.hidden = torch.empty(B, T, C)
        self.aux = torch.empty(len(aux), B, T, C) if aux else None
        self.program = program = Program()
        positions = torch.zeros(B, T, dtype=torch.int64)
        program.places(self.start_tensor, self.depth, step.held, cache.offset, positions)
        program.angles(positions.view(-1), model.inv, c.rope.concentration, self.cos, self.sin)
        embedding = model.embed_tokens.weight
        assert not isinstance(embedding, Joined), "an embedding is one matrix"
        program.embed(self.tokens, embedding, self.x)
        for i, (block, memory) in enumerate(zip(model.layers, cache.layers, strict=True)):
            assert isinstance(block, DecoderBlock)
            self._layer(block, memory)
            for j, _ in (pair for pair in enumerate(aux) if pair[1] == i):
                assert self.aux is not None
                program.copy(self.x.view(B, T, C), self.aux[j])
        program.rms_norm(self.x, model.norm.weight, model.norm.eps, self.hidden.view(M, C))

    def _layer(self, block: DecoderBlock, memory: LayerCache) -> None:
        program, norm = self.program, block.input_layernorm
        program.rms_norm(self.x, norm.weight, norm.eps, self.normed)
        self._attention(block.self_attn, memory)
        program.add(self.y, self.x)
        norm = block.post_attention_layernorm
        program.rms_norm(self.x, norm.weight, norm.eps, self.normed)
        if isinstance(block.mlp, Experts):
            self._experts(block.mlp)
        else:
            assert isinstance(block.mlp, MLP)
            self._mlp(block.mlp)
        program.add(self.y, self.x)

    def _linear(self, x: Tensor, layer: Linear, y: Tensor) -> None:
        if not isinstance(layer.weight, Joined):
            self.program.linear(x, layer.weight, layer.bias, y)
            return
        rows = layer.weight.rows
        biases = [None] * len(rows) if layer.bias is None else layer.bias.split(rows)
        for part, bias, columns in zip(layer.weight.parts, biases, y.split(rows, dim=1), strict=True):
            self.program.linear(x, part, bias, columns)

    def _attention(self, a: Attention, memory: LayerCache) -> None:
        program, (B, T, _), H, K = self.program, self.attended.shape, a.heads, a.kv_heads
        norms = None
        if a.q_norm is not None and a.k_norm is not None:
            norms = (a.q_norm.weight, a.k_norm.weight, a.q_norm.eps)
        self._linear(self.normed, a.qkv_proj, self.qkv)
        program.rope(self.qkv, self.cos, self.sin, H, K, norms)
        qkv = self.qkv.view(B, T, -1)
        program.append(qkv, memory.k, memory.v, self.start_tensor, self.counts_tensor, H, self.step.held)
        q = qkv.unflatten(-1, (-1, a.head_dim))[:, :, :H]
        k, v = memory.k[:, :, : memory.size], memory.v[:, :, : memory.size]
        rules = {"window": a.window, "sinks": a.sinks, "scale": a.scale}
        if self.step.tree is not None:
            rules |= {"tree": self._mask(a.window), "depth": self.depth}
        program.attend(q, k, v, self.start_tensor, self.attended, **rules)
        self._linear(self.attended.view(B * T, -1), a.o_proj, self.y)

    def _mask(self, window: int) -> Tensor:
        assert self.step.tree is not None
        return self.masks.setdefault(window, torch.empty_like(self.step.tree.within(window)))

    def _mlp(self, mlp: MLP) -> None:
        gate_up = torch.empty(len(self.x), mlp.gate_up_proj.weight.shape[0])
        act = torch.empty(len(self.x), gate_up.shape[1] // 2)
        self._linear(self.normed, mlp.gate_up_proj, gate_up)
        self.program.gated(gate_up, act)
        self._linear(act, mlp.down_proj, self.y)

    def _experts(self, e: Experts) -> None:
        index = torch.zeros(len(self.x), e.per_token, dtype=torch.int64)
        weight = torch.empty(index.shape)
        router, style = e.router.weight, "silu" if e.limit is None else "gpt_oss"
        assert isinstance(router, Tensor)
        rules = {"softmax_first": e.limit is None, "renormalise": e.renormalise}
        self.program.route(self.normed, router, e.router.bias, index, weight, **rules)
        gates = (None, None) if e.gate is None else (e.gate.data, e.gate.bias)
        matrices = e.up.data, e.up.bias, e.down.data, e.down.bias, style, e.limit or 0.0, ALPHA, *gates
        tensors = self.normed, index, weight, self.y
        for some in zip(*(t.split(MOST_TOKENS) for t in tensors), strict=True):
            self.program.moe(*some, *matrices)

    def run(self, tokens: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor | None]:
        """tokens [B, T] -> hidden [B, T, C] after the final norm, aux [n, B, T, C]: copies of the buffers."""
        self.tokens.view(tokens.shape).copy_(tokens)
        self.starts[:], self.counts[:] = list(step.start), list(step.counts)
        if step.tree is not None and self.depth is not None:
            self.depth.copy_(step.tree.depth)
            for window, mask in self.masks.items():
                mask.copy_(step.tree.within(window))
        self.program.run()
        return self.hidden.clone(), None if self.aux is None else self.aux.clone()


def native_step(model: Layers, cache: KVCache, step: StepMetadata, aux: Sequence[int]) -> NativeStep | None:
    """The step of this size, made at its first use; None where the modules must run it."""
    if not use_kernel(cache.layers[0].k):
        return None
    U = 0 if step.tree is None else step.tree.parents.shape[1]
    key = len(step.start), step.T, U, tuple(aux), torch.get_num_threads()
    if key not in cache.native_steps:
        covered = _covered(model, cache, step)
        cache.native_steps[key] = NativeStep(model, cache, step, aux) if covered else None
    known = cache.native_steps[key]
    assert known is None or isinstance(known, NativeStep)
    return known


def _covered(model: Layers, cache: KVCache, step: StepMetadata) -> bool:
    """Few tokens, in float32, over plain keys and values; no new token is overwritten by one of the same step
    (see `LayerCache.append`)."""
    rows = len(step.start) * step.T
    if rows > MOST_ROWS or (step.tree is None and step.T > FEW) or step.both_ways:
        return False
    if model.config.head_dim % 8:
        return False
    for memory in cache.layers:
        plain = type(memory) is LayerCache and memory.keys is None and not memory.record_queries
        fits = not memory.window or step.held + step.T <= memory.size - memory.window + 1
        if not plain or not fits:
            return False
    return True
