"""Deliberately wrong forwards: mistakes patched into copies of transformers models."""

import copy
import importlib

import torch
from torch import nn


def modeling(twin):
    return importlib.import_module(type(twin).__module__)


def layers(twin):
    return twin.model.layers


def on_layers(change):
    """A mistake made by changing each layer's modules."""

    def make(twin, monkeypatch):
        for layer in layers(twin):
            change(layer)

    return make


def replaced(name, function):
    """A mistake made by replacing a function of the modelling file."""

    def make(twin, monkeypatch):
        monkeypatch.setattr(modeling(twin), name, function)

    return make


def cyclic(x, n):
    return x.repeat(1, n, 1, 1)


def turn_neighbours(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def rope_on_neighbours(q, k, cos, sin, unsqueeze_dim=1):
    """Llama and Qwen hand out both halves of cos and sin, which are alike."""
    cos, sin = (t.unsqueeze(unsqueeze_dim).chunk(2, dim=-1)[0] for t in (cos, sin))
    return turn_neighbours(q, cos, sin), turn_neighbours(k, cos, sin)


def cyclic_inverse(x, n):
    """Query head h reads the kv head that a cyclic order of heads had put there."""
    K, h = x.shape[1], torch.arange(x.shape[1] * n)
    return x[:, (h % n * K + h // n) // n]


def rotate_halves(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def on_half(change, other, first):
    """`change` in the first half of the heads of x [B, heads, T, D] (or in the rest), `other` elsewhere."""

    def rotate(x, cos, sin):
        chosen = (torch.arange(x.shape[1]) < -(-x.shape[1] // 2)) == first
        return torch.where(chosen[:, None, None], change(x, cos, sin), other(x, cos, sin))

    return replaced("_apply_rotary_emb", rotate)


def still(x, cos, sin):
    return x


def half_the_dimensions(q, k, cos, sin, unsqueeze_dim=1):
    """The first half of each head is rotated as a head of half the size: by every second frequency."""
    cos, sin = (t.unsqueeze(unsqueeze_dim).chunk(2, dim=-1)[0][..., ::2] for t in (cos, sin))
    parts = [x.chunk(2, dim=-1) for x in (q, k)]
    return tuple(torch.cat((rotate_halves(a, cos, sin), b), dim=-1) for a, b in parts)


def columns(order, *names):
    """The inputs of the experts' matrices in the order that `order` gives for a range of indices."""

    def make(layer):
        for name in names or ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            weight.data = weight.data[:, order(torch.arange(weight.shape[1])).flatten()].contiguous()

    return on_layers(make)


def high_first(i):
    return i.view(-1, 2).flip(1)


def bytes_reversed(i):
    return i.view(-1, 16, 2).flip(1)


def blocks_reversed(i):
    return i.view(-1, 32).flip(0)


def norm_after_rope(twin, monkeypatch):
    """Attention runs with its norms switched off, and the rotation applies them behind itself."""
    module = modeling(twin)
    rotate, attention = module.apply_rotary_pos_emb, type(layers(twin)[0].self_attn)
    forward, now = attention.forward, []

    def patched(self, *args, **kwargs):
        now[:] = self.q_norm, self.k_norm
        self.q_norm = self.k_norm = nn.Identity()
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.q_norm, self.k_norm = now

    def normed(q, k, cos, sin, unsqueeze_dim=1):
        q, k = rotate(q, k, cos, sin, unsqueeze_dim)
        return now[0](q), now[1](k)

    monkeypatch.setattr(attention, "forward", patched)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", normed)


def gated(alpha=1.702, limit=7.0, one=1.0, halves=False, swapped=False):
    def gate(self, gate_up):
        a, b = gate_up.chunk(2, dim=-1) if halves else (gate_up[..., ::2], gate_up[..., 1::2])
        if swapped:
            a, b = b, a
        a, b = a.clamp(max=limit), b.clamp(min=-limit, max=limit)
        return a * torch.sigmoid(a * alpha) * (b + one)

    def make(twin, monkeypatch):
        monkeypatch.setattr(type(layers(twin)[0].mlp.experts), "_apply_gate", gate)

    return make


def softmax_first(twin, monkeypatch):
    def forward(self, x):
        logits = nn.functional.linear(x, self.weight, self.bias)
        top, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, top, chosen

    monkeypatch.setattr(type(layers(twin)[0].mlp.router), "forward", forward)


def renormalised(yes):
    def make(twin, monkeypatch):
        for layer in layers(twin):
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.norm_topk_prob = yes

    return make


def parity(twin, monkeypatch):
    kinds = list(reversed(twin.config.layer_types))
    assert kinds != twin.config.layer_types
    twin.config.layer_types = kinds


def window(longer):
    def make(twin, monkeypatch):
        twin.config.sliding_window += longer

    return make


def no_mask(twin, monkeypatch):
    attend = modeling(twin).eager_attention_forward

    def unmasked(module, q, k, v, mask, **kwargs):
        return attend(module, q, k, v, None, **kwargs)

    monkeypatch.setattr(modeling(twin), "eager_attention_forward", unmasked)


def sinks(change):
    def make(layer):
        layer.self_attn.sinks.data = change(layer.self_attn.sinks.data, layer.self_attn.scaling)

    return on_layers(make)


def rotary(factor=None, theta=None, slower=1.0):
    """`theta` leaves every scaling out, `slower` divides all frequencies alike."""

    def make(twin, monkeypatch):
        table = twin.model.rotary_emb
        if factor is not None:
            table.attention_scaling = factor
        if theta is not None:
            size = 2 * len(table.inv_freq)
            table.inv_freq = theta ** (-torch.arange(0, size, 2).float() / size) / slower

    return make


def truncated(twin, monkeypatch):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = copy.deepcopy(twin.config)
    config.rope_parameters["truncate"] = True
    twin.model.rotary_emb.inv_freq, _ = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")


def zeroed(*names):
    def make(layer):
        for name in names:
            layer.get_parameter(name).data.zero_()

    return on_layers(make)


def scaled(by):
    def make(layer):
        experts = layer.mlp.experts
        experts.gate_up_proj.data *= by
        experts.down_proj.data *= by

    return on_layers(make)


def reorder(shape, *names):
    """The inputs of each block of 32 in another order; transformers has gpt-oss's experts as [E, in, out]."""

    def make(layer):
        for name in names or ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            moved = weight.data.mT.unflatten(-1, (-1, *shape)).mT.flatten(-3)
            weight.data = moved.mT.contiguous()

    return on_layers(make)


def transposed(layer):
    down = layer.mlp.experts.down_proj
    down.data = down.data.mT.contiguous()


def eps(value):
    def make(twin, monkeypatch):
        for module in twin.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = value

    return make


def ones(*names):
    def make(layer):
        for name in names:
            layer.get_parameter(name).data.fill_(1.0)

    return on_layers(make)


def scaling(value):
    def make(twin, monkeypatch):
        for layer in layers(twin):
            layer.self_attn.scaling = value

    return make


def swap_dense(layer):
    layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def tied(twin, monkeypatch):
    twin.lm_head.weight = nn.Parameter(twin.model.embed_tokens.weight.data.clone())


# an original length at which the range of YaRN does not end on whole dimensions anyway
LATER = {"original_max_position_embeddings": 512}
CYCLIC = "cyclic GQA mapping (query head h reads kv head h % K)"
PAIRS = "interleaved RoPE pairs (2i, 2i + 1)"
UNDONE = "split nibbles undone (interleaved order)"
BIASES = [f"self_attn.{x}_proj.bias" for x in "qkv"]
EXPERT_BIASES = ["mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"]
# family, the mistake's name, how it is made, and what the twin's config must say for it to matter
ATTENTION = [
    ("gpt_oss", CYCLIC, replaced("repeat_kv", cyclic), {}),
    ("qwen3", CYCLIC, replaced("repeat_kv", cyclic), {}),
    ("gpt_oss", "cyclic GQA mapping, inverse order", replaced("repeat_kv", cyclic_inverse), {}),
    ("gpt_oss", "RoPE in the first half of the heads alone", on_half(rotate_halves, still, True), {}),
    ("gpt_oss", "RoPE in the second half of the heads alone", on_half(rotate_halves, still, False), {}),
    (
        "gpt_oss",
        "interleaved RoPE pairs in the first half of the heads",
        on_half(turn_neighbours, rotate_halves, True),
        {},
    ),
    (
        "gpt_oss",
        "interleaved RoPE pairs in the second half of the heads",
        on_half(turn_neighbours, rotate_halves, False),
        {},
    ),
    (
        "llama",
        "RoPE in half of each head's dimensions",
        replaced("apply_rotary_pos_emb", half_the_dimensions),
        {},
    ),
    ("gpt_oss", PAIRS, replaced("_apply_rotary_emb", turn_neighbours), {}),
    ("llama", PAIRS, replaced("apply_rotary_pos_emb", rope_on_neighbours), {}),
    ("qwen3", PAIRS, replaced("apply_rotary_pos_emb", rope_on_neighbours), {}),
    ("gpt_oss", "sinks dropped", sinks(lambda s, scale: torch.full_like(s, -1e9)), {}),
    ("gpt_oss", "sinks of zero", sinks(lambda s, scale: torch.zeros_like(s)), {}),
    ("gpt_oss", "sinks scaled like the scores", sinks(lambda s, scale: s * scale), {}),
    ("gpt_oss", "wrong window parity", parity, {}),
    ("gpt_oss", "window off by one: one key longer", window(1), {}),
    ("qwen3", "window off by one: one key shorter", window(-1), {}),
    ("gpt_oss", "YaRN's attention factor missing", rotary(factor=1.0), {}),
    ("gpt_oss", "no RoPE scaling at all", rotary(factor=1.0, theta=15000.0), {}),
    ("llama", "no RoPE scaling at all", rotary(theta=50000.0), {}),
    ("gpt_oss", "linear scaling instead of YaRN", rotary(1.0, 15000.0, slower=64.0), {}),
    ("llama", "no RoPE", rotary(theta=50000.0, slower=float("inf")), {}),
    ("gpt_oss", "YaRN's range truncated", truncated, {"rope_parameters": LATER}),
    ("qwen3_moe", "RoPE base 10,000", rotary(theta=10000.0), {"rope_parameters": {"rope_theta": 5e5}}),
    ("qwen3", "missing q/k norm", on_layers(lambda one: _without_norm(one.self_attn)), {}),
    ("qwen3_moe", "q/k norm after RoPE", norm_after_rope, {}),
    ("qwen3", "q/k norm without its weights", ones("self_attn.q_norm.weight", "self_attn.k_norm.weight"), {}),
    ("gpt_oss", "missing q, k and v biases", zeroed(*BIASES), {}),
    ("gpt_oss", "missing o bias", zeroed("self_attn.o_proj.bias"), {}),
    ("gpt_oss", "missing attention biases", zeroed(*BIASES, "self_attn.o_proj.bias"), {}),
    ("gpt_oss", "attention scale from hidden_size / heads", scaling((96 / 6) ** -0.5), {}),
    ("llama", "no attention scale", scaling(1.0), {}),
    ("llama", "no causal mask", no_mask, {}),
    ("llama", "input norm without its weights", ones("input_layernorm.weight"), {}),
]
PARTS = {"": (), " of gate and up alone": ("gate_up_proj",), " of down alone": ("down_proj",)}
ORDERS = {
    "high nibble first": high_first,
    "bytes of each block reversed": bytes_reversed,
    "blocks of each row reversed": blocks_reversed,
}
MLP = [
    *(
        ("gpt_oss", name + where, columns(order, *parts), {})
        for name, order in ORDERS.items()
        for where, parts in PARTS.items()
    ),
    ("gpt_oss", "softmax before top-k", softmax_first, {}),
    ("qwen3_moe", "softmax before top-k", renormalised(False), {}),
    ("qwen3_moe", "top-k weights renormalised", renormalised(True), {"norm_topk_prob": False}),
    ("gpt_oss", "unclamped SwiGLU", gated(limit=1e9), {"swiglu_limit": 0.5}),
    ("gpt_oss", "missing +1 on the up branch", gated(one=0.0), {}),
    ("gpt_oss", "plain SiLU (alpha 1)", gated(alpha=1.0), {}),
    ("gpt_oss", "gate and up exchanged", gated(swapped=True), {}),
    ("llama", "gate and up exchanged", on_layers(swap_dense), {}),
    ("gpt_oss", "gate and up rows read as halves, not interleaved", gated(halves=True), {}),
    ("gpt_oss", "split nibbles (GGML's order)", reorder((16, 2)), {}),
    ("gpt_oss", UNDONE, reorder((2, 16)), {}),
    ("gpt_oss", "split nibbles (GGML's order) of gate and up alone", reorder((16, 2), "gate_up_proj"), {}),
    ("gpt_oss", "split nibbles (GGML's order) of down alone", reorder((16, 2), "down_proj"), {}),
    ("gpt_oss", f"{UNDONE} of down alone", reorder((2, 16), "down_proj"), {}),
    ("gpt_oss", f"{UNDONE} of gate and up alone", reorder((2, 16), "gate_up_proj"), {}),
    ("gpt_oss", "scale exponent off by one: doubled", scaled(2.0), {}),
    ("qwen3_moe", "scale exponent off by one: halved", scaled(0.5), {"mlp_only_layers": []}),
    ("gpt_oss", "down matrices transposed", on_layers(transposed), {"intermediate_size": 96}),
    ("gpt_oss", "missing router bias", zeroed("mlp.router.bias"), {}),
    ("gpt_oss", "missing gate and up biases", zeroed("mlp.experts.gate_up_proj_bias"), {}),
    ("gpt_oss", "missing down biases", zeroed("mlp.experts.down_proj_bias"), {}),
    (
        "gpt_oss",
        "missing expert biases",
        zeroed("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"),
        {},
    ),
    (
        "qwen3",
        "gate and up rows read as interleaved, not halves",
        on_layers(lambda layer: _interleave(layer.mlp)),
        {},
    ),
    ("llama", "post-attention norm without its weights", ones("post_attention_layernorm.weight"), {}),
]


def _interleave(mlp):
    """Gate and up become the even and odd rows of both, one under the other."""
    both = torch.cat((mlp.gate_proj.weight.data, mlp.up_proj.weight.data))
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = both[::2].clone(), both[1::2].clone()


def _without_norm(attention):
    attention.q_norm = attention.k_norm = nn.Identity()
