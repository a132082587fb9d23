"""gpt-oss: sinks, alternating windows, YaRN, biases, clamped-SwiGLU experts, and its names in checkpoints."""

from functools import partial
from typing import Any

from outpace.models.attention import DecoderBlock
from outpace.models.blocks import Experts, Layout
from outpace.models.config import FULL, WINDOW, ModelConfig, fields_to_hf, need, parse_fields, parse_rope
from outpace.models.decoder import Decoder
from outpace.models.weights import Entry, backbone_weights, split_experts

ALPHA = 1.702


class GptOss(Decoder):
    def __init__(self, config: ModelConfig, layout: Layout = "dense") -> None:
        sizes = config.hidden_size, config.expert_size, config.num_experts, config.experts_per_token
        experts = partial(Experts, *sizes, limit=config.swiglu_limit, bias=True, layout=layout)
        blocks = [DecoderBlock(config, i, experts()) for i in range(config.num_layers)]
        super().__init__(config, blocks)


def parse(hf: dict[str, Any]) -> ModelConfig:
    if hf.get("swiglu_alpha", ALPHA) != ALPHA:
        raise ValueError(f"config.json: swiglu_alpha {hf['swiglu_alpha']} is not supported, only {ALPHA}")
    values = parse_fields(
        hf, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, attention_bias=True
    )
    layers = values["num_layers"]
    return ModelConfig(
        **values,
        architecture="GptOssForCausalLM",
        rope=parse_rope(hf, 150000.0),
        layer_types=tuple(hf.get("layer_types") or (WINDOW if i % 2 == 0 else FULL for i in range(layers))),
        sliding_window=hf.get("sliding_window") or 128,
        sinks=True,
        num_experts=hf.get("num_local_experts") or need(hf, "num_experts"),
        experts_per_token=hf.get("num_experts_per_tok") or need(hf, "experts_per_token"),
        expert_size=values["intermediate_size"],
        moe_layers=(True,) * layers,
        swiglu_limit=hf.get("swiglu_limit", 7.0),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return fields_to_hf(config, "gpt_oss") | {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "experts_per_token": config.experts_per_token,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "initial_context_length": config.rope.original_max_position,
        "swiglu_limit": config.swiglu_limit,
        "router_aux_loss_coef": 0.9,
        "output_router_logits": False,
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
