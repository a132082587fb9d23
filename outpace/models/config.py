"""ModelConfig: what a config.json specifies, in our terms."""

from dataclasses import dataclass, field
from typing import Any

from outpace.kv.topk import TopKConfig
from outpace.ops.rope import RopeConfig

FULL, WINDOW = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder. Sizes: `hidden_size` C, `num_heads` H, `num_kv_heads` K, `head_dim` D (not C/H)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: RopeConfig
    layer_types: tuple[str, ...]
    sliding_window: int = 0
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    tie_word_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    norm_topk_prob: bool = True
    moe_layers: tuple[bool, ...] = ()
    swiglu_limit: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    mlp_bias: bool = False
    mla_ranks: tuple[int, ...] = ()  # per layer, 0: keys and values as they are (models/latent.py)
    use_mla_kv: bool = False
    dsa_layers: tuple[int, ...] = ()  # those with an index (models/indexer.py) ..
    dsa_index_dim: int = 0
    dsa_index_heads: int = 0
    dsa_keep: TopKConfig = field(default_factory=TopKConfig)
    use_dsa: bool = False  # .. which chooses what is seen

    def mla_rank(self, layer: int) -> int:
        return self.mla_ranks[layer] if self.mla_ranks else 0

    def kv_numbers(self, layer: int) -> int:
        """What a layer remembers of a token, an index's key not counted."""
        rank = self.mla_rank(layer) if self.use_mla_kv else 0
        return rank + self.num_kv_heads * self.qk_norm if rank else 2 * self.num_kv_heads * self.head_dim

    def index_numbers(self, layer: int) -> int:
        return self.dsa_index_dim if self.use_dsa and layer in self.dsa_layers else 0

    @property
    def full_layers(self) -> list[int]:
        """Those without a sliding window."""
        return [i for i in range(self.num_layers) if not self.window(i)]

    def window(self, layer: int) -> int:
        """The sliding window of a layer, current token included; 0 where it sees everything."""
        return self.sliding_window if self.layer_types[layer] == WINDOW else 0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"config: layer_types names {len(self.layer_types)} layers, "
                f"num_hidden_layers is {self.num_layers}"
            )
        unknown = set(self.layer_types) - {FULL, WINDOW}
        if unknown:
            raise ValueError(f"config: layer_types holds {sorted(unknown)}; known: {FULL}, {WINDOW}")
        if WINDOW in self.layer_types and self.sliding_window < 1:
            raise ValueError("config: sliding_attention layers need a sliding_window of at least 1")
        if self.head_dim % 2 or self.head_dim < 2:
            fault = "odd" if self.head_dim % 2 else "below 2"
            raise ValueError(f"config: head_dim {self.head_dim} is {fault}; rotary halves need an even one")
        if self.rope.kind == "factors" and len(self.rope.factors) != self.head_dim // 2:
            raise ValueError(
                f"config: {len(self.rope.factors)} rope factors for a head_dim of {self.head_dim}: "
                "half as many are wanted"
            )
        if self.mla_ranks and len(self.mla_ranks) != self.num_layers:
            raise ValueError(
                f"config: {len(self.mla_ranks)} latent ranks, num_hidden_layers is {self.num_layers}"
            )
        windowed = [i for i, rank in enumerate(self.mla_ranks) if rank and self.window(i)]
        if windowed:
            raise ValueError(
                f"config: layer {windowed[0]} has a sliding window: it takes no latent (mla_layers)"
            )
        unfit = [i for i in self.dsa_layers if not 0 <= i < self.num_layers or self.window(i)]
        if unfit:
            raise ValueError(
                f"config: dsa_layers names layer {unfit[0]}, which is not one of those with full attention"
            )
        if self.dsa_layers and (self.dsa_index_dim < 2 or self.dsa_index_dim % 2 or self.dsa_index_heads < 1):
            raise ValueError(
                f"config: an index of {self.dsa_index_heads} heads of {self.dsa_index_dim} (dsa_index_heads, "
                "dsa_index_dim): at least one, of an even number of dimensions"
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"config: {self.experts_per_token} experts per token of {self.num_experts} experts"
            )


def need(hf: dict[str, Any], key: str) -> Any:
    if hf.get(key) is None:
        raise ValueError(f"config.json lacks `{key}`")
    return hf[key]


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def parse_rope(hf: dict[str, Any], default_theta: float = 10000.0) -> RopeConfig:
    """Either form: `rope_parameters` (transformers 5), or `rope_theta` alongside `rope_scaling`."""
    value = hf.get("rope_parameters") or {}
    scaling = {**(hf.get("rope_scaling") or {}), **value}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn", "factors"):
        raise ValueError(f"config.json: rope type {kind!r} is not supported (default, linear, llama3, yarn)")
    theta = scaling.get("rope_theta") or hf.get("rope_theta") or default_theta
    original = scaling.get("original_max_position_embeddings") or hf.get("max_position_embeddings") or 0
    original = original if kind in ("llama3", "yarn") else 0
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=float(scaling.get("factor") or 1.0),
        original_max_position=int(original),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=scaling.get("attention_factor"),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        factors=tuple(scaling.get("factors") or ()),
    )


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """Both forms, since readers differ."""
    if rope.kind == "factors":
        raise ValueError(
            "this rope came from a GGUF file as one factor per frequency, which config.json cannot say: "
            "start from the safetensors the file was made of"
        )
    values: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        values["factor"] = rope.factor
    if rope.kind in ("yarn", "llama3"):
        values["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        if rope.attention_factor is not None:
            values["attention_factor"] = rope.attention_factor
    if rope.kind == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else values,
        "rope_parameters": {**values, "rope_theta": rope.theta},
    }
