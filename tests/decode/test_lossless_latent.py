"""Over a latent cache every loop states what the retrofitted target generates, with partial KV too."""

import functools

import pytest
import tiny
import torch
from latents import latent_target
from test_lossless import NEW, PROMPTS, by_whole_texts
from test_partial import BAD, SMALL, drafts

from outpace.decode.generate import generate
from outpace.decode.partial import Partial
from outpace.decode.request import Request
from outpace.kv.partial import PartialCache

NAMES = ["ngram", "dflash, window", "tree of dflash", "eagle3, tree", "half, tree"]


@functools.cache
def known(family):
    """Greedy text of the retrofitted target, each token by a forward over the whole text: no cache at all."""
    return by_whole_texts(latent_target(family, 7)[1])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_draft_says_the_same(family):
    every_draft_says(latent_target(family, 7)[1], known(family))


def every_draft_says(model, wanted):
    """Plain decoding, and every draft of NAMES with the full cache and on partial KV."""
    assert generate(model, PROMPTS, Request(max_new_tokens=NEW, prefill_chunk=7)).tokens == wanted
    for name in NAMES:
        for partial in (None, Partial(config=SMALL), Partial(config=BAD)):
            draft = drafts(name, model, wanted)
            got = generate(model, PROMPTS, Request(max_new_tokens=NEW), draft, partial=partial)
            assert got.tokens == wanted, (name, partial)
            if name == "half, tree":
                assert 0 < got.trace.accept_rate < 1


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
@torch.inference_mode()
def test_partial_kv_holds_what_the_latents_expand_to(family):
    model = latent_target(family, 7)[1]
    full = model.make_cache(2, 70, slack=20)
    near = PartialCache(full, SMALL, 20)
    model(tiny.tokens(2, 40, seed=5), full)
    near.refresh()
    for partial in near.partials:
        k, v = partial.full.read(1, 0, 40)
        start = SMALL.window_start(40)
        chosen = partial.choose(1, SMALL.n_sink_blocks, start // SMALL.block_size)
        for h, blocks in enumerate(chosen.tolist()):
            index = [*range(2), *(i for n in blocks for i in (2 * n, 2 * n + 1)), *range(start, 40)]
            for ours, theirs in ((partial.k, k), (partial.v, v)):
                assert (ours[1, h, : len(index)] - theirs[h, index]).abs().max() < 1e-6
