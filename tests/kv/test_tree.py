"""Trees against brute force, and commits over rings: the cache of a path is the cache of its text."""

import ctypes

import pytest
import torch
import trees
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outpace.kernels.bindings import available
from outpace.kernels.program import Program
from outpace.kv import tree as module
from outpace.kv.base import KVCache
from outpace.kv.tree import Tree

K, D = 3, 5  # kv heads, head dim


@st.composite
def families(draw, most=14):
    """Parents of a batch of trees of different sizes, padded to one width."""
    sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=3))
    rows = [[0, *(draw(st.integers(0, c - 1)) for c in range(1, n))] for n in sizes]
    return rows, max(sizes) + draw(st.integers(0, 2))


@given(families(), st.integers(0, 9), st.data())
@example(([[0, *range(11)]], 12), 3, None)  # a chain deeper than its window
def test_depths_and_ancestors(case, window, data):
    rows, N = case
    parents = trees.padded(rows, N)
    held = data.draw(st.integers(0, N - 1)) if data is not None else 4
    whole, grown = Tree(parents), Tree(parents, held)
    seen, depth = torch.zeros(len(rows), N, N, dtype=torch.bool), torch.zeros(len(rows), N, dtype=torch.int64)
    near = seen.clone()
    for b, family in enumerate(parents.tolist()):
        for column in range(N):
            path = trees.ancestors(family, column)
            depth[b, column] = len(path) - 1
            seen[b, column, path] = True
            near[b, column, path[-window:]] = True
    assert torch.equal(whole.sees, seen) and torch.equal(whole.depth, depth)
    assert torch.equal(whole.within(window), near) and torch.equal(whole.within(0), seen)
    assert torch.equal(grown.sees, seen[:, held:]) and torch.equal(grown.depth, depth[:, held:])
    assert torch.equal(grown.within(window), near[:, held:])
    for result, wanted in zip(module._by_doubling(parents), (seen, depth), strict=True):
        assert torch.equal(result, wanted)  # what devices do instead
    for part in (grown.sees, grown.depth, grown.within(window)):
        assert part.is_contiguous()  # kernels read them by address
    if available():
        assert all(
            map(torch.equal, native_family(parents, held, window)[:2], (grown.within(window), grown.depth))
        )


def native_family(parents, held, window):
    """What a native step makes of a tree: the nodes seen, the depths, and how many parents are none."""
    B, U = parents.shape
    sees = torch.ones(B, U - held, U, dtype=torch.bool)
    depth, wrong = torch.full((B, U - held), -1), ctypes.c_int64(-1)
    program = Program()
    program.family(parents, held, window, sees, depth, wrong)
    program.run()
    return sees, depth, wrong.value


@pytest.mark.parametrize("parents", [[0, 2, 1], [0, 0, 3], [0, -1], [1, 0]])
def test_a_parent_that_does_not_stand_before_its_child(parents):
    with pytest.raises(AssertionError, match="a parent is before its child"):
        _ = Tree(torch.tensor([[0] * len(parents), parents])).sees
    if available():
        assert native_family(torch.tensor([[0] * len(parents), parents]), 0, 0)[2] == 1


def test_trees_of_another_shape():
    cache = KVCache(2, 30, 8, (0,), K, D)
    for parents in (torch.zeros(4, dtype=torch.int64), torch.zeros(1, 4)):
        with pytest.raises(AssertionError, match="int64"):
            Tree(parents)
    with pytest.raises(AssertionError, match="of this batch and these positions"):
        cache.begin(4, tree=Tree(torch.zeros(1, 4, dtype=torch.int64)))
    with pytest.raises(AssertionError, match="of this batch and these positions"):
        cache.begin(4, tree=Tree(torch.zeros(2, 4, dtype=torch.int64), 1))
    with pytest.raises(AssertionError, match="new positions"):
        Tree(torch.zeros(2, 4, dtype=torch.int64), 4)
    with pytest.raises(AssertionError, match="forgotten"):
        cache.advance(cache.begin(2, tree=Tree(torch.zeros(2, 4, dtype=torch.int64), 2)))
    with pytest.raises(ValueError, match="holds 0 tokens and 31 more"):
        cache.begin(1, tree=Tree(torch.zeros(2, 31, dtype=torch.int64), 30))


