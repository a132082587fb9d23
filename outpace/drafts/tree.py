"""Growing trees of draft tokens from a draft's scores: best-first from marginals, level by level from a walk.

Every tree here has its positions in descending order of survival, parents before their children, so the first
n positions of one are its best tree of n positions: `cut` takes them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import exp, inf, isnan, nan
from typing import Protocol

import torch
from torch import Tensor

from outpace.drafts.base import Draft, HostProposal, Proposal, RowsSession
from outpace.drafts.sampler import DraftSampler, Greedy
from outpace.drafts.vocab import DraftVocabulary
from outpace.kv.tree import Tree
from outpace.ops.candidates import top_k
from outpace.ops.dispatch import use_kernel

MOST_NODES = 1024  # of a tree: the target's logits of all of them are formed at once

# What a predecessor adds to the log-probabilities of those that may follow it, before they are normalised:
# previous [B, n, a] and ids [B, n, k], tokens at depths 0 .. n - 1 and 1 .. n -> [B, n, a, k] float32.
Pairs = Callable[[Tensor, Tensor], Tensor]


def check_nodes(nodes: int) -> None:
    """Raises ValueError for a count, root included, that makes no tree or is verified by nobody."""
    if nodes < 2:
        raise ValueError(f"a tree of {nodes} nodes proposes nothing: it needs at least 2")
    if nodes > MOST_NODES:
        raise ValueError(f"a tree of {nodes} nodes: at most {MOST_NODES}, all verified at once")


def best_first(
    last: Tensor,
    scores: Tensor,
    nodes: int,
    branch: int = 16,
    pairs: Pairs | None = None,
    vocab: DraftVocabulary | None = None,
) -> Proposal:
    """The most probable `nodes` positions of a block (DDTree, arXiv 2604.12989): a node's score is the sum
    of its path's. Without `pairs` the draft tokens of one depth do not know those of another.

    last [B] int64; scores [B, n, V], of every token 1 .. n tokens after `last`: `Choice.scores`, at most 0;
    or of every one of `vocab` [B, n, N]. Of each depth the `branch` best are looked at. Rows come out
    narrower than `nodes` where there are fewer paths, or only impossible ones (-inf). One wait for the
    device.
    """
    assert nodes >= 1 and branch >= 1 and scores.dim() == 3 and len(last) == len(scores)
    top, ids = _best(scores, branch)
    ids = ids if vocab is None else vocab.named(ids)
    n, k = top.shape[1:]
    places = torch.arange(k, device=ids.device).expand_as(ids)[:, :, None]
    followers = top[:, :, None] if pairs is None else _after_each(last, top, ids, pairs)
    if pairs is not None:
        followers, places = followers.sort(dim=-1, descending=True, stable=True)
    parts = last, ids, places, followers
    # as float64, which holds ids exactly
    host = torch.cat([part.reshape(len(last), -1).double() for part in parts], dim=1).tolist()
    rows, ends = [], (1, 1 + n * k, 1 + n * k + places[0].numel())
    for row in host:
        value, ranked, values = row[ends[0] : ends[1]], row[ends[1] : ends[2]], row[ends[2] :]
        parents, taken, reach = _best_paths(values, ranked, (n, followers.shape[2], k), nodes)
        if isnan(sum(values)):  # of any candidate, in the tree or not
            reach[0] = nan
        tokens = [int(row[0]), *(int(value[place]) for place in taken)]
        rows.append((tokens, parents, [exp(score) for score in reach]))
    return assembled(rows, last.device)


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, falling: values float32 and ids."""
    if use_kernel(scores) and k <= 64:  # what the kernel takes: for more, `top_k` would sort the row
        ids, values, _ = top_k(scores.contiguous(), k)
        return values, ids
    top, ids = scores.topk(min(k, scores.shape[-1]), dim=-1)
    return top.float(), ids


def _after_each(last: Tensor, top: Tensor, ids: Tensor, pairs: Pairs) -> Tensor:
    """top, ids [B, n, k], the candidates of each depth -> [B, n, k, k]: log-probability of each after each
    candidate of the depth before. The tokens that are no candidates keep the share they had."""
    root = last[:, None, None].expand(-1, 1, ids.shape[2])
    scores = top[:, :, None] + pairs(torch.cat((root, ids[:, :-1]), dim=1), ids)
    others = (1 - top.exp().sum(-1, keepdim=True)).clamp_(min=0).log_()
    return (scores - torch.logaddexp(scores.logsumexp(-1), others)[..., None]).clamp_(max=0)


