"""With the target on partial KV in between, the loop states the same: every draft, and a bad selector."""

from dataclasses import replace
from itertools import pairwise

import pytest
import tiny
import torch
from eagle3_drafts import bound_eagle3
from scripted import Scripted
from test_coupled import WAYS, by_definition, request, seed
from test_lossless import NEW, PROMPTS, answers, half, random_dflash
from test_lossless_eagle3 import TREE
from test_suffix import draft as suffix
from test_trees import ScriptedTree

from outpace.decode.controller import Fixed
from outpace.decode.generate import generate
from outpace.decode.partial import LONGEST_REST, Partial
from outpace.decode.request import Request
from outpace.drafts.eagle3_decode import TreeShape
from outpace.drafts.lookup import NGram, NullDraft
from outpace.drafts.sampler import Greedy
from outpace.drafts.tree import DDTree
from outpace.kv.partial import PartialCache, PartialConfig, PartialLayerCache
from outpace.models import attention
from outpace.ops.attention import attend

SMALL = PartialConfig(
    block_size=2, n_sink_blocks=1, n_retrieval_blocks=2, n_window_blocks=2, n_spec_tokens_buf=6
)


BAD = replace(SMALL, selector="worst")


def drafts(name, model, known):
    prompts = PROMPTS[: len(known)]
    match name:
        case "silent":
            return NullDraft()
        case "ngram":
            return NGram(block_size=6)
        case "suffix":
            return suffix(nodes=5)
        case "dflash":
            return random_dflash(model)
        case "dflash, window":
            types = ("sliding_attention", "full_attention")
            return random_dflash(model, 6, layer_types=types, sliding_window=9)
        case "tree of dflash":
            return DDTree(random_dflash(model), nodes=9)
        case "eagle3, window":
            return bound_eagle3(model, shape=TreeShape(depth=6), sliding_window=5)
        case "eagle3, tree":
            return bound_eagle3(model, shape=TREE)
        case "p-eagle":
            return bound_eagle3(model, shape=TREE, parallel=True)
        case "half":
            return Scripted(known, prompts, half, ragged=True, patient=True)
        case "half, tree":
            return ScriptedTree(known, prompts, half, 9, True, patient=True)
    raise AssertionError(name)


DRAFTS = [
    "silent", "ngram", "suffix", "dflash", "dflash, window", "tree of dflash", "eagle3, window",
    "eagle3, tree", "p-eagle", "half", "half, tree",
]  # fmt: skip
# every pair of a draft, a family and a window
PAIRS = [
    (family, (i + j) % 2 == 0, name)
    for i, name in enumerate(DRAFTS)
    for j, family in enumerate(tiny.FAMILIES)
]
STATEFUL = [name for name in DRAFTS if not name.startswith("half")]


@pytest.mark.parametrize(("family", "window", "name"), PAIRS)
def test_the_text_is_plain_decodings(family, window, name):
    """Past the budget of ten tokens, rows of one batch before it and past it; partial KV is often wrong."""
    model, known = tiny.target(family, window), answers(family, window, 3)
    for batch, config in ((3, SMALL), (3, BAD), (1, BAD)):
        draft = drafts(name, model, known[:batch])
        partial = Partial(config=config)
        got = generate(model, PROMPTS[:batch], Request(max_new_tokens=NEW), draft, partial=partial)
        assert got.tokens == known[:batch], config.selector
        assert got.trace.partial_forwards > 0 and len(got.trace.provisional) == len(got.trace.accepted)


def runs(config=SMALL, mode="lossless", new=60):
    model = tiny.target("gpt_oss")
    prompts = [tiny.tokens(n, seed=n).tolist() for n in (61, 40)]
    asked = Request(max_new_tokens=new)
    partial = Partial(config=config, mode=mode)
    got = generate(model, prompts, asked, random_dflash(model), partial=partial)
    return got, generate(model, prompts, asked).tokens


def test_a_bad_selector_costs_speed_and_nothing_else():
    """A middle drafter that is mostly wrong is asked ever more seldom."""
    good, wanted = runs()
    bad, _ = runs(BAD)
    assert good.tokens == bad.tokens == wanted
    kept, all_ = bad.trace.confirmed
    assert 0 < kept < all_ and kept / all_ < good.trace.confirmed[0] / good.trace.confirmed[1]
    assert good.trace.rounds < bad.trace.rounds


