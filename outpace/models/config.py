"""ModelConfig: what a config.json specifies, in our terms."""

from dataclasses import dataclass, field, fields
from reprlib import repr  # short, however long or deep the value
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
    dsa_layers: tuple[int, ...] = ()  # those with an index (models/blocks.py) ..
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


FAR = 2**24  # larger than any axis of a model that fits a disk
COUNTS = {  # whole numbers from 1 to ..; null and a missing key mean the default
    "vocab_size": FAR,
    "hidden_size": 2**20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "intermediate_size": FAR,
    "moe_intermediate_size": FAR,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "num_experts_per_tok": 4096,
    "experts_per_token": 4096,
    "decoder_sparse_step": 1024,
    "dsa_index_dim": 256,
    "dsa_index_heads": 64,
    "dsa_recent": 2**40,
    "max_position_embeddings": 2**40,
}
LENGTHS = {  # from 0
    "sliding_window": 2**40,
    "max_window_layers": 2**20,
    "dsa_min_context": 2**40,
    "dsa_sinks": 2**40,
}
NUMBERS = {  # (above, up to)
    "rms_norm_eps": (0.0, 1.0),
    "swiglu_limit": (0.0, 1e6),
    "dsa_top_k": (0.0, 1e12),
    "dsa_top_p": (0.0, 1.0),
    "dsa_least_mass": (0.0, 1.0),
    "swiglu_alpha": (0.0, 1e6),
    "rope_theta": (1.0, 1e12),
}
FLAGS = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "norm_topk_prob",
    "use_mla_kv",
    "use_dsa",
)
IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
ROPE_COUNTS = {"original_max_position_embeddings": 2**40}
ROPE_NUMBERS = {
    "rope_theta": (1.0, 1e12),
    "factor": (0.0, 1e6),
    "beta_fast": (0.0, 1e6),
    "beta_slow": (0.0, 1e6),
    "attention_factor": (0.0, 1e6),
    "low_freq_factor": (0.0, 1e6),
    "high_freq_factor": (0.0, 1e6),
}
MOST_EXPERTS = 2**16  # over all layers


def check_values(hf: dict[str, Any]) -> None:
    """Raises ValueError naming the key and what it should be. States nothing of keys that are missing, and
    nothing of keys that no parser of ours reads."""
    _strings(hf, "architectures")
    for key, most in COUNTS.items():
        _whole(hf, key, 1, most)
    for key, most in LENGTHS.items():
        _whole(hf, key, 0, most)
    for key, (above, most_of_it) in NUMBERS.items():
        _number(hf, key, above, most_of_it)
    for key in FLAGS:
        if not isinstance(hf.get(key), bool | None):
            raise _wrong(key, hf[key], "true or false")
    for key in IDS:
        _ids(hf, key)
    _strings(hf, "layer_types")
    for key in ("mlp_only_layers", "mla_layers", "dsa_layers"):
        layers = hf.get(key)
        if layers is not None and not (isinstance(layers, list) and all(type(i) is int for i in layers)):
            raise _wrong(key, layers, "a list of layers")
    rank = hf.get("mla_latent_dim")
    for each in rank if isinstance(rank, list) else [rank]:
        _whole({"mla_latent_dim": each}, "mla_latent_dim", 1, 2**20)
    experts = hf.get("num_local_experts") or hf.get("num_experts") or 1
    if experts * (hf.get("num_hidden_layers") or 1) > MOST_EXPERTS:
        raise ValueError(
            f"config.json: {experts} experts in each layer are more than {MOST_EXPERTS:,} in all"
        )
    _rope(hf, "rope_parameters")
    _rope(hf, "rope_scaling")
    _only(hf, "hidden_act", ("silu", "swish"))
    _only(hf, "partial_rotary_factor", (1, 1.0))


def _rope(hf: dict[str, Any], key: str) -> None:
    value = hf.get(key)
    if value is None:
        return
    if not isinstance(value, dict):
        raise _wrong(key, value, "an object, or null")
    for inner in ("rope_type", "type"):
        if not isinstance(value.get(inner), str | None):
            raise _wrong(f"{key}.{inner}", value[inner], "a string")
    for inner, most in ROPE_COUNTS.items():
        _whole(value, inner, 1, most, f"{key}.")
    for inner, (above, most_of_it) in ROPE_NUMBERS.items():
        _number(value, inner, above, most_of_it, f"{key}.")
    if not isinstance(value.get("truncate"), bool | None):
        raise _wrong(f"{key}.truncate", value["truncate"], "true or false")
    low, high = value.get("low_freq_factor") or 1.0, value.get("high_freq_factor") or 4.0
    if low >= high:
        raise ValueError(f"config.json: {key}.low_freq_factor {low} is not below high_freq_factor {high}")
    for inner in ("mscale", "mscale_all_dim"):
        _only(value, inner, (), f"{key}.")


