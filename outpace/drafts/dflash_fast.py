"""A small draft's forward with few calls: what is between two attentions is one call of several kernels.

At the sizes of one sequence's step, half of a draft's time is spent on calling. `DFlash.denoise` and
`DFlashLayer.context_kv` say what is computed; here is the same to the bit, for one size of batch and block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.dflash_heads import AFTER, BEFORE, BlockConv
from outpace.drafts.dflash_layer import Attend, DFlashLayer
from outpace.models.blocks import Linear, RMSNorm
from outpace.ops.dispatch import Program
from outpace.ops.quant import Joined, Quant, Weight


def whole(weight: Weight) -> Tensor | Quant:
    assert not isinstance(weight, Joined), "a draft's weights lie in one piece"
    return weight


class FastBlock:
    """The layers of a draft and its last norm, for B blocks of T rows; `inv` are its rope's frequencies."""

    def __init__(
        self, c: DFlashConfig, layers: Sequence[DFlashLayer], norm: RMSNorm, inv: Tensor, B: int, T: int
    ) -> None:
        M, self.T = B * T, T
        H, K, D = c.num_heads, c.num_kv_heads, c.head_dim
        self.positions = torch.zeros(M, dtype=torch.int64)
        self.x, self.h, self.y, self.z, self.hidden = (torch.empty(M, c.hidden_size) for _ in range(5))
        self.cos, self.sin = torch.empty(M, D // 2), torch.empty(M, D // 2)
        self.qkv = torch.empty(M, (H + 2 * K) * D)
        self.gate_up, self.act = torch.empty(M, 2 * c.intermediate_size), torch.empty(M, c.intermediate_size)
        taps, groups = c.conv_kernel_size, c.hidden_size // (c.conv_group_size or c.hidden_size)
        self.deltas = [torch.empty(M, 2, taps, groups) for _ in range(2)]  # of attention and of the MLP
        self.by_block = self.x.view(B, T, -1)
        q, k, v = self.qkv.view(B, T, -1, D).split((H, K, K), dim=2)
        self.heads = q, k.transpose(1, 2), v.transpose(1, 2)
        self.steps = [Program()]
        self.steps[0].angles(self.positions, inv, c.rope.concentration, self.cos, self.sin)
        self.takes: list[int] = []  # where each later step reads what attention gave
        for layer in layers:
            self._begin(self.steps[-1], layer)
            step = Program()
            self.takes.append(self._end(step, layer))
            self.steps.append(step)
        self.steps[-1].rms_norm(self.x, norm.weight, norm.eps, self.hidden)

    def _begin(self, step: Program, layer: DFlashLayer) -> None:
        """Norm, projection and rotation: up to what attention takes."""
        step.rms_norm(self.x, layer.input_layernorm.weight, layer.input_layernorm.eps, self.h)
        h = self._before(step, layer.attention_conv, self.h, self.deltas[0])
        step.linear(h, whole(layer.qkv_proj.weight), layer.qkv_proj.bias, self.qkv)
        norms = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
        step.rope(self.qkv, self.cos, self.sin, layer.heads, layer.kv_heads, norms)

    def _end(self, step: Program, layer: DFlashLayer) -> int:
        """From what attention gave to the layer's end. -> the call that reads it."""
        o, down = layer.o_proj, layer.mlp.down_proj
        attended = torch.empty(len(self.x), o.weight.shape[1])  # means it until there is any
        takes = step.linear(attended, whole(o.weight), o.bias, self.y)
        step.add(self._after(step, layer.attention_conv, self.deltas[0]), self.x)
        norm = layer.post_attention_layernorm
        step.rms_norm(self.x, norm.weight, norm.eps, self.h)
        h = self._before(step, layer.mlp_conv, self.h, self.deltas[1])
        step.linear(h, whole(layer.mlp.gate_up_proj.weight), layer.mlp.gate_up_proj.bias, self.gate_up)
        step.gated(self.gate_up, self.act)
        step.linear(self.act, whole(down.weight), down.bias, self.y)
        step.add(self._after(step, layer.mlp_conv, self.deltas[1]), self.x)
        return takes

    def _before(self, step: Program, conv: BlockConv | None, x: Tensor, delta: Tensor) -> Tensor:
        if conv is None:
            return x
        step.linear(x, whole(conv.kernel_projection.weight), None, delta.view(len(x), -1))
        step.block_conv(x, conv.base_kernel[BEFORE], delta, self.T, BEFORE, self.z)
        return self.z

    def _after(self, step: Program, conv: BlockConv | None, delta: Tensor) -> Tensor:
        if conv is None:
            return self.y
        step.block_conv(self.y, conv.base_kernel[AFTER], delta, self.T, AFTER, self.z)
        return self.z

    def denoise(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """`DFlash.denoise`: x [B,T,C] at positions [B,T] -> hidden [B,T,C]."""
        self.by_block.copy_(x)
        self.positions.view(positions.shape).copy_(positions)
        self.steps[0].run()
        for i, (step, takes) in enumerate(zip(self.steps[1:], self.takes, strict=True)):
            attended = attend(i, *self.heads)
            step.read_from(takes, attended)
            step.run()
        return self.hidden.view(x.shape).clone()


class FastContext:
    """Keys and values of B rows of T verified tokens, all layers in one call."""

    def __init__(
        self,
        c: DFlashConfig,
        layers: Sequence[DFlashLayer],
        fc: Linear,
        norm: RMSNorm,
        inv: Tensor,
        B: int,
        T: int,
    ) -> None:
        M = B * T
        K, D = c.num_kv_heads, c.head_dim
        states = len(c.target_layer_ids)
        self.aux = torch.empty(B, T, states, c.hidden_size)
        self.positions = torch.zeros(M, dtype=torch.int64)
        fused, features = torch.empty(M, c.hidden_size), torch.empty(M, c.hidden_size)
        cos, sin = torch.empty(M, D // 2), torch.empty(M, D // 2)
        self.step = step = Program()
        step.linear(self.aux.view(M, -1), whole(fc.weight), fc.bias, fused)
        step.rms_norm(fused, norm.weight, norm.eps, features)
        step.angles(self.positions, inv, c.rope.concentration, cos, sin)
        self.kv: list[tuple[Tensor, Tensor]] = []
        for layer in layers:
            kv = torch.empty(M, 2 * K * D)
            weight, bias = layer.context_weights()
            step.linear(features, whole(weight), bias, kv)
            norms = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
            step.rope(kv, cos, sin, 0, layer.kv_heads, norms)
            k, v = kv.view(B, T, -1, D).split((K, K), dim=2)
            self.kv.append((k.transpose(1, 2), v.transpose(1, 2)))

    def __call__(self, aux: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """aux [n,B,T,C] at positions [B,T] -> per layer k, v [B,K,T,D], which the next call overwrites."""
        self.aux.copy_(aux.permute(1, 2, 0, 3))
        self.positions.view(positions.shape).copy_(positions)
        self.step.run()
        return self.kv
