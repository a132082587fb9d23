"""The index's choice: kernel and reference agree, and both agree with a loop over tokens."""

import pytest
import torch
import trees
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.kernels import bindings
from outpace.kv.topk import Index, QueryPositions, TopKConfig, choose, reference_pick, reference_scores
from outpace.kv.tree import Tree

needs_kernels = pytest.mark.skipif(not bindings.available(), reason=f"no CPU kernels: {bindings.why_not()}")


def sample(B, T, S, heads=3, dim=8, seed=0):
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=rng)  # noqa: E731
    keys = draw(B, S + 5, dim)
    return Index(draw(B, T, heads, dim), draw(B, T, dim), draw(B, T, heads)), keys


def place_of(start, T, counts=None, tree=None):
    counts = counts or [T] * len(start)
    return QueryPositions(torch.tensor(start), torch.tensor(counts), T, tree, max(start) + T)


def by_hand(index, keys, place, keep, b, t):
    """The tokens of one query, as the docstring of `choose` states them."""
    if t >= place.counts[b]:
        return []
    start, tree = int(place.start[b]), place.tree
    length = int(place.lengths()[b, t])
    past = range(start if tree is not None else length)
    score = {
        s: sum(
            float(w) * max(0.0, float(q @ keys[b, s]))
            for q, w in zip(index.q[b, t], index.w[b, t], strict=True)
        )
        for s in past
    }
    fixed = {s for s in past if s < keep.sinks or s >= length - keep.recent}
    rest = sorted((s for s in past if s not in fixed), key=lambda s: (score[s], s), reverse=True)
    own = [] if tree is None else [start + u for u in range(tree.parents.shape[1]) if tree.sees[b, t, u]]
    take = len(rest) if length <= keep.min_context else keep.most(length) - len(fixed) - len(own)
    if length > keep.min_context and rest:
        weight = torch.tensor([score[s] for s in rest], dtype=torch.float64).softmax(0)
        if keep.top_p:
            take = min(take, int((weight.cumsum(0) < keep.top_p).sum()) + 1)
        if weight[: max(0, take)].sum() < keep.least_mass:
            take = len(rest)
    return sorted(fixed | set(rest[: max(0, take)])) + own


@settings(max_examples=60, deadline=None)
@given(
    starts=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    T=st.integers(1, 9),
    keep=st.sampled_from(
        [
            TopKConfig(top_k=12, min_context=0, sinks=2, recent=9),
            TopKConfig(top_k=20, min_context=25, sinks=0, recent=9),
            TopKConfig(top_k=0.3, min_context=10, sinks=3, recent=9),
            TopKConfig(top_k=40, top_p=0.6, min_context=0, sinks=1, recent=9),
            TopKConfig(top_k=14, least_mass=0.9, min_context=20, sinks=1, recent=9),
            TopKConfig(top_k=30, top_p=0.9, least_mass=0.8, min_context=0, sinks=1, recent=9),
        ]
    ),
    branched=st.booleans(),
    seed=st.integers(0, 5),
)
def test_what_is_chosen_is_what_a_loop_chooses(starts, T, keep, branched, seed):
    B = len(starts)
    index, keys = sample(B, T, max(starts) + T, seed=seed)
    tree = (
        Tree(trees.padded([trees.parents_of("any", T, seed + b) for b in range(B)], T)) if branched else None
    )
    counts = [1 + (seed + b) % T for b in range(B)] if tree is None else None
    place = place_of(starts, T, counts, tree)
    with torch.inference_mode():
        result = choose(index, keys, place, keep)
    for b in range(B):
        for t in range(T):
            wanted = by_hand(index, keys, place, keep, b, t)
            if result is None:
                assert len(wanted) in (0, place.lengths()[b, t])
            else:
                lists, many = result
                assert lists[b, t, : many[b, t]].tolist() == wanted


