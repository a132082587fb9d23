"""A small draft's forward in two native calls: one for a block, one for the context of verified tokens.

`DFlash.denoise` and `DFlashLayer.context_kv` say what is computed; here is the same to the bit, over static
buffers, for one size of batch and block.
"""

from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.dflash_heads import AFTER, BEFORE, BlockConv
from outpace.drafts.dflash_layer import DFlashLayer
from outpace.drafts.native import whole
from outpace.kv.base import KVCache
from outpace.kv.metadata import StepMetadata
from outpace.models.blocks import Linear, RMSNorm
from outpace.ops.dispatch import Program, Rings


class NativeBlock:
    """The layers of a draft and its last norm, for B blocks of T rows behind what a cache holds; `inv` are
    its rope's frequencies, from position `offset` on. The blocks' own keys are not advanced over: the next
    append replaces them."""

    def __init__(
        self,
        c: DFlashConfig,
        layers: Sequence[DFlashLayer],
        norm: RMSNorm,
        inv: Tensor,
        offset: int,
        B: int,
        T: int,
    ) -> None:
        self.T, self.rings, self.lock = T, Rings(len(layers)), Lock()
        M, H, K, D = B * T, c.num_heads, c.num_kv_heads, c.head_dim
        self.start, self.counts, self.rows = (
            torch.zeros(B, dtype=torch.int64),
            torch.full((B,), T),
            torch.arange(B),
        )
        self.x, self.h, self.y, self.z = (torch.empty(M, c.hidden_size) for _ in range(4))
        self.hidden = torch.empty(B, T, c.hidden_size)
        self.cos, self.sin = torch.empty(M, D // 2), torch.empty(M, D // 2)
        self.qkv, self.attended = torch.empty(B, T, (H + 2 * K) * D), torch.empty(B, T, H * D)
        self.gate_up, self.act = torch.empty(M, 2 * c.intermediate_size), torch.empty(M, c.intermediate_size)
        taps, groups = c.conv_kernel_size, c.hidden_size // (c.conv_group_size or c.hidden_size)
        self.deltas = [torch.empty(M, 2, taps, groups) for _ in range(2)]  # of attention and of the MLP
        self.program = program = Program()
        positions = torch.zeros(B, T, dtype=torch.int64)
        program.places(self.start, None, 0, offset, positions)
        program.angles(positions.view(-1), inv, c.rope.concentration, self.cos, self.sin)
        for i, layer in enumerate(layers):
            self._attention(layer, self.rings.address(i), c.window(i), not c.hides(i))
            self._mlp(layer)
        program.rms_norm(self.x, norm.weight, norm.eps, self.hidden.view(M, -1))

    def _attention(self, layer: DFlashLayer, ring: int, window: int, both_ways: bool) -> None:
        program, norm, M = self.program, layer.input_layernorm, len(self.x)
        H, K, D = layer.heads, layer.kv_heads, layer.head_dim
        program.rms_norm(self.x, norm.weight, norm.eps, self.h)
        h = self._before(layer.attention_conv, self.h, self.deltas[0])
        qkv = self.qkv.view(M, -1)
        program.linear(h, whole(layer.qkv_proj.weight), layer.qkv_proj.bias, qkv)
        norms = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
        program.rope(qkv, self.cos, self.sin, H, K, norms)
        program.append(self.qkv, ring, self.start, self.counts, H, K, 0, self.rows)
        q = self.qkv.unflatten(-1, (-1, D))[:, :, :H]
        rules = window, None, D**-0.5, None, None, both_ways
        program.attend(q, ring, K, self.start, self.attended, *rules, rows=self.rows)
        program.linear(self.attended.view(M, -1), whole(layer.o_proj.weight), layer.o_proj.bias, self.y)
        program.add(self._after(layer.attention_conv, self.deltas[0]), self.x)

    def _mlp(self, layer: DFlashLayer) -> None:
        program, norm, down = self.program, layer.post_attention_layernorm, layer.mlp.down_proj
        program.rms_norm(self.x, norm.weight, norm.eps, self.h)
        h = self._before(layer.mlp_conv, self.h, self.deltas[1])
        program.linear(h, whole(layer.mlp.gate_up_proj.weight), layer.mlp.gate_up_proj.bias, self.gate_up)
        program.gated(self.gate_up, self.act)
        program.linear(self.act, whole(down.weight), down.bias, self.y)
        program.add(self._after(layer.mlp_conv, self.deltas[1]), self.x)

    def _before(self, conv: BlockConv | None, x: Tensor, delta: Tensor) -> Tensor:
        if conv is None:
            return x
        self.program.linear(x, whole(conv.kernel_projection.weight), None, delta.view(len(x), -1))
        self.program.block_conv(x, conv.base_kernel[BEFORE], delta, self.T, BEFORE, self.z)
        return self.z

    def _after(self, conv: BlockConv | None, delta: Tensor) -> Tensor:
        if conv is None:
            return self.y
        self.program.block_conv(self.y, conv.base_kernel[AFTER], delta, self.T, AFTER, self.z)
        return self.z

    def denoise(self, x: Tensor, step: StepMetadata, cache: KVCache) -> Tensor:
        """`DFlash.denoise` behind the cached tokens: x [B,T,C] -> hidden [B,T,C]."""
        with self.lock:
            self.rings.point_to(cache.rings)
            self.x.view(x.shape).copy_(x)
            self.start.copy_(step.starts)
            self.rows.copy_(step.rows[:, 0])
            self.program.run()
            return self.hidden.clone()


class NativeContext:
    """Keys and values of B rows of up to T verified tokens, appended in all layers."""

    def __init__(
        self,
        c: DFlashConfig,
        layers: Sequence[DFlashLayer],
        fc: Linear,
        norm: RMSNorm,
        inv: Tensor,
        offset: int,
        B: int,
        T: int,
    ) -> None:
        K, D, M = c.num_kv_heads, c.head_dim, B * T
        self.rings, self.lock = Rings(len(layers)), Lock()
        self.aux = torch.empty(B, T, len(c.target_layer_ids), c.hidden_size)
        self.start, self.counts, self.rows = (torch.zeros(B, dtype=torch.int64) for _ in range(3))
        fused, features = torch.empty(M, c.hidden_size), torch.empty(M, c.hidden_size)
        cos, sin = torch.empty(M, D // 2), torch.empty(M, D // 2)
        positions, kv = torch.zeros(B, T, dtype=torch.int64), torch.empty(B, T, 2 * K * D)
        self.program = program = Program()
        program.linear(self.aux.view(M, -1), whole(fc.weight), fc.bias, fused)
        program.rms_norm(fused, norm.weight, norm.eps, features)
        program.places(self.start, None, 0, offset, positions)
        program.angles(positions.view(-1), inv, c.rope.concentration, cos, sin)
        for i, layer in enumerate(layers):
            weight, bias = layer.context_weights()
            program.linear(features, whole(weight), bias, kv.view(M, -1))
            norms = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
            program.rope(kv.view(M, -1), cos, sin, 0, K, norms)
            program.append(kv, self.rings.address(i), self.start, self.counts, 0, K, 0, self.rows)

    def append(self, aux: Tensor, step: StepMetadata, cache: KVCache) -> None:
        """aux [n,B,T,C] of the step's tokens."""
        with self.lock:
            self.rings.point_to(cache.rings)
            self.aux.copy_(aux.permute(1, 2, 0, 3))
            self.start.copy_(step.starts)
            self.rows.copy_(step.rows[:, 0])
            self.counts.copy_(step.counts_tensor)
            self.program.run()
