"""How many columns a round drafts and verifies: fixed, or what makes most tokens a second by a cost table.

A decision reads what earlier rounds brought, and what the draft says of guesses that nobody drew. It is made
before the target runs: it changes the speed and, at temperature 0 or under the coupled rule, nothing else.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from outpace.decode.acceptance import Record, depths
from outpace.decode.costs import Costs
from outpace.drafts.proposal import Proposal
from outpace.drafts.tree import cut

KEEP_DRAFTING = 0.9  # what a round of guesses leaves of what was learnt before
KEEP_RESTING = 0.98  # and a plain step
FIRST_GAP = 16  # plain steps before the first probe
PROBE_SHARE = 0.01  # of the time, for probes that go on failing
STRETCH = 64  # tokens of context over which costs are taken as equal


class Controller(Protocol):
    """Asked by the loop, each round in this order. `foreseen`: tokens of all rows and seconds that the round
    will bring, where it can say."""

    @property
    def foreseen(self) -> tuple[float, float] | None: ...

    def begin(self, block: int) -> None:
        """A generation begins; `block` is the draft's widest proposal."""
        ...

    def width(self, lengths: Sequence[int]) -> int:
        """Columns to draft, root included: 2 to `block`, or 1 for a plain step. lengths: tokens that the
        cache holds of each row."""
        ...

    def cut(self, proposal: Proposal) -> Proposal:
        """What of the proposal is verified: its first columns."""
        ...

    def learn(self, proposal: Proposal, path: list[list[int]]) -> None:
        """What was verified, and the columns accepted."""
        ...


class Fixed:
    """So many columns in every round, or as many as the draft has: `columns` 1 is plain decoding."""

    foreseen = None

    def __init__(self, columns: int) -> None:
        if columns < 1:
            raise ValueError(f"{columns} columns a round: there is always the last verified token")
        self.columns = self.block = columns

    def begin(self, block: int) -> None:
        self.block = block

    def width(self, lengths: Sequence[int]) -> int:
        return min(self.columns, self.block)

    def cut(self, proposal: Proposal) -> Proposal:
        return proposal

    def learn(self, proposal: Proposal, path: list[list[int]]) -> None:
        pass


