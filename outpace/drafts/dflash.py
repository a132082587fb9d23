"""DFlash (arXiv 2602.06036): fill a masked block in one pass, conditioned on the target's hidden states."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outpace.cache.kv import Cache
from outpace.drafts.choice import Choice
from outpace.drafts.proposal import Proposal
from outpace.models.blocks import MLP, Linear, RMSNorm
from outpace.models.config import FULL, WINDOW
from outpace.models.decoder import Decoder
from outpace.ops.attention import attend_view
from outpace.ops.linear import linear
from outpace.ops.rope import RopeConfig, inverse_frequencies, rope_tables, rotate_heads

# (layer, q [B,T,H,D], k [B,K,T,D], v [B,K,T,D]) of a block -> [B,T,H*D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def default_layer_ids(num_target_layers: int, features: int = 5) -> tuple[int, ...]:
    """Spread from the 2nd to the 3rd-last target layer (paper, section 4.1); N//2 for a single one.
    A target with too few layers for that many gives each layer once."""
    span = num_target_layers - 3 - 1
    if features == 1 or span < 1:
        return (num_target_layers // 2,)
    return tuple(sorted({round(1 + i * span / (features - 1)) for i in range(features)}))


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    hidden_size: int  # C, the target's
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope: RopeConfig
    rms_norm_eps: float
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int | None  # None: the checkpoint holds a learned mask_embedding
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int = 0
    causal: bool = False  # in layers with a window, a slot sees none of its block behind it
    max_position_embeddings: int = 131072

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"block_size {self.block_size}: a block is an anchor and at least one MASK")
        bad = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if bad or not self.target_layer_ids:
            raise ValueError(
                f"target_layer_ids {list(self.target_layer_ids)}: each must lie in "
                f"0..{self.num_target_layers - 1}"
            )
        if list(self.target_layer_ids) != sorted(set(self.target_layer_ids)):
            raise ValueError(
                f"target_layer_ids {list(self.target_layer_ids)} are not ascending: fc reads the "
                "features in that order, so a reordered list silently halves acceptance"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads do not share {self.num_kv_heads} kv heads evenly")
        if len(self.layer_types) not in (0, self.num_layers) or set(self.layer_types) - {FULL, WINDOW}:
            raise ValueError(
                f"layer_types {list(self.layer_types)}: one of {FULL}, {WINDOW} for each of the "
                f"{self.num_layers} layers"
            )
        if WINDOW in self.layer_types and self.sliding_window < 1:
            raise ValueError("sliding_attention layers need a sliding_window of at least 1")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
            )

    def window(self, layer: int) -> int:
        return self.sliding_window if self.layer_types and self.layer_types[layer] == WINDOW else 0


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

    def context_kv(self, features: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """features [B,T,C] -> k, v [B,K,T,D], ready to be remembered."""
        first = self.heads * self.head_dim
        weight, bias = self.qkv_proj.weight, self.qkv_proj.bias
        assert isinstance(weight, Tensor), "a draft's weights are plain tensors"
        kv = linear(features, weight[first:], None if bias is None else bias[first:])
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        _, k, v = rotate_heads(kv, cos, sin, 0, self.kv_heads, norms)
        return k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        qkv = self.qkv_proj(self.input_layernorm(x))
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q, k, v = rotate_heads(qkv, cos, sin, self.heads, self.kv_heads, norms)
        x = x + self.o_proj(attend(layer, q, k.transpose(1, 2), v.transpose(1, 2)))
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlash(nn.Module):
    """Embedding and head are the target's, frozen: `bind` gives them; they are not parameters here."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        C, K = config.hidden_size, len(config.target_layer_ids)
        self.fc = Linear(K * C, C)
        self.hidden_norm = RMSNorm(C, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(C, config.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(C)) if config.mask_token_id is None else None
        self.inv = inverse_frequencies(config.rope, config.head_dim)

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def block_size(self) -> int:
        return self.config.block_size

    def context(self, aux: Tensor) -> Tensor:
        """aux [n,B,T,C] in the order of target_layer_ids -> c_s = RMSNorm(W_c [h^l1; ..; h^lm]) [B,T,C]."""
        return self.hidden_norm(self.fc(aux.permute(1, 2, 0, 3).flatten(2)))

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self.inv.to(positions.device), self.config.rope.concentration)

    def embed_block(self, anchors: Tensor, target: Decoder) -> Tensor:
        """anchors [...] -> [..., block_size, C]: the anchor's embedding, then MASKs."""
        size = (*anchors.shape, self.block_size - 1)
        mask_id = self.config.mask_token_id
        if self.mask_embedding is None:
            assert mask_id is not None
            masks = torch.full(size, mask_id, dtype=anchors.dtype, device=anchors.device)
            return target.embed(torch.cat((anchors[..., None], masks), dim=-1))
        anchor = target.embed(anchors)[..., None, :]
        masks = self.mask_embedding.to(anchor.dtype).expand(*size, -1)
        return torch.cat((anchor, masks), dim=-2)

    def denoise(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, recompute: bool = False) -> Tensor:
        """x [B,T,C], embedded blocks -> hidden [B,T,C]; the state at a MASK predicts that very position.
        `attend` says how a block's queries meet the context's and the block's own keys. `recompute`: in
        training, layers are run again in the backward."""
        for i, layer in enumerate(self.layers):
            inputs = (x, cos, sin, i, attend)
            x = checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
        return self.norm(x)

    def bind(self, target: Decoder) -> "BoundDFlash":
        return BoundDFlash(self, target)


