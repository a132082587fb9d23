"""Growing trees of guesses from a draft's scores: best-first from marginals, level by level from a walk.

Every tree here has its columns in falling order of survival, parents before their children, so the first
n columns of one are its best tree of n columns: `cut` takes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate
from math import exp, inf

import torch
from torch import Tensor

from outpace.cache.tree import Tree
from outpace.drafts.proposal import Proposal


def best_first(last: Tensor, scores: Tensor, nodes: int, branch: int = 16) -> Proposal:
    """The likeliest `nodes` columns where the guesses of one depth do not know those of another (DDTree,
    arXiv 2604.12989): a node's score is the sum of its path's.

    last [B] int64; scores [B, n, V], of every token 1 .. n tokens after `last`: `Choice.scores`, at most 0.
    Of each depth the `branch` best are looked at. Rows come out narrower than `nodes` where there are
    fewer paths, or only impossible ones (-inf). One wait for the device.
    """
    assert nodes >= 1 and branch >= 1 and scores.dim() == 3 and len(last) == len(scores)
    top, ids = scores.topk(min(branch, scores.shape[-1]), dim=-1)
    n, breadth = top.shape[1:]
    # as float64, which holds ids exactly
    host = torch.cat((last[:, None], ids.flatten(1), top.double().flatten(1)), dim=1).tolist()
    rows = []
    for row in host:
        said, values = row[1 : 1 + n * breadth], row[1 + n * breadth :]
        parents, taken, reach = _best_paths([values[d * breadth :][:breadth] for d in range(n)], nodes)
        tokens = [int(row[0]), *(int(said[depth * breadth + rank]) for depth, rank in taken)]
        rows.append((tokens, parents, [exp(score) for score in reach]))
    return assembled(rows, last.device)


def _best_paths(
    values: list[list[float]], nodes: int
) -> tuple[list[int], list[tuple[int, int]], list[float]]:
    """values[d][r]: the r-th best log-probability at depth d, falling -> per column its parent's column and
    the sum of its path (column 0 is the root), and per guess its (depth, rank).

    Popping a node offers its next sister (same parent, rank + 1) and its first child: whatever is not yet
    offered scores no more than something that is.
    """
    parents, reach = [0], [0.0]
    taken: list[tuple[int, int]] = []
    if not values or not values[0]:
        return parents, taken, reach
    breadth, deepest = len(values[0]), len(values) - 1
    heap = [(-values[0][0], 0, 0, 0, 0)]  # falling score, then order of offering; parent, depth, rank
    serial = 0
    while heap and len(parents) < nodes:
        cost, _, parent, depth, rank = heappop(heap)
        if cost == inf:
            break
        column = len(parents)
        parents.append(parent)
        taken.append((depth, rank))
        reach.append(-cost)
        if rank + 1 < breadth:
            serial += 1
            heappush(heap, (-reach[parent] - values[depth][rank + 1], serial, parent, depth, rank + 1))
        if depth < deepest:
            serial += 1
            heappush(heap, (cost - values[depth + 1][0], serial, column, depth + 1, 0))
    return parents, taken, reach


def assembled(rows: list[tuple[list[int], list[int], list[float]]], device: torch.device) -> Proposal:
    """Per row tokens, parents and survival by column, rows of different lengths -> a padded Proposal."""
    counts = [len(tokens) for tokens, _, _ in rows]
    N = max(counts)
    short = [N - count for count in counts]
    tokens = [row[0] + [0] * n for row, n in zip(rows, short, strict=True)]
    # padding is its own parent: it descends from nobody
    parents = [[*row[1], *range(len(row[1]), N)] for row in rows]
    survival = [row[2] + [0.0] * n for row, n in zip(rows, short, strict=True)]
    return Proposal(
        torch.tensor(tokens, device=device),
        counts,
        torch.tensor(parents, device=device),
        survival=torch.tensor(survival, dtype=torch.float32, device=device),
    )


@dataclass(frozen=True)
class Frontier:
    """The nodes to run next. tokens [B, k] int64; follows [B, k] int64: which node of the frontier before
    it each of them follows (0, the root, in the first). Depth is their distance from the root."""

    tokens: Tensor
    follows: Tensor
    depth: int


class Growth:
    """The dynamic tree of a draft that walks (EAGLE-2, arXiv 2406.16858; EAGLE-3, arXiv 2503.01840): each
    level runs the `branch` best nodes of the level before it, and of all children seen on the way the best
    make the tree.

        grown = Growth(last, branch)
        frontier = grown.expand(scores_after_root)            # [B, 1, V]
        for _ in range(depth - 1):
            ...run frontier.tokens [B, k], each on the state of the node that frontier.follows names...
            frontier = grown.expand(scores_after_frontier)    # [B, k, V]
        return grown.proposal(width)
    """

    def __init__(self, last: Tensor, branch: int) -> None:
        assert branch >= 1
        self.last, self.branch, self.depth = last, branch, 0
        zero = torch.zeros(len(last), 1, dtype=torch.int64, device=last.device)
        self.frontier = zero - 1  # [B, F], which candidate each of its nodes is; -1: the root
        self.reach = zero.float()  # [B, F], the summed scores of their paths
        # of all candidates, level by level [B, M]: token, parent candidate, summed score
        self.tokens, self.above, self.scores = zero[:, :0], zero[:, :0], self.reach[:, :0]
        self.ran = zero[:, :0]  # parents of the nodes of all frontiers, as columns of one forest

    def expand(self, scores: Tensor) -> Frontier:
        """scores [B, F, V]: of every token after each node of the frontier (F = 1 at first: the root):
        `Choice.scores`, at most 0, so that no child beats its parent."""
        B, F = self.frontier.shape
        assert scores.shape[:2] == (B, F), "scores of the frontier's nodes, in its order"
        top, ids = scores.topk(min(self.branch, scores.shape[-1]), dim=-1)
        reach, ids = (self.reach[:, :, None] + top).flatten(1), ids.flatten(1)
        above = self.frontier.repeat_interleave(top.shape[-1], dim=1)
        made = self.tokens.shape[1]
        self.tokens = torch.cat((self.tokens, ids), dim=1)
        self.above = torch.cat((self.above, above), dim=1)
        self.scores = torch.cat((self.scores, reach), dim=1)
        self.reach, best = reach.topk(min(self.branch, reach.shape[1]), dim=1)
        follows = best // top.shape[-1]
        self._run(follows)
        self.frontier = made + best
        self.depth += 1
        return Frontier(ids.gather(1, best), follows, self.depth)

    def _run(self, follows: Tensor) -> None:
        before = self.ran.shape[1]
        if self.depth:
            own = before - self.frontier.shape[1] + follows
        else:
            own = torch.arange(follows.shape[1], device=follows.device).expand_as(follows)
        self.ran = torch.cat((self.ran, own), dim=1)

    @property
    def forest(self) -> Tree:
        """All frontiers so far, one after the other, as columns: who descends from whom. The nodes of the
        first are roots, at depth 0; the root itself was observed and is no column."""
        return Tree(self.ran, self.ran.shape[1] - self.frontier.shape[1])

    def proposal(self, width: int) -> Proposal:
        """The best `width` - 1 candidates of all levels and the root. One wait for the device."""
        B, M = self.scores.shape
        # a stable order keeps a parent, the older of the two, before a child that scores the same
        order = self.scores.argsort(dim=1, descending=True, stable=True)[:, : width - 1]
        n = order.shape[1]
        score = self.scores.gather(1, order)
        counts = [1 + real for real in (score > -torch.inf).sum(1).tolist()]
        column = torch.arange(n + 1, device=order.device).expand(B, -1)
        place = torch.zeros(
            B, M + 1, dtype=torch.int64, device=order.device
        )  # the last one is the root's, -1
        place.scatter_(1, order, column[:, 1:])
        parents = place.gather(1, self.above.gather(1, order) % (M + 1))
        parents = torch.where(score > -torch.inf, parents, column[:, 1:])
        tokens = torch.cat((self.last[:, None], self.tokens.gather(1, order)), dim=1)
        parents = torch.cat((column[:, :1], parents), dim=1)
        survival = torch.cat((torch.ones_like(score[:, :1]), score.exp()), dim=1)
        return cut(Proposal(tokens, counts, parents, survival=survival), max(counts))


def cut(proposal: Proposal, columns: int) -> Proposal:
    """The first `columns` columns alone. Of a chain and of the trees grown here these are the likeliest."""
    if columns >= proposal.tokens.shape[1]:
        return proposal
    assert columns >= 1
    parts = {
        name: None if part is None else part[:, :columns]
        for name, part in (("parents", proposal.parents), ("q", proposal.q), ("survival", proposal.survival))
    }
    counts = [min(count, columns) for count in proposal.counts]
    return replace(proposal, tokens=proposal.tokens[:, :columns], counts=counts, **parts)


def worth(survival: Sequence[Sequence[float]], draft_seconds: float, verify_seconds: Sequence[float]) -> int:
    """How many columns to verify: the n that makes most tokens a second, (1 + E[accepted](n)) /
    (C_draft + C_verify(n)), summed over rows, which share a forward (CaDDTree, arXiv 2606.01813).

    survival[b][c]: how likely column c of row b is accepted, 1 at the root, falling; E[accepted](n) is the
    sum over columns 1 .. n - 1. verify_seconds[n]: what a forward of n columns takes for this batch; what
    lies past its end is not verified. Stops at the first decrease: with a convex cost nothing better can
    follow it.
    """
    gains = [sum(row[c] for row in survival if c < len(row)) for c in range(max(map(len, survival)))]
    best, most = 1, 0.0
    for n, tokens in enumerate(accumulate(gains[: len(verify_seconds) - 1]), start=1):
        rate = tokens / (draft_seconds + verify_seconds[n])
        if rate < most:
            break
        best, most = n, rate
    return best
