"""How many positions a step drafts and verifies: fixed, or what makes most tokens/s by a cost table.

A decision reads what earlier steps brought, and what the draft states of draft tokens that nobody drew. It
is made before the target runs: it changes the speed and, at temperature 0 or under the coupled rule, nothing
else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from outpace.decode.costs import Costs
from outpace.drafts.base import Proposal
from outpace.drafts.tree import cut
from outpace.kv.tree import depths

KEPT = 0.9  # what a step of draft tokens leaves of what was learnt before
PRIOR_TRIALS = 3.0  # what held before weighs as much as so many trials of late
LENT_TRIALS = 1.5  # of a deeper draft token: as good as the one it follows, until it was tried
FIRST_TRIALS = 6.0  # of what the calibration found, against all that was tried since
SLOWLY = 0.99  # and what a step leaves of that
TRUST_TRIALS, TRUST_KEPT = 3.0, 0.96  # the same of the draft's word: a habit of the draft, not of the text


class AcceptanceHistory:
    """What became of the draft tokens of earlier steps, fading. A step without the draft's own word is
    predicted from `steps`, one with it from `trust`; `gains` is what the next proposal is likely to
    bring."""

    def __init__(self, widest: int, prior: float) -> None:
        """widest: positions of the widest proposal. prior: how often a draft token is right where its parent
        is."""
        self.first, self.all_tried, self.all_taken = prior, 0.0, 0.0
        self.tried, self.taken = [0.0] * widest, [0.0] * widest  # by position, where its parent was accepted
        self.parents = [max(i - 1, 0) for i in range(widest)]  # of the last proposal, as far as it went
        self.expected, self.observed = (
            [0.0] * widest,
            [0.0] * widest,
        )  # by depth: survival as the draft predicted it, and as it came
        self.seen, self.seen_gain = [0.0] * widest, [0.0] * widest  # by position: proposals, their survival

    def fade(self, share: float) -> None:
        """What was learnt counts for `share` of what it did."""
        for part in (self.tried, self.taken, self.seen, self.seen_gain):
            part[:] = [x * share for x in part]

    def drafts(self) -> None:
        """A step of draft tokens begins."""
        self.fade(KEPT)
        self.all_tried *= SLOWLY
        self.all_taken *= SLOWLY
        self.expected = [x * TRUST_KEPT for x in self.expected]
        self.observed = [x * TRUST_KEPT for x in self.observed]

    @property
    def prior(self) -> float:
        """How often a draft token is right where its parent is: over the long run."""
        return (self.all_taken + FIRST_TRIALS * self.first) / (self.all_tried + FIRST_TRIALS)

    # ---- without the draft's word -------------------------------------------------------------------

    @property
    def first_step(self) -> float:
        """`steps()[1]`, without the others."""
        return (self.taken[1] + PRIOR_TRIALS * self.prior) / (self.tried[1] + PRIOR_TRIALS)

    def steps(self) -> list[float]:
        """By position: how often it was accepted where its parent was. What was rarely tried of late is held
        for as good as its parent."""
        items, long_run = [1.0] * len(self.tried), self.prior
        for i in range(1, len(items)):
            parent = self.parents[i]
            prior, weight = (items[parent], LENT_TRIALS) if parent else (long_run, PRIOR_TRIALS)
            items[i] = (self.taken[i] + weight * prior) / (self.tried[i] + weight)
        return items

    def reach(self, parents: Sequence[int]) -> list[float]:
        """By position: how likely it is accepted, the product of the steps to it; 1 at the root."""
        steps, items = self.steps(), [1.0]
        for i in range(1, len(parents)):
            items.append(items[parents[i]] * steps[i])
        return items

    # ---- with it ------------------------------------------------------------------------------------

    def trust(self, deepest: int) -> list[float]:
        """By depth: the survival that came, over the survival that the draft predicted. Depths of
        which little is known are trusted as far as the one above."""
        items = [1.0] * (deepest + 1)
        for d in range(1, len(items)):
            items[d] = (self.observed[d] + TRUST_TRIALS * items[d - 1]) / (self.expected[d] + TRUST_TRIALS)
        return items

    def corrected(
        self, survival: Sequence[float], parents: Sequence[int], depth: Sequence[int]
    ) -> list[float]:
        """The draft's word, corrected; a draft token lives no longer than its parent."""
        trust, items = self.trust(max(depth)), [1.0]
        for i in range(1, len(survival)):
            own, above = survival[i] * trust[depth[i]], items[parents[i]]
            items.append(own if own < above else above)
        return items

    # ---- what is likely to come ---------------------------------------------------------------------

    def gains(self, speaks: bool) -> list[float]:
        """By position: what it adds to the accepted tokens of one row, before the proposal is made. `speaks`:
        the draft states how sure it is. A position that was not asked for of late is held to follow the one
        before it as that one follows its own."""
        if not speaks:
            return self.reach(self.parents)
        before, step = 1.0, self.first_step
        items = [before]
        weight = 0.25  # of what is thought of a position while none was seen
        for gain, seen in zip(self.seen_gain[1:], self.seen[1:], strict=True):
            now = (gain + weight * before * step) / (seen + weight)
            now = now if now < before else before
            items.append(now)
            step = now / before if before else 0.0
            before = now
        return items

    def foresaw(self, gains: Sequence[float], asked: int) -> None:
        """The corrected survival of a proposal, whether or not all of it is verified; of the positions
        `asked` for, those that were not offered gain nothing."""
        for i in range(asked):
            self.seen[i] += 1
            self.seen_gain[i] += gains[i] if i < len(gains) else 0.0

    def add(
        self, parents: Sequence[int], depth: Sequence[int], path: Sequence[int], items: Sequence[float] | None
    ) -> None:
        """One row of a step: of the positions verified their parents, their depth and what the draft
        generated of them, and the path that was accepted."""
        taken = set(path)
        for i in range(1, len(parents)):
            if parents[i] in taken:
                self.tried[i] += 1
                self.taken[i] += i in taken
                self.all_tried += 1
                self.all_taken += i in taken
            if items is not None:
                self.expected[depth[i]] += items[i]
                self.observed[depth[i]] += i in taken


