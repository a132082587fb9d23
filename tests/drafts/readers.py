"""How each engine reads a DFlash's files, rebuilt from its rules: the states it takes, and its block.

Nothing of `outpace` is used. In float64, one position at a time: which hidden_states, which rope, which
norms, who sees whom. `hs[j]` is HF's hidden_states[j] of the verified tokens, [S, C].
"""

import json
import math
from dataclasses import dataclass

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

EAGLE_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass
class Block:
    states: torch.Tensor  # [S, n * C], joined
    hidden: torch.Tensor  # [block, C]


def open_folder(folder):
    tensors = {n: t if not t.is_floating_point() else t.double() for n, t in _load(folder).items()}
    return json.loads((folder / "config.json").read_text()), tensors


def _load(folder):
    return load_file(folder / "model.safetensors")


# ---- mathematics that all share ----------------------------------------------------------------------


def norm(x, weight, eps):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def hf_rope(message, head_dim):
    """(inverse frequencies, factor on cos and sin) of a rope_parameters object, as transformers has them."""
    kind, theta = message.get("rope_type", "default"), message["rope_theta"]
    factor, original = message.get("factor"), message.get("original_max_position_embeddings")
    turns, scale = [], 1.0
    for i in range(head_dim // 2):
        turn = theta ** (-2 * i / head_dim)
        if kind == "linear":
            turn /= factor
        if kind == "llama3":
            low, high, wave = message["low_freq_factor"], message["high_freq_factor"], 2 * math.pi / turn
            smooth = min(max((original / wave - low) / (high - low), 0), 1)
            turn = (1 - smooth) * turn / factor + smooth * turn
        if kind == "yarn":
            ends = [
                head_dim * math.log(original / (message[b] * 2 * math.pi)) / (2 * math.log(theta))
                for b in ("beta_fast", "beta_slow")
            ]
            if message.get("truncate", True):
                ends = [math.floor(ends[0]), math.ceil(ends[1])]
            low, high = max(ends[0], 0), min(ends[1], head_dim - 1)
            ramp = min(max((i - low) / (high - low or 0.001), 0), 1)
            turn = turn / factor * ramp + turn * (1 - ramp)
        turns.append(turn)
    if kind == "yarn":
        scale = message.get("attention_factor") or 0.1 * math.log(factor) + 1
    return torch.tensor(turns, dtype=torch.float64), scale


def old_rope(config):
    """rope_theta alongside rope_scaling, which readers of transformers 4's time look at."""
    return {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {})}


