"""How each engine reads an EAGLE-3's files, rebuilt from its rules: states, draft tokens."""

import math
from dataclasses import dataclass

import torch
from readers import (
    EAGLE_IDS,
    attend,
    ggml_config,
    ggml_names,
    ggml_rope,
    heads,
    hf_rope,
    mlp,
    norm,
    old_rope,
    open_folder,
    open_gguf,
    turn,
)


@dataclass
class Chain:
    states: torch.Tensor
    logits: list  # per proposed token, over the target's vocabulary
    tokens: list


@dataclass
class Rules:
    """What differs between engines, and between drafts, in one forward of the layer."""

    eps: float
    dim: int
    rope: tuple
    normed_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    window: int = 0
    head_norm: bool = True  # the norm before the head
    in_pairs: bool = False


def run_chain(w, rules, states, parts, embedding, tokens, last, head, targets, steps=3):
    """Row t takes state t and the embedding of token t + 1, at position t; the row of the last state draft
    tokens what follows `last`, and each draft token is fed on with the state it came from. `targets`: draft
    id -> id."""
    f = states
    if rules.norm_before_fc:
        f = norm(f, w["input_norm.weight"], rules.eps)
    if rules.fc_norm:
        chunks = f.chunk(parts, dim=-1)
        f = torch.cat([norm(c, w[f"fc_norm.{i}.weight"], rules.eps) for i, c in enumerate(chunks)], -1)
    f = f @ w["fc.weight"].T
    following = [*tokens[1:], last]
    keys, values, logits, items, fed = [], [], [], [], None
    for position in range(len(tokens) + steps - 1):
        feature = f[position] if position < len(f) else fed
        emb = embedding.double()[following[position]]
        normed = norm(feature, w["layers.0.hidden_norm.weight"], rules.eps)
        x = torch.cat((norm(emb, w["layers.0.input_layernorm.weight"], rules.eps), normed))
        at = "layers.0."
        q, k, v = (heads(x, w, at, n, rules.dim) for n in "qkv")
        keys.append(turn(k, position, rules.rope, rules.in_pairs))
        values.append(v)
        seen = [s for s in range(position + 1) if not rules.window or position - s < rules.window]
        out = attend(turn(q, position, rules.rope, rules.in_pairs), keys, values, seen)
        h = (normed if rules.normed_residual else feature) + out @ w[f"{at}self_attn.o_proj.weight"].T
        h = h + mlp(norm(h, w[f"{at}post_attention_layernorm.weight"], rules.eps), w, at)
        final = norm(h, w["norm.weight"], rules.eps)
        fed = final if rules.norm_output else h
        if position >= len(tokens) - 1:
            row = torch.full((len(embedding),), -math.inf, dtype=torch.float64)
            row[targets] = (final if rules.head_norm else h) @ head.double().T
            logits.append(row)
            items.append(int(row.argmax()))
            following.append(items[-1])
    return Chain(states, logits, items)


def by_offset(w, rows):
    """All HF-style readers: the target's id is the row's number plus d2t."""
    ids = torch.arange(rows)
    return ids + w["d2t"] if "d2t" in w else ids


