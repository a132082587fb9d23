"""The drafts again, from their papers' equations: float64, slow and obvious, by checkpoint names."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from outpace.drafts.dflash import DFlashConfig
from outpace.drafts.eagle3_config import Eagle3Config
from outpace.ops.rope import RopeConfig

Tensors = Mapping[str, Tensor]  # a draft's tensors, by the names of z-lab (DFlash) or SGLang (EAGLE-3)
Stages = dict[str, Tensor]  # what is computed on the way, in order


PIECE = 2**24  # weights taken to float64 at a time: a head may have 600 million


def times(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, C] @ weight [N, C]^T -> [T, N]."""
    rows = weight.split(max(PIECE // weight.shape[1], 1))
    return torch.cat([x @ part.double().T for part in rows], dim=-1)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def mlp(x: Tensor, w: Tensors, at: str) -> Tensor:
    gate = times(x, w[f"{at}mlp.gate_proj.weight"])
    up = times(x, w[f"{at}mlp.up_proj.weight"])
    return times(gate / (1 + torch.exp(-gate)) * up, w[f"{at}mlp.down_proj.weight"])


def frequencies(rope: RopeConfig, D: int) -> tuple[list[float], float]:
    """Radians per position of each of D / 2 dimensions, and what cos and sin are multiplied by."""
    items, scale = [], 1.0
    for i in range(D // 2):
        turn = rope.theta ** (-2 * i / D)
        match rope.kind:
            case "linear":
                turn /= rope.factor
            case "factors":
                turn /= rope.factors[i]
            case "llama3":
                wavelength, low, high = 2 * math.pi / turn, rope.low_freq_factor, rope.high_freq_factor
                smooth = (rope.original_max_position / wavelength - low) / (high - low)
                smooth = min(max(smooth, 0.0), 1.0)
                turn = (1 - smooth) * turn / rope.factor + smooth * turn
            case "yarn":
                first, last = (
                    D
                    * math.log(rope.original_max_position / (beta * 2 * math.pi))
                    / (2 * math.log(rope.theta))
                    for beta in (rope.beta_fast, rope.beta_slow)
                )
                if rope.truncate:
                    first, last = math.floor(first), math.ceil(last)
                first, last = max(first, 0), min(last, D - 1)
                ramp = (i - first) / (last - first if last != first else 0.001)
                ramp = min(max(ramp, 0.0), 1.0)
                turn = turn / rope.factor * ramp + turn * (1 - ramp)
                scale = rope.attention_factor or (0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0)
        items.append(turn)
    return items, scale


def turned(x: Tensor, positions: list[int], rope: RopeConfig) -> Tensor:
    """x [T, heads, D], dimension i turned together with i + D/2."""
    D = x.shape[-1]
    turns, scale = frequencies(rope, D)
    angles = torch.tensor(
        [[position * turn for turn in turns] for position in positions], dtype=torch.float64
    )
    cos, sin = (angles.cos() * scale)[:, None], (angles.sin() * scale)[:, None]
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """q [T, H, D], k and v [S, K, D], sees [T, S] bool -> [T, H * D]; query head h reads head h // (H/K)."""
    T, H, D = q.shape
    out = torch.empty(T, H, D, dtype=torch.float64)
    for h in range(H):
        kv = h // (H // k.shape[1])
        scores = q[:, h] @ k[:, kv].T / math.sqrt(D)
        out[:, h] = scores.masked_fill(~sees, -math.inf).softmax(-1) @ v[:, kv]
    return out.reshape(T, H * D)


def heads(x: Tensor, w: Tensors, name: str, D: int) -> Tensor:
    projected = times(x, w[f"{name}.weight"])
    if f"{name}.bias" in w:
        projected = projected + w[f"{name}.bias"].double()
    return projected.unflatten(-1, (-1, D))


# ---- EAGLE-3 (arXiv 2503.01840) ------------------------------------------------------------------------


def eagle3_feature(w: Tensors, c: Eagle3Config, states: list[Tensor]) -> Tensor:
    """states: per layer of layer_ids [T, C'] -> f_t = fc([h^a; h^b; h^c]) [T, C]."""
    states = [x.double() for x in states]
    if c.fc_norm:
        states = [norm(x, w[f"fc_norm.{i}.weight"], c.rms_norm_eps) for i, x in enumerate(states)]
    joined = torch.cat(states, dim=-1)
    if c.norm_before_fc:
        joined = norm(joined, w["input_norm.weight"], c.rms_norm_eps)
    return times(joined, w["fc.weight"])


def eagle3_stages(
    w: Tensors, c: Eagle3Config, features: Tensor, embeds: Tensor, first: int, head: Tensor
) -> Stages:
    """Row t: feature [T, C] of the token at t and embedding [T, C] of the token after it, at rotary position
    first + t; it sees the rows up to its own. head [draft_vocab, C].

    "hidden" is what is fed back before any norm.
    """
    T, D, eps = len(features), c.head_dim, c.rms_norm_eps
    positions = list(range(first, first + T))
    behind = torch.arange(T)[:, None] - torch.arange(T)
    sees = (behind >= 0) & (behind < (c.sliding_window or T))
    values: Stages = {"fc": features}
    x = features
    for i in range(c.num_layers):
        at = f"layers.{i}." if i else "midlayer."
        residual, read = x, norm(x, w[f"{at}input_layernorm.weight"], eps)
        if i == 0:
            normed = norm(x, w[f"{at}hidden_norm.weight"], eps)
            residual = normed if c.norm_before_residual else x
            token = norm(embeds.double(), w[f"{at}input_layernorm.weight"], eps)
            read = torch.cat((token, normed), dim=-1)
        q, k, v = (heads(read, w, f"{at}self_attn.{name}_proj", D) for name in "qkv")
        mixed = attention(turned(q, positions, c.rope), turned(k, positions, c.rope), v, sees)
        values[f"attention {i}"] = times(mixed, w[f"{at}self_attn.o_proj.weight"])
        x = residual + values[f"attention {i}"]
        values[f"mlp {i}"] = mlp(norm(x, w[f"{at}post_attention_layernorm.weight"], eps), w, at)
        x = x + values[f"mlp {i}"]
    values["hidden"] = x
    values["before the head"] = norm(x, w["norm.weight"], eps)
    values["logits"] = times(values["before the head"], head)
    return values


# ---- DFlash (arXiv 2602.06036; its convolutions: inco.ai/blog/dflash2) -----------------------------------


def dflash_stages(
    w: Tensors, c: DFlashConfig, states: list[Tensor], block: Tensor, first: int, head: Tensor
) -> Stages:
    """states: per layer of target_layer_ids [S, C], of the verified tokens; block [B, C]: the embeddings of
    the anchor and its MASKs, which are right after them. The verified text begins at rotary position first.
    head [N, C]."""
    S, B, D, eps = len(states[0]), len(block), c.head_dim, c.rms_norm_eps
    positions = list(range(first, first + S + B))
    values: Stages = {"fc": times(torch.cat([x.double() for x in states], dim=-1), w["fc.weight"])}
    context = norm(values["fc"], w["hidden_norm.weight"], eps)
    x = block.double()
    key, query = torch.arange(S + B), torch.arange(S, S + B)[:, None]
    for i in range(c.num_layers):
        at, window = f"layers.{i}.", c.window(i)
        sees = (key <= query if c.hides(i) else key >= 0) & (key > query - (window or S + B))
        normed = norm(x, w[f"{at}input_layernorm.weight"], eps)
        read = convolved(normed, normed, w, f"{at}attention_conv", 0)
        rows = torch.cat((context, read))
        q = norm(heads(read, w, f"{at}self_attn.q_proj", D), w[f"{at}self_attn.q_norm.weight"], eps)
        k = norm(heads(rows, w, f"{at}self_attn.k_proj", D), w[f"{at}self_attn.k_norm.weight"], eps)
        v = heads(rows, w, f"{at}self_attn.v_proj", D)
        mixed = attention(turned(q, positions[S:], c.rope), turned(k, positions, c.rope), v, sees)
        out = times(mixed, w[f"{at}self_attn.o_proj.weight"])
        if f"{at}self_attn.o_proj.bias" in w:
            out = out + w[f"{at}self_attn.o_proj.bias"].double()
        values[f"attention {i}"] = convolved(out, normed, w, f"{at}attention_conv", 1)
        x = x + values[f"attention {i}"]
        normed = norm(x, w[f"{at}post_attention_layernorm.weight"], eps)
        out = mlp(convolved(normed, normed, w, f"{at}mlp_conv", 0), w, at)
        values[f"mlp {i}"] = convolved(out, normed, w, f"{at}mlp_conv", 1)
        x = x + values[f"mlp {i}"]
    values["before the head"] = norm(x, w["norm.weight"], eps)
    values["logits"] = times(values["before the head"], head)
    return values


def convolved(x: Tensor, read: Tensor, w: Tensors, name: str, side: int) -> Tensor:
    """x [B, C]; the coefficients are read off `read` [B, C]. As it is where the draft has no convolutions."""
    if f"{name}.base_kernel" not in w:
        return x
    base = w[f"{name}.base_kernel"][side].double()  # [taps, C]
    delta = times(read, w[f"{name}.kernel_projection.weight"]).unflatten(-1, (2, len(base), -1))[:, side]
    each = x.shape[1] // delta.shape[-1]  # channels of a group
    out = torch.zeros_like(x)
    for i in range(len(x)):
        for t in range(min(len(base), i + 1)):
            out[i] += (base[t] + delta[i, t].repeat_interleave(each)) * x[i - t]
    return out
