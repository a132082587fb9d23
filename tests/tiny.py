"""Tiny models where the axis sizes all differ, as `transformers` twins on disk and as targets of ours."""

import dataclasses
import functools
import json
import math

import torch

from outpace.models.config import FULL, WINDOW
from outpace.models.load import build, named_tensors, parse_config
from outpace.ops import mxfp4

VOCAB = 97
LONGEST = 131072 + 4096

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "layer_types": [WINDOW, FULL] * 2,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 15000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "eos_token_id": 3,
    "pad_token_id": 0,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 42,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 56,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 50000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "eos_token_id": [3, 4],
    "bos_token_id": 1,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 3,
    "head_dim": 10,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": 7,
    "max_window_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
del QWEN3["mlp_bias"]
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 36,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
}
HF = {"gpt_oss": GPT_OSS, "llama": LLAMA, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}
FAMILIES = tuple(HF)


def randomise(named, seed=0):
    """Weights large enough that every part shows in the logits; norms near 1, so that they matter."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in named:
            if not p.is_floating_point():
                continue
            noise = torch.randn(p.shape, generator=rng)
            if name.endswith("norm.weight"):
                p.copy_(1 + 0.3 * noise)
            elif p.dim() == 1 or name.endswith("bias"):
                p.copy_(0.3 * noise if "sinks" not in name else noise)
            else:
                p.copy_(noise * (1.0 if "embed" in name else 0.17))


def save_twin(family, folder, stored=torch.float32, **changes):
    """A random `transformers` model of the family in float32, saved to `folder` in `stored`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {k: v for k, v in (HF[family] | changes).items() if k != "architectures"}
    config = AutoConfig.for_model(**values)
    twin = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomise(twin.named_parameters())
    if stored != torch.float32:
        twin = twin.to(stored)
    twin.save_pretrained(folder)
    return twin


def read_twin(folder):
    """What transformers makes of a folder, in float32."""
    from transformers import AutoModelForCausalLM

    how = {"attn_implementation": "eager", "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(folder, **how).eval()


def config(family, *, window=True, **changes):
    """A ModelConfig; `window` False makes every layer see everything, True gives every family one ring."""
    result = parse_config(HF[family])
    types = tuple(WINDOW if i % 2 == 0 and window else FULL for i in range(result.num_layers))
    changes = {"layer_types": types, "sliding_window": 7 if window else 0} | changes
    return dataclasses.replace(result, **changes)


@functools.cache
@torch.inference_mode(False)  # the first test to ask may be inside it, a later one may train
def target(family, window=True, seed=0):
    """A random target of ours, in float32. Shared between tests: none may change it, see `changed`."""
    model = build(config(family, window=window))
    randomise(named_tensors(model), seed)
    SHARED.append((model.eval(), attributes(model)))
    return model


SHARED = []  # targets of `target`, with the attributes that they were built with


def attributes(model):
    return {name: id(value) for name, value in vars(model).items()} | {"config": repr(model.config)}


def changed():
    """Names of attributes of shared targets that are not as they were built; the next ones are built anew."""
    names = {name for model, built in SHARED for name, _ in attributes(model).items() ^ built.items()}
    if names:
        SHARED.clear()
        target.cache_clear()
    return sorted(names)


def in_mxfp4(dense):
    """A model with the experts of `dense` packed; the rest is another's."""
    packed = build(dense.config, "mxfp4")
    randomise(named_tensors(packed), 3)
    for a, b in zip(dense.layers, packed.layers, strict=True):
        for name in ("up", "down"):
            part = getattr(b.mlp, name)
            part.blocks, part.scales = mxfp4.pack(getattr(a.mlp, name).weight)
    return packed.eval()


def tokens(*shape, seed=1, low=5):
    """Random ids that avoid the first few, which are special."""
    return torch.randint(low, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def write_config(folder, **changes):
    """Change keys of folder/config.json; None removes one."""
    path = folder / "config.json"
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def exact_frequencies(rope, head_dim):
    """Inverse frequencies in float64 by the published formulas, one dimension at a time, and YaRN's
    factor on cos and sin. `rope` is a config.json's rope_parameters."""
    kind, theta = rope["rope_type"], rope["rope_theta"]
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    items = []
    for i in range(head_dim // 2):
        turn = theta ** (-2 * i / head_dim)
        if kind == "llama3":
            wavelength = 2 * math.pi / turn
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wavelength > original / low:
                turn /= factor
            elif wavelength > original / high:
                smooth = (original / wavelength - low) / (high - low)
                turn = (1 - smooth) * turn / factor + smooth * turn
        elif kind == "yarn":
            bounds = [
                head_dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta))
                for beta in (rope["beta_fast"], rope["beta_slow"])
            ]
            low, high = bounds if not rope["truncate"] else (math.floor(bounds[0]), math.ceil(bounds[1]))
            low, high = max(low, 0), min(high, head_dim - 1)
            ramp = min(max((i - low) / (high - low), 0), 1)
            turn = turn / factor * ramp + turn * (1 - ramp)
        items.append(turn)
    scale = 0.1 * math.log(factor) + 1 if kind == "yarn" else 1.0
    return torch.tensor(items, dtype=torch.float64), scale


class ExactRotary(torch.nn.Module):
    """Is in for a twin's rotary table; its float32 angles are off by up to 0.008 rad near 131,072."""

    def __init__(self, family):
        super().__init__()
        self.halves = 1 if family == "gpt_oss" else 2  # gpt-oss keeps one half of the table
        self.turns, self.scale = exact_frequencies(HF[family]["rope_parameters"], HF[family]["head_dim"])

    def forward(self, x, position_ids, *args, **kwargs):
        angles = position_ids.double()[..., None] * self.turns
        angles = torch.cat([angles] * self.halves, -1)
        return (angles.cos() * self.scale).float(), (angles.sin() * self.scale).float()