def _whole(values: dict[str, Any], key: str, least: int, most: int, prefix: str = "") -> None:
    value = values.get(key)
    if value is not None and not (type(value) is int and least <= value <= most):
        raise _wrong(prefix + key, value, f"a whole number from {least} to {most:,}")


def _number(values: dict[str, Any], key: str, above: float, most: float, prefix: str = "") -> None:
    value = values.get(key)
    if value is None:
        return
    if type(value) not in (int, float) or not above < value <= most:  # NaN is in no range
        raise _wrong(prefix + key, value, f"a number above {above:g}, up to {most:g}")


def _strings(hf: dict[str, Any], key: str) -> None:
    value = hf.get(key)
    if value is None:
        return
    if not isinstance(value, list) or not all(isinstance(v, str) and v.isprintable() for v in value):
        raise _wrong(key, value, "a list of strings")


def _ids(hf: dict[str, Any], key: str) -> None:
    """-1 means none in older files. Only eos may be several."""
    value = hf.get(key)
    many = value if isinstance(value, list) and key == "eos_token_id" else [value]
    if value is not None and not all(type(v) is int and -1 <= v < FAR for v in many):
        raise _wrong(key, value, "a token's id" + (" or a list of them" if key == "eos_token_id" else ""))


def _only(values: dict[str, Any], key: str, known: tuple[Any, ...], prefix: str = "") -> None:
    value = values.get(key)
    if value is not None and value not in known:
        only = f"only {known[0]}" if known else "no value of it"
        raise ValueError(f"config.json: {prefix}{key} {repr(value)} is not supported, {only}")


def _wrong(key: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"config.json: `{key}` is {repr(value)}; it should be {wanted}")


SHARES = ("dsa_top_p", "dsa_least_mass")  # left out where they are 0
KEEP = tuple(field.name for field in fields(TopKConfig))


def parse_mla(hf: dict[str, Any], layers: int) -> dict[str, Any]:
    """Of a retrofitted checkpoint: fields of ModelConfig from `use_mla_kv`, `mla_layers` and
    `mla_latent_dim`, one for all of these layers or a list. Nothing where there are no such layers."""
    named = hf.get("mla_layers")
    if not named:
        if hf.get("use_mla_kv"):
            raise ValueError("config.json: use_mla_kv without mla_layers: name the layers that have a latent")
        return {}
    value = need(hf, "mla_latent_dim")
    ranks = value if isinstance(value, list) else [value] * len(named)
    if len(ranks) != len(named) or len(set(named)) < len(named) or not all(0 <= i < layers for i in named):
        raise ValueError(
            f"config.json: mla_layers {named}, mla_latent_dim {value}: distinct layers below {layers}, and "
            "one rank for all or one for each"
        )
    values = dict(zip(named, ranks, strict=True))
    return {
        "mla_ranks": tuple(values.get(i, 0) for i in range(layers)),
        "use_mla_kv": bool(hf.get("use_mla_kv", True)),
    }


def mla_to_hf(config: ModelConfig) -> dict[str, Any]:
    layers = [i for i, rank in enumerate(config.mla_ranks) if rank]
    if not layers:
        return {}
    ranks = [config.mla_ranks[i] for i in layers]
    return {
        "use_mla_kv": config.use_mla_kv,
        "mla_layers": layers,
        "mla_latent_dim": ranks[0] if len(set(ranks)) == 1 else ranks,
    }


def parse_dsa(hf: dict[str, Any], layers: int) -> dict[str, Any]:
    """Fields of ModelConfig from `use_dsa`, `dsa_layers`, `dsa_index_dim`, `dsa_index_heads` and those of
    `TopKConfig` with dsa_ before them. Nothing where there are no such layers."""
    named = hf.get("dsa_layers")
    if not named:
        if hf.get("use_dsa"):
            raise ValueError("config.json: use_dsa without dsa_layers: name the layers that have an index")
        return {}
    if len(set(named)) < len(named) or not all(0 <= i < layers for i in named):
        raise ValueError(f"config.json: dsa_layers {named}: distinct layers below {layers}")
    values = {name: hf[f"dsa_{name}"] for name in KEEP if hf.get(f"dsa_{name}") is not None}
    return {
        "dsa_layers": tuple(sorted(named)),
        "dsa_index_dim": need(hf, "dsa_index_dim"),
        "dsa_index_heads": need(hf, "dsa_index_heads"),
        "dsa_keep": TopKConfig(**values),
        "use_dsa": bool(hf.get("use_dsa", True)),
    }


def dsa_to_hf(config: ModelConfig) -> dict[str, Any]:
    if not config.dsa_layers:
        return {}
    values = {
        "use_dsa": config.use_dsa,
        "dsa_layers": list(config.dsa_layers),
        "dsa_index_dim": config.dsa_index_dim,
        "dsa_index_heads": config.dsa_index_heads,
        **{f"dsa_{name}": value for name, value in vars(config.dsa_keep).items()},
    }
    return {name: value for name, value in values.items() if value or name not in SHARES}
