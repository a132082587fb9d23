"""A target through XLA, on a CPU: the decoding loop gets the same tokens, and programs are made once.

`test_xla.py` runs these in a process of their own: with torchax in it, torch.compile finds no way any more.
"""

import sys
from pathlib import Path

import pytest
import tiny
import torch
from dflash_drafts import random_dflash

sys.path.append(str(Path(__file__).parents[1] / "decode"))
from questions import PROMPT
from test_device_rounds import HOT, Alternating, draft_of, lucky
from test_lossless import NEW, PROMPTS, answers

import outpace
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.dflash import BoundDFlash
from outpace.drafts.lookup import NGram
from outpace.kv.tree import Tree
from outpace.models import xla
from outpace.models.load import build, named_tensors

TOLERANCE = 1e-4


def model_of(family):
    model = build(tiny.config(family))
    tiny.randomise(named_tensors(model), 3)
    return model.eval()


def prompts_of(*sizes):
    return [tiny.tokens(1, n, seed=n)[0].tolist() for n in sizes]


def both(model, target, prompts, draft, new_tokens=20):
    """The tokens of the engine and of XLA."""
    request = Request(max_new_tokens=new_tokens, stop=frozenset(), prefill_chunk=8)
    return [generate(x, prompts, request, draft).tokens for x in (model, target)]


@pytest.mark.parametrize(("family", "lookup"), [("gpt_oss", True), ("qwen3", False)])
def test_decoding_has_the_engines_tokens_past_the_windows(family, lookup):
    """With drafts that are wrong often, of the text or none, and a DFlash, which runs there whole."""
    model = model_of(family)
    target = xla.XLATarget(model)
    drafts = [NGram(block_size=4) if lookup else None, BoundDFlash(random_dflash(model), model)]
    for draft in drafts:
        size, layers = (1, ()) if draft is None else (draft.block_size, draft.target_layer_ids)
        target.precompile(1, 50, size, layers, most=8)
        both(model, target, prompts_of(13), draft)  # compiles the rounds of the draft
    programs = target.programs
    for draft in drafts:
        for prompt_tokens in (17, 21):
            mine, theirs = both(model, target, prompts_of(prompt_tokens), draft)
            assert mine == theirs
    assert target.programs == programs >= 8, "no length and no count needs another program"


def test_decoding_over_keys_of_two_bytes():
    model = model_of("qwen3")
    model.kv_cache_dtype = torch.bfloat16
    target, draft = xla.XLATarget(model), BoundDFlash(random_dflash(model), model)
    assert target.make_cache(1, 40).layers[0].k.dtype == torch.bfloat16
    for drafting in (None, draft):
        mine, theirs = both(model, target, prompts_of(17), drafting)
        assert mine == theirs


@pytest.mark.parametrize("kind", ["DFlash 2, window", "DSpark", "EAGLE-3"])
def test_rounds_of_a_draft_run_whole(kind):
    """Ragged rows, which end one after the other; accepted as by the engine, with a length that changes."""
    model = tiny.target("gpt_oss", True)
    draft, target = draft_of(kind, model, "gpt_oss"), xla.XLATarget(model)
    request = Request(max_new_tokens=20, limits=(20, 7, 13), prefill_chunk=8)
    for controller in (None, Alternating):
        mine, theirs = (
            generate(x, PROMPTS, request, draft, controller=controller and controller(4))
            for x in (model, target)
        )
        assert mine.tokens == theirs.tokens
        assert mine.trace.accepted == theirs.trace.accepted and sum(mine.trace.accept_lens)


def test_drawn_rounds_have_the_engines_tokens():
    how = HOT[1]
    model = tiny.target("gpt_oss", True)
    draft, target = lucky(model, "gpt_oss"), xla.XLATarget(model)
    request = Request(max_new_tokens=20, limits=(20, 7, 13), prefill_chunk=8, sampling=how, rule="gumbel")
    mine, theirs = (
        generate(x, PROMPTS, request, draft, rng=torch.Generator().manual_seed(5)) for x in (model, target)
    )
    assert mine.tokens == theirs.tokens and mine.trace.accepted == theirs.trace.accepted
    assert sum(mine.trace.accept_lens)


def test_a_stop_token_and_who_reads_end_rows():
    model = tiny.target("gpt_oss", True)
    draft, target, known = lucky(model, "gpt_oss"), xla.XLATarget(model), answers("gpt_oss", True, 3)
    request = Request(max_new_tokens=NEW, stop=frozenset({known[0][11]}), prefill_chunk=8)

    def first_ends(row, tokens):
        return row == 1

    tokens = generate(target, PROMPTS, request, draft, on_tokens=first_ends).tokens
    assert tokens[0] == known[0][: known[0].index(known[0][11]) + 1] and tokens[1] == known[1][:1]
    assert tokens[2] == generate(model, PROMPTS, request, draft).tokens[2]


def test_rows_that_end_leave_the_others_as_they_are():
    model = model_of("gpt_oss")
    request = Request(max_new_tokens=12, limits=(3, 12), stop=frozenset(), prefill_chunk=8)
    mine, theirs = (generate(x, prompts_of(9, 20), request).tokens for x in (model, xla.XLATarget(model)))
    assert mine == theirs and list(map(len, theirs)) == [3, 12]


@torch.no_grad()
def test_states_and_logits_are_the_modules():
    """Mixed counts of a padded step, with the layers that a draft reads; `precompile` makes all programs."""
    model = tiny.in_mxfp4(model_of("gpt_oss"))
    target = xla.XLATarget(model)
    target.precompile(2, 40, slack=8, aux=(2, 0), most=8)
    programs = target.programs
    caches = [x.make_cache(2, 40, slack=8) for x in (model, target)]
    for n, counts in ((5, [5, 2]), (3, [1, 3]), (8, [8, 8]), (1, [1, 1])):
        tokens = tiny.tokens(2, n, seed=n)
        want, got = (
            x(tokens, cache, counts=counts, aux=(2, 0), logits=True)
            for x, cache in zip((model, target), caches, strict=True)
        )
        for b, count in enumerate(counts):
            for name in ("hidden", "logits"):
                pair = (getattr(x, name)[b, :count] for x in (got, want))
                torch.testing.assert_close(*pair, rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(got.aux[:, b, :count], want.aux[:, b, :count], rtol=0, atol=TOLERANCE)
            assert torch.equal(got.best[b, :count], want.logits[b, :count].argmax(-1))
    assert caches[0].lengths == caches[1].lengths and target.programs == programs == 4


def test_the_embedded_model_solves_a_problem_with_the_same_tokens():
    model, prompt = outpace.load(), list(PROMPT)
    target = xla.XLATarget(model.target)
    mine, theirs = both(model.target, target, [prompt], outpace.load_draft("dflash", model), 40)
    assert mine == theirs


def test_what_it_does_not_do_is_refused():
    model = model_of("llama")
    target = xla.XLATarget(model)
    cache = target.make_cache(1, 80)
    tree = Tree(torch.tensor([[0, 0, 0]]))
    for tokens, options in ((tiny.tokens(1, 3), {"tree": tree}), (tiny.tokens(1, 65), {})):
        with pytest.raises(ValueError, match="a chain of at most 64 tokens, no tree"):
            target(tokens, cache, **options)
    assert cache.lengths == [0]