@dataclass(frozen=True)
class BoundDFlash:
    """A DFlash with its target, ready to draft. Raises ValueError where the two do not fit."""

    draft: DFlash
    target: Decoder

    def __post_init__(self) -> None:
        ours, theirs = self.draft.config, self.target.config
        for what, a, b in (
            ("hidden_size", ours.hidden_size, theirs.hidden_size),
            ("num_target_layers", ours.num_target_layers, theirs.num_layers),
            ("vocab_size", ours.vocab_size, theirs.vocab_size),
        ):
            if a != b:
                raise ValueError(f"this draft was made for a target with {what} {a}; this one has {b}")

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.draft.target_layer_ids

    @property
    def block_size(self) -> int:
        return self.draft.block_size

    def begin(self, batch: int, length: int, offset: int = 0) -> "DFlashSession":
        return DFlashSession(self.draft, self.target, batch, length, offset)


class DFlashSession:
    """The context-only KV cache: rows of verified tokens alone. A block's own rows are written behind
    them while it is drafted and are never committed, so the next append overwrites them."""

    def __init__(self, draft: DFlash, target: Decoder, batch: int, length: int, offset: int) -> None:
        config = draft.config
        self.draft, self.target = draft, target
        self.cache = Cache(
            batch,
            length + draft.block_size,
            draft.block_size,
            tuple(config.window(i) for i in range(config.num_layers)),
            config.num_kv_heads,
            config.head_dim,
            offset=offset,
            dtype=target.dtype,
            device=target.device,
        )

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        assert aux is not None, "DFlash reads the target's hidden states"
        width = max(counts)
        if not width:
            return
        features = self.draft.context(aux[:, :, :width])
        step = self.cache.begin(width, counts)
        cos, sin = self.draft.rope(step.storage + self.cache.offset)
        for layer, memory in zip(self.draft.layers, self.cache.layers, strict=True):
            assert isinstance(layer, DFlashLayer)
            k, v = layer.context_kv(features, cos, sin)
            memory.append(k, v, step)
        self.cache.advance(step)

    def propose(self, last: Tensor, width: int, choice: Choice) -> Proposal:
        guesses, q = choice.tokens(self.logits(last, width), depth=1)
        if q is not None:
            q = torch.nn.functional.pad(q, (0, 0, 1, 0))
        return Proposal(torch.cat((last[:, None], guesses), dim=1), [width] * len(last), q=q)

    def keep(self, rows: list[int]) -> None:
        self.cache.keep(rows)

    def logits(self, last: Tensor, width: int) -> Tensor:
        """last [B] -> [B, width - 1, V], of the tokens 1 .. width - 1 after it (width <= block_size), each
        blind to the others."""
        return self.target.logits(self.block_hidden(last)[:, 1:width])

    def block_hidden(self, last: Tensor) -> Tensor:
        """last [B] -> [B, block_size, C]."""
        x = self.draft.embed_block(last, self.target)
        step = self.cache.begin(self.draft.block_size, both_ways=True)
        cos, sin = self.draft.rope(step.storage + self.cache.offset)
        config = self.draft.config
        scale = config.head_dim**-0.5
        windowed = replace(step, both_ways=False) if config.causal else step

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window = config.window(layer)
            sees = windowed if window else step
            view = self.cache.layers[layer].append(k, v, sees)
            return attend_view(q, view, sees, window, None, scale)

        return self.draft.denoise(x, cos, sin, attention)