RESTING = 0.98  # what a plain step leaves of what was learnt before
SHARE = 0.01  # of the time that may be lost to probes, and to showing the draft what it missed
LEFT = 0.25  # of that, what is left for probes where showing takes more
CREDIT = 2.0  # probes that may be lost at the beginning of a text
BANK = 8.0  # and later, where draft tokens gained as much before
DEBT = 5.0  # steps more that may be lost while they seem to pay
GAP = 8  # plain steps from a probe that failed to the next
STRETCH = 64  # tokens of context over which costs are taken as equal


class Controller(Protocol):
    """Asked by the loop, each step in this order. `predicted`: tokens of all rows and seconds that the step
    will bring, where it can say."""

    @property
    def predicted(self) -> tuple[float, float] | None: ...

    def begin(self, block: int) -> None:
        """A generation begins; `block` is the draft's widest proposal."""
        ...

    def width(self, lengths: Sequence[int]) -> int:
        """Positions to draft, root included: 2 to `block`, or 1 for a plain step. lengths: tokens that the
        cache holds of each row."""
        ...

    def cut(self, proposal: Proposal) -> Proposal:
        """What of the proposal is verified: its first positions."""
        ...

    def learn(self, proposal: Proposal, path: list[list[int]]) -> None:
        """What was verified, and the positions accepted."""
        ...


