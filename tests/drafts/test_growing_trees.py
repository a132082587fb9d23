"""Growing trees against brute force: every path of small vocabularies scored, the best of them kept."""

import itertools
import math

import pytest
import torch
import trees
from hypothesis import assume, given
from hypothesis import strategies as st

from outpace.drafts.base import Proposal
from outpace.drafts.tree import Growth, best_first, cut

LAST = torch.tensor([91, 92, 93])


def spelled(proposal, b):
    """Per position of a row, the tokens of its path after the root."""
    parents, tokens = proposal.parents[b].tolist(), proposal.tokens[b].tolist()
    return [
        tuple(tokens[c] for c in trees.ancestors(parents, column)[1:]) for column in range(proposal.counts[b])
    ]


def check(proposal, last, scored, most):
    """`scored`: per row, path -> log-probability of every path that may be chosen. The proposal holds the
    best of them, `most` positions in all, and states what they score."""
    assert proposal.tokens[:, 0].tolist() == last.tolist() and proposal.q is None
    N = proposal.tokens.shape[1]
    assert N == max(proposal.counts)
    for b, paths in enumerate(scored):
        result, count = spelled(proposal, b), proposal.counts[b]
        possible = {path: x for path, x in paths.items() if x > -math.inf}
        assert count == min(most, 1 + len(possible))
        assert result[0] == () and len(set(result)) == count  # no path twice
        values = [0.0, *(possible[path] for path in result[1:])]
        best = sorted(possible.values(), reverse=True)[: count - 1]
        assert values[1:] == pytest.approx(best, abs=1e-4)
        assert proposal.survival[b, :count].tolist() == pytest.approx([math.exp(x) for x in values], abs=1e-5)
        assert all(x >= y - 1e-6 for x, y in itertools.pairwise(values))  # falling: a cut is a best tree
        assert proposal.parents[b, count:].tolist() == list(range(count, N))
        assert proposal.survival[b, count:].tolist() == [0.0] * (N - count)
    assert proposal.tree.depth.tolist() == [
        [len(path) for path in spelled(proposal, b)] + [0] * (N - proposal.counts[b])
        for b in range(len(last))
    ]


@st.composite
def marginals(draw):
    B, n, V = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(B, n, V, generator=rng) * draw(st.sampled_from([0.0, 1.0, 8.0, 200.0]))
    forbidden = torch.rand(B, n, V, generator=rng) < draw(st.sampled_from([0.0, 0.4]))
    forbidden[..., 0] = False
    scores = logits.masked_fill(forbidden, -torch.inf).log_softmax(-1)
    return scores, draw(st.integers(1, 60)), draw(st.integers(1, 6))


@given(marginals())
def test_best_first_is_the_best_of_all_paths(case):
    scores, nodes, branch = case
    B, n, V = scores.shape
    scored = []
    for row in scores.tolist():
        ranked = [sorted(range(V), key=lambda v, p=p: -p[v])[:branch] for p in row]
        scored.append(
            {
                path: sum(p[v] for p, v in zip(row, path, strict=False))
                for depth in range(1, n + 1)
                for path in itertools.product(*ranked[:depth])
            }
        )
    # among equals at the edge of `branch` either may be looked at
    assume(all(len(set(p)) == V or branch >= V for row in scores.tolist() for p in row))
    check(best_first(LAST[:B], scores, nodes, branch), LAST[:B], scored, nodes)


@given(marginals(), st.integers(0, 2**31), st.sampled_from([0.0, 1.0, 3.0]))
def test_best_first_after_each_other_is_the_best_of_all_paths(case, seed, strength):
    """Each predecessor shifts its followers' scores; tokens outside the candidates keep their share."""
    scores, nodes, branch = case
    B, n, V = scores.shape
    shift = torch.randn(n, V + 100, V, generator=torch.Generator().manual_seed(seed)) * strength
    depth = torch.arange(n)[:, None, None]

    def pairs(previous, ids):
        return shift[depth, previous[..., None], ids[:, :, None]]

    scored = []
    for b, row in enumerate(scores):
        top = row.topk(min(branch, V))
        ranked, others = top.indices.tolist(), (1 - top.values.exp().sum(-1)).tolist()
        fields, level = {}, {(): 0.0}
        for d, kept in enumerate(ranked):
            below = {}
            for path, reach in level.items():
                before = path[-1] if path else int(LAST[b])
                weights = {v: math.exp(float(row[d, v]) + float(shift[d, before, v])) for v in kept}
                total = sum(weights.values()) + max(others[d], 0.0)
                for v, w in weights.items():
                    below[(*path, v)] = reach + math.log(w / total) if w else -math.inf
            fields |= below
            level = below
        scored.append(fields)
    assume(all(len(set(p)) == V or branch >= V for row in scores.tolist() for p in row))
    assume(all(x > -60 or x == -math.inf for paths in scored for x in paths.values()))  # sums of float32
    check(best_first(LAST[:B], scores, nodes, branch, pairs), LAST[:B], scored, nodes)


@given(marginals(), st.integers(1, 40))
def test_the_first_columns_are_the_best_tree_of_so_many(case, columns):
    scores, nodes, branch = case
    last = LAST[: len(scores)]
    whole, fewer = (
        best_first(last, scores, nodes, branch),
        best_first(last, scores, min(nodes, columns), branch),
    )
    part = cut(whole, columns)
    assert part.counts == fewer.counts
    for name in ("tokens", "parents", "survival"):
        assert torch.equal(getattr(part, name), getattr(fewer, name))
    assert cut(whole, 10**6) is whole


