"""The door of config.json: every value that a parser reads has the type and the range it should have."""

from reprlib import repr  # short, however long or deep the value
from typing import Any

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
