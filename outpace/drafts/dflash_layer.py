"""One layer of a DFlash: a Qwen3 layer whose keys are those of the block and of the context."""

from collections.abc import Callable

from torch import Tensor, nn

from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.dflash_heads import BlockConv
from outpace.models.blocks import MLP, Linear, RMSNorm
from outpace.ops.linear import linear
from outpace.ops.quant import Joined, Weight
from outpace.ops.rope import rotate_heads

# (layer, q [B,T,H,D], k [B,K,T,D], v [B,K,T,D]) of a block -> [B,T,H*D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class DFlashLayer(nn.Module):
    """A Qwen3 layer: q/k norm before rotary positions, SwiGLU. Context rows use k and v alone."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        H, K, D, C = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.input_layernorm = RMSNorm(C, config.rms_norm_eps)
        self.qkv_proj = Linear(C, (H + 2 * K) * D, config.attention_bias)
        self.o_proj = Linear(H * D, C, config.attention_bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(C, config.rms_norm_eps)
        self.mlp = MLP(C, config.intermediate_size)
        convolved = config.conv_kernel_size > 0
        self.attention_conv = BlockConv(config) if convolved else None
        self.mlp_conv = BlockConv(config) if convolved else None

    def context_weights(self) -> tuple[Weight, Tensor | None]:
        """The rows of qkv_proj that make keys and values, and their bias."""
        first = self.heads * self.head_dim
        weight, bias = self.qkv_proj.weight, self.qkv_proj.bias
        assert not isinstance(weight, Joined), "a draft's q, k and v are one matrix"
        return weight[first:], None if bias is None else bias[first:]

    def context_kv(
        self,
        features: Tensor,
        cos: Tensor,
        sin: Tensor,
        weights: tuple[Weight, Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """features [B,T,C] -> k, v [B,K,T,D], ready to be remembered. `weights`: `context_weights()`, where
        they were asked for before."""
        kv = linear(features, *(weights or self.context_weights()), self.qkv_proj.rounded)
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        _, k, v = rotate_heads(kv, cos, sin, 0, self.kv_heads, norms)
        return k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        h = self.input_layernorm(x)
        if self.attention_conv is None or self.mlp_conv is None:
            x = x + self.attention(h, cos, sin, layer, attend)
            return x + self.mlp(self.post_attention_layernorm(x))
        h, delta = self.attention_conv.before(h)
        x = x + self.attention_conv.after(self.attention(h, cos, sin, layer, attend), delta)
        h, delta = self.mlp_conv.before(self.post_attention_layernorm(x))
        return x + self.mlp_conv.after(self.mlp(h), delta)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q, k, v = rotate_heads(self.qkv_proj(x), cos, sin, self.heads, self.kv_heads, norms)
        out: Tensor = self.o_proj(attend(layer, q, k.transpose(1, 2), v.transpose(1, 2)))
        return out