@needs_kernels
@pytest.mark.parametrize("heads", [1, 3, 8, 21])
@torch.inference_mode()
def test_scores_of_the_kernel(heads):
    index, keys = sample(2, 37, 300, heads, dim=24)
    start = torch.tensor([260, 0])
    result = bindings.index_scores(index.q, index.w, keys, start, 297, chain=True)
    wanted = reference_scores(index.q, index.w, keys[:, :297])
    for b, first in enumerate(start.tolist()):
        for t in range(37):
            seen = first + t + 1
            assert (result[b, t, :seen] - wanted[b, t, :seen]).abs().max() < 1e-4


@needs_kernels
@torch.inference_mode()
def test_a_query_s_scores_do_not_depend_on_its_company():
    index, keys = sample(1, 40, 900, heads=5, dim=16)
    start = torch.tensor([700])
    together = bindings.index_scores(index.q, index.w, keys, start, 740, chain=True)
    for t in range(40):
        q, w = index.q[:, t : t + 1].contiguous(), index.w[:, t : t + 1].contiguous()
        alone = bindings.index_scores(q, w, keys, start + t, 701 + t, chain=True)
        assert torch.equal(alone[0, 0], together[0, t, : 701 + t])


@pytest.mark.parametrize("where", ["kernel", "reference"])
@torch.inference_mode()
def test_of_equals_the_later_ones(where, force_kernels):
    """An index gives many tokens exactly 0."""
    force_kernels(where == "kernel")
    keep, place = TopKConfig(top_k=10, min_context=0, sinks=2, recent=3), place_of([49], 1)
    scores = torch.zeros(1, 1, 50)
    scores[..., 7], scores[..., 20:30] = 1.0, -0.5
    pick = _picked(where)
    lists, many = pick(scores, place, keep.wanted(place.lengths()), 10, keep)
    assert lists[0, 0, : many[0, 0]].tolist() == [0, 1, 7, 43, 44, 45, 46, 47, 48, 49]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@torch.inference_mode()
def test_scores_that_are_not_finite_leave_nothing_out(broken):
    index, keys = sample(2, 3, 60)
    keys[1, 30] = broken
    place, keep = place_of([50, 50], 3), TopKConfig(top_k=12, min_context=0, sinks=1, recent=4)
    lists, many = choose(index, keys, place, keep)
    assert many[0].tolist() == [12, 12, 12]
    assert many[1].tolist() == [51, 52, 53]
    assert lists[1, 2, :53].tolist() == list(range(53))


@torch.inference_mode()
def test_a_long_chain_in_pieces_is_the_whole(monkeypatch):
    index, keys = sample(2, 60, 75)
    place, keep = place_of([0, 15], 60, [60, 41]), TopKConfig(top_k=12, min_context=20, sinks=1, recent=4)
    whole = choose(index, keys, place, keep)
    monkeypatch.setattr("outpace.kv.topk.PIECE", 7 * 75 * 2)
    pieces = choose(index, keys, place, keep)
    assert torch.equal(whole[1], pieces[1])
    real = torch.arange(whole[0].shape[2]) < whole[1][..., None]
    assert torch.equal(whole[0][real], pieces[0][..., : whole[0].shape[2]][real])


def test_a_tree_deeper_than_the_recent_tokens_is_refused():
    index, keys = sample(1, 8, 60)
    place = place_of([50], 8, tree=Tree(torch.arange(8).sub(1).clamp(min=0)[None]))
    with pytest.raises(ValueError, match=r"tree of depth 7.*dsa_recent"):
        choose(index, keys, place, TopKConfig(top_k=12, min_context=0, sinks=1, recent=7))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"top_k": 0}, "top_k 0"),
        ({"top_k": 10.5}, "top_k 10.5"),
        ({"top_k": 68}, "above sinks and recent, 68"),
        ({"top_k": -3}, "top_k -3"),
        ({"top_k": float("nan")}, "top_k nan"),
        ({"top_p": 1.0}, "top_p 1.0"),
        ({"least_mass": 1.0}, "least_mass 1.0"),
        ({"recent": 0}, "recent 0"),
        ({"sinks": -1}, "sinks -1"),
    ],
)
def test_a_choice_that_is_none_is_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        TopKConfig(**wrong)


def _picked(where):
    from outpace.kv.topk import pick

    return pick if where == "kernel" else reference_pick
