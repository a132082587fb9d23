"""Partial KV against brute force: which tokens it shows, that they are the full cache's, and its budget."""

import pytest
import torch
import trees
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.kv.base import KVCache
from outpace.kv.partial import (
    SELECTORS,
    PartialCache,
    PartialConfig,
    PartialLayerCache,
    extremes,
    minmax,
    quest,
    rank,
)
from outpace.kv.tree import Tree

H, K, D = 6, 3, 5
WINDOWS = (0, 7, 0)


def keys_of(batch, T, seed):
    return torch.randn(batch, K, T, D, generator=torch.Generator().manual_seed(seed))


def append(cache, T, counts, seed, tree=None):
    """Random keys into every layer, values their negatives, with the queries of whoever asks."""
    rng = torch.Generator().manual_seed(seed)
    step = cache.begin(T, counts, tree=tree)
    k, q = keys_of(cache.batch, T, seed), torch.randn(cache.batch, T, H, D, generator=rng)
    views = [memory.append(k, -k, step, q) for memory in cache.layers]
    cache.advance(step)
    return k, q, views


def seen(view, query, window=0):
    """Of each row and head, the keys that one query may look at, as a set of tuples."""
    allowed = view.allowed(window)[:, query]
    return [
        [{tuple(x) for x in view.k[b, h][allowed[b]].tolist()} for h in range(K)] for b in range(len(allowed))
    ]


def as_set(keys):
    return {tuple(x) for x in keys.tolist()}


@st.composite
def configs(draw):
    return PartialConfig(
        block_size=draw(st.integers(1, 5)),
        n_sink_blocks=draw(st.integers(0, 2)),
        n_retrieval_blocks=draw(st.integers(0, 4)),
        n_window_blocks=draw(st.integers(1, 3)),
        n_spec_tokens_buf=draw(st.integers(1, 6)),
        selector=draw(st.sampled_from(sorted(SELECTORS))),
        reduce=draw(st.sampled_from(["mean", "max"])),
    )


def wanted_blocks(config, keys, q, first, end):
    """Brute force, one kv head: keys [n, D], q [T, G, D] -> the chosen blocks. `q` None: nobody asked."""
    size, scores = config.block_size, []
    for i in range(first, end):
        block = keys[i * size : (i + 1) * size]
        low, high = block.min(0).values, block.max(0).values
        if q is None or config.selector == "recent":
            scores.append(float(i))
            continue
        if config.selector in ("quest", "worst"):
            each = torch.maximum(q * low, q * high).sum(-1)
        else:
            each = torch.maximum((q * low).sum(-1), (q * high).sum(-1))
        each = -each if config.selector == "worst" else each
        over = each.amax(0) if config.reduce == "max" else each.mean(0)
        scores.append(float(over.mean()))
    best = sorted(range(first, end), key=lambda i: -scores[i - first])
    return sorted(best[: config.n_retrieval_blocks])