class Adaptive:
    """Each round as many columns n as make (1 + E[accepted](n)) / (C_draft + C_verify(n) + rest) largest,
    summed over the rows, which share a forward (CaDDTree, arXiv 2606.01813; DSpark's scheduler, 2607.05147).

    Where no n beats plain decoding, drafting rests, and is probed: after 16 plain steps, then after ever
    more while probes fail, up to where they cost one part in a hundred. One controller serves one generation
    after another, and remembers.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.foreseen: tuple[float, float] | None = None
        self.record = Record(2, costs.acceptance)
        self.speaks = True  # the draft says how sure it is; taken for granted until a proposal was seen
        self.rests = self.probing = self.hit = False
        self.gap, self.wait, self.rested = float(FIRST_GAP), 0, 0  # plain steps: to come, passed
        self._rounds: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
        self._now: tuple[list[float], list[float]] = ([], [])  # by columns: drafting; the rest of the round
        self._drafted, self._corrected = 0.0, [1.0]

    def begin(self, block: int) -> None:
        if len(self.record.tried) != block:
            self.record = Record(block, self.costs.acceptance)
            self._rounds = {}
        self.record.fade(0.5)
        self.rests = self.probing = False
        self.gap = float(FIRST_GAP)

    def width(self, lengths: Sequence[int]) -> int:
        rows = len(lengths)
        self._now = self._seconds(rows, sum(lengths) / rows)
        if self.rests and self.wait > 0:  # nothing to decide
            self.wait -= 1
            self.rested += 1
            self.foreseen = (float(rows), self._now[1][1])
            return 1
        self.record.fade(KEEP_RESTING**self.rested)
        self.rested = 0
        drafting, others = self._now
        gains = [rows * g for g in self.record.gains(self.speaks)]
        whole = [d + o for d, o in zip(drafting, others, strict=True)]
        best = fastest(gains, whole, least=2)
        pays = sum(gains[:best]) / whole[best] > rows / whole[1]
        if not self._drafts(pays, whole[best] / whole[1]):
            self.rested = 1
            self.foreseen = (float(rows), whole[1])
            return 1
        self.record.fade(KEEP_DRAFTING)
        width = best
        if self.speaks:  # a wider proposal may be worth more than most, where it costs next to nothing
            room = drafting[best] + 0.02 * whole[best]
            width = max(w for w in range(best, len(drafting)) if drafting[w] <= room)
        self._drafted = drafting[width]
        return width

    def cut(self, proposal: Proposal) -> Proposal:
        offered = self._gains(proposal)
        whole = [self._drafted + o for o in self._now[1]]
        # what the draft does not speak of is learnt only from what is verified: at least one guess
        least = 1 if self.speaks else min(2, len(offered))
        columns = fastest(offered, whole, least)
        self.foreseen = (sum(offered[:columns]), whole[columns])
        return cut(proposal, columns)

    def learn(self, proposal: Proposal, path: list[list[int]]) -> None:
        N = proposal.tokens.shape[1]
        if N == 1:
            return
        said = self._said(proposal)
        shape = _parents(proposal)
        for b, columns in enumerate(path):
            n = proposal.counts[b]
            parents = shape[b][:n]
            self.record.add(parents, depths(parents), columns, None if said is None else said[b])
        self.hit = any(len(columns) > 1 for columns in path)

    def _drafts(self, pays: bool, cost: float) -> bool:
        """Whether this round drafts. cost: that of a probe, in plain steps."""
        if not self.rests:
            self.rests, self.wait = not pays, int(self.gap)
            self.gap = max(FIRST_GAP, self.gap * KEEP_DRAFTING)
            self.probing = False
            if not self.rests:
                return True
        elif self.probing:  # what the last round brought is known by now
            if pays:
                self.rests = self.probing = False
                return True
            if not self.hit:
                self.probing = False
                self.gap = min(2 * self.gap, max(FIRST_GAP, math.ceil((cost - 1) / PROBE_SHARE)))
                self.wait = int(self.gap)
        if self.wait > 0:
            self.wait -= 1
            return False
        self.probing, self.hit = True, False
        return True

    def _gains(self, proposal: Proposal) -> list[float]:
        """By column, what it is expected to add, summed over the rows."""
        said, shape, record = self._said(proposal), _parents(proposal), self.record
        self.speaks = said is not None
        record.parents[: len(shape[0])] = shape[0]
        found = [0.0] * proposal.tokens.shape[1]
        for b, n in enumerate(proposal.counts):
            parents = shape[b][:n]
            if said is None:
                row = record.reach(parents)
            else:
                row = record.corrected(said[b][:n], parents, depths(parents))
                record.foresaw(row)
            for i, gain in enumerate(row):
                found[i] += gain
        return found

    def _said(self, proposal: Proposal) -> list[list[float]] | None:
        """The draft's survival; not of guesses that were drawn: what is verified of those may not depend on
        which they are, and their survival may."""
        if proposal.survival is None or proposal.q is not None:
            return None
        found: list[list[float]] = proposal.survival.tolist()
        return found

    def _seconds(self, rows: int, context: float) -> tuple[list[float], list[float]]:
        """By columns (0 unused): what drafting so many takes, and what else a round of so many takes."""
        at = (rows, int(context) // STRETCH)
        if at not in self._rounds:
            costs, middle, block = self.costs, (at[1] + 0.5) * STRETCH, len(self.record.tried)
            rest = costs.rest_seconds(rows)
            self._rounds[at] = (
                [0.0, *(costs.draft_seconds(n, middle, rows) for n in range(1, block + 1))],
                [0.0, *(costs.verify_seconds(n, middle, rows) + rest for n in range(1, block + 1))],
            )
        return self._rounds[at]


def fastest(gains: Sequence[float], seconds: Sequence[float], least: int = 1) -> int:
    """The n >= least with the most tokens a second, sum(gains[:n]) / seconds[n]; the smallest of equals.

    All are tried: a measured cost need not be convex, so that the first decrease need not be the last.
    """
    best, most = least, 0.0
    for n, tokens in enumerate(accumulate(gains), start=1):
        if n >= least and tokens > most * seconds[n]:
            best, most = n, tokens / seconds[n]
    return best


def _parents(proposal: Proposal) -> list[list[int]]:
    if proposal.parents is None:
        chain = [max(i - 1, 0) for i in range(proposal.tokens.shape[1])]
        return [chain] * len(proposal.counts)
    found: list[list[int]] = proposal.parents.tolist()
    return found
