"""A Reading: every choice in which engines differ when they turn one layer's weights into numbers.

The right one follows from the config; a known mistake is the right one with a field or two replaced. So
trying a mistake never touches the engine, nor the weights.
"""

from dataclasses import dataclass
from typing import Literal

from outpace.models.config import ModelConfig
from outpace.ops.norm import ALPHA
from outpace.ops.rope import RopeConfig

Nibbles = Literal["as stored", "from split", "to split"]
ALL_BIASES = frozenset({"q", "k", "v", "o", "router", "gate_up", "down"})


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How one layer is read. Defaults are what all our families share."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float  # of q.k before the softmax
    rope: RopeConfig | None  # None: no rotation at all
    window: int  # keys a query sees, itself included; 0: all before it
    qk_norm: Literal["none", "before rope", "after rope", "without weights"]
    sinks: Literal["none", "in the denominator", "scaled", "zero"]
    experts_per_token: int = 0
    renormalise: bool = True  # the chosen experts' weights sum to 1: what softmax after top-k gives
    gate_up: Literal["interleaved", "halves"] = "halves"
    limit: float | None = None  # the clamp of gate and up
    alpha: float = 1.0  # gate * sigmoid(alpha * gate)
    one: float = 0.0  # added to the up branch

    causal: bool = True
    groups: Literal["blocked", "cyclic"] = "blocked"  # query head h reads kv head h // G, or h % K
    pairs: Literal["halves", "neighbours"] = "halves"  # RoPE turns (i, i + D/2), or (2i, 2i + 1)
    qk_rows: Literal["as stored", "from neighbours", "to neighbours"] = "as stored"
    norm_weights: bool = True
    biases: frozenset[str] = ALL_BIASES
    gate_up_nibbles: Nibbles = "as stored"  # the columns within blocks of 32
    down_nibbles: Nibbles = "as stored"
    expert_scale: float = 1.0
    gate_first: bool = True
    down_transposed: bool = False


def right_reading(config: ModelConfig, layer: int) -> Reading:
    """What the config specifies of a layer."""
    clamped = config.swiglu_limit is not None
    return Reading(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
        rope=config.rope,
        window=config.window(layer),
        qk_norm="before rope" if config.qk_norm else "none",
        sinks="in the denominator" if config.sinks else "none",
        experts_per_token=config.experts_per_token,
        renormalise=clamped or config.norm_topk_prob,
        gate_up="interleaved" if clamped else "halves",
        limit=config.swiglu_limit,
        alpha=ALPHA if clamped else 1.0,
        one=1.0 if clamped else 0.0,
    )