def sglang_eagle3(folder, hs, embedding, head, tokens, last, window=0):
    """`window`: the server's --speculative-draft-window-size, the only place it looks for one."""
    config, w = open_folder(folder)
    w = {n.replace("midlayer.", "layers.0."): t for n, t in w.items()}
    ids = (config.get("eagle_config") or {}).get(EAGLE_IDS)
    depth = len(hs) - 1
    ids = [k + 1 for k in ids] if ids else [2, depth // 2, depth - 3]
    states = torch.cat([hs[k].double() for k in ids], -1)
    own = w["lm_head.weight"] if config["draft_vocab_size"] else head
    rules = Rules(
        eps=config["rms_norm_eps"],
        dim=config["head_dim"],
        rope=hf_rope(old_rope(config), config["head_dim"]),
        fc_norm=config.get("fc_norm", False),
        norm_output=config.get("norm_output", False),
        window=window and window + 1,
    )
    return run_chain(w, rules, states, len(ids), embedding, tokens, last, own, by_offset(w, len(own)))


def specforge_eagle3(folder, hs, embedding, head, tokens, last):
    """SpecForge's class, which trains in this format: three states, one layer, the target's embedding. Its
    `norm_output` is the norm before the head, true by default; it always feeds back the state before it."""
    config, w = open_folder(folder)
    w = {n.replace("midlayer.", "layers.0."): t for n, t in w.items()}
    ids = [k + 1 for k in config["eagle_config"][EAGLE_IDS]]
    assert len(ids) == 3 and config["num_hidden_layers"] == 1
    states = torch.cat([hs[k].double() for k in ids], -1)
    own = w["lm_head.weight"]
    rules = Rules(
        eps=config["rms_norm_eps"],
        dim=config["head_dim"],
        rope=hf_rope(old_rope(config), config["head_dim"]),
        fc_norm=config.get("fc_norm", False),
        head_norm=config.get("norm_output", True),
    )
    return run_chain(w, rules, states, len(ids), embedding, tokens, last, own, by_offset(w, len(own)))


def vllm_eagle3(folder, hs, embedding, head, tokens, last):
    """SGLang's format and speculators'; the contents of the file of embedding and head is preferred."""
    config, w = open_folder(folder)
    w = {n.replace("midlayer.", "layers.0."): t for n, t in w.items()}
    if "speculators_model_type" in config:
        keys = (EAGLE_IDS, "norm_before_fc", "fc_norm", "norm_output")
        values = {k: config.get(k) for k in keys} | {
            "norm_before_residual": config.get("norm_before_residual", True)
        }
        config = {**config["transformer_layer_config"], **values}
    depth = len(hs) - 1
    ids = config.get(EAGLE_IDS) or [2, depth // 2, depth - 3]
    states = torch.cat([hs[k].double() for k in ids], -1)
    own = w.get("lm_head.weight", head)
    nested = config.get("eagle_config") or {}
    rules = Rules(
        eps=config["rms_norm_eps"],
        dim=config["head_dim"],
        rope=hf_rope(config["rope_parameters"], config["head_dim"]),
        normed_residual=config.get("norm_before_residual", False),
        norm_before_fc=nested.get("norm_before_fc", config.get("norm_before_fc", False)),
        fc_norm=config.get("fc_norm", False),
        norm_output=config.get("norm_output", False),
        window=config["sliding_window"] if config["layer_types"][0] == "sliding_attention" else 0,
    )
    embedding = w.get("embed_tokens.weight", embedding)
    return run_chain(w, rules, states, len(ids), embedding, tokens, last, own, by_offset(w, len(own)))


def speculators_eagle3(folder, hs, embedding, head, tokens, last):
    config, w = open_folder(folder)
    layer = config["transformer_layer_config"]
    states = torch.cat([hs[k].double() for k in config[EAGLE_IDS]], -1)
    rules = Rules(
        eps=layer["rms_norm_eps"],
        dim=layer["head_dim"],
        rope=hf_rope(layer["rope_parameters"], layer["head_dim"]),
        normed_residual=config.get("norm_before_residual", False),
        norm_before_fc=config.get("norm_before_fc", False),
        fc_norm=config.get("fc_norm", False),
        norm_output=config.get("norm_output", False),
        window=layer["sliding_window"] if layer["layer_types"][0] == "sliding_attention" else 0,
    )
    own, emb = w["lm_head.weight"], w["embed_tokens.weight"]
    return run_chain(w, rules, states, len(config[EAGLE_IDS]), emb, tokens, last, own, by_offset(w, len(own)))


def llama_cpp_eagle3(path, hs, embedding, head, tokens, last):
    value, tensors = open_gguf(path)
    config = ggml_config(value, "eagle3")
    states = torch.cat([hs[k].double() for k in value["eagle3.target_layers"]], -1)
    rope = ggml_rope(value, "eagle3", config["head_dim"], tensors.pop("rope_freqs.weight", None))
    w = ggml_names(tensors, "input_norm")
    rules = Rules(
        eps=config["rms_norm_eps"],
        dim=config["head_dim"],
        rope=rope,
        normed_residual=value.get("eagle3.norm_before_residual", False),
        norm_before_fc=value.get("eagle3.norm_before_fc", False),
        in_pairs=True,
    )
    own, emb = w.get("lm_head.weight", head), w.get("embed_tokens.weight", embedding)
    targets = w.get("d2t", torch.arange(len(own)))  # target ids, as they are
    return run_chain(w, rules, states, 3, emb, tokens, last, own, targets)
