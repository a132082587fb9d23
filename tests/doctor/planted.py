"""Mistakes planted in copies of checkpoints: tensors in a wrong layout, configs that say it wrong."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file


def plant(folder, copy, change=None, **message):
    """Copy a folder. `change` edits its tensors, a dict, in place; `value`: keys of its config."""
    shutil.copytree(folder, copy)
    path = copy / "config.json"
    config = json.loads(path.read_text()) | message
    path.write_text(json.dumps(config))
    if change is not None:
        tensors = {name: tensor.clone() for name, tensor in load_file(copy / "model.safetensors").items()}
        change(tensors, config)
        save_file(
            {k: t.contiguous() for k, t in tensors.items()}, copy / "model.safetensors", {"format": "pt"}
        )
    return copy


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def each(ending, change):
    """Edit every tensor where the name ends so."""

    def edit(tensors, config):
        for name in tensors:
            if name.endswith(ending):
                tensors[name] = change(tensors[name], config)

    return edit


def both(*edits):
    def edit(tensors, config):
        for one in edits:
            one(tensors, config)

    return edit


def cyclic_order(config):
    """Heads as a converter lays them out that counts groups first: new head g*K + k was head k*G + g."""
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    return torch.arange(H).view(K, H // K).T.flatten()


def by_heads(x, config, axis=0):
    D = config["head_dim"]
    return x.unflatten(axis, (-1, D)).index_select(axis, cyclic_order(config)).flatten(axis, axis + 1)


cyclic_heads = both(
    each("q_proj.weight", by_heads),
    each("q_proj.bias", by_heads),
    each("o_proj.weight", lambda x, config: by_heads(x, config, axis=1)),
    each("sinks", lambda x, config: x[cyclic_order(config)]),
)


def to_neighbours(x, config):
    """Rows of each head in the order that interleaved pairs want: 0, D/2, 1, D/2 + 1, .."""
    D = config["head_dim"]
    order = torch.arange(D).view(2, D // 2).T.flatten()
    return x.unflatten(0, (-1, D))[:, order].flatten(0, 1)


def to_halves(x, config):
    D = config["head_dim"]
    order = torch.arange(D).view(D // 2, 2).T.flatten()
    return x.unflatten(0, (-1, D))[:, order].flatten(0, 1)


def on_q_and_k(change):
    return both(*(each(f"{x}_proj.{kind}", change) for x in "qk" for kind in ("weight", "bias")))


def split(blocks, config):
    """GGML's order: byte j holds the values j and 16 + j."""
    values = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return values[..., :16] | (values[..., 16:] << 4)


def joined(blocks, config):
    """The way back: what a file in safetensors' order looks like once it was taken for GGML's."""
    values = torch.cat((blocks & 15, blocks >> 4), dim=-1)
    return values[..., ::2] | (values[..., 1::2] << 4)


def halves(x, config):
    """Rows of gate and up one half after the other, where they should be in turn."""
    return torch.cat((x[:, ::2], x[:, 1::2]), dim=1)


def dense_halves(x, config):
    """The same for dense experts, which are stored as [E, in, out]."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


def swapped(x, config):
    """Of dense experts' last axis, or of their biases."""
    return torch.stack((x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def zeros(x, config):
    return torch.zeros_like(x)


def ones(x, config):
    return torch.ones_like(x)


def exchanged(blocks, config):
    """High nibble first: each pair of values changes places."""
    return (blocks >> 4) | (blocks << 4)


def backwards(x, config):
    """Packed experts: the blocks of each row, or their scales, in reverse."""
    return x.flip(2)


def swapped_rows(x, config):
    """Gate and up rows of packed experts, or their biases."""
    return x.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)


def lost(x, config):
    return torch.full_like(x, -1e9)


def half_to_neighbours(x, config):
    """As `to_neighbours`, in the first half of the heads."""
    D = config["head_dim"]
    rows = -(-(len(x) // D) // 2) * D
    return torch.cat((to_neighbours(x[:rows], config), x[rows:]))


def swap_names(a, b):
    def edit(tensors, config):
        for name in list(tensors):
            if a in name:
                other = name.replace(a, b)
                tensors[name], tensors[other] = tensors[other], tensors[name]

    return edit


def copy_head(tensors, config):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
