"""Llama 3 and Qwen3, dense: config, blocks, names in checkpoints (q/k norm is the difference)."""

from typing import Any

from outpace.models.attention import DecoderBlock
from outpace.models.blocks import MLP, Layout
from outpace.models.config import FULL, WINDOW, ModelConfig, fields_to_hf, need, parse_fields, parse_rope
from outpace.models.decoder import Decoder
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
    heads = need(hf, "num_attention_heads")
    values = parse_fields(
        hf,
        num_key_value_heads=heads,
        head_dim=128 if qwen3 else need(hf, "hidden_size") // heads,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
    )
    return ModelConfig(
        **values,
        architecture=architecture,
        rope=parse_rope(hf),
        layer_types=layer_types(hf, values["num_layers"]),
        sliding_window=hf.get("sliding_window", 0) if hf.get("use_sliding_window") else 0,
        qk_norm=qwen3,
        mlp_bias=hf.get("mlp_bias", False),
    )


def layer_types(hf: dict[str, Any], layers: int) -> tuple[str, ...]:
    """As written, or Qwen's older rule: windows from layer `max_window_layers` on, if switched on."""
    if hf.get("layer_types"):
        return tuple(hf["layer_types"])
    first = hf.get("max_window_layers", layers) if hf.get("use_sliding_window") else layers
    return tuple(WINDOW if i >= first else FULL for i in range(layers))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    if not config.qk_norm:
        return fields_to_hf(config, "llama") | {"mlp_bias": config.mlp_bias}
    windows = WINDOW in config.layer_types
    return fields_to_hf(config, "qwen3") | {
        "layer_types": list(config.layer_types),
        "use_sliding_window": windows,
        "sliding_window": config.sliding_window if windows else None,
    }


def entries(config: ModelConfig, layout: Layout) -> list[Entry]:
    return backbone_weights(config) + [e for i in range(config.num_layers) for e in dense_mlp(config, i)]