class Fixed:
    """So many positions in every step, or as many as the draft has: `columns` 1 is autoregressive
    decoding."""

    predicted = None

    def __init__(self, columns: int) -> None:
        if columns < 1:
            raise ValueError(f"{columns} positions a round: there is always the last verified token")
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
    """Each step as many positions n as make (1 + E[accepted](n)) / (C_draft + C_verify(n) + rest) largest,
    summed over the rows, which share a forward (CaDDTree, arXiv 2606.01813; DSpark's scheduler, 2607.05147).

    Where no n beats autoregressive decoding, drafting rests and is probed. An account of what drafting loses
    against autoregressive decoding, showing the draft what it missed included, holds it to a few probes and
    one part in a hundred of the time. One controller serves one generation after another, and remembers.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.predicted: tuple[float, float] | None = None
        self.record = AcceptanceHistory(2, costs.acceptance)
        self.speaks = True  # the draft states how sure it is; taken for granted until a proposal was seen
        self.rests = self.missed = False  # missed: the last probe brought nothing
        self.wait = self.rested = 0  # plain steps to come, and passed
        self.spare: float | None = None  # seconds that may yet be lost
        self._tables: dict[tuple[int, int], Table] = {}
        self._now = Table.of(costs, 1, 0.0, 2)
        self._rows: list[BatchRow] = []
        self._asked, self._drafted = 1, 0.0  # positions, and the seconds that they take

    def begin(self, block: int) -> None:
        if len(self.record.tried) != block:
            self.record = AcceptanceHistory(block, self.costs.acceptance)
            self._tables = {}
        self.record.fade(0.5 * RESTING**self.rested)
        self.rests = self.missed = False
        self.wait = self.rested = 0
        self.spare = None

    def width(self, lengths: Sequence[int]) -> int:
        now = self._now = self._table(len(lengths), sum(lengths) / len(lengths))
        if self.rests and self.wait > 0:  # nothing to decide
            self.wait -= 1
            self.rested += 1
            self.predicted = now.plain
            return 1
        if self.rested:
            self.record.fade(RESTING**self.rested)
        gains = [now.rows * g for g in self.record.gains(self.speaks)]
        best = fastest(gains, now.whole, least=2)
        pays = sum(gains[:best]) / now.whole[best] > now.rows / now.whole[1]
        best = best if pays else now.even
        wakeup = now.wake if self.rested else 0.0
        if not self._drafts(pays, wakeup + now.whole[best] - now.whole[1]):
            self.rested = 1
            self.predicted = now.plain
            return 1
        self.rested = 0
        self.record.drafts()
        width = best
        if self.speaks:  # a wider proposal may be worth more than most, where it costs next to nothing
            headroom = now.draft[best] + 0.02 * now.whole[best]
            width = max(w for w in range(best, len(now.draft)) if now.draft[w] <= headroom)
        self._asked, self._drafted = width, wakeup + now.draft[width]
        return width

    def cut(self, proposal: Proposal) -> Proposal:
        offered = self._gains(proposal)
        whole = [self._drafted + other for other in self._now.others]
        # without the draft's confidence, only verified tokens teach the controller: at least one draft token
        least = 1 if self.speaks else min(2, len(offered))
        columns = fastest(offered, whole, least)
        self.predicted = (sum(offered[:columns]), whole[columns])
        return cut(proposal, columns)

    def learn(self, proposal: Proposal, path: list[list[int]]) -> None:
        assert self.predicted is not None and self.spare is not None, "width comes first"
        if self.rested:  # a plain step
            self.spare += self._now.allowed
            return
        seconds, plain = self.predicted[1], self._now.whole[1] / len(path)
        self.spare += SHARE * seconds - (seconds - plain * sum(map(len, path)))
        self.missed = self.rests and all(len(columns) == 1 for columns in path)
        for columns, n, (parents, depth, value) in zip(path, proposal.counts, self._rows, strict=True):
            self.record.add(parents[:n], depth, columns, value)

    def _drafts(self, pays: bool, loss: float) -> bool:
        """Whether this step drafts. loss: seconds that are lost where it brings nothing."""
        self.spare = CREDIT * loss if self.spare is None else min(self.spare, BANK * loss)
        self.rests = not pays or self.spare < -DEBT * loss
        if not self.rests:
            return True
        if self.spare < loss or (self.missed and self.spare < CREDIT * loss):
            self.wait, self.missed = GAP - 1, False
            return False
        return True

    def _gains(self, proposal: Proposal) -> list[float]:
        """By position, what it is expected to add, summed over the rows."""
        record, self._rows = self.record, _rows(proposal)
        self.speaks = self._rows[0].survival is not None
        record.parents[: len(self._rows[0].parents)] = self._rows[0].parents
        items = [0.0] * proposal.tokens.shape[1]
        for n, (parents, depth, value) in zip(proposal.counts, self._rows, strict=True):
            if value is None:
                row = record.reach(parents[:n])
            else:
                row = record.corrected(value[:n], parents, depth)
                record.foresaw(row, self._asked)
            for i, gain in enumerate(row):
                items[i] += gain
        return items

    def _table(self, rows: int, context: float) -> "Table":
        at = (rows, int(context) // STRETCH)
        if at not in self._tables:
            middle = (at[1] + 0.5) * STRETCH
            self._tables[at] = Table.of(self.costs, rows, middle, len(self.record.tried))
        return self._tables[at]


@dataclass(frozen=True)
class Table:
    """Costs of `rows` rows near one context, by positions (0 unused): of drafting so many, of the rest of a
    step, of both; `show`: of what a plain step leaves for later; `wake`: of the first step after some.
    `even`: the positions of a step that just pays, where draft tokens are as likely right as that takes:
    what a probe asks for."""

    rows: int
    draft: list[float]
    others: list[float]
    whole: list[float]
    show: float
    wake: float
    even: int

    @staticmethod
    def of(costs: Costs, rows: int, context: float, block: int) -> "Table":
        rest = costs.rest_seconds(rows)
        draft = [0.0, *(costs.draft_seconds(n, context, rows) for n in range(1, block + 1))]
        others = [0.0, *(costs.verify_seconds(n, context, rows) + rest for n in range(1, block + 1))]
        whole = [d + o for d, o in zip(draft, others, strict=True)]
        even, low, high = 2, 0.0, 1.0
        for _ in range(7):  # halves the interval that holds the chance of a draft token at which it pays
            chance = (low + high) / 2
            gains = [rows * chance**i for i in range(block)]
            even = fastest(gains, whole, least=2)
            pays = sum(gains[:even]) / whole[even] > rows / whole[1]
            low, high = (low, chance) if pays else (chance, high)
        return Table(rows, draft, others, whole, costs.show_seconds(rows), costs.wake_seconds(rows), even)

    @property
    def plain(self) -> tuple[float, float]:
        """Tokens and seconds of a plain step, what it leaves for later included."""
        return float(self.rows), self.whole[1] + self.show

    @property
    def allowed(self) -> float:
        """Seconds that a plain step adds to what probes may lose."""
        return SHARE * self.whole[1] - min(self.show, (1 - LEFT) * SHARE * self.whole[1])


def fastest(gains: Sequence[float], seconds: Sequence[float], least: int = 1) -> int:
    """The n >= least with the most tokens/s, sum(gains[:n]) / seconds[n]; the smallest of equals.

    All are tried: a measured cost need not be convex, so that the first decrease need not be the last.
    """
    best, most = least, 0.0
    for n, tokens in enumerate(accumulate(gains), start=1):
        if n >= least and tokens > most * seconds[n]:
            best, most = n, tokens / seconds[n]
    return best


class BatchRow(NamedTuple):
    """One row of a proposal, by position. `survival`: None where the draft gives none."""

    parents: list[int]
    depth: list[int]
    survival: list[float] | None


def _rows(proposal: Proposal) -> list[BatchRow]:
    """Survival is left out where draft tokens were drawn: what is verified of those may not depend on which
    they are, and their survival may."""
    quiet = proposal.survival is None or proposal.q is not None
    items = [None] * len(proposal.counts) if quiet else proposal.survival.tolist()  # type: ignore[union-attr]
    return [
        BatchRow(parents, depths(parents), row) for parents, row in zip(proposal.above, items, strict=True)
    ]
