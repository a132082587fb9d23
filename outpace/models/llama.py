"""Llama 3 and Qwen3, dense: config, blocks, names in checkpoints (q/k norm is the difference)."""

from typing import Any

from outpace.models.blocks import MLP, Layout
from outpace.models.config import FULL, WINDOW, ModelConfig, need, parse_rope, rope_to_hf, token_ids
from outpace.models.decoder import Decoder, DecoderBlock
from outpace.models.weights import Entry, backbone_weights, dense_mlp


class Llama(Decoder):
    def __init__(self, config: ModelConfig, layout: Layout = "dense") -> None:
        C, F = config.hidden_size, config.intermediate_size
        super().__init__(
            config,
            [DecoderBlock(config, i, MLP(C, F, config.mlp_bias)) for i in range(config.num_layers)],
        )


def parse(hf: dict[str, Any]) -> ModelConfig:
    architecture = need(hf, "architectures")[0]
    qwen3 = architecture == "Qwen3ForCausalLM"
    layers, heads = need(hf, "num_hidden_layers"), need(hf, "num_attention_heads")
    hidden = need(hf, "hidden_size")
    return ModelConfig(
        architecture=architecture,
        vocab_size=need(hf, "vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or (128 if qwen3 else hidden // heads),
        intermediate_size=need(hf, "intermediate_size"),
        rope=parse_rope(hf),
        layer_types=layer_types(hf, layers),
        sliding_window=(hf.get("sliding_window") or 0) if hf.get("use_sliding_window") else 0,
        max_position_embeddings=hf.get("max_position_embeddings", 2048),
        rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
        attention_bias=hf.get("attention_bias", False),
        qk_norm=qwen3,
        tie_word_embeddings=hf.get("tie_word_embeddings", False),
        mlp_bias=hf.get("mlp_bias", False),
        eos_token_ids=token_ids(hf.get("eos_token_id")),
        bos_token_id=hf.get("bos_token_id"),
        pad_token_id=hf.get("pad_token_id"),
    )


def layer_types(hf: dict[str, Any], layers: int) -> tuple[str, ...]:
    """As written, or Qwen's older rule: windows from layer `max_window_layers` on, if switched on."""
    if hf.get("layer_types"):
        return tuple(hf["layer_types"])
    first = hf.get("max_window_layers", layers) if hf.get("use_sliding_window") else layers
    return tuple(WINDOW if i >= first else FULL for i in range(layers))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    qwen3 = config.qk_norm
    values = {
        "architectures": [config.architecture],
        "model_type": "qwen3" if qwen3 else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "initializer_range": 0.02,
        **rope_to_hf(config.rope),
    }
    if not qwen3:
        return {**values, "mlp_bias": config.mlp_bias}
    windows = WINDOW in config.layer_types
    return {
        **values,
        "layer_types": list(config.layer_types),
        "use_sliding_window": windows,
        "sliding_window": config.sliding_window if windows else None,
    }


def entries(config: ModelConfig, layout: Layout) -> list[Entry]:
    return backbone_weights(config) + [e for i in range(config.num_layers) for e in dense_mlp(config, i)]
