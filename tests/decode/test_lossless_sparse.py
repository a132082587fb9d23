"""With sparse attention every loop says what the retrofitted target says, over latents and partial KV too."""

import functools

import pytest
import torch
from indexers import indexed_target
from test_lossless import NEW, PROMPTS, by_whole_texts
from test_partial import BAD, SMALL, drafts

from outpace.cache.index import Keep
from outpace.decode import plain, speculative
from outpace.decode.partial import Partial
from outpace.decode.request import Request

NAMES = ["ngram", "dflash, window", "tree of dflash", "eagle3, tree", "half, tree"]
KEEPS = {
    "top k": Keep(top_k=16, min_context=17, sinks=1, recent=13),
    "share": Keep(top_k=0.5, min_context=0, sinks=1, recent=13),
    "top p": Keep(top_k=24, top_p=0.7, min_context=0, sinks=1, recent=13),
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
    assert plain.generate(model, PROMPTS, Request(max_new_tokens=NEW, prefill_chunk=7)).tokens == wanted
    for name in NAMES:
        for partial in (None, Partial(config=SMALL), Partial(config=BAD)):
            draft = drafts(name, model, wanted)
            got = speculative.generate(model, draft, PROMPTS, Request(max_new_tokens=NEW), partial=partial)
            assert got.tokens == wanted, (name, partial)
            if name == "half, tree":
                assert 0 < got.trace.accept_rate < 1