def _best_paths(
    values: list[float], places: list[float], shape: tuple[int, int, int], nodes: int
) -> tuple[list[int], list[int], list[float]]:
    """shape n, A, k; values[(d * A + a) * k + r]: the r-th best log-probability at depth d after candidate a
    of the depth before (A = 1: after any), falling, and `places` which candidate of depth d that is -> per
    position its parent's position and the sum of its path (position 0 is the root), and per draft token its
    d * k + candidate.

    Popping a node offers its next sister (same parent, rank + 1) and its first child: whatever is not yet
    offered scores no more than something that is.
    """
    n, A, k = shape
    parents, reach = [0], [0.0]
    taken: list[int] = []
    # falling score, order of offering; the parent's position, depth, rank, where the parent's followers begin
    heap = [(-values[0], 0, 0, 0, 0, 0)] if values else []
    serial = 0
    while heap and len(parents) < nodes:
        cost, _, parent, depth, rank, at = heappop(heap)
        if cost == inf:
            break
        column, place = len(parents), int(places[at + rank])
        parents.append(parent)
        taken.append(depth * k + place)
        reach.append(-cost)
        if rank + 1 < k:
            serial += 1
            heappush(heap, (-reach[parent] - values[at + rank + 1], serial, parent, depth, rank + 1, at))
        if depth + 1 < n:
            serial += 1
            at = ((depth + 1) * A + (place if A > 1 else 0)) * k
            heappush(heap, (cost - values[at], serial, column, depth + 1, 0, at))
    return parents, taken, reach


def assembled(rows: list[tuple[list[int], list[int], list[float]]], device: torch.device) -> HostProposal:
    """Per row tokens, parents and survival by position, rows of different lengths -> a padded Proposal."""
    counts = [len(tokens) for tokens, _, _ in rows]
    N = max(counts)
    short = [N - count for count in counts]
    tokens = [row[0] + [0] * n for row, n in zip(rows, short, strict=True)]
    # padding is its own parent: it descends from nobody
    parents = [[*row[1], *range(len(row[1]), N)] for row in rows]
    survival = [row[2] + [0.0] * n for row, n in zip(rows, short, strict=True)]
    return HostProposal(tokens, counts, parents, survival, device)


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
        self.ran = zero[:, :0]  # parents of the nodes of all frontiers, as positions of one forest

    def expand(self, scores: Tensor) -> Frontier:
        """scores [B, F, V]: of every token after each node of the frontier (F = 1 at first: the root):
        `Choice.scores`, at most 0, so that no child beats its parent."""
        B, F = self.frontier.shape
        assert scores.shape[:2] == (B, F), "scores of the frontier's nodes, in its order"
        top, ids = _best(scores, self.branch)
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
        """All frontiers so far, one after the other, as positions: who descends from whom. The nodes of the
        first are roots, at depth 0; the root itself was observed and is no position."""
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
        place = torch.zeros(B, M + 1, dtype=torch.int64, device=order.device)
        # the last one is the root's, which is candidate -1
        place.scatter_(1, order, column[:, 1:])
        parents = place.gather(1, self.above.gather(1, order) % (M + 1))
        parents = torch.where(score > -torch.inf, parents, column[:, 1:])
        tokens = torch.cat((self.last[:, None], self.tokens.gather(1, order)), dim=1)
        parents = torch.cat((column[:, :1], parents), dim=1)
        # NaN is no candidate, and what remains would be a tree like others
        root = torch.where(self.scores.isnan().any(1, keepdim=True), nan, 1.0)
        survival = torch.cat((root, score.exp()), dim=1)
        return cut(Proposal(tokens, counts, parents, survival=survival), max(counts))


def cut(proposal: Proposal, columns: int) -> Proposal:
    """The first `columns` positions alone. Of a chain and of the trees grown here these are the most
    probable."""
    if columns >= proposal.width:
        return proposal
    assert columns >= 1
    counts = [min(count, columns) for count in proposal.counts]
    if isinstance(proposal, HostProposal):
        tokens, stated = [row[:columns] for row in proposal.host_tokens], proposal.stated
        above = None if proposal.chain else [row[:columns] for row in proposal.above]
        stated = None if stated is None else [row[:columns] for row in stated]
        return HostProposal(tokens, counts, above, stated, proposal.device, proposal.provisional)
    optional = (proposal.parents, proposal.q, proposal.survival)
    parents, q, survival = (None if part is None else part[:, :columns] for part in optional)
    first = proposal.tokens[:, :columns]
    return replace(proposal, tokens=first, counts=counts, parents=parents, q=q, survival=survival)


