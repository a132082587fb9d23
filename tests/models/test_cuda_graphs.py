"""Steps that are captured once and replayed, on a CPU by running them again: the plain target's bits."""

import pytest
import tiny
import torch
from dflash_drafts import random_dflash
from indexers import indexed_target

from outpace.decode.generate import generate
from outpace.decode.partial import Partial
from outpace.decode.request import Request
from outpace.drafts.dflash import BoundDFlash
from outpace.drafts.lookup import NGram
from outpace.drafts.tree import DDTree
from outpace.kv.metadata import FEW
from outpace.kv.partial import PartialConfig
from outpace.kv.tree import Tree
from outpace.models.cuda_graphs import GraphCache, GraphTarget, reruns
from outpace.models.load import build, named_tensors

TREE = Tree(torch.tensor([[0, 0, 0, 1, 2], [0, 1, 0, 1, 1]]))


def model_of(family):
    model = build(tiny.config(family, head_dim=8))
    tiny.randomise(named_tensors(model), 3)
    return model.eval()


def prompts_of(*sizes):
    return [tiny.tokens(1, n, seed=n)[0].tolist() for n in sizes]


def drafts_of(model):
    dflash = BoundDFlash(random_dflash(model), model)
    return {"none": None, "chain": NGram(block_size=4), "states": dflash, "tree": DDTree(dflash, 7, 3)}


def decoded(target, prompts, draft, **options):
    """Tokens, and the logits of each."""
    seen = [[] for _ in prompts]
    request = Request(
        max_new_tokens=24,
        stop=frozenset(),
        limits=tuple(24 - 7 * b for b in range(len(prompts))),
        prefill_chunk=9,
    )
    out = generate(
        target, prompts, request, draft, on_logits=lambda b, x: seen[b].append(x.clone()), **options
    )
    return out.tokens, [torch.cat(rows) for rows in seen]


def same(mine, theirs):
    assert mine[0] == theirs[0]
    assert all(torch.equal(a, b) for a, b in zip(mine[1], theirs[1], strict=True))