def test_what_never_stands_is_left_alone(monkeypatch):
    """The full pass contradicts all that partial KV states: rests double up to the longest."""
    model, prompt = tiny.target("gpt_oss"), tiny.tokens(40, seed=1).tolist()
    known = generate(model, [prompt], Request(max_new_tokens=200)).tokens
    head = model.logits

    def logits(hidden):
        value = head(hidden)
        return value.roll(1, -1) if model.on_partial else value

    forward = model.forward

    def noting(tokens, cache=None, **asked):
        model.on_partial = isinstance(cache, PartialCache)
        return forward(tokens, cache, **asked)

    model.on_partial, model.forward, model.logits = False, noting, logits
    monkeypatch.setattr(model, "native", False)  # a native step has a head of its own
    try:
        draft = Scripted(known, [prompt], lambda b, i: True, patient=True)
        got = generate(model, [prompt], Request(max_new_tokens=200), draft, partial=Partial(config=SMALL))
    finally:
        del model.on_partial, model.forward, model.logits
    assert got.tokens == known
    tried = [n for n, (m,) in enumerate(got.trace.provisional) if m]
    gaps = [b - a - 1 for a, b in pairwise(tried)]
    assert gaps == [min(2**i, LONGEST_REST) for i in range(len(gaps))] and len(gaps) >= 6
    assert got.trace.confirmed[0] == 0


def test_a_large_enough_buffer_for_everything_is_the_full_cache():
    """While nothing is left out, partial KV is not asked at all; and its output would be bit-equal."""
    model = tiny.target("gpt_oss")
    config = PartialConfig(block_size=2, n_retrieval_blocks=60)
    got, wanted = runs(config)
    assert got.tokens == wanted and got.trace.partial_forwards == 0
    tokens = tiny.tokens(2, 50, seed=4)
    full = model.make_cache(2, 80, slack=30)
    with torch.inference_mode():
        near = PartialCache(full, config, 30)
        model(tokens[:, :40], full)
        near.refresh()
        here, there = (model(tokens[:, 40:45], cache, aux=(0, 2)) for cache in (near, full))
    assert torch.equal(there.hidden, here.hidden) and torch.equal(there.aux, here.aux)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
