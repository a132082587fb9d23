"""Caches against a brute-force list of keys per sequence: appends, rewinds and commits, wraps included."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.kv.base import KVCache

K, D = 2, 4  # kv heads, head dim


@dataclass
class Row:
    """What one sequence remembers, as an honest list, and what a ring of `size` slots still holds.

    A ring keeps, in slot i % size, the last key written at an index i that lands there. `slots` plays
    that literally, so that a promise can be judged without the cache's own arithmetic.
    """

    keys: list[float] = field(default_factory=list)
    slots: dict[int, dict[int, int]] = field(default_factory=dict)  # ring size -> slot -> index

    def append(self, keys, sizes):
        for key in keys:
            for size in sizes:
                self.slots.setdefault(size, {})[len(self.keys) % size] = len(self.keys)
            self.keys.append(key)

    def holds(self, size, index):
        return self.slots.get(size, {}).get(index % size) == index


@dataclass
class Model:
    """The brute-force twin of a cache with layers of these (window, ring size or 0)."""

    layers: list[tuple[int, int]]
    rows: list[Row]
    last_start: list[int]

    @property
    def sizes(self):
        return {size for _, size in self.layers if size}

    def may_rewind(self, b, n):
        """Every key the next query needs is still in its slot."""
        if not 0 <= n <= len(self.rows[b].keys):
            return False
        return all(
            self.rows[b].holds(size, i)
            for window, size in self.layers
            if size
            for i in range(max(0, n - window + 1), n)
        )

    def rewind(self, b, n):
        row = self.rows[b]
        del row.keys[n:]
        if not n:
            row.slots.clear()

    def may_commit(self, b, path):
        start, row = self.last_start[b], self.rows[b]
        appended = len(row.keys) - start
        if any(not 0 <= c < appended for c in path) or len(set(path)) != len(path):
            return False
        moved = [(start + c, start + i) for i, c in enumerate(path) if c != i]
        held = all(row.holds(size, x) for pair in moved for x in pair for size in self.sizes)
        return held and self.may_rewind(b, start + len(path))

    def commit(self, b, path):
        row, start = self.rows[b], self.last_start[b]
        row.keys[start : start + len(path)] = [row.keys[start + c] for c in path]
        self.rewind(b, start + len(path))


def tensor_of(rows, T):
    """Numbers per row -> k [B,K,T,D] in which every head and dimension tells where it came from."""
    padded = [[*r, *[-1e6] * (T - len(r))] for r in rows]
    base = torch.tensor(padded)[:, None, :, None]
    return base + torch.arange(K)[:, None, None] * 0.25 + torch.arange(D) * 0.01


def append(cache, model, counts, fresh, T=None):
    """One forward: append `counts` new keys to the rows, and check every query of every layer."""
    T = T or max(counts)
    rows = [[float(next(fresh)) for _ in range(c)] for c in counts]
    before = [len(r.keys) for r in model.rows]
    step = cache.begin(T, counts)
    k = tensor_of(rows, T)
    for row, keys in zip(model.rows, rows, strict=True):
        row.append(keys, model.sizes)
    for memory, (window, _) in zip(cache.layers, model.layers, strict=True):
        view = memory.append(k, -k, step)
        allowed = view.allowed(window)
        assert allowed.shape == (len(counts), T, view.k.shape[2])
        for b, count in enumerate(counts):
            for t in range(count):
                end = before[b] + t + 1
                begin = max(0, end - window) if window else 0
                wanted = tensor_of([model.rows[b].keys[begin:end]], end - begin)[0]
                seen = allowed[b, t].nonzero()[:, 0]
                order = view.k[b, 0, seen, 0].argsort()  # fresh keys only ever grow ..
                wanted_order = wanted[0, :, 0].argsort()  # .. but commits may have permuted them
                assert torch.equal(view.k[b][:, seen[order]], wanted[:, wanted_order])
                assert torch.equal(view.v[b][:, seen[order]], -wanted[:, wanted_order])
    cache.advance(step)
    model.last_start = before


LENGTH = 60
WINDOWS = st.lists(st.sampled_from([0, 1, 2, 5, 7]), min_size=1, max_size=3)


@st.composite
def scripts(draw):
    """A cache and what is done to it: appends ragged and wider than any ring, rewinds, commits."""
    windows = draw(WINDOWS)
    slack = draw(st.sampled_from([1, 2, 4, 9]))
    batch = draw(st.sampled_from([1, 3]))
    counts = st.integers(0, 22) if draw(st.booleans()) else st.integers(0, 4)
    each = st.lists(counts, min_size=batch, max_size=batch)
    back = st.lists(st.integers(0, 12) | st.just(1000), min_size=batch, max_size=batch)
    seeds = st.integers(0, 2**16)
    actions = st.lists(
        st.tuples(st.just("append"), each, st.integers(0, 3))
        | st.tuples(st.just("rewind"), back, st.none())
        | st.tuples(st.just("commit"), st.sampled_from(["run", "rising", "any"]), seeds),
        min_size=1,
        max_size=14,
    )
    return windows, slack, batch, draw(actions)


def paths(kind, seed, appended):
    """A path per row: a leading run, an increasing one, or any order."""
    rng = torch.Generator().manual_seed(seed)
    items = []
    for n in appended:
        kept = int(torch.randint(n + 1, (1,), generator=rng))
        columns = torch.randperm(n, generator=rng)[:kept].tolist()
        items.append(list(range(kept)) if kind == "run" else sorted(columns) if kind == "rising" else columns)
    return items


def snapshot(cache):
    return [(m.k.clone(), m.v.clone()) for m in cache.layers], list(cache.lengths), list(cache.last_start)


def assert_unchanged(cache, before):
    memories, lengths, starts = before
    assert (cache.lengths, cache.last_start) == (lengths, starts)
    for memory, (k, v) in zip(cache.layers, memories, strict=True):
        assert torch.equal(memory.k, k) and torch.equal(memory.v, v)


@settings(max_examples=200)
@given(scripts())
def test_against_a_list(script):
    windows, slack, batch, actions = script
    cache = KVCache(batch, LENGTH, slack, tuple(windows), K, D)
    layers = [(w, w + slack if w and w + slack < LENGTH else 0) for w in windows]
    model = Model(layers, [Row() for _ in range(batch)], [0] * batch)
    fresh = iter(range(10**6))
    for action, first, second in actions:
        if action == "append":
            counts = [min(c, LENGTH - n) for c, n in zip(first, cache.lengths, strict=True)]
            append(cache, model, counts, fresh, max(max(counts) + second, 1))
            continue
        if action == "rewind":
            to = [max(0, n - back) for n, back in zip(cache.lengths, first, strict=True)]
            allowed = [model.may_rewind(b, n) for b, n in enumerate(to)]
            call, change = (lambda to=to: cache.rewind(to)), model.rewind
        else:
            appended = [n - s for n, s in zip(cache.lengths, cache.last_start, strict=True)]
            if min(appended) < 0:  # rewound further than the last forward: nothing left to commit
                continue
            to = paths(first, second, appended)
            allowed = [model.may_commit(b, path) for b, path in enumerate(to)]
            call, change = (lambda to=to: cache.commit(to)), model.commit
        if all(allowed):
            call()
            for b, how in enumerate(to):
                change(b, how)
        else:
            before = snapshot(cache)
            with pytest.raises(ValueError):
                call()
            assert_unchanged(cache, before)
        assert cache.lengths == [len(r.keys) for r in model.rows]
    append(cache, model, [min(3, LENGTH - n) for n in cache.lengths], fresh, 3)  # whatever was left


# ---- the same promises, one at a time ---------------------------------------------------------------


def one(window, slack, length=LENGTH, batch=1):
    cache = KVCache(batch, length, slack, (0, window), K, D)
    size = window + slack if window and window + slack < length else 0
    return cache, Model([(0, 0), (window, size)], [Row() for _ in range(batch)], [0] * batch)


def test_every_rewind_within_the_slack_holds_once_wrapped():
    """The popular defect: a rewind that does nothing once the ring has wrapped."""
    fresh = iter(range(10**6))
    cache, model = one(window=5, slack=4)
    append(cache, model, [23], fresh)
    for back in (4, 1, 3, 2, 4, 4):
        append(cache, model, [4], fresh)
        cache.rewind([cache.lengths[0] - back])
        model.rewind(0, cache.lengths[0])
        append(cache, model, [2], fresh)


def test_a_rewind_past_the_slack_raises_and_says_what_would_help():
    cache, model = one(window=5, slack=4)
    append(cache, model, [30], iter(range(100)))
    with pytest.raises(ValueError, match=r"from 30 to 24: .* layer 1 .* slack >= (\d+)") as e:
        cache.rewind([24])
    enough = int(str(e.value).rsplit(" ", 1)[1])
    for slack, fine in ((enough, True), (enough - 1, False)):
        cache, model = one(window=5, slack=slack)
        append(cache, model, [30], iter(range(100)))
        assert model.may_rewind(0, 24) is fine


def test_beginning_anew_is_always_possible():
    cache, model = one(window=5, slack=2)
    fresh = iter(range(1000))
    append(cache, model, [40], fresh)
    cache.rewind([0])
    model.rewind(0, 0)
    append(cache, model, [3], fresh)
    cache.rewind([2])  # the ring of the new text has not wrapped
    model.rewind(0, 2)
    append(cache, model, [20], fresh)


def test_what_was_overwritten_stays_lost_after_a_rewind():
    """The slots that a longer text took are not given back by rewinding it: slack is not renewed until
    as much has been written again."""
    fresh = iter(range(1000))
    cache, model = one(window=5, slack=4)
    append(cache, model, [30], fresh)
    cache.rewind([26])
    model.rewind(0, 26)
    append(cache, model, [1], fresh)
    assert not model.may_rewind(0, 24) and model.may_rewind(0, 25)
    with pytest.raises(ValueError, match="from 27 to 24"):
        cache.rewind([24])
    cache.rewind([25])
    model.rewind(0, 25)
    append(cache, model, [8], fresh)


def test_a_dense_cache_rewinds_anywhere():
    cache, model = one(window=0, slack=1)
    fresh = iter(range(1000))
    append(cache, model, [50], fresh)
    cache.rewind([1])
    model.rewind(0, 1)
    append(cache, model, [9], fresh)


@pytest.mark.parametrize("lengths", [[6], [-1]])
def test_lengths_that_do_not_exist(lengths):
    cache, model = one(window=5, slack=4)
    append(cache, model, [5], iter(range(9)))
    with pytest.raises(ValueError, match="cannot be rewound"):
        cache.rewind(lengths)


@pytest.mark.parametrize("path", [[4], [-1], [0, 0], [0, 1, 2, 3, 0]])
def test_paths_that_do_not_exist(path):
    cache, model = one(window=5, slack=6)
    append(cache, model, [9], iter(range(99)))
    append(cache, model, [4], iter(range(99, 199)))
    with pytest.raises(ValueError, match="path"):
        cache.commit([path])


@pytest.mark.parametrize("path", [[2, 0, 1], [1, 0], [3, 2, 1, 0], [0, 3, 1]])
def test_a_path_may_be_in_any_order(path):
    """Each position of the path lies where it is in the path, whether it moves back or forth."""
    cache, model = one(window=5, slack=6, batch=2)
    append(cache, model, [13, 9], iter(range(99)))
    append(cache, model, [4, 3], iter(range(99, 199)))
    before = [row.keys[start:] for row, start in zip(model.rows, model.last_start, strict=True)]
    kept = [path, [0, 2]]
    cache.commit(kept)
    for b, (columns, start) in enumerate(zip(kept, (13, 9), strict=True)):
        wanted = tensor_of([[before[b][c] for c in columns]], len(columns))[0]
        for layer in cache.layers:
            index = torch.arange(start, start + len(columns)) % layer.size
            assert torch.equal(layer.k[b][:, index], wanted) and torch.equal(layer.v[b][:, index], -wanted)


def test_a_cache_that_is_full():
    cache, model = one(window=5, slack=4, batch=2)
    append(cache, model, [LENGTH, 3], iter(range(999)))
    append(cache, model, [0, 1], iter(range(999, 1999)))
    with pytest.raises(ValueError, match=f"sequence 0 holds {LENGTH} tokens and 1 more"):
        cache.begin(1)


@pytest.mark.parametrize("sizes", [(0, 9, 1), (1, 0, 1), (1, 9, 0)])
def test_sizes_that_are_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        KVCache(*sizes, (0,), K, D)


def test_bytes_are_those_of_the_tensors():
    cache = KVCache(3, 50, 4, (0, 7, 0), K, D, dtype=torch.bfloat16)
    slots = 2 * (50 + 1) + (7 + 4 + 1)  # one more slot per layer takes the padding
    assert [m.nbytes for m in cache.layers] == [2 * 3 * K * s * D * 2 for s in (51, 12, 51)]
    assert cache.nbytes == 2 * 3 * K * slots * D * 2


def test_both_ways_lets_a_block_see_all_of_itself():
    """A draft's block: every row sees the context of its window and the whole block, never padding;
    and what is not advanced is not remembered."""
    cache, model = one(window=5, slack=4, batch=2)
    append(cache, model, [13, 2], iter(range(999)))
    for _ in range(2):
        step = cache.begin(4, both_ways=True)
        block = tensor_of([[500.0 + i for i in range(4)]] * 2, 4)
        for memory, (window, _) in zip(cache.layers, model.layers, strict=True):
            view = memory.append(block, -block, step)
            allowed = view.allowed(window)
            for b, held in enumerate((13, 2)):
                for t in range(4):
                    seen = sorted(round(x) for x in view.k[b, 0, allowed[b, t].nonzero()[:, 0], 0].tolist())
                    end = held + t + 1
                    begin = max(0, end - window) if window else 0
                    text = ([*model.rows[b].keys, 500.0, 501.0, 502.0, 503.0])[begin:]
                    assert seen == sorted(text)
    append(cache, model, [3, 1], iter(range(900, 999)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memories_begin_where_a_cache_line_does(dtype):
    """Else each vector that a kernel reads lies in two of them."""
    for length in range(20, 30):
        cache = KVCache(2, length, 3, (0, 7), K, D, dtype=dtype)
        parts = [part for layer in cache.layers for part in (layer.k, layer.v)]
        assert all(part.data_ptr() % 64 == 0 and part.dtype == dtype and not part.any() for part in parts)