@pytest.mark.parametrize("deterministic", [False, True], ids=["padded", "one shape"])
@pytest.mark.parametrize("kind", ["none", "chain", "states", "tree"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_decoding_has_the_targets_tokens_and_logits(family, kind, deterministic):
    """Past the windows of 7, with a draft that is wrong often; of three rows two end before the others."""
    model = model_of(family)
    target, draft = GraphTarget(model, deterministic=deterministic), drafts_of(model)[kind]
    for sizes in ((17,), (21, 9, 14)):
        same(decoded(target, prompts_of(*sizes), draft), decoded(model, prompts_of(*sizes), draft))
    captured = target.captured
    assert captured > 1
    same(decoded(target, prompts_of(17), draft), decoded(model, prompts_of(17), draft))
    assert target.captured == captured, "known shapes need no other graph"


@pytest.mark.parametrize("kind", ["none", "states", "tree"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decoding_over_keys_of_two_bytes(dtype, kind):
    model = model_of("gpt_oss")
    model.kv_cache_dtype = dtype
    target, draft = GraphTarget(model), drafts_of(model)[kind]
    same(decoded(target, prompts_of(21, 9, 14), draft), decoded(model, prompts_of(21, 9, 14), draft))


@torch.no_grad()
def test_every_output_is_the_modules_and_stays_after_the_next_step():
    """Ragged chains and trees, states of layers, commits, rows that leave."""
    model = model_of("gpt_oss")
    results = []
    for target in (GraphTarget(model), model):
        cache, kept = target.make_cache(2, 60, slack=8), []
        for i, counts in enumerate(([5, 2], [1, 4], [5, 3], [5, 5])):
            tree = TREE if i % 2 else None
            out = target(tiny.tokens(2, 5, seed=i), cache, counts=counts, tree=tree, aux=(2, 0), logits=True)
            kept.append((counts, out))
            cache.commit([[0, 1][: counts[0]], [0, 2][: counts[1]] if tree else [0]])
        cache.select([1])
        kept.append(([3], target(tiny.tokens(1, 3), cache, aux=(2, 0), logits=True)))
        results.append((kept, cache.lengths))
    assert results[0][1] == results[1][1]
    for (counts, mine), (_, theirs) in zip(results[0][0], results[1][0], strict=True):
        for b, n in enumerate(counts):
            assert torch.equal(mine.hidden[b, :n], theirs.hidden[b, :n])
            assert torch.equal(mine.logits[b, :n], theirs.logits[b, :n])
            assert torch.equal(mine.aux[:, b, :n], theirs.aux[:, b, :n])
            assert torch.equal(mine.best[b, :n], theirs.logits[b, :n].argmax(-1))


@torch.no_grad()
def test_a_cache_of_some_rows_is_written_in_these():
    """As the server asks: sequences that come and go, in any order of rows."""
    model = model_of("llama")
    hidden = []
    for target in (GraphTarget(model), model):
        whole, lengths, items = target.make_cache(3, 40, slack=40), [0, 0, 0], []
        for i, rows in enumerate(([1], [1], [2, 0], [0, 1, 2])):
            cache = whole.of(rows, [lengths[row] for row in rows])
            items.append(target(tiny.tokens(len(rows), 3, seed=i), cache).hidden)
            for row, n in zip(rows, cache.lengths, strict=True):
                lengths[row] = n
        hidden.append(items)
    assert all(torch.equal(a, b) for a, b in zip(*hidden, strict=True))


@torch.no_grad()
def test_caches_that_live_at_once_have_memories_of_their_own():
    model = model_of("gpt_oss")
    target = GraphTarget(model)
    texts = tiny.tokens(1, 9, seed=1), tiny.tokens(1, 9, seed=2)
    alone = [model(text, model.make_cache(1, 20)).hidden for text in texts]
    caches = [target.make_cache(1, 20) for _ in texts]
    for at in range(9):
        for text, cache, want in zip(texts, caches, alone, strict=True):
            assert torch.equal(target(text[:, at : at + 1], cache).hidden[0, 0], want[0, at])
    assert target.captured == 2
    del cache, caches
    again = target.make_cache(1, 20)
    assert len(target.free) == 1 and not any(part.any() for m in again.layers for part in m.parts)
    target(texts[0][:, :1], again)
    assert target.captured == 2, "the memories come back with their graphs"


@torch.no_grad()
def test_graphs_are_captured_largest_first_and_remember_nothing():
    widths = []

    def capture(run):
        out, replay = reruns(run)
        widths.append(out.hidden.shape[1])
        return out, replay

    target = GraphTarget(model_of("gpt_oss"), capture=capture)
    target.precompile(2, 40, slack=4, most=11)
    assert widths == [16, 8, 4, 2, 1]
    cache = target.make_cache(2, 40, slack=4)
    target(tiny.tokens(2, 5), cache)
    before = kept(cache)
    target._step(cache, 4, True, ())
    assert all(torch.equal(a, b) for a, b in zip(before, kept(cache), strict=True))


def kept(cache):
    """All but the trash slots."""
    return [part[:, :, :-1].clone() for memory in cache.layers for part in memory.parts]


def test_what_no_graph_covers_runs_through_the_modules():
    """Long chunks of a prompt, partial KV, an index."""
    model = model_of("gpt_oss")
    target, draft = GraphTarget(model), NGram(block_size=4)
    with torch.no_grad():
        target(tiny.tokens(1, FEW + 1), target.make_cache(1, 90, slack=4))
    assert not target.captured
    few = {"block_size": 4, "n_sink_blocks": 1, "n_retrieval_blocks": 2, "n_window_blocks": 2}
    partial = Partial(config=PartialConfig(**few))
    prompts = prompts_of(60, 47)
    same(
        decoded(target, prompts, draft, partial=partial),
        decoded(model, prompts, draft, partial=partial),
    )
    _, indexed = indexed_target("gpt_oss")
    target = GraphTarget(indexed)
    assert not isinstance(target.make_cache(1, 20), GraphCache)
    same(decoded(target, prompts, draft), decoded(indexed, prompts, draft))


def test_a_deterministic_target_has_one_shape_with_a_draft_and_without():
    model = model_of("gpt_oss")
    target = GraphTarget(model, deterministic=True)
    for text in range(4096 - 80, 4096 - 50):  # a draft's block makes the cache longer by itself
        caches = [target.make_cache(1, text + block, max(block, 1)) for block in (0, 4, 16)]
        assert len({tuple(memory.k.shape for memory in cache.layers) for cache in caches}) == 1
    cache = target.make_cache(1, 200, slack=128)
    tree = Tree(torch.zeros(1, 65, dtype=torch.int64))
    with pytest.raises(ValueError, match="trees of at most 64 nodes, not 65"):
        target(tiny.tokens(1, 65), cache, tree=tree)