def turn(x, position, rope, in_pairs=False):
    """x [heads, D] at one position; pairs (2i, 2i + 1), or halves i with i + D/2."""
    turns, scale = rope
    cos, sin = torch.cos(position * turns) * scale, torch.sin(position * turns) * scale
    if in_pairs:
        a, b = x[:, 0::2], x[:, 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(q, keys, values, seen):
    """q [H, D]; keys and values: lists of [K, D]; query head h reads kv head h // (H / K)."""
    group = len(q) // len(keys[0])
    out = []
    for h, one in enumerate(q):
        scores = torch.stack([one @ keys[s][h // group] for s in seen]) / math.sqrt(q.shape[-1])
        p = scores.softmax(0)
        out.append(sum(p[j] * values[s][h // group] for j, s in enumerate(seen)))
    return torch.cat(out)


def mlp(x, w, at):
    gate = x @ w[f"{at}mlp.gate_proj.weight"].T
    return (gate * torch.sigmoid(gate) * (x @ w[f"{at}mlp.up_proj.weight"].T)) @ w[
        f"{at}mlp.down_proj.weight"
    ].T


def heads(x, w, at, name, dim):
    bias = w.get(f"{at}self_attn.{name}_proj.bias", 0)
    return (x @ w[f"{at}self_attn.{name}_proj.weight"].T + bias).unflatten(-1, (-1, dim))


# ---- DFlash ------------------------------------------------------------------------------------------


def run_block(w, config, states, embedding, last, mask_id, block, sees, rope):
    """Context rows enter keys and values alone; the block is [anchor, MASK ..] at the positions behind them.
    `sees(layer, query position, key position, start of the block)`."""
    eps, dim, layers = config["rms_norm_eps"], config["head_dim"], config["num_hidden_layers"]
    context = norm(states @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    start = len(states)
    x = embedding.double()[[last] + [mask_id] * (block - 1)]
    for i in range(layers):
        at = f"layers.{i}."
        h = norm(x, w[f"{at}input_layernorm.weight"], eps)
        rows = torch.cat((context, h))
        k = norm(heads(rows, w, at, "k", dim), w[f"{at}self_attn.k_norm.weight"], eps)
        q = norm(heads(h, w, at, "q", dim), w[f"{at}self_attn.q_norm.weight"], eps)
        keys = [turn(one, s, rope) for s, one in enumerate(k)]
        values = list(heads(rows, w, at, "v", dim))
        out = []
        for t in range(block):
            seen = [s for s in range(start + block) if sees(i, start + t, s, start)]
            out.append(attend(turn(q[t], start + t, rope), keys, values, seen))
        out = torch.stack(out) @ w[f"{at}self_attn.o_proj.weight"].T
        x = x + out + w.get(f"{at}self_attn.o_proj.bias", 0)
        x = x + mlp(norm(x, w[f"{at}post_attention_layernorm.weight"], eps), w, at)
    return Block(states, norm(x, w["norm.weight"], eps))


def causal_by_layer(config, types):
    """An explicit is_causal counts for all layers; without one, windows are causal."""
    value = config.get("is_causal")
    return [t == "sliding_attention" if value is None else bool(value) for t in types]


def sglang_dflash(folder, hs, embedding, last):
    config, w = open_folder(folder)
    inner = config["dflash_config"]
    states = torch.cat([hs[k + 1].double() for k in inner["target_layer_ids"]], -1)
    types = config["layer_types"]
    left = config["sliding_window"] - 1 if config["use_sliding_window"] else None  # "window_left"
    causal = causal_by_layer(config, types)

    def sees(layer, q, k, start):
        behind = types[layer] == "full_attention" or k >= q - left
        return behind and (k <= q or not causal[layer])

    rope = hf_rope(old_rope(config), config["head_dim"])
    block = inner.get("block_size", config.get("block_size", 16))
    return run_block(w, config, states, embedding, last, inner["mask_token_id"], block, sees, rope)


def vllm_dflash(folder, hs, embedding, last):
    """z-lab's, speculators' and transformers' layouts; an embedding in the file is preferred."""
    config, w = open_folder(folder)
    block = config["block_size"]  # vLLM itself is told by --num-speculative-tokens
    if "speculators_model_type" in config:
        inner = {
            "mask_token_id": config["mask_token_id"],
            "causal": not config.get("sliding_window_non_causal", True),
        }
        config = {**config["transformer_layer_config"], EAGLE_IDS: config["aux_hidden_state_layer_ids"]}
        types = config["layer_types"]
        causal = [t == "sliding_attention" and inner["causal"] for t in types]
    else:
        inner, types = config["dflash_config"], config["layer_types"]
        causal = causal_by_layer(config, types)
    ids = config.get(EAGLE_IDS) or [k + 1 for k in inner["target_layer_ids"]]
    states = torch.cat([hs[k].double() for k in ids], -1)
    window = config.get("sliding_window")

    def sees(layer, q, k, start):
        return (types[layer] == "full_attention" or q - k < window) and (k <= q or not causal[layer])

    rope = hf_rope(config["rope_parameters"], config["head_dim"])
    own = w.get("embed_tokens.weight", embedding)
    return run_block(w, config, states, own, last, inner["mask_token_id"], block, sees, rope)


def speculators_dflash(folder, hs, embedding, last):
    config, w = open_folder(folder)
    layer = config["transformer_layer_config"]
    states = torch.cat([hs[k].double() for k in config["aux_hidden_state_layer_ids"]], -1)
    types, window = layer["layer_types"], layer["sliding_window"]

    def sees(i, q, k, start):
        slides = types[i] == "sliding_attention"
        if k < start:
            return not slides or k >= start - window
        return k <= q or not slides or config["sliding_window_non_causal"]

    rope = hf_rope(layer["rope_parameters"], layer["head_dim"])
    own = w.get("embed_tokens.weight", embedding)
    return run_block(w, layer, states, own, last, config["mask_token_id"], config["block_size"], sees, rope)


# ---- GGUF --------------------------------------------------------------------------------------------


def open_gguf(path):
    reader = gguf.GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for t in reader.tensors:
        data = (
            t.data
            if t.tensor_type != gguf.GGMLQuantizationType.BF16
            else gguf.dequantize(t.data, t.tensor_type)
        )
        data = torch.from_numpy(np.array(data))
        tensors[t.name] = data.double() if data.is_floating_point() else data  # type: ignore[attr-defined]
    return values, tensors


def ggml_rope(message, arch, dim, factors):
    """llama.cpp's: YaRN with its own betas and a range rounded outwards, and a divisor per frequency."""
    theta, scale = message[f"{arch}.rope.freq_base"], 1 / message.get(f"{arch}.rope.scaling.factor", 1.0)
    kind = message.get(f"{arch}.rope.scaling.type", "linear")
    scale, more = 1.0 if kind == "none" else scale, message.get(f"{arch}.rope.scaling.attn_factor", 1.0)
    turns = []
    for i in range(dim // 2):
        full = theta ** (-2 * i / dim) / (1.0 if factors is None else float(factors[i]))
        if kind == "yarn":
            original = message[f"{arch}.rope.scaling.original_context_length"]
            low, high = (
                dim * math.log(original / (b * 2 * math.pi)) / (2 * math.log(theta)) for b in (32, 1)
            )
            low, high = max(0, math.floor(low)), min(dim - 1, math.ceil(high))
            keep = 1 - min(1, max(0, (i - low) / max(0.001, high - low)))
            turns.append(full * scale * (1 - keep) + full * keep)
        else:
            turns.append(full * scale)
    if kind == "yarn":
        more *= 1 + 0.1 * math.log(1 / scale)
    return torch.tensor(turns, dtype=torch.float64), more


PARTS = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}


def ggml_names(tensors, encoder_norm):
    whole = {
        "output_norm": "norm",
        "enc.output_norm": encoder_norm,
        "output": "lm_head",
        "token_embd": "embed_tokens",
    }
    values = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            stem = f"layers.{layer}.{PARTS[part]}"
        values[name if name == "d2t" else f"{whole.get(stem, stem)}.weight"] = tensor
    return values


def ggml_config(message, arch):
    return {
        "rms_norm_eps": message[f"{arch}.attention.layer_norm_rms_epsilon"],
        "head_dim": message[f"{arch}.attention.key_length"],
        "num_hidden_layers": message[f"{arch}.block_count"],
    }


def llama_cpp_dflash(path, hs, embedding, last):
    value, tensors = open_gguf(path)
    config = ggml_config(value, "dflash")
    states = torch.cat([hs[k].double() for k in value["dflash.target_layers"]], -1)  # a layer's input
    window = value.get("dflash.attention.sliding_window", 0)
    slides = value.get("dflash.attention.sliding_window_pattern", [False] * config["num_hidden_layers"])
    causal = value.get("dflash.attention.causal", False)

    def sees(layer, q, k, start):
        return not (slides[layer] and q - k >= window) and (k <= q or not causal)

    rope = ggml_rope(value, "dflash", config["head_dim"], tensors.pop("rope_freqs.weight", None))
    w, mask = ggml_names(tensors, "hidden_norm"), value["tokenizer.ggml.mask_token_id"]
    return run_block(w, config, states, embedding, last, mask, value["dflash.block_size"], sees, rope)
