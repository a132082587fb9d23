"""EAGLE-3: its sizes and variants."""

from dataclasses import dataclass

from outpace.ops.rope import RopeConfig


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