@settings(max_examples=60, deadline=None)
@given(
    configs(), st.lists(st.integers(1, 60), min_size=1, max_size=3), st.integers(1, 9), st.integers(0, 999)
)
def test_what_is_shown_is_sinks_chosen_blocks_window_and_buffer(config, lengths, T, seed):
    """Per row and kv head. Short rows are shown whole. The values go with their keys."""
    batch, headroom = len(lengths), config.buffer_size(T)
    full = KVCache(batch, 60 + headroom, headroom, WINDOWS, K, D)
    cache = PartialCache(full, config, headroom)
    k, q, _ = append(full, max(lengths), lengths, seed)
    cache.refresh()
    new, _, views = append(cache, T, None, seed + 1)
    size = config.block_size
    for layer, (view, window) in enumerate(zip(views, WINDOWS, strict=True)):
        shown = seen(view, T - 1, window)
        for b, n in enumerate(lengths):
            for h in range(K):
                text = torch.cat((k[b, h, :n], new[b, h]))
                if window:
                    wanted = text[-window:]
                elif n <= config.static_size:
                    wanted = text
                else:
                    start = -(-(n - config.window_size) // size) * size
                    group = q[b, :n, h * 2 : h * 2 + 2]
                    chosen = wanted_blocks(config, k[b, h], group, config.n_sink_blocks, start // size)
                    retrieved = [k[b, h, i * size : (i + 1) * size] for i in chosen]
                    wanted = torch.cat((k[b, h, : config.sink_size], *retrieved, text[start:]))
                    assert len(wanted) <= config.total_budget(T)
                assert shown[b][h] == as_set(wanted), (layer, b, h)
        allowed = view.allowed(window).any(1)[:, None].expand(-1, K, -1)
        assert torch.equal(view.k[allowed], -view.v[allowed])


@settings(max_examples=30, deadline=None)
@given(configs(), st.data())
def test_rounds_of_trees_leave_what_plain_text_leaves(config, data):
    """A tree is appended on partial KV and a path of it lives, round after round until the buffer is full;
    the same keys appended as text show the same. The full cache is untouched, and goes on where it was."""
    batch, T = 2, data.draw(st.integers(1, 6))
    headroom = config.buffer_size(T) + 1  # and the query that looks at the end
    pairs = []
    for _ in range(2):
        full = KVCache(batch, 90, headroom, WINDOWS, K, D)
        append(full, 40, [40, 23], 5)
        pairs.append(PartialCache(full, config, headroom))
        pairs[-1].refresh()
    ours, plain = pairs
    held = [memory.k.clone() for memory in ours.full.layers if not memory.window]
    for round_ in range(data.draw(st.integers(1, 4))):
        if max(ours.buffered) + T >= headroom:
            break
        rows = [[0, *(data.draw(st.integers(0, c - 1)) for c in range(1, T))] for _ in range(batch)]
        new, _, _ = append(ours, T, None, 50 + round_, Tree(trees.padded(rows, T)))
        path = [trees.ancestors(row, data.draw(st.integers(0, T - 1))) for row in rows]
        ours.commit(path)
        counts = [len(columns) for columns in path]
        step = plain.begin(max(counts), counts)
        for memory in plain.layers:
            kept = torch.zeros(batch, K, max(counts), D)
            for b, columns in enumerate(path):
                kept[b, :, : len(columns)] = new[b][:, columns]
            memory.append(kept, -kept, step)
        plain.advance(step)
    assert ours.lengths == plain.lengths
    for seed in (80, 81):  # the next query, and after a rewind to the full cache's text the first one
        (_, _, mine), (_, _, theirs) = (append(cache, 1, None, seed) for cache in pairs)
        for x, y, window in zip(mine, theirs, WINDOWS, strict=True):
            assert seen(x, 0, window) == seen(y, 0, window)
        for cache in pairs:
            cache.rewind(list(cache.full.lengths))
    dense = [memory.k for memory in ours.full.layers if not memory.window]
    assert all(map(torch.equal, held, dense)) and ours.full.lengths == [40, 23]
    k, _, views = append(ours.full, 3, None, 99)
    assert seen(views[1], 2, 7)[0][0] == as_set(torch.cat((keys_of(2, 40, 5)[0, 0, 36:], k[0, 0])))


def test_rows_that_end_leave_and_their_blocks_with_them():
    config = PartialConfig(block_size=2, n_sink_blocks=1, n_retrieval_blocks=2, n_window_blocks=2)
    whole = KVCache(3, 60, 30, WINDOWS, K, D)
    part = KVCache(2, 60, 30, WINDOWS, K, D)
    caches = [PartialCache(full, config, 30) for full in (whole, part)]
    rng, k = torch.Generator().manual_seed(1), keys_of(3, 31, 7)
    q = torch.randn(3, 31, H, D, generator=rng)
    for full, rows in ((whole, [0, 1, 2]), (part, [2, 0])):
        step = full.begin(31, [(31, 9, 26)[b] for b in rows])
        for memory in full.layers:
            memory.append(k[rows], -k[rows], step, q[rows])
        full.advance(step)
    caches[0].refresh()
    whole.select([2, 0])
    caches[0].select([2, 0])
    for cache in caches:
        cache.refresh()
    views = [append(cache, 2, None, 8)[2] for cache in caches]
    for x, y, window in zip(*views, WINDOWS, strict=True):
        assert seen(x, 1, window) == seen(y, 1, window)


def test_blocks_are_summarised_once_and_only_whole():
    config = PartialConfig(block_size=4, n_sink_blocks=1, n_retrieval_blocks=1, n_window_blocks=1)
    full = KVCache(1, 60, 25, (0,), K, D)
    cache = PartialCache(full, config, 25)
    k, _, _ = append(full, 18, None, 1)
    cache.refresh()
    assert cache.summarised == [4]
    more, _, _ = append(full, 9, None, 2)
    full.commit([[0, 1, 2, 3, 4, 5, 6]])
    memory = cache.layers[0]
    # what was summarised is not read again
    memory.full.k[:, :, :16] += 100  # type: ignore[attr-defined]
    cache.refresh()
    assert cache.summarised == [6]
    low, high = extremes(torch.cat((k, more), 2)[0, :, :24], 4)
    assert torch.equal(memory.low[0, :, :6], low) and torch.equal(memory.high[0, :, :6], high)  # type: ignore[attr-defined]


def test_only_quest_bounds_what_a_block_holds():
    rng = torch.Generator().manual_seed(0)
    keys, q = torch.randn(K, 40, D, generator=rng), torch.randn(9, H, D, generator=rng)
    low, high = extremes(keys, 8)
    dots = torch.einsum("tkgd,ksd->tkgs", q.view(9, K, 2, D), keys).flatten(1, 2)
    best = dots.unflatten(2, (5, 8)).amax(3)
    assert (quest(q, low, high) >= best - 1e-5).all()
    assert (minmax(q, low, high) < best - 0.1).any()
    assert rank(best, K, "max").shape == (K, 5)


def test_it_takes_what_it_says():
    config = PartialConfig(block_size=2, n_sink_blocks=1, n_retrieval_blocks=3, n_window_blocks=2)
    full = KVCache(2, 80, 30, WINDOWS, K, D)
    cache = PartialCache(full, config, 30)
    slots = config.static_size + 30 + 1  # and one for padding
    per_layer = 2 * K * D * 4 * (2 * slots + 2 * (80 // 2))
    assert cache.nbytes == 2 * per_layer
    assert [type(memory) is PartialLayerCache for memory in cache.layers] == [True, False, True]
    assert cache.layers[1] is full.layers[1]


def test_the_names_and_sizes_of_the_paper():
    config = PartialConfig()
    assert (config.sink_size, config.retrieval_size, config.window_size) == (32, 4096, 128)
    assert config.static_size == 4256 and config.total_budget(60) == 4256 + 80


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"block_size": 0}, "block_size 0: it must be at least 1"),
        ({"n_window_blocks": 0}, "n_window_blocks 0: it must be at least 1"),
        ({"n_retrieval_blocks": -1}, "n_retrieval_blocks -1: it must be at least 0"),
        ({"n_spec_tokens_buf": 0}, "n_spec_tokens_buf 0: it must be at least 1"),
        ({"selector": "best"}, "selector 'best': it must be one of quest, minmax, recent, worst"),
        ({"reduce": "sum"}, "reduce 'sum': it must be one of mean, max"),
    ],
)
def test_sizes_that_cannot_be(message, error):
    with pytest.raises(ValueError, match=error):
        PartialConfig(**message)


