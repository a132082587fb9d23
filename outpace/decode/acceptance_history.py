"""Acceptance probabilities: history of earlier steps, and the draft's confidence if available.

Nothing here ever reads a draft token that is still to be judged, unless the draft chose it without drawing.
"""

from collections.abc import Sequence

KEPT = 0.9  # what a round of draft tokens leaves of what was learnt before
PRIOR_TRIALS = 3.0  # what held before weighs as much as so many trials of late
LENT_TRIALS = 1.5  # of a deeper draft token: as good as the one it follows, until it was tried
FIRST_TRIALS = 6.0  # of what the calibration found, against all that was tried since
SLOWLY = 0.99  # and what a round leaves of that
TRUST_TRIALS, TRUST_KEPT = 3.0, 0.96  # the same of the draft's word: a habit of the draft, not of the text


class AcceptanceHistory:
    """What became of the draft tokens of earlier rounds, fading. A round without the draft's own word is
    predicted from `steps`, one with it from `trust`; `gains` states what the next proposal is likely to
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
        )  # by depth: survival as stated, and as it came
        self.seen, self.seen_gain = [0.0] * widest, [0.0] * widest  # by position: proposals, their survival

    def fade(self, share: float) -> None:
        """What was learnt counts for `share` of what it did."""
        for part in (self.tried, self.taken, self.seen, self.seen_gain):
            part[:] = [x * share for x in part]

    def drafts(self) -> None:
        """A round of draft tokens begins."""
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
        """By depth: what came of what the draft generated, over what it stated. Depths of which little is
        known are believed as far as the one above."""
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
