"""A draft that reads hidden states, for all sequences of an engine: one forward drafts for many."""

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from outpace.drafts.base import Draft, Proposal, RowsSession
from outpace.drafts.deferred import MAX_PENDING, States, joined, stacked
from outpace.drafts.sampler import DraftSampler, RowSamplers


class SharedDraft:
    """Row b of its session belongs to the sequence that has row b of the target's cache."""

    def __init__(self, draft: Draft, rows: int, length: int) -> None:
        """`length`: tokens of a sequence, at most. Any beginning of a row can be reused."""
        session = draft.begin(rows, length, slack=length)
        assert hasattr(session, "reuse"), "a draft that reads hidden states has a session with rows"
        self.session = cast(RowsSession, session)
        self.pending: list[list[States]] = [[] for _ in range(rows)]  # verified, and not observed yet

    def known(self, row: int) -> int:
        """How many tokens of the text in this row it remembers."""
        return self.session.lengths[row]

    def begin(self, source: int, row: int, reused: int) -> None:
        """A sequence begins in `row`, like the one in row `source`."""
        self.pending[row] = []
        self.session.reuse(source, row, reused)

    def add(self, row: int, states: States) -> None:
        """Verified tokens of one row, observed with the next proposal, or when they are many."""
        self.pending[row].append(states)
        if sum(part.counts[0] for part in self.pending[row]) >= MAX_PENDING:
            self.flush(row)

    def flush(self, row: int) -> None:
        if self.pending[row]:
            states = joined(self._taken(row))
            with self.session.of([row]) as session:
                session.observe(*states)

    def propose(
        self, rows: Sequence[int], last: Tensor, width: int, samplers: Sequence[DraftSampler]
    ) -> Proposal:
        """last [B], the last verified token of each of these rows -> what may follow, in at most `width`
        positions."""
        new = [joined(self._taken(row)) if self.pending[row] else None for row in rows]
        with self.session.of(rows) as session:
            if any(states is not None for states in new):
                session.observe(*stacked(new))
            return session.propose(last, width, RowSamplers.of(samplers))

    def _taken(self, row: int) -> list[States]:
        states, self.pending[row] = self.pending[row], []
        return states