def test_promises_that_cannot_be_kept():
    config = PartialConfig(block_size=2, n_sink_blocks=1, n_retrieval_blocks=1, n_window_blocks=2)
    full = KVCache(1, 60, 8, WINDOWS, K, D)
    with pytest.raises(AssertionError, match="9 buffered positions"):
        PartialCache(full, config, 9)
    cache = PartialCache(full, config, 8)
    append(full, 30, None, 1)
    cache.refresh()
    append(cache, 5, None, 2)
    with pytest.raises(ValueError, match="the first 30 are the full cache's"):
        cache.rewind([29])
    with pytest.raises(AssertionError, match="5 and 4 more; the buffer has 8 positions"):
        cache.begin(4)


def test_summaries_stay_with_their_rows():
    """When rows leave a batch, the others choose the blocks that a cache made for them alone would choose."""
    config = PartialConfig(
        block_size=3, n_sink_blocks=1, n_retrieval_blocks=2, n_window_blocks=1, n_spec_tokens_buf=4
    )
    full = KVCache(3, 80, 8, WINDOWS, K, D)
    cache = PartialCache(full, config, 8)
    append(full, 50, [50, 38, 45], 1)
    cache.refresh()
    full.select([2, 0])
    cache.select([2, 0])
    append(full, 5, None, 2)
    cache.refresh()
    alone = PartialCache(full, config, 8)
    alone.refresh()
    assert cache.static == alone.static
    for ours, wanted in zip(cache.partials, alone.partials, strict=True):
        for b, (n, length) in enumerate(zip(alone.static, full.lengths, strict=True)):
            blocks = length // config.block_size
            assert torch.equal(ours.k[b, :, :n], wanted.k[b, :, :n])
            assert torch.equal(ours.low[b, :, :blocks], wanted.low[b, :, :blocks])
            assert torch.equal(ours.high[b, :, :blocks], wanted.high[b, :, :blocks])
