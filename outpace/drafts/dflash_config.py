"""What a DFlash draft is made of: sizes, what it reads of the target, and its optional parts."""

from dataclasses import dataclass

from outpace.models.config import FULL, WINDOW
from outpace.ops.rope import RopeConfig


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
    causal_full: bool = False  # nor in layers without one: with both, no slot knows what follows (JetSpec)
    max_position_embeddings: int = 131072
    # DFlash 2: convolutions around every sublayer, and a selector over the most probable candidates; 0: none
    conv_kernel_size: int = 0  # taps
    conv_group_size: int = 0  # channels that share a coefficient
    selector_rank: int = 0
    selector_top_k: int = 0
    # DSpark: a bias on each position's logits that its predecessor gives, and how sure a draft token is
    markov_rank: int = 0
    markov_gated: bool = False
    confidence: bool = False
    temperatures: tuple[float, ...] = ()  # of the chance that each position is right; () is 1 for all
    draft_vocab_size: int = 0  # the draft tokens are of so many of the target's tokens; 0: of all

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
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim}: rotary halves need an even number of at least 2")
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

        self._check_heads()

    def _check_heads(self) -> None:
        if bool(self.conv_kernel_size) != bool(self.conv_group_size):
            raise ValueError("conv_kernel_size and conv_group_size go together: both, or neither")
        if self.conv_kernel_size and not 1 <= self.conv_kernel_size <= min(self.block_size, 16):
            raise ValueError(
                f"conv_kernel_size {self.conv_kernel_size}: taps reach back in a block of {self.block_size}"
            )
        if self.conv_group_size and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size {self.conv_group_size} does not divide hidden_size {self.hidden_size}"
            )
        if bool(self.selector_rank) != bool(self.selector_top_k):
            raise ValueError("selector_rank and selector_top_k go together: both, or neither")
        if self.selector_rank and self.markov_rank:
            raise ValueError("a selector and a Markov head both answer for the predecessor: choose one")
        if self.markov_gated and not self.markov_rank:
            raise ValueError("markov_gated without a markov_rank: there is nothing to gate")
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} must lie in 1..{self.vocab_size}, or be 0 for all"
            )
        if self.selector_top_k > self.rows:
            raise ValueError(f"selector_top_k {self.selector_top_k} of {self.rows} tokens")
        if self.temperatures and len(self.temperatures) < self.block_size - 1:
            raise ValueError(f"{len(self.temperatures)} temperatures for {self.block_size - 1} draft tokens")
        if any(t <= 0 for t in self.temperatures):
            raise ValueError(f"temperatures {list(self.temperatures)} must be above 0")
        if self.causal_full and WINDOW in self.layer_types and not self.causal:
            raise ValueError("causal_full without causal: full layers are causal only where windows are too")

    @property
    def rows(self) -> int:
        """How many tokens the draft can say."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def previous_rank(self) -> int:
        """Width of what means a predecessor: of the Markov head's embedding, or the selector's."""
        return self.markov_rank or self.selector_rank

    def hides(self, layer: int) -> bool:
        """Whether a slot sees none of its block behind it."""
        return self.causal if self.window(layer) else self.causal_full

    @property
    def one_way(self) -> bool:
        """No slot depends on a later one: the first positions of a block may be drafted alone."""
        return all(self.hides(i) for i in range(self.num_layers))

    def window(self, layer: int) -> int:
        return self.sliding_window if self.layer_types and self.layer_types[layer] == WINDOW else 0