@torch.inference_mode()
def test_a_forward_on_partial_kv_sees_no_more_than_it_shows(family, monkeypatch):
    """Brute force: a pass over the full cache where the full-attention layers hide all other keys, by
    head."""
    model, text = tiny.target(family), tiny.tokens(1, 46, seed=9)
    config = PartialConfig(block_size=4, n_sink_blocks=1, n_retrieval_blocks=1, n_window_blocks=2)
    full = model.make_cache(1, 80, slack=30)
    near = PartialCache(full, config, 30)
    model(text[:, :40], full)
    near.refresh()
    got = model(text[:, 40:], near).hidden
    partial = [memory if isinstance(memory, PartialLayerCache) else None for memory in near.layers]
    chosen = [None if memory is None else memory.choose(0, 1, 8)[:, 0].tolist() for memory in partial]
    layers = iter(chosen)

    def hiding(q, view, window, sinks, scale):
        kept, group = next(layers), q.shape[2] // view.k.shape[1]
        items = []
        for h in range(view.k.shape[1]):
            allowed = view.allowed(window)
            if kept is not None:
                allowed[:, :, [i for i in range(4, 32) if i // 4 != kept[h]]] = False
            heads = slice(h * group, (h + 1) * group)
            theirs = None if sinks is None else sinks[heads]
            k, v = (x[:, h : h + 1] for x in (view.k, view.v))
            items.append(attend(q[:, :, heads], k, v, allowed, theirs, scale))
        return torch.cat(items, -1)

    whole = model(text[:, 40:], full).hidden
    full.rewind([40])
    monkeypatch.setattr(attention, "attend_view", hiding)
    monkeypatch.setattr(model, "native", False)
    wanted = model(text[:, 40:], full).hidden
    assert (got - wanted).abs().max() < 1e-5 < (whole - wanted).abs().max()
    assert next(layers, None) is None
    assert len({block for blocks in chosen if blocks for block in blocks}) > 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_the_same_noise_gives_the_same_text(family, way):
    model, known = tiny.target(family), by_definition(family, way)
    for name in ("ngram", "dflash", "tree of dflash", "half, tree"):
        for config in (SMALL, BAD):
            partial = Partial(config=config)
            draft = drafts(name, model, known)
            got = generate(model, PROMPTS, request(way), draft, rng=seed(), partial=partial)
            assert got.tokens == known and got.trace.partial_forwards > 0


def test_rows_that_leave_change_nothing_for_the_others():
    model, known = tiny.target("gpt_oss"), answers("gpt_oss", True, 3)
    limits, stop = (3, NEW, 9), known[1][8]
    wanted = [row[:n] for row, n in zip(known, limits, strict=True)]
    for name in ("dflash, window", "eagle3, tree", "half"):
        draft = drafts(name, model, known)
        asked = Request(max_new_tokens=NEW, limits=limits)
        got = generate(model, PROMPTS, asked, draft, partial=Partial(config=SMALL))
        assert got.tokens == wanted
        asked = Request(max_new_tokens=NEW, stop=frozenset({stop}))
        draft = drafts(name, model, known)
        got = generate(model, PROMPTS, asked, draft, partial=Partial(config=SMALL))
        assert got.tokens == [row[: row.index(stop) + 1] if stop in row else row for row in known]


@pytest.mark.parametrize("name", STATEFUL)
@torch.inference_mode()
def test_what_was_provisional_is_forgotten(name):
    """A session that was shown text and had it taken back proposes what one does that never saw it."""
    model = tiny.target("gpt_oss")
    draft = drafts(name, model, answers("gpt_oss", True, 2))
    text = tiny.tokens(2, 50, seed=3)
    aux = model(text, aux=draft.target_layer_ids).aux
    other = None if aux is None else aux.flip(1)
    sessions = [draft.begin(2, 60, slack=20) for _ in range(2)]

    def show(session, begin, end, counts, states=aux):
        part = None if states is None else states[:, :, begin:end]
        session.observe(text[:, begin:end], part, counts)

    ways = Greedy()
    for session in sessions:
        show(session, 0, 20, [20, 17])
        first = session.propose(text[:, 20], draft.block_size, ways)
    for begin, end, counts in ((30, 35, [5, 2]), (36, 40, [4, 4]), (41, 44, [3, 1])):
        show(sessions[0], begin, end, counts, other)
        sessions[0].propose(text[:, end], draft.block_size, ways)
    sessions[0].rewind([20, 17])
    items = []
    for session in sessions:
        show(session, 20, 24, [4, 2])
        items.append(session.propose(text[:, 24], draft.block_size, ways))
    assert torch.equal(items[0].tokens, items[1].tokens) and items[0].counts == items[1].counts
    if items[0].survival is not None:
        assert torch.equal(items[0].survival, items[1].survival)
    assert first.tokens.shape[0] == 2


def test_the_lossy_mode_takes_what_partial_kv_says():
    """Nothing provisional is ever taken back, and the text is another one."""
    lossy, wanted = runs(BAD, mode="lossy")
    kept, all_ = lossy.trace.confirmed
    assert kept == all_ > 0 and lossy.tokens != wanted
    assert [len(row) for row in lossy.tokens] == [60, 60]
    sampled = Request(max_new_tokens=20, sampling=WAYS["penalty"], rule="match")
    model = tiny.target("gpt_oss")
    partial = Partial(config=SMALL, mode="lossy")
    got = generate(model, PROMPTS, sampled, NGram(), rng=seed(), partial=partial)
    assert got.trace.confirmed[0] == got.trace.confirmed[1]


def test_what_is_refused():
    model = tiny.target("gpt_oss")
    with pytest.raises(ValueError, match="mode 'fast': it must be one of lossless, lossy"):
        Partial(mode="fast")
    with pytest.raises(ValueError, match="no controller"):
        generate(model, PROMPTS, Request(max_new_tokens=3), NGram(), partial=Partial(), controller=Fixed(2))
