"""Qwen3-MoE: q/k norm, softmax-first routing over small experts, optional dense layers."""

from typing import Any

from outpace.models import llama
from outpace.models.attention import DecoderBlock
from outpace.models.blocks import MLP, Experts, Layout
from outpace.models.config import FULL, WINDOW, ModelConfig, need, parse_fields, parse_rope
from outpace.models.decoder import Decoder
from outpace.models.weights import Entry, backbone_weights, dense_mlp, split_experts


class Qwen3Moe(Decoder):
    def __init__(self, config: ModelConfig, layout: Layout = "dense") -> None:
        blocks = []
        for i in range(config.num_layers):
            mlp: MLP | Experts = MLP(config.hidden_size, config.intermediate_size)
            if config.moe_layers[i]:
                mlp = Experts(
                    config.hidden_size,
                    config.expert_size,
                    config.num_experts,
                    config.experts_per_token,
                    limit=None,
                    bias=False,
                    renormalise=config.norm_topk_prob,
                    layout=layout,
                )
            blocks.append(DecoderBlock(config, i, mlp))
        super().__init__(config, blocks)


def parse(hf: dict[str, Any]) -> ModelConfig:
    head_dim = need(hf, "hidden_size") // need(hf, "num_attention_heads")
    values = parse_fields(hf, head_dim=head_dim, max_position_embeddings=32768, rms_norm_eps=1e-6)
    layers, sparse_step = values["num_layers"], hf.get("decoder_sparse_step", 1)
    dense = set(hf.get("mlp_only_layers") or ())
    windows = bool(hf.get("use_sliding_window") and hf.get("sliding_window"))
    return ModelConfig(
        **values,
        architecture="Qwen3MoeForCausalLM",
        rope=parse_rope(hf),
        layer_types=(WINDOW if windows else FULL,) * layers,  # unlike dense Qwen3, all or none
        sliding_window=hf["sliding_window"] if windows else 0,
        qk_norm=True,
        num_experts=hf.get("num_experts") or need(hf, "num_local_experts"),
        experts_per_token=need(hf, "num_experts_per_tok"),
        expert_size=need(hf, "moe_intermediate_size"),
        norm_topk_prob=hf.get("norm_topk_prob", False),
        moe_layers=tuple(i not in dense and (i + 1) % sparse_step == 0 for i in range(layers)),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    return llama.to_hf(config) | {
        "model_type": "qwen3_moe",
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, moe in enumerate(config.moe_layers) if not moe],
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    }


def entries(config: ModelConfig, layout: Layout) -> list[Entry]:
    result = backbone_weights(config)
    F = config.expert_size
    for i, moe in enumerate(config.moe_layers):
        if not moe:
            result += dense_mlp(config, i)
            continue
        here, there = f"layers.{i}.mlp.", f"model.layers.{i}.mlp."
        if layout == "split":
            result += [Entry(f"{here}router.weight", (f"{there}gate.weight",)), *split_experts(i, bias=False)]
            continue
        each = [f"{there}experts.{e}." for e in range(config.num_experts)]
        gate_up = tuple(f"{e}{x}_proj.weight" for e in each for x in ("gate", "up"))
        down = tuple(f"{e}down_proj.weight" for e in each)
        result.append(Entry(f"{here}router.weight", (f"{there}gate.weight",)))
        result.append(Entry(f"{here}up.weight", gate_up, (F,) * len(gate_up)))
        result.append(Entry(f"{here}down.weight", down, (config.hidden_size,) * len(down)))
    return result
