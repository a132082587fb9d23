"""Sparse attention: what the index leaves out is not read, in chunks, in trees and over latents."""

import json

import pytest
import tiny
import torch
import trees
from indexers import KEEP, indexed_target

from outpace.checkpoint.open import LoadError
from outpace.kv.topk import TopKConfig
from outpace.kv.tree import Tree
from outpace.models.load import fingerprint, load_target, parse_config
from outpace.models.save import save_target
from outpace.ops.attention import attend

LATENT = [(family, rank) for family in tiny.FAMILIES for rank in (None, 7)]


def whole(model, tokens):
    return model.logits(model(tokens).hidden)


def in_chunks(model, tokens, size, **kind):
    cache, items = model.make_cache(len(tokens), tokens.shape[1] + 3, slack=9, **kind), []
    for i in range(0, tokens.shape[1], size):
        items.append(model(tokens[:, i : i + size], cache).hidden)
    return model.logits(torch.cat(items, 1))


@pytest.mark.parametrize(("family", "rank"), LATENT)
@torch.inference_mode()
def test_cached_and_not_say_the_same(family, rank):
    dense, sparse = indexed_target(family, rank=rank)
    tokens = tiny.tokens(2, 60, seed=4)
    wanted = whole(sparse, tokens)
    lost = (wanted - whole(dense, tokens)).abs().amax((0, 2))
    assert lost[: KEEP.min_context].max() < 2e-4 and lost[KEEP.min_context + 2 :].max() > 0.1
    alone = in_chunks(sparse, tokens, 1)
    for size in (5, 60):
        assert (in_chunks(sparse, tokens, size) - wanted).abs().max() < 2e-4
    assert (alone - wanted).abs().max() < 2e-4
    if sparse.config.head_dim % 8 == 0:  # the kernels' rows do not depend on how many there are
        assert torch.equal(in_chunks(sparse, tokens, 5), alone)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_an_index_that_leaves_nothing_out_is_the_target(family):
    dense, sparse = indexed_target(family, TopKConfig(top_k=0.999, min_context=5, sinks=0, recent=59))
    tokens = tiny.tokens(2, 60, seed=4)
    assert (in_chunks(sparse, tokens, 7) - in_chunks(dense, tokens, 7)).abs().max() < 2e-5


@torch.inference_mode()
def test_what_is_left_out_is_not_read():
    """Keys and values that no query chose may be anything."""
    _, sparse = indexed_target("gpt_oss")
    tokens = tiny.tokens(1, 60, seed=4)
    cache = sparse.make_cache(1, 70, slack=9)
    sparse(tokens, cache)
    more, seen = tiny.tokens(1, 3, seed=5), {}
    layers = [cache.layers[i] for i in sparse.config.dsa_layers]
    for memory in layers:
        memory.append = recording(memory, seen)
    wanted = sparse(more, cache).hidden
    cache.rewind([60])
    for memory in layers:
        lists, many = seen[id(memory)]
        kept = {s for t in range(3) for s in lists[0, t, : many[0, t]].tolist()}
        left_out = [s for s in range(60) if s not in kept]
        assert len(left_out) > 20
        memory.k[:, :, left_out] = memory.v[:, :, left_out] = float("nan")
        del memory.append
    assert torch.equal(sparse(more, cache).hidden, wanted)


def recording(memory, seen):
    append = type(memory).append

    def record(*given):
        view = append(memory, *given)
        seen[id(memory)] = view.lists
        return view

    return record


@pytest.mark.parametrize(("family", "rank"), LATENT)
@torch.inference_mode()
def test_a_tree_s_paths_are_chains(family, rank):
    """Each root-to-leaf path states what it states alone; the committed one is remembered as text is."""
    _, sparse = indexed_target(family, rank=rank)
    rows = [trees.parents_of("any", 9, 1), [0, 0, 1, 1, 3]]
    text, new = tiny.tokens(2, 40, seed=4), tiny.tokens(2, 9, seed=6)
    cache = sparse.make_cache(2, 70, slack=16)
    sparse(text[:, :40], cache, counts=[40, 31])
    result = sparse(new, cache, counts=[9, 5], tree=Tree(trees.padded(rows, 9))).hidden
    for b, (row, n) in enumerate(zip(rows, (40, 31), strict=True)):
        for path in trees.leaf_paths(row, len(row)):
            alone = whole_hidden(sparse, torch.cat((text[b, :n], new[b, path])))[n:]
            assert (result[b, path] - alone).abs().max() < 2e-4
    paths = [trees.leaf_paths(row, len(row))[-1] for row in rows]
    cache.commit(paths)
    more = tiny.tokens(2, 4, seed=7)
    result = sparse(more, cache).hidden
    for b, (path, n) in enumerate(zip(paths, (40, 31), strict=True)):
        alone = whole_hidden(sparse, torch.cat((text[b, :n], new[b, path], more[b])))[-4:]
        assert (result[b] - alone).abs().max() < 2e-4


