"""EAGLE-3 (arXiv 2503.01840): one layer over the next token's embedding and the target's fused states."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outpace.drafts.native import NativeDraft
from outpace.models.blocks import MLP, Embedding, Linear, RMSNorm
from outpace.models.decoder import Decoder
from outpace.ops.linear import linear
from outpace.ops.rope import RopeConfig, inverse_frequencies, rope_tables, rotate_heads


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """EAGLE-3 (arXiv 2503.01840): one decoder layer over the embedding of the next token and the fused
    states of the target. `layer_ids`: layer l is the output of block l, HF's hidden_states[l+1]."""

    hidden_size: int
    target_hidden_size: int  # of each state that `fc` reads
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int  # rows of the draft's head
    rope: RopeConfig
    rms_norm_eps: float
    layer_ids: tuple[int, ...]
    norm_before_residual: bool = False  # the residual is the normed feature, not the raw one
    norm_before_fc: bool = False  # one norm over the joined states (`input_norm`)
    fc_norm: bool = False  # a norm per state (`fc_norm.0` ..; EAGLE-3.1)
    norm_output: bool = False  # the state fed back is the one after `norm` (EAGLE-3.1)
    sliding_window: int = 0  # the current token included; 0: it sees everything
    max_position_embeddings: int = 131072
    num_layers: int = 1  # those after the first are plain Llama layers
    parallel: bool = False  # all draft tokens in one pass (P-EAGLE, arXiv 2602.01469): it holds `mask_hidden`
    mask_token_id: int | None = None  # of the draft tokens after the first; None: it holds `mask_embedding`

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads do not share {self.num_kv_heads} kv heads evenly")
        if self.num_layers < 1:
            raise ValueError(f"num_layers {self.num_layers}: an EAGLE-3 has at least one")
        masks = range(self.vocab_size if self.parallel else 0)
        if self.mask_token_id is not None and self.mask_token_id not in masks:
            raise ValueError(
                f"mask_token_id {self.mask_token_id}: a parallel EAGLE-3 alone has one, below "
                f"{self.vocab_size} (vocab_size)"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary halves need an even one")
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise ValueError(f"layer_ids {list(self.layer_ids)}: fc reads the states in ascending order")
        if self.layer_ids[0] < 0:
            raise ValueError(f"layer_ids {list(self.layer_ids)}: the embedding is no layer's output")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} must lie in 1..{self.vocab_size} (vocab_size)"
            )


# (layer, q [B,T,H,D], k [B,K,T,D], v [B,K,T,D]) -> [B,T,H*D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# (layer, k [B,K,T,D], v [B,K,T,D]): remember them
Keep = Callable[[int, Tensor, Tensor], object]


