"""With EAGLE-3 drafts that are mostly wrong, the loop states the same: chains, trees, all in one pass."""

import functools

import pytest
import tiny
import torch
from eagle3_drafts import bound_eagle3

from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.eagle3_decode import TreeShape
from outpace.ops.sampling import Sampling

PROMPTS = [tiny.tokens(n, seed=n).tolist() for n in (23, 5, 12)]
NEW = 24
TREE = TreeShape(depth=4, branch=3, nodes=9)
DRAFTS = {
    "chain": {"shape": TreeShape(depth=4)},
    "chain, window": {"shape": TreeShape(depth=6), "sliding_window": 5, "norm_output": True},
    "tree": {"shape": TREE},
    "tree, window": {"shape": TREE, "sliding_window": 5, "num_layers": 2},
    "one pass": {"shape": TreeShape(depth=4), "parallel": True, "sliding_window": 6},
    "one pass, tree": {"shape": TREE, "parallel": True},
}


@functools.cache
def answers(family, sampling=None, rule="match"):
    model = tiny.target(family)
    request = Request(max_new_tokens=NEW, sampling=sampling or Sampling(), rule=rule)
    rng = torch.Generator().manual_seed(3)
    return generate(model, PROMPTS, request, rng=rng).tokens


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_loop_says_the_same(family, name):
    """Past the windows of the target and of the draft; rows of one batch take different paths."""
    model = tiny.target(family)
    draft = bound_eagle3(model, **DRAFTS[name])
    for batch in (3, 1):
        got = generate(model, PROMPTS[:batch], Request(max_new_tokens=NEW), draft)
        assert got.tokens == answers(family)[:batch]
        assert got.trace.accept_rate < 0.5 and got.trace.rounds <= batch * (NEW - 1)


@pytest.mark.parametrize("name", ["chain", "tree", "one pass"])
@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
def test_the_same_noise_gives_the_same_text(family, name):
    sampling = Sampling(temperature=1.0)
    model = tiny.target(family)
    draft = bound_eagle3(model, **DRAFTS[name])
    request = Request(max_new_tokens=NEW, sampling=sampling, rule="gumbel")
    rng = torch.Generator().manual_seed(3)
    got = generate(model, PROMPTS, request, draft, rng=rng)
    assert got.tokens == answers(family, sampling, "gumbel") != answers(family)
    assert max(got.trace.accept_lens) > 0  # noise that is shared makes even these drafts right at times


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drawn_guesses_come_with_what_they_were_drawn_from(rule):
    """The rules read q over the target's vocabulary; a draft of fewer words gives 0 elsewhere."""
    model = tiny.target("qwen3")
    request = Request(max_new_tokens=NEW, sampling=Sampling(temperature=1.5), rule=rule)
    for name in ("chain", "one pass", "tree"):
        draft = bound_eagle3(model, **DRAFTS[name])
        rng = torch.Generator().manual_seed(5)
        got = generate(model, PROMPTS, request, draft, rng=rng)
        assert [len(row) for row in got.tokens] == [NEW] * 3


def test_offsets_and_rows_alone_change_nothing():
    model, known = tiny.target("gpt_oss"), answers("gpt_oss")
    for name in ("chain, window", "tree, window", "one pass"):
        draft = bound_eagle3(model, **DRAFTS[name])
        request = Request(max_new_tokens=NEW, prefill_chunk=7)
        together = generate(model, PROMPTS, request, draft)
        far = generate(model, PROMPTS, Request(max_new_tokens=NEW, offset=65536), draft)
        assert together.tokens == far.tokens == known
        assert together.trace.accepted == far.trace.accepted
        for b, prompt in enumerate(PROMPTS):
            alone = generate(model, [prompt], Request(max_new_tokens=NEW), draft)
            assert alone.trace.accept_lens == [r[b] for r in together.trace.accepted if r[b] >= 0]
