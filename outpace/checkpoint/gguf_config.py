"""GGUF metadata -> what HF's config.json would say."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.checkpoint.base import LoadError
from outpace.text.gguf_tokenizer import special_ids

ARCHITECTURES = {
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "llama": ("LlamaForCausalLM", "llama"),
}


class _Fields:
    """Metadata of one architecture, with errors that name the key."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str) -> None:
        self.path, self.metadata, self.architecture = path, metadata, architecture

    def number(self, key: str, default: float | None = None) -> Any:
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if isinstance(value, list) and value and value == [value[0]] * len(value):
            value = value[0]  # written per layer
        if value is None:
            raise LoadError(f"{self.path}: the metadata lacks {name!r}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LoadError(f"{self.path}: metadata {name!r} is {str(value)[:60]!r}, not one number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        result = self.number(key, default)
        if not isinstance(result, int) or not 0 < result < 2**31:
            raise LoadError(f"{self.path}: metadata '{self.architecture}.{key}' is {result}, not a count")
        return result


def architecture_of(path: Path, metadata: Mapping[str, Any]) -> str:
    """Raises LoadError for one that is not read."""
    value = metadata.get("general.architecture")
    if not isinstance(value, str) or value not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise LoadError(f"{path}: general.architecture is {str(value)[:60]!r}; read are {known}")
    return value


def config_from(
    path: Path,
    metadata: Mapping[str, Any],
    *,
    vocab_size: int,
    tied: bool,
    biased: bool,
    mlp_biased: bool,
    rope_factors: list[float] | None,
) -> dict[str, Any]:
    """Sizes and rope from the metadata; what it does not say comes from the tensors, as given here.

    Raises LoadError for an architecture that is not read and for keys that are missing or no numbers.
    """
    architecture = architecture_of(path, metadata)
    fields = _Fields(path, metadata, architecture)
    name, model_type = ARCHITECTURES[architecture]
    hidden, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", max(hidden // heads, 1))
    rotated = fields.count("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise LoadError(
            f"{path}: metadata '{architecture}.rope.dimension_count' is {rotated}, and a head has {head_dim} "
            "dimensions: RoPE over a part of a head is not supported"
        )
    values = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": float(fields.number("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": tied,
        "attention_bias": biased,
        "mlp_bias": mlp_biased,
        **_ids(path, metadata),
        "rope_parameters": _rope(fields, rope_factors),
    }
    if architecture == "llama" and metadata.get("llama.expert_count"):
        raise LoadError(f"{path} is a mixture of Llama experts, which is not read")
    if architecture in ("llama", "qwen3"):
        return values | {"intermediate_size": fields.count("feed_forward_length")}
    experts = {
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
    }
    size = fields.count("expert_feed_forward_length")
    if architecture == "qwen3moe":
        more = {"moe_intermediate_size": size, "norm_topk_prob": True}  # llama.cpp knows no other
        return values | experts | more | {"intermediate_size": fields.count("feed_forward_length", size)}
    return (
        values
        | experts
        | {"intermediate_size": size, "sliding_window": fields.count("attention.sliding_window", 128)}
    )


def _rope(fields: _Fields, factors: list[float] | None) -> dict[str, Any]:
    """YaRN's correction range: llama.cpp rounds it, the gpt-oss config does not, and the model is followed.
    A key of our own, `rope.scaling.truncate`, holds it in files that we write."""
    gpt_oss = fields.architecture == "gpt-oss"
    theta = float(fields.number("rope.freq_base", 150000.0 if gpt_oss else 10000.0))
    factor = float(fields.number("rope.scaling.factor", 1.0))
    value = fields.metadata.get(f"{fields.architecture}.rope.scaling.type")
    kind = value or ("linear" if factor != 1 else "none")
    if factors is not None:
        return {"rope_type": "factors", "rope_theta": theta, "factors": factors}
    if kind in ("none", "linear"):
        rope = {"rope_type": "default" if kind == "none" or factor == 1 else "linear", "factor": factor}
        return rope | {"rope_theta": theta}
    if kind != "yarn":
        raise LoadError(f"{fields.path}: rope scaling {str(kind)[:40]!r} is none of: none, linear, yarn")
    truncate = fields.metadata.get(f"{fields.architecture}.rope.scaling.truncate", not gpt_oss)
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": fields.count("rope.scaling.original_context_length"),
        "beta_fast": float(fields.number("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(fields.number("rope.scaling.yarn_beta_slow", 1.0)),
        "truncate": bool(truncate),
    }


def _ids(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    if "tokenizer.ggml.tokens" not in metadata:
        return {}
    try:
        ids = special_ids(metadata)
    except ValueError as error:
        raise LoadError(f"{path}: {error}") from error
    return {"eos_token_id": list(ids.stop), "bos_token_id": ids.bos, "pad_token_id": ids.pad}