def whole_hidden(model, row):
    return model(row[None]).hidden[0]


@torch.inference_mode()
def test_the_far_end_of_the_positions():
    """The index turns with the attention's own frequencies: the same text far out chooses the same."""
    _, sparse = indexed_target("gpt_oss")
    tokens = tiny.tokens(2, 60, seed=4)
    near, far = (in_chunks(sparse, tokens, 9, offset=offset) for offset in (0, 70000))
    assert (near - far).abs().max() < 2e-2


def test_with_gradients_it_attends_to_the_same():
    """No kernel takes part where gradients are kept."""
    _, sparse = indexed_target("llama")
    tokens = tiny.tokens(2, 60, seed=4)
    with torch.inference_mode():
        wanted = whole(sparse, tokens)
    assert (whole(sparse, tokens) - wanted).abs().max() < 2e-4


@torch.inference_mode()
def test_lists_are_a_mask(monkeypatch):
    """Against the reference of attention, with every key that no list names hidden."""
    _, sparse = indexed_target("gpt_oss")
    tokens = tiny.tokens(2, 60, seed=4)
    wanted = whole(sparse, tokens)

    def by_mask(q, view, window, sinks, scale):
        return attend(q, view.k, view.v, view.allowed(window), sinks, scale)

    monkeypatch.setattr("outpace.models.attention.attend_view", by_mask)
    assert (whole(sparse, tokens) - wanted).abs().max() < 2e-4


@torch.inference_mode()
def test_switched_off_it_is_the_target_it_was_made_from():
    dense, sparse = indexed_target("qwen3_moe")
    tokens = tiny.tokens(2, 40, seed=4)
    sparse.use_dsa(False)
    assert torch.equal(in_chunks(sparse, tokens, 6), in_chunks(dense, tokens, 6))
    assert sparse.make_cache(2, 50).nbytes == dense.make_cache(2, 50).nbytes
    sparse.use_dsa(True)
    layers = len(sparse.config.dsa_layers)
    assert sparse.make_cache(2, 50).nbytes - dense.make_cache(2, 50).nbytes == layers * 2 * 51 * 8 * 4
    with pytest.raises(ValueError, match="no sparse attention to switch"):
        dense.use_dsa(True)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("rank", [None, 5])
@torch.inference_mode()
def test_saved_and_loaded(tmp_path, family, rank):
    _, sparse = indexed_target(family, rank=rank, window=family == "gpt_oss")
    save_target(sparse, tmp_path)
    loaded = load_target(tmp_path)
    assert loaded.config == sparse.config and fingerprint(loaded) == fingerprint(sparse)
    tokens = tiny.tokens(1, 40, seed=4)
    assert torch.equal(whole(loaded, tokens), whole(sparse, tokens))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dsa_top_k"] == 14 and config["dsa_index_dim"] == 8 and config["use_dsa"] is True
    del config["dsa_layers"], config["use_dsa"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="dsa_"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"dsa_layers": None}, "use_dsa without dsa_layers"),
        ({"dsa_layers": [1, 1]}, "distinct layers"),
        ({"dsa_layers": [0]}, "layer 0, which is not one of those with full attention"),
        ({"dsa_layers": [99]}, "distinct layers below 4"),
        ({"dsa_layers": "all"}, "a list of layers"),
        ({"dsa_index_dim": 7}, "an even number of dimensions"),
        ({"dsa_index_dim": None}, "lacks `dsa_index_dim`"),
        ({"dsa_top_k": 5}, "above sinks and recent, 8"),
        ({"dsa_top_k": "many"}, "dsa_top_k"),
        ({"dsa_recent": 0}, "dsa_recent"),
        ({"dsa_top_p": 1.5}, "dsa_top_p"),
        ({"dsa_top_p": [1]}, "dsa_top_p"),
        ({"use_dsa": 3}, "true or false"),
    ],
)
def test_a_config_that_says_nonsense(tmp_path, message, named):
    save_target(indexed_target("gpt_oss")[1], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match=named):
        parse_config(config | message)
