"""A tiny target on disk with a tokenizer, and random drafts of every shape that the formats can say."""

import dataclasses
import functools
import json

import tiny
import torch
from safetensors.torch import load_file, save_file

from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.eagle3 import Eagle3Config
from outpace.formats.export import export_draft, open_target_files
from outpace.formats.spec import DFlashDraft, Eagle3Draft, canonical, dflash_shapes, eagle3_shapes, marks
from outpace.models.config import FULL, WINDOW
from outpace.models.load import build, named_tensors
from outpace.models.save import save_target
from outpace.ops.rope import RopeConfig
from outpace.text.tokenizer import train_bpe

VOCAB = 290
LAYERS = 6  # enough for EAGLE's default choice of layers
MASK = 2  # <|MASK|>, which no text yields
YARN = RopeConfig(theta=15000.0, kind="yarn", factor=64.0, original_max_position=32, truncate=False)
ROPES = {
    "yarn": YARN,
    "rounded yarn": dataclasses.replace(YARN, truncate=True, factor=4.0),
    "its own yarn": dataclasses.replace(YARN, beta_fast=24.0, beta_slow=2.0, attention_factor=1.25),
    "llama3": RopeConfig(theta=50000.0, kind="llama3", factor=8.0, original_max_position=32),
    "linear": RopeConfig(theta=20000.0, kind="linear", factor=4.0),
    "default": RopeConfig(theta=700.0),
}


@functools.cache
@torch.inference_mode(False)
def target():
    changes = {"vocab_size": VOCAB, "num_layers": LAYERS, "layer_types": (WINDOW, FULL) * 3}
    model = build(dataclasses.replace(tiny.config("gpt_oss"), **changes))
    tiny.randomise(named_tensors(model))
    return model.eval()


def target_folder(folder):
    """The target saved, with its tokenizer -> the folder."""
    save_target(target(), folder)
    train_bpe(["def f(n):\n    return n + 1\n"] * 2 + ["for i in range(10): print(i, end='')\n"], VOCAB).save(
        str(folder / "tokenizer.json")
    )
    return folder


def target_files(folder):
    return open_target_files(str(target_folder(folder)))


def edited(folder, target, draft, name, edit):
    """The draft in a format, after `edit(config, tensors)` -> its folder."""
    out = folder / name
    export_draft(draft, name, out, target, allow_lossy=True)
    config = json.loads((out / "config.json").read_text())
    tensors = load_file(out / "model.safetensors")
    edit(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    return out


DFLASH = DFlashConfig(
    hidden_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=28,
    vocab_size=VOCAB,
    rope=YARN,
    rms_norm_eps=1e-5,
    block_size=5,
    target_layer_ids=(0, 2, 4),
    num_target_layers=LAYERS,
    mask_token_id=MASK,
    max_position_embeddings=4096,
)
WINDOWS = {"layer_types": (WINDOW,) * 3, "sliding_window": 7}
MIXED = {"layer_types": (WINDOW, FULL, WINDOW), "sliding_window": 7}
DFLASHES = {name: {"rope": rope} for name, rope in ROPES.items()} | {
    "biases": {"attention_bias": True},
    "window": WINDOWS,
    "some windows": MIXED,
    "causal window": WINDOWS | {"causal": True},
    "some causal windows": MIXED | {"causal": True},
    "one state": {"target_layer_ids": (3,)},
}

EAGLE3 = Eagle3Config(
    hidden_size=96,
    target_hidden_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=28,
    vocab_size=VOCAB,
    draft_vocab_size=37,
    rope=RopeConfig(theta=10000.0),
    rms_norm_eps=1e-5,
    layer_ids=(1, 2, 4),
    max_position_embeddings=4096,
)
EAGLE3S = {name: {"rope": rope} for name, rope in ROPES.items()} | {
    "normed residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norm per state": {"fc_norm": True, "norm_output": True},
    "narrow": {"hidden_size": 40, "own_embedding": True},
    "window": {"sliding_window": 7},
    "two states": {"layer_ids": (1, 4)},
    "own embedding": {"own_embedding": True},
    "whole vocabulary": {"draft_vocab_size": VOCAB},
    "target's head": {"draft_vocab_size": VOCAB, "own_head": False},
    "two layers": {"num_layers": 2, "sliding_window": 7},
    "one pass": {"parallel": True},
    "one pass, a token": {"parallel": True, "mask_token_id": MASK, "num_layers": 3, "fc_norm": True},
}


def dflash(dtype=torch.float32, **changes):
    config = canonical(dataclasses.replace(DFLASH, **changes))
    return DFlashDraft(config=config, tensors=randoms(dflash_shapes(config), dtype))


def eagle3(dtype=torch.float32, *, own_embedding=False, own_head=True, **changes):
    config = dataclasses.replace(EAGLE3, **changes)
    mapped = config.draft_vocab_size < config.vocab_size
    shapes = eagle3_shapes(config, embedding=own_embedding, head=own_head, mapped=mapped)
    tensors = randoms({n: s for n, s in shapes.items() if n not in ("d2t", "t2d")}, dtype)
    if mapped:
        rng = torch.Generator().manual_seed(5)
        ids = torch.randperm(VOCAB, generator=rng)[: config.draft_vocab_size].sort().values
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": marks(ids, VOCAB)}
    return Eagle3Draft(config=config, tensors=tensors)


def randoms(shapes, dtype):
    named = {name: torch.empty(shape) for name, shape in shapes.items()}
    tiny.randomise(named.items(), seed=11)
    return {name: t.to(dtype) for name, t in named.items()}


def same(one, other):
    """Equal to the bit, precision included."""
    assert type(one) is type(other) and one.config == other.config
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype, name
        assert torch.equal(tensor, other.tensors[name]), name


@functools.cache
@torch.inference_mode()
def hidden_states(length=9, seed=1):
    """[hs[0] .. hs[L]], each [length, C]: hs[0] the embeddings, hs[l+1] what block l gives."""
    tokens = tiny.tokens(1, length, seed=seed)
    aux = target()(tokens, aux=tuple(range(LAYERS))).aux
    return [target().embed(tokens)[0], *aux[:, 0]]


def embedding():
    return target().embed_tokens.weight.detach()


def head():
    return target().lm_head.weight.detach()