@pytest.mark.parametrize("window", [0, 1, 4, 7])
def test_a_window_reaches_as_far_back_from_a_node_as_from_its_text(window):
    """Of the verified text and the tree, a node sees what the end of its path would see in plain text."""
    starts, families = (23, 2), ([0, 0, 0, 1, 3, 0, 4], [0, 0, 1, 2, 3, 0])
    cache = KVCache(2, 70, 9, (window,), K, D)
    for counts, tree in ((starts, None), ((7, 6), Tree(trees.padded(families, 7)))):
        step = cache.begin(max(counts), list(counts), tree=tree)
        keys = torch.zeros(2, K, step.T, D)
        view = cache.layers[0].append(keys, keys, step)
        cache.advance(step)
    allowed, index = view.allowed(window), view.index()
    for b, (start, family) in enumerate(zip(starts, families, strict=True)):
        for column in range(len(family)):
            text = [*range(start), *(start + c for c in trees.ancestors(family, column))]
            assert sorted(index[b, allowed[b, column]].tolist()) == text[-window:]


# ---- commits --------------------------------------------------------------------------------------

LENGTH, SLACK = 70, 9
WINDOWS = (0, 5, 7, 1)


def made(batch):
    return KVCache(batch, LENGTH, SLACK, WINDOWS, K, D)


def append(cache, keys, counts, tree=None):
    """keys [B, T, K, D] into every layer; values are their negatives."""
    step = cache.begin(keys.shape[1], counts, tree=tree)
    k = keys.transpose(1, 2)
    for memory in cache.layers:
        memory.append(k, -k, step)
    cache.advance(step)


def visible(cache, b):
    """Per layer, what the next query of row b may look at, and all a rewind may give back: by index."""
    n, items = cache.lengths[b], []
    for memory, window in zip(cache.layers, WINDOWS, strict=True):
        index = torch.arange(max(0, n - window + 1) if window else 0, n)
        items += [memory.k[b][:, index % memory.size], memory.v[b][:, index % memory.size]]
    return items


@settings(max_examples=60)
@given(st.data(), st.integers(0, 2**31))
def test_the_cache_of_a_path_is_the_cache_of_its_text(data, seed):
    """Round after round of a decoding loop: a tree is appended, a path of it lives. Row by row the same keys
    appended as plain text leave the same cache, bit for bit, wrapped or not."""
    rng = torch.Generator().manual_seed(seed)
    batch = data.draw(st.sampled_from([1, 3]))
    ours, plain = made(batch), made(batch)
    lengths = [data.draw(st.integers(1, 25)) for _ in range(batch)]
    prompt = torch.randn(batch, max(lengths), K, D, generator=rng)
    for cache in (ours, plain):
        append(cache, prompt, lengths)
    for _ in range(data.draw(st.integers(1, 4))):
        counts = [data.draw(st.integers(1, SLACK)) for _ in range(batch)]
        N = max(counts)
        rows = [[0, *(data.draw(st.integers(0, c - 1)) for c in range(1, n))] for n in counts]
        keys = torch.randn(batch, N, K, D, generator=rng)
        append(ours, keys, counts, Tree(trees.padded(rows, N)))
        ends = [data.draw(st.integers(0, n - 1)) for n in counts]
        path = [trees.ancestors(row, end) for row, end in zip(rows, ends, strict=True)]
        ours.commit(path)
        for i in range(max(map(len, path))):
            one = torch.stack([keys[b, p[i] if i < len(p) else 0] for b, p in enumerate(path)])[:, None]
            append(plain, one, [int(i < len(p)) for p in path])
        assert ours.lengths == plain.lengths
        for b in range(batch):
            for got, wanted in zip(visible(ours, b), visible(plain, b), strict=True):
                assert torch.equal(got, wanted)


def test_a_tree_wider_than_the_slack_is_refused_at_its_commit():
    cache = made(1)
    append(cache, torch.randn(1, 40, K, D), [40])
    N = SLACK + 4
    append(cache, torch.randn(1, N, K, D), [N], Tree(torch.zeros(1, N, dtype=torch.int64)))
    before = [memory.k.clone() for memory in cache.layers]
    with pytest.raises(ValueError, match=r"slack >= (\d+)"):
        cache.commit([[0, N - 1]])
    assert all(torch.equal(m.k, k) for m, k in zip(cache.layers, before, strict=True))
