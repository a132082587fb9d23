"""ModelConfig: what a config.json specifies, in our terms."""

from collections.abc import Callable
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
        factors = self.head_dim // 2 if self.rope.kind == "factors" else 0
        if len(self.rope.factors) != factors:
            raise ValueError(
                f"config: {len(self.rope.factors)} rope factors for a head_dim of {self.head_dim} and "
                f"the rope type {self.rope.kind!r}: {factors} are needed"
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
MOST_EXPERTS = 2**16  # over all layers


@dataclass(frozen=True)
class Rule:
    """The values a key of config.json may have, and their description for the error message."""

    accepts: Callable[[Any], bool]
    wanted: str


def _whole(least: int, most: int) -> Rule:
    wanted = f"a whole number from {least} to {most:,}"
    return Rule(lambda v: type(v) is int and least <= v <= most, wanted)


def _number(above: float, most: float) -> Rule:
    wanted = f"a number above {above:g}, up to {most:g}"
    return Rule(lambda v: type(v) in (int, float) and above < v <= most, wanted)  # NaN is in no range


def _list(item: Callable[[Any], bool], wanted: str, least: int = 0, most: int = 10**6) -> Rule:
    return Rule(lambda v: isinstance(v, list) and least <= len(v) <= most and all(map(item, v)), wanted)


def _only(*known: Any) -> Rule:
    wanted = f"{known[0]}: nothing else is supported" if known else "left out: it is not supported"
    return Rule(lambda v: type(v) in map(type, known) and v in known, wanted)


def _token(value: Any) -> bool:
    """-1 means none in older files."""
    return type(value) is int and -1 <= value < FAR


FLAG = Rule(lambda v: isinstance(v, bool), "true or false")
LAYERS = _list(lambda v: type(v) is int, "a list of layers")
STRINGS = _list(lambda v: isinstance(v, str) and v.isprintable(), "a list of strings")
STRING = Rule(lambda v: isinstance(v, str), "a string")
TOKEN = Rule(_token, "a token's id")
OBJECT = Rule(lambda v: isinstance(v, dict), "an object, or null")
RANK = _whole(1, 2**20)
FACTOR = _number(0.0, 1e30)
KEYS = {  # every key that a parser reads; null and a missing key mean the default of the architecture
    "architectures": STRINGS,
    "vocab_size": _whole(1, FAR),
    "hidden_size": _whole(1, 2**20),
    "num_hidden_layers": _whole(1, 1024),
    "num_attention_heads": _whole(1, 2**16),
    "num_key_value_heads": _whole(1, 2**16),
    "head_dim": _whole(1, 2**16),
    "intermediate_size": _whole(1, FAR),
    "moe_intermediate_size": _whole(1, FAR),
    "num_experts": _whole(1, 4096),
    "num_local_experts": _whole(1, 4096),
    "num_experts_per_tok": _whole(1, 4096),
    "experts_per_token": _whole(1, 4096),
    "decoder_sparse_step": _whole(1, 1024),
    "max_position_embeddings": _whole(1, 2**40),
    "sliding_window": _whole(0, 2**40),
    "max_window_layers": _whole(0, 2**20),
    "rms_norm_eps": _number(0.0, 1.0),
    "swiglu_limit": _number(0.0, 1e6),
    "swiglu_alpha": _number(0.0, 1e6),
    "rope_theta": _number(1.0, 1e12),
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "use_sliding_window": FLAG,
    "norm_topk_prob": FLAG,
    "eos_token_id": Rule(
        lambda v: _token(v) or (isinstance(v, list) and all(map(_token, v))), "a token's id or a list of them"
    ),
    "bos_token_id": TOKEN,
    "pad_token_id": TOKEN,
    "layer_types": STRINGS,
    "mlp_only_layers": LAYERS,
    "hidden_act": _only("silu", "swish"),
    "partial_rotary_factor": _only(1, 1.0),
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
    "use_mla_kv": FLAG,
    "mla_layers": LAYERS,
    "mla_latent_dim": Rule(
        lambda v: all(map(RANK.accepts, v if isinstance(v, list) else [v])),
        f"{RANK.wanted}, or a list of them",
    ),
    "use_dsa": FLAG,
    "dsa_layers": LAYERS,
    "dsa_index_dim": _whole(1, 256),
    "dsa_index_heads": _whole(1, 64),
    "dsa_top_k": _number(0.0, 1e12),
    "dsa_top_p": _number(0.0, 1.0),
    "dsa_least_mass": _number(0.0, 1.0),
    "dsa_min_context": _whole(0, 2**40),
    "dsa_sinks": _whole(0, 2**40),
    "dsa_recent": _whole(1, 2**40),
}
ROPE_KEYS = {  # of the objects rope_parameters and rope_scaling
    "rope_type": STRING,
    "type": STRING,
    "rope_theta": _number(1.0, 1e12),
    "factor": _number(0.0, 1e6),
    "factors": _list(FACTOR.accepts, f"a list of up to 32,768 numbers, each {FACTOR.wanted[2:]}", 1, 2**15),
    "original_max_position_embeddings": _whole(1, 2**40),
    "beta_fast": _number(0.0, 1e6),
    "beta_slow": _number(0.0, 1e6),
    "truncate": FLAG,
    "attention_factor": _number(0.0, 1e6),
    "low_freq_factor": _number(0.0, 1e6),
    "high_freq_factor": _number(0.0, 1e6),
    "mscale": _only(),
    "mscale_all_dim": _only(),
}


def check_values(hf: dict[str, Any]) -> None:
    """Raises ValueError naming the key and the values it may have. Ignores keys that are missing or that no
    parser of ours reads."""
    _check(hf, KEYS, "")
    for key in ("rope_parameters", "rope_scaling"):
        rope = hf.get(key) or {}
        _check(rope, ROPE_KEYS, f"{key}.")
        low, high = rope.get("low_freq_factor") or 1.0, rope.get("high_freq_factor") or 4.0
        if low >= high:
            raise ValueError(f"config.json: {key}.low_freq_factor {low} is not below high_freq_factor {high}")
    experts = hf.get("num_local_experts") or hf.get("num_experts") or 1
    if experts * (hf.get("num_hidden_layers") or 1) > MOST_EXPERTS:
        raise ValueError(
            f"config.json: {experts} experts in each layer are more than {MOST_EXPERTS:,} in all"
        )


def _check(values: dict[str, Any], rules: dict[str, Rule], prefix: str) -> None:
    for key, rule in rules.items():
        value = values.get(key)
        if value is not None and not rule.accepts(value):
            raise ValueError(f"config.json: `{prefix}{key}` is {repr(value)}; it should be {rule.wanted}")


FIELDS = {  # of ModelConfig, and their keys, in every architecture
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "tie_word_embeddings": "tie_word_embeddings",
}


def parse_fields(hf: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """FIELDS and the special tokens of a config.json whose values are checked. `defaults`: of keys that may
    be missing. Raises ValueError for another one that is missing."""
    defaults = {"attention_bias": False, "tie_word_embeddings": False} | defaults
    eos = hf.get("eos_token_id", ())
    return {field: need(defaults | hf, key) for field, key in FIELDS.items()} | {
        "eos_token_ids": tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        "bos_token_id": hf.get("bos_token_id"),
        "pad_token_id": hf.get("pad_token_id"),
    }


def fields_to_hf(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """The keys that every architecture has."""
    return {
        "architectures": [config.architecture],
        "model_type": model_type,
        **{key: getattr(config, field) for field, key in FIELDS.items()},
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "use_cache": True,
        "initializer_range": 0.02,
        **rope_to_hf(config.rope),
    }


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
