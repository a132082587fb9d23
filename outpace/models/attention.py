"""Grouped-query attention with rotary positions, and what each layer remembers."""

import torch
from torch import Tensor, nn

from outpace.kv.base import LayerCache
from outpace.kv.metadata import KVView, StepMetadata
from outpace.kv.topk import choose
from outpace.models.blocks import MLP, Experts, Linear, RMSNorm
from outpace.models.config import ModelConfig
from outpace.models.indexer import Indexer
from outpace.models.latent import Latent
from outpace.ops.attention import Packed, attend_view, causal_attend
from outpace.ops.rope import rotate_heads


class Attention(nn.Module):
    """q, k and v are one matrix [(H+2K)*D, C]; sinks and q/k norm where the config specifies so."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.window = config.window(layer)
        self.scale = D**-0.5
        self.qkv_proj = Linear(config.hidden_size, (H + 2 * K) * D, config.attention_bias)
        self.o_proj = Linear(H * D, config.hidden_size, config.attention_bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(H)) if config.sinks else None
        self.latent = Latent(config, config.mla_rank(layer)) if config.mla_rank(layer) else None
        self.use_latent = config.use_mla_kv
        self.keep = config.dsa_keep
        sizes = config.hidden_size, config.dsa_index_heads, config.dsa_index_dim
        self.indexer = Indexer(*sizes) if layer in config.dsa_layers else None
        self.use_index = config.use_dsa

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        memory: LayerCache | None,
        step: StepMetadata | None,
        packed: Packed | None = None,
    ) -> Tensor:
        """x [B,T,C], cos and sin [B,T,D/2] -> [B,T,C]. With a memory, appends T keys to it."""
        H, K = self.heads, self.kv_heads
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        qkv = self.qkv_proj(x)
        rows = self._rows(x, qkv)  # before the rotation overwrites the keys
        q, k, v = rotate_heads(qkv, cos, sin, H, K, norms)
        if rows is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            assert self.latent is not None
            k, v = self.latent.expand(rows, cos, sin, self.k_norm)
        asked = self.use_index if memory is None else memory.keys is not None
        index = self.indexer(x, cos, sin) if self.indexer is not None and asked else None
        if memory is not None and step is not None:
            view = memory.append(k, v, step, q, rows, index)
            return self.o_proj(attend_view(q, view, self.window, self.sinks, self.scale))
        lists = None
        if index is not None:
            step = StepMetadata((0,) * len(x), (x.shape[1],) * len(x), x.shape[1], x.device)
            lists = choose(index, index.k.contiguous(), step.query_positions, self.keep)
        if step is not None and lists is not None:
            view = KVView(k.contiguous(), v.contiguous(), step, lists=lists)
            return self.o_proj(attend_view(q, view, self.window, self.sinks, self.scale))
        return self.o_proj(causal_attend(q, k, v, self.window, self.sinks, self.scale, packed))

    def _rows(self, x: Tensor, qkv: Tensor) -> Tensor | None:
        """[B,T,W], what a layer with a latent remembers; None where it has none, or does not use it."""
        if self.latent is None or not self.use_latent:
            return None
        k = qkv[..., self.heads * self.head_dim : -self.kv_heads * self.head_dim]
        return self.latent.rows(x, k, 0.0 if self.k_norm is None else self.k_norm.eps)


class DecoderBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, mlp: MLP | Experts) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        memory: LayerCache | None,
        step: StepMetadata | None,
        routing: list[Tensor] | None,
        packed: Packed | None = None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, memory, step, packed)
        normed = self.post_attention_layernorm(x)
        mlp = self.mlp(normed, routing) if isinstance(self.mlp, Experts) else self.mlp(normed)
        return x + mlp
