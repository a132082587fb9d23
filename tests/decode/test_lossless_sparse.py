"""Sparse attention: every loop gives the retrofitted target's tokens, latents included."""

import functools
from dataclasses import replace

import pytest
import tiny
import torch
from indexers import indexed_target
from test_lossless import NEW, PROMPTS, by_whole_texts
from test_partial import BAD, SMALL, drafts

from outpace.decode.generate import generate
from outpace.decode.partial import Partial
from outpace.decode.request import Request
from outpace.kv.partial import PartialCache
from outpace.kv.topk import TopKConfig

BY_INDEX = replace(SMALL, selector="index")
NAMES = ["ngram", "dflash, window", "tree of dflash", "eagle3, tree", "half, tree"]
KEEPS = {
    "top k": TopKConfig(top_k=16, min_context=17, sinks=1, recent=13),
    "share": TopKConfig(top_k=0.5, min_context=0, sinks=1, recent=13),
    "top p": TopKConfig(top_k=24, top_p=0.7, least_mass=0.5, min_context=0, sinks=1, recent=13),
}


@functools.cache
def known(family, keep, rank):
    """Greedy text of the retrofitted target, each token by a forward over the whole text: no cache at all."""
    return by_whole_texts(indexed_target(family, KEEPS[keep], rank)[1])


@pytest.mark.parametrize(
    ("family", "keep", "rank"),
    [("gpt_oss", keep, rank) for keep in KEEPS for rank in (None, 7)]
    + [("qwen3", "top k", 7), ("llama", "share", None), ("qwen3_moe", "top p", None)],
)
def test_every_draft_says_the_same(family, keep, rank):
    model, wanted = indexed_target(family, KEEPS[keep], rank)[1], known(family, keep, rank)
    text = torch.tensor([PROMPTS[0] + wanted[0]])
    with torch.inference_mode():
        lost = model(text).hidden - indexed_target(family, KEEPS[keep], rank)[0](text).hidden
    assert lost.abs().max() > 0.1  # it does leave out
    assert generate(model, PROMPTS, Request(max_new_tokens=NEW, prefill_chunk=7)).tokens == wanted
    for name in NAMES:
        configs = (SMALL, BAD, BY_INDEX) if name == "half, tree" else (BY_INDEX,)
        for partial in (None, *(Partial(config=config) for config in configs)):
            draft = drafts(name, model, wanted)
            got = generate(model, PROMPTS, Request(max_new_tokens=NEW), draft, partial=partial)
            assert got.tokens == wanted, (name, partial)
            if name == "half, tree":
                assert 0 < got.trace.accept_rate < 1


@pytest.mark.parametrize("rank", [None, 7])
def test_an_index_may_choose_for_partial_kv_alone(rank):
    """Attention is dense, and the text the original's; a target without an index is told so."""
    dense, model = indexed_target("gpt_oss", KEEPS["top k"], rank)
    model.use_dsa(False)
    wanted = by_whole_texts(dense)
    partial = Partial(config=BY_INDEX)
    draft = drafts("half, tree", dense, wanted)
    got = generate(model, PROMPTS, Request(max_new_tokens=NEW), draft, partial=partial)
    assert got.tokens == wanted and got.trace.partial_forwards
    with pytest.raises(ValueError, match="no index to choose by"):
        generate(dense, PROMPTS, Request(max_new_tokens=NEW), draft, partial=partial)


@torch.inference_mode()
def test_the_blocks_that_the_index_wants_most():
    model = indexed_target("gpt_oss", KEEPS["top k"])[1]
    model.use_dsa(False)
    full = model.make_cache(2, 70, slack=20, index=True)
    near = PartialCache(full, BY_INDEX, 20)
    text = tiny.tokens(2, 44, seed=5)
    model(text[:, :40], full)
    model(text[:, 40:], full, counts=[4, 2])
    near.refresh()
    size, count = BY_INDEX.block_size, BY_INDEX.n_retrieval_blocks
    for partial in near.partials:
        index, keys = partial.full.recorded.index, partial.full.keys
        for b, real in ((0, 4), (1, 2)):
            first, end = BY_INDEX.n_sink_blocks, BY_INDEX.window_start(full.lengths[b]) // size
            q, w = index.q[b, :real], index.w[b, :real]
            worth = (torch.einsum("thd,sd->ths", q, keys[b, 0]).relu() * w[..., None]).sum(1)
            best = [worth[:, n * size : n * size + size].amax(1).mean() for n in range(first, end)]
            wanted = sorted(first + i for i in torch.stack(best).topk(count).indices.tolist())
            assert partial.choose(b, first, end).tolist() == [wanted] * 2