def together(proposals: Sequence[Proposal]) -> Proposal:
    """One of several rows, from proposals of one row each, chains and trees; none may have q."""
    assert all(len(p.counts) == 1 and p.q is None for p in proposals)
    counts = [p.counts[0] for p in proposals]
    N = max(counts)
    tokens = [p.host_tokens[0][:n] + [0] * (N - n) for p, n in zip(proposals, counts, strict=True)]
    above = [[*p.above[0][:n], *range(n, N)] for p, n in zip(proposals, counts, strict=True)]
    parents = None if all(p.chain for p in proposals) else above
    stated = [p.stated if n > 1 else [[1.0]] for p, n in zip(proposals, counts, strict=True)]
    survival = [x[0][:n] + [0.0] * (N - n) for x, n in zip(stated, counts, strict=True) if x is not None]
    says = len(survival) == len(counts)
    return HostProposal(tokens, counts, parents, survival if says else None, proposals[0].device)


def row_of(proposal: Proposal, b: int) -> HostProposal:
    """Row b alone, without padding; what was drawn is not looked at."""
    n = proposal.counts[b]
    parents = None if proposal.chain else [proposal.above[b][:n]]
    stated = None if proposal.stated is None else [proposal.stated[b][:n]]
    return HostProposal([proposal.host_tokens[b][:n]], [n], parents, stated, proposal.device)


class BlockSession(RowsSession, Protocol):
    """A session of a draft that proposes a whole block at once. `vocab`: its vocabulary."""

    def of(self, rows: Sequence[int]) -> AbstractContextManager["BlockSession"]: ...

    @property
    def vocab(self) -> DraftVocabulary: ...

    def block(self, last: Tensor, width: int) -> tuple[Tensor, Pairs | None]:
        """last [B] -> logits [B, width - 1, N] of its vocabulary, 1 .. width - 1 tokens after it, blind to
        each other; and what a token adds to the logits of the next one, if the draft has such a part."""
        ...

    def tree(self, last: Tensor, width: int, nodes: int, branch: int) -> HostProposal | None:
        """`best_first` of these logits, in one native call where there is one."""
        ...


class BlockDraft(Draft, Protocol):
    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> BlockSession: ...


@dataclass(frozen=True)
class DDTree:
    """A block draft that proposes trees of `nodes` positions, root included (DDTree, arXiv 2604.12989): as
    deep as its block, and as wide as the scores say. `branch`: how many followers of a depth are looked at.

    Nothing is drawn: q is None, so rejection rules take its draft tokens as certain ones.
    Raises ValueError for sizes that make no tree.
    """

    draft: BlockDraft
    nodes: int = 16
    branch: int = 16

    def __post_init__(self) -> None:
        check_nodes(self.nodes)
        if self.branch < 1:
            raise ValueError(f"branch {self.branch}: at least 1 follower of each depth")

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.draft.target_layer_ids

    @property
    def block_size(self) -> int:
        return self.nodes

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> "DDTreeSession":
        session = self.draft.begin(batch, length, offset, slack)
        return DDTreeSession(session, self.draft.block_size, self.branch)


class DDTreeSession:
    def __init__(self, session: BlockSession, block: int, branch: int) -> None:
        self.session, self.block, self.branch = session, block, branch

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        self.session.observe(tokens, aux, counts)

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        """Positions in descending order of survival: the first n of them are the best tree of n."""
        deep = min(width, self.block)
        if sampler == Greedy():
            tree = self.session.tree(last, deep, width, self.branch)
            if tree is not None:
                return tree
        logits, pairs = self.session.block(last, deep)
        vocab, sharper = self.session.vocab, 1 / sampler.temperature
        added = None if pairs is None else lambda previous, ids: pairs(previous, ids) * sharper
        return best_first(last, vocab.scores(sampler, logits, 1), width, self.branch, added, vocab)

    @property
    def lengths(self) -> list[int]:
        return self.session.lengths

    @property
    def nbytes(self) -> int:
        return self.session.nbytes

    @contextmanager
    def of(self, rows: Sequence[int]) -> Iterator["DDTreeSession"]:
        with self.session.of(rows) as session:
            yield DDTreeSession(session, self.block, self.branch)

    def flush(self) -> None:
        self.session.flush()

    def reuse(self, source: int, row: int, count: int) -> None:
        self.session.reuse(source, row, count)

    def rewind(self, lengths: list[int]) -> None:
        self.session.rewind(lengths)

    def select(self, batch_indices: list[int]) -> None:
        self.session.select(batch_indices)
