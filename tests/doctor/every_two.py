"""Every known mistake and every two of them, in tiny layers where each one shows."""

import dataclasses
import functools
import tempfile
from pathlib import Path

import tiny
import torch

from outpace.doctor.mistakes import AS_IS, pairs
from outpace.doctor.reference import relative
from outpace.doctor.search import EXACT, ROUNDING, ROWS, Explainer, half_layer
from outpace.models.load import load_target
from outpace.models.save import save_target

TOKENS = 40  # far past the window of 7
SMALL = 0.02  # of the layer's input, so that RMSNorm's eps matters
# what a config must hold for every mistake to change the layer: a clamp that is reached, matrices that can be
# transposed, a range of YaRN that ends between dimensions, experts' weights that do not sum to 1
ORIGINAL = {"original_max_position_embeddings": 512}
CHANGES = {
    "gpt_oss": {
        "swiglu_limit": 0.5,
        "intermediate_size": 96,
        "rope_parameters": tiny.GPT_OSS["rope_parameters"] | ORIGINAL,
    },
    "llama": {"intermediate_size": 42},
    "qwen3": {},
    "qwen3_moe": {"norm_topk_prob": False},
}
SIDES = (
    ("gpt_oss", "attention"),
    ("gpt_oss", "mlp"),
    ("llama", "attention"),
    ("llama", "mlp"),
    ("qwen3", "attention"),
    ("qwen3_moe", "mlp"),
)
BOTH = "both"
# one is named: the other changes less than EXACT of the output with it, or the one is the sum of the two
ONE = "one"
# both are named, and two others that no input tells apart from them
OTHERS = "both, or others that compute the same"
IN_PAIRS = (("gpt_oss", "attention"), ("gpt_oss", "mlp"), ("qwen3", "attention"))


@functools.cache
@torch.inference_mode(False)
def model_of(family):
    """gpt-oss with its experts in MXFP4."""
    with tempfile.TemporaryDirectory() as place:
        dense, packed = Path(place) / "dense", Path(place) / "packed"
        tiny.save_twin(family, dense, **CHANGES[family])
        if family != "gpt_oss":
            return load_target(dense)
        save_target(load_target(dense), packed, pack=True)
        return load_target(packed)


@functools.cache
@torch.inference_mode()
def side_of(family, half):
    """One half of the first layer; it computes each reading once."""
    model = model_of(family)
    x = SMALL * torch.randn(TOKENS, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(TOKENS if half == "attention" else ROWS)
    side = half_layer(half, model, 0, x, rows)
    outs = {}

    def run(readings):
        new = [r for r in dict.fromkeys(readings) if r not in outs]
        outs.update(zip(new, side.run(new) if new else [], strict=True))
        return [outs[r] for r in readings]

    return dataclasses.replace(side, run=run)


@torch.inference_mode()
def explained(side, names):
    """What explains a reference that makes the mistakes `names`."""
    outs = side.under([AS_IS, names])
    return Explainer().explain(side, None, outs[AS_IS], outs[names], EXACT).ours


@torch.inference_mode()
def alike(side, a, b):
    """The same output, but for the rounding of float32."""
    outs = side.under([a, b])
    return float(relative(outs[a], outs[b])) <= ROUNDING


def verdict(side, two):
    """BOTH, ONE or OTHERS; or what is named instead."""
    ours = explained(side, two)
    same = bool(ours) and all(alike(side, two, names) for names in ours)
    if ours == (two,):
        return BOTH
    if len(ours) == 1 and len(ours[0]) == 1 and (ours[0][0] in two or same):
        return ONE
    if same and two in ours:
        return OTHERS
    return f"instead: {ours}"


def verdicts(side, every=1):
    """Of each pair, or of every `every`th."""
    return {" + ".join(two): verdict(side, two) for two in pairs(side.known)[::every]}
