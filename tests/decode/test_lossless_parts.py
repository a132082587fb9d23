"""Drafts with DFlash 2's and DSpark's parts decode losslessly, past the window and as trees."""

import pytest
import tiny
import torch
from test_lossless import NEW, PROMPTS, answers, random_dflash

from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.quantize import quantised
from outpace.drafts.tree import DDTree

SECOND = {"conv_kernel_size": 2, "conv_group_size": 6, "selector_rank": 7, "selector_top_k": 5}
PARTS = {
    "DFlash 2": SECOND,
    "DFlash 2, window": SECOND | {"layer_types": ("sliding_attention",) * 2, "sliding_window": 9},
    "DSpark": {"markov_rank": 9, "markov_gated": True, "confidence": True},
    "causal": SECOND | {"causal_full": True},
    "lean": SECOND | {"draft_vocab_size": 31, "temperatures": (1.0, 2.0, 0.5)},
}


def draft_for(model, name, block_size=4):
    bound = random_dflash(model, block_size, **PARTS[name])
    if bound.draft.d2t is not None:  # of what the target does say, and of much else
        value = torch.tensor(sorted({t for row in answers("gpt_oss", True, 3) for t in row[:12]}))
        others = torch.tensor([i for i in range(tiny.VOCAB) if i not in set(value.tolist())])
        ids = torch.cat((value, others))[:31].sort().values
        bound.draft.d2t.copy_(ids - torch.arange(31))
    return bound


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_parts_say_the_same(family, name):
    model, known = tiny.target(family, True), answers(family, True, 3)
    got = generate(model, PROMPTS, Request(max_new_tokens=NEW), draft_for(model, name))
    assert got.tokens == known
    assert got.trace.accept_rate < 0.5  # usually wrong


@pytest.mark.parametrize("name", ["DFlash 2", "DSpark", "lean"])
def test_trees_of_parts_say_the_same(name):
    model, known = tiny.target("gpt_oss", True), answers("gpt_oss", True, 3)
    draft = DDTree(draft_for(model, name), nodes=11, branch=4)
    assert generate(model, PROMPTS, Request(max_new_tokens=NEW), draft).tokens == known


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_packed_weights_say_the_same(family):
    model, known = tiny.target(family, True), answers(family, True, 3)
    bound = random_dflash(model, 4, **SECOND, num_heads=8, head_dim=8)  # outputs of 64 positions, which pack
    draft = quantised(bound.draft, "q8_0").bind(model)
    assert generate(model, PROMPTS, Request(max_new_tokens=NEW), draft).tokens == known
