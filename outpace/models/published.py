"""What the config.json and generation_config.json of published models say, by the name of the model."""

from typing import Any

from outpace.models.config import FULL, WINDOW

Config = dict[str, Any]


def _gpt_oss(layers: int, experts: int) -> Config:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "layer_types": [WINDOW if i % 2 == 0 else FULL for i in range(layers)],
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "router_aux_loss_coef": 0.9,
        "output_router_logits": False,
        "use_cache": True,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, tied: bool) -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": layers,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }


def _llama(layers: int, hidden: int, intermediate: int, factor: float, tied: bool) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": hidden // 32,
        "intermediate_size": intermediate,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "hidden_act": "silu",
        "pretraining_tp": 1,
        "tie_word_embeddings": tied,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


QWEN3_30B_A3B = _qwen3(48, 2048, 32, 4, 6144, tied=False) | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}
PUBLISHED: dict[str, Config] = {
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288, tied=False),
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "llama-3.1-8b": _llama(32, 4096, 14336, 8.0, tied=False),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32.0, tied=True),
}
GENERATION: dict[str, Config] = {  # by model_type
    "gpt_oss": {
        "bos_token_id": 199998,
        "do_sample": True,
        "eos_token_id": [200002, 199999, 200012],
        "pad_token_id": 199999,
    },
    "qwen3": {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "pad_token_id": 151643,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    },
    "llama": {
        "bos_token_id": 128000,
        "do_sample": True,
        "eos_token_id": 128001,
        "temperature": 0.6,
        "top_p": 0.9,
    },
}
GENERATION["qwen3_moe"] = GENERATION["qwen3"]


def first_layers(config: Config, layers: int) -> Config:
    """The same config with its first `layers` layers."""
    most = config["num_hidden_layers"]
    if not 1 <= layers <= most:
        raise ValueError(f"layers {layers}: this model has {most}; give 1 to {most}")
    cut = config | {"num_hidden_layers": layers}
    for key in {"layer_types", "max_window_layers"} & cut.keys():
        cut[key] = cut[key][:layers] if isinstance(cut[key], list) else min(cut[key], layers)
    if "mlp_only_layers" in cut:
        cut["mlp_only_layers"] = [i for i in cut["mlp_only_layers"] if i < layers]
    return cut
