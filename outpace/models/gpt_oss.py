"""gpt-oss: sinks, alternating windows, YaRN, biases, clamped-SwiGLU experts, and its names in checkpoints."""

from typing import Any

from outpace.models.blocks import Experts, Layout
from outpace.models.config import FULL, WINDOW, ModelConfig, need, parse_rope, rope_to_hf, token_ids
from outpace.models.decoder import Decoder, DecoderBlock
from outpace.models.weights import Entry, backbone_weights, split_experts

ALPHA = 1.702


class GptOss(Decoder):
    def __init__(self, config: ModelConfig, layout: Layout = "dense") -> None:
        super().__init__(
            config,
            [
                DecoderBlock(
                    config,
                    i,
                    Experts(
                        config.hidden_size,
                        config.expert_size,
                        config.num_experts,
                        config.experts_per_token,
                        limit=config.swiglu_limit,
                        bias=True,
                        layout=layout,
                    ),
                )
                for i in range(config.num_layers)
            ],
        )


def parse(hf: dict[str, Any]) -> ModelConfig:
    layers = need(hf, "num_hidden_layers")
    if hf.get("swiglu_alpha", ALPHA) != ALPHA:
        raise ValueError(f"config.json: swiglu_alpha {hf['swiglu_alpha']} is not supported, only {ALPHA}")
    return ModelConfig(
        architecture="GptOssForCausalLM",
        vocab_size=need(hf, "vocab_size"),
        hidden_size=need(hf, "hidden_size"),
        num_layers=layers,
        num_heads=need(hf, "num_attention_heads"),
        num_kv_heads=need(hf, "num_key_value_heads"),
        head_dim=hf.get("head_dim") or 64,
        intermediate_size=need(hf, "intermediate_size"),
        rope=parse_rope(hf, 150000.0),
        layer_types=tuple(hf.get("layer_types") or (WINDOW if i % 2 == 0 else FULL for i in range(layers))),
        sliding_window=hf.get("sliding_window") or 128,
        max_position_embeddings=hf.get("max_position_embeddings", 131072),
        rms_norm_eps=hf.get("rms_norm_eps", 1e-5),
        attention_bias=hf.get("attention_bias", True),
        sinks=True,
        tie_word_embeddings=hf.get("tie_word_embeddings", False),
        num_experts=hf.get("num_local_experts") or need(hf, "num_experts"),
        experts_per_token=hf.get("num_experts_per_tok") or need(hf, "experts_per_token"),
        expert_size=need(hf, "intermediate_size"),
        moe_layers=(True,) * layers,
        swiglu_limit=hf.get("swiglu_limit", 7.0),
        eos_token_ids=token_ids(hf.get("eos_token_id")),
        bos_token_id=hf.get("bos_token_id"),
        pad_token_id=hf.get("pad_token_id"),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.expert_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "experts_per_token": config.experts_per_token,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "max_position_embeddings": config.max_position_embeddings,
        "initial_context_length": config.rope.original_max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "swiglu_limit": config.swiglu_limit,
        "tie_word_embeddings": config.tie_word_embeddings,
        "router_aux_loss_coef": 0.9,
        "output_router_logits": False,
        "use_cache": True,
        "initializer_range": 0.02,
        **rope_to_hf(config.rope),
    }


def entries(config: ModelConfig, layout: Layout) -> list[Entry]:
    result = backbone_weights(config)
    for i in range(config.num_layers):
        here, there = f"layers.{i}.mlp.", f"model.layers.{i}.mlp."
        for kind in ("weight", "bias"):
            result.append(Entry(f"{here}router.{kind}", (f"{there}router.{kind}",)))
        if layout == "split":
            result += split_experts(i, bias=True)
            continue
        for ours, theirs in (("up", "gate_up_proj"), ("down", "down_proj")):
            name = f"{there}experts.{theirs}"
            result.append(Entry(f"{here}{ours}.bias", (f"{name}_bias",)))
            if layout == "mxfp4":
                result.append(Entry(f"{here}{ours}.blocks", (f"{name}_blocks",)))
                result.append(Entry(f"{here}{ours}.scales", (f"{name}_scales",)))
            else:
                result.append(Entry(f"{here}{ours}.weight", (name,), swapped=True))
    return result