def test_a_cut_takes_what_belongs_to_its_columns():
    q = torch.rand(2, 4, 6)
    chain = Proposal(torch.arange(8).view(2, 4), [4, 2], q=q, survival=torch.rand(2, 4))
    part = cut(chain, 3)
    assert part.parents is None and part.counts == [3, 2] and part.tokens.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert torch.equal(part.q, q[:, :3]) and torch.equal(part.survival, chain.survival[:, :3])


def test_ids_of_large_vocabularies_are_exact():
    scores = torch.full((1, 2, 201_088), -20.0)
    scores[0, 0, 201_087], scores[0, 1, 200_001] = -0.1, -0.2
    assert best_first(LAST[:1], scores, 3).tokens.tolist() == [[91, 201_087, 200_001]]


# ---- the dynamic tree -----------------------------------------------------------------------------


class Walk:
    """A draft where the scores depend on the whole path walked: a fresh distribution for each."""

    def __init__(self, V, seed, sharp, forbidden=0.0):
        self.V, self.seed, self.sharp, self.forbidden, self.seen = V, seed, sharp, forbidden, {}

    def __call__(self, path):
        if path not in self.seen:
            rng = torch.Generator().manual_seed(hash((self.seed, path)) % 2**31)
            logits = torch.randn(self.V, generator=rng) * self.sharp
            banned = torch.rand(self.V, generator=rng) < self.forbidden
            banned[int(torch.randint(self.V, (1,), generator=rng))] = False
            self.seen[path] = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
        return self.seen[path]


def grow(walks, branch, depth):
    """What a draft does with a Growth, keeping each frontier node's path; -> the Growth."""
    last = LAST[: len(walks)]
    grown = Growth(last, branch)
    frontier = grown.expand(torch.stack([walk(())[None] for walk in walks]))
    paths = [[()] for _ in walks]
    for level in range(1, depth + 1):
        assert frontier.depth == level
        paths = [
            [(*before[f], t) for f, t in zip(follows, tokens, strict=True)]
            for before, follows, tokens in zip(
                paths, frontier.follows.tolist(), frontier.tokens.tolist(), strict=True
            )
        ]
        forest = grown.forest
        assert forest.held == sum(len(x) for x in grown_levels(grown, level)[:-1])
        assert forest.depth.tolist() == [[level - 1] * len(row) for row in paths]
        if level < depth:
            frontier = grown.expand(
                torch.stack(
                    [torch.stack([walk(p) for p in row]) for walk, row in zip(walks, paths, strict=True)]
                )
            )
    return grown, paths


def grown_levels(grown, level):
    """Positions of the forest by level: each node is one deeper than what it follows."""
    row, items = grown.ran[0].tolist(), [[] for _ in range(level)]
    for column in range(len(row)):
        items[len(trees.ancestors(row, column)) - 1].append(column)
    assert [c for part in items for c in part] == list(range(len(row)))
    return items


def candidates(walk, branch, depth):
    """EAGLE's growth in plain Python: of each frontier node its best children, of all children of a level
    the best go on. -> every child seen, and its score."""
    frontier, seen = [((), 0.0)], {}
    for _ in range(depth):
        children = []
        for path, score in frontier:
            p = walk(path)
            for v in p.topk(min(branch, walk.V)).indices.tolist():
                children.append(((*path, v), score + float(p[v])))
        seen |= dict(children)
        frontier = sorted(children, key=lambda child: -child[1])[:branch]
    return seen


@given(
    st.integers(1, 3), st.integers(2, 6), st.integers(1, 4), st.integers(1, 4), st.integers(2, 30),
    st.integers(0, 2**20), st.sampled_from([0.5, 3.0, 60.0]), st.sampled_from([0.0, 0.3]),
)  # fmt: skip
def test_the_dynamic_tree_is_the_best_of_what_was_seen(B, V, branch, depth, width, seed, sharp, forbidden):
    walks = [Walk(V, (seed, b), sharp, forbidden) for b in range(B)]
    grown, _ = grow(walks, branch, depth)
    scored = [candidates(walk, branch, depth) for walk in walks]
    check(grown.proposal(width), LAST[:B], scored, width)


@given(st.integers(2, 3), st.integers(1, 4), st.integers(2, 50), st.integers(0, 2**20))
def test_a_frontier_that_loses_nothing_finds_the_best_tree_there_is(V, depth, width, seed):
    walk = Walk(V, seed, 2.0)
    grown, _ = grow([walk], V**depth, depth)
    scored = {
        path: sum(float(walk(path[:i])[path[i]]) for i in range(length))
        for length in range(1, depth + 1)
        for path in itertools.product(range(V), repeat=length)
    }
    check(grown.proposal(width), LAST[:1], [scored], width)


def test_certain_paths_keep_parents_before_children():
    """Scores of exactly 0 tie a parent with its child."""
    grown = Growth(LAST[:2], 2)
    sure = torch.tensor([0.0, -torch.inf, -torch.inf])
    frontier = grown.expand(sure.expand(2, 1, 3))
    for _ in range(4):
        frontier = grown.expand(sure.expand(2, frontier.tokens.shape[1], 3))
    proposal = grown.proposal(20)
    assert proposal.counts == [6, 6] and proposal.parents.tolist() == [[0, 0, 1, 2, 3, 4]] * 2
    assert proposal.survival.tolist() == [[1.0] * 6] * 2


def test_scores_must_belong_to_the_frontier():
    grown = Growth(LAST, 2)
    with pytest.raises(AssertionError, match="scores of the frontier's nodes"):
        grown.expand(torch.zeros(3, 2, 5))