class Eagle3Layer(nn.Module):
    """A Llama layer. The first one's q, k and v read the token's embedding and the feature, each normed,
    side by side; its residual is the feature."""

    def __init__(self, config: Eagle3Config, layer: int) -> None:
        super().__init__()
        H, K, D, C = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        self.heads, self.kv_heads = H, K
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = None if layer else RMSNorm(C, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(C, config.rms_norm_eps)
        self.qkv_proj = Linear(C if layer else 2 * C, (H + 2 * K) * D)
        self.o_proj = Linear(H * D, C)
        self.post_attention_layernorm = RMSNorm(C, config.rms_norm_eps)
        self.mlp = MLP(C, config.intermediate_size)

    def read(
        self, x: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """-> the residual [B,T,C]; q [B,T,H,D]; k, v [B,K,T,D], ready to be remembered."""
        if self.hidden_norm is None:
            residual, read = x, self.input_layernorm(x)
        else:
            normed = self.hidden_norm(x)
            residual = normed if self.norm_before_residual else x
            read = torch.cat((self.input_layernorm(embeds), normed), dim=-1)  # [B,T,2C]
        q, k, v = rotate_heads(self.qkv_proj(read), cos, sin, self.heads, self.kv_heads)
        return residual, q, k.transpose(1, 2), v.transpose(1, 2)

    def forward(
        self, x: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend
    ) -> Tensor:
        residual, q, k, v = self.read(x, embeds, cos, sin)
        x = residual + self.o_proj(attend(layer, q, k, v))
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(NativeDraft):
    """The module that is trained and served. At index t it reads a state of the token at t and the embedding
    of the token at t + 1, is at rotary position t, and predicts the token at t + 2.

    One step is `head(draft(embeds, feature, cos, sin, attend))`; the first feature is `fuse(aux)`, the next
    one `feedback(hidden)`, at a position one further.
    Embedding and head are the target's where the draft has none of its own: they are given at the call, and
    are no parameters here.
    """

    def __init__(
        self,
        config: Eagle3Config,
        *,
        own_embedding: bool = False,
        own_head: bool = True,
        mapped: bool | None = None,
    ) -> None:
        """`mapped`: the head's rows are some of the target's tokens, which `d2t` maps; by default where
        there are fewer of them."""
        super().__init__()
        self.config = config
        C, wide, eps = config.hidden_size, config.target_hidden_size, config.rms_norm_eps
        joined = len(config.layer_ids) * wide
        norms = [RMSNorm(wide, eps) for _ in config.layer_ids] if config.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.input_norm = RMSNorm(joined, eps) if config.norm_before_fc else None
        self.fc = Linear(joined, C)
        self.layers = nn.ModuleList(Eagle3Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(C, eps)
        self.embed_tokens = Embedding(config.vocab_size, C) if own_embedding else None
        self.lm_head = Linear(C, config.draft_vocab_size) if own_head else None
        # what means a state and for a token that are not there yet (P-EAGLE)
        self.mask_hidden = nn.Parameter(torch.zeros(1, joined)) if config.parallel else None
        learnt = config.parallel and config.mask_token_id is None
        self.mask_embedding = nn.Parameter(torch.zeros(C)) if learnt else None
        if mapped is None:
            mapped = config.draft_vocab_size < config.vocab_size
        d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if mapped else None
        self.d2t: Tensor | None
        self.register_buffer("d2t", d2t)
        self.inv = inverse_frequencies(config.rope, config.head_dim)

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.config.layer_ids

    def fuse(self, aux: Tensor) -> Tensor:
        """aux [n,B,T,C'] of the target, in the order of layer_ids -> the feature [B,T,C]."""
        if self.fc_norm:
            aux = torch.stack([norm(x) for norm, x in zip(self.fc_norm, aux, strict=True)])
        joined = aux.permute(1, 2, 0, 3).flatten(2)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def embed(self, tokens: Tensor, target: Decoder) -> Tensor:
        """tokens [B,T] of the target's vocabulary -> [B,T,C]."""
        return target.embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens, target.dtype)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B,T] -> cos, sin [B,T,D/2] float32."""
        return rope_tables(positions, self.inv.to(positions.device), self.config.rope.concentration)

    def forward(self, embeds: Tensor, feature: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """embeds of the next tokens and feature, both [B,T,C] -> hidden [B,T,C], before `norm`. `attend`
        decides whom each query sees."""
        x = feature
        for i, layer in enumerate(self.layers):
            x = layer(x, embeds, cos, sin, i, attend)
        return x

    def remember(
        self, embeds: Tensor, feature: Tensor, cos: Tensor, sin: Tensor, attend: Attend, keep: Keep
    ) -> None:
        """`forward` as far as later tokens will ask for it: of the last layer, keys and values alone."""
        x = feature
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Eagle3Layer)
            if i + 1 < len(self.layers):
                x = layer(x, embeds, cos, sin, i, attend)
            else:
                keep(i, *layer.read(x, embeds, cos, sin)[2:])

    def head(self, hidden: Tensor, target: Decoder | None = None) -> Tensor:
        """hidden [..., C] -> logits [..., draft_vocab]. The target is read where its head serves."""
        normed: Tensor = self.norm(hidden)
        if self.lm_head is not None:
            logits: Tensor = self.lm_head(normed)
            return logits
        assert target is not None, "this EAGLE-3 uses the target's head"
        return linear(normed, target.head, rounded=self.rounded)

    def feedback(self, hidden: Tensor) -> Tensor:
        """hidden [B,T,C] -> the feature of the next step: as it is, or normed (EAGLE-3.1)."""
        normed: Tensor = self.norm(hidden) if self.config.norm_output else hidden
        return normed

    def masks(self, target: Decoder) -> tuple[Tensor, Tensor]:
        """P-EAGLE: embedding and feature [1,1,C] of every draft token but the first."""
        assert self.mask_hidden is not None, "this EAGLE-3 was not made to predict in one pass"
        states = self.mask_hidden.view(len(self.config.layer_ids), 1, 1, -1).to(target.dtype)
        if self.mask_embedding is not None:
            return self.mask_embedding.to(target.dtype).view(1, 1, -1), self.fuse(states)
        mask = torch.tensor([[self.config.mask_token_id]], device=states.device)
        return self.embed(mask, target), self.fuse(states)

    def target_ids(self) -> Tensor | None:
        """[draft_vocab] int64: the target's token of each row of the head; None: the same."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


def init_eagle3(
    config: Eagle3Config,
    seed: int,
    *,
    ids: Tensor | None = None,
    head: Tensor | None = None,
    own_embedding: bool = False,
    own_head: bool = True,
) -> Eagle3:
    """An untrained draft: norms at 1, matrices N(0, 0.02^2). `ids` [draft_vocab] int64, ascending: the
    target's tokens that it can say. `head` [V, C]: the target's, from whose rows its own head begins.

    Raises ValueError where `ids` is not draft_vocab_size ascending tokens, or is missing and needed.
    """
    if ids is None and config.draft_vocab_size != config.vocab_size:
        raise ValueError(
            f"a draft vocabulary of {config.draft_vocab_size} out of {config.vocab_size}: give `ids`, the "
            "target's tokens it consists of"
        )
    if ids is not None:
        inside = len(ids) and 0 <= int(ids[0]) and int(ids[-1]) < config.vocab_size
        if len(ids) != config.draft_vocab_size or not inside or not bool((ids[1:] > ids[:-1]).all()):
            raise ValueError(
                f"ids must be {config.draft_vocab_size} (draft_vocab_size) ascending tokens below "
                f"{config.vocab_size}"
            )
    draft = Eagle3(config, own_embedding=own_embedding, own_head=own_head, mapped=ids is not None)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.dim() > 1 or name == "mask_embedding":
                weight.copy_(torch.randn(weight.shape, generator=rng) * 0.02)
        if ids is not None:
            draft.d2t = ids - torch.arange(len(ids))
        if head is not None and draft.lm_head is not None:
            assert isinstance(draft.lm_head.weight, Tensor)
            draft.lm_head.weight.copy_(head if ids is None else head[ids])
    return draft
