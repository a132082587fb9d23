"""A draft that reads hidden states, for all sequences of an engine: one forward drafts for many."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

from torch import Tensor

from outpace.drafts.base import Draft, Proposal, RowsSession
from outpace.drafts.deferred import MAX_PENDING, States, joined, stacked
from outpace.drafts.sampler import DraftSampler, RowSamplers

MOST_BYTES = 128 << 20  # of hidden states that rows without a sequence may keep


class Pending(NamedTuple):
    """The first `length` of verified tokens of one row, as a function that takes them out of hidden states
    `aux` of a step, which are of many rows."""

    states: Callable[[], States]
    aux: Tensor
    length: int

    def formed(self) -> States:
        tokens, aux, (n,) = self.states()
        if n == self.length:
            return States(tokens, aux, [n])
        assert aux is not None
        return States(tokens[:, : self.length], aux[:, :, : self.length], [self.length])


class SharedDraft:
    """Row b of its session belongs to the sequence that has row b of the target's cache. What is verified
    waits, as a function that takes it out of its step, until a proposal needs it: while nothing is drafted,
    a step costs no more than without a draft."""

    def __init__(self, draft: Draft, rows: int, length: int) -> None:
        """`length`: tokens of a sequence, at most. Any beginning of a row can be reused."""
        session = draft.begin(rows, length, slack=length)
        assert hasattr(session, "reuse"), "a draft that reads hidden states has a session with rows"
        self.session, self.layers = cast(RowsSession, session), draft.target_layer_ids
        self.pending: list[list[Pending]] = [[] for _ in range(rows)]
        self.unobserved = [0] * rows  # tokens of `pending`
        self.left = dict[int, None]()  # rows without a sequence, with something pending
        self.uses, self.held = Counter[int](), 0  # of each `aux` that is pending; bytes of all

    def known(self, row: int) -> int:
        """How many tokens of the text in this row it remembers, those included that it has yet to observe."""
        return self.session.lengths[row] + self.unobserved[row]

    def begin(self, source: int, row: int, reused: int, wanted: bool) -> None:
        """A sequence begins in `row`, with the first `reused` tokens of the one in row `source`. Those that
        were not observed yet wait here, too, if they are `wanted`."""
        observed = min(reused, self.session.lengths[source])
        waiting = self.pending[source] if wanted else []
        self._taken(row)
        self.left.pop(row, None)
        self.session.reuse(source, row, observed)
        for part in waiting:
            length = min(part.length, reused - self.known(row))
            if length > 0:
                self._wait(row, part._replace(length=length))

    def add(self, row: int, count: int, states: Callable[[], States], aux: Tensor) -> None:
        """The next `count` verified tokens of one row (see `Pending`), observed with the next proposal, or
        when they are many."""
        self._wait(row, Pending(states, aux, count))
        if self.unobserved[row] >= MAX_PENDING:
            self.flush(row)

    def _wait(self, row: int, part: Pending) -> None:
        self.pending[row].append(part)
        self.unobserved[row] += part.length
        if id(part.aux) not in self.uses:
            self.held += part.aux.nbytes
        self.uses[id(part.aux)] += 1

    def leave(self, row: int) -> None:
        """The sequence in this row has ended. What is pending stays, for one that begins alike; of too much
        the rows are observed that were left first."""
        self.left[row] = None
        while self.left and self.held > MOST_BYTES:
            first = next(iter(self.left))
            del self.left[first]
            self.flush(first)

    def flush(self, row: int) -> None:
        if pending := self._taken(row):
            with self.session.of([row]) as session:
                session.observe(*_formed(pending))
                session.flush()

    def propose(
        self, rows: Sequence[int], last: Tensor, width: int, samplers: Sequence[DraftSampler]
    ) -> Proposal:
        """last [B], the last verified token of each of these rows -> what may follow, in at most `width`
        positions."""
        with self.observed(rows) as session:
            return session.propose(last, width, RowSamplers.of(samplers))

    @contextmanager
    def observed(self, rows: Sequence[int]) -> Iterator[RowsSession]:
        """A session of these rows, for which nothing is pending any more."""
        taken = [self._taken(row) for row in rows]
        with self.session.of(rows) as session:
            if any(taken):
                session.observe(*stacked([_formed(pending) if pending else None for pending in taken]))
            yield session

    def _taken(self, row: int) -> list[Pending]:
        """What was pending in this row, and is no longer."""
        pending, self.pending[row], self.unobserved[row] = self.pending[row], [], 0
        for part in pending:
            self.uses[id(part.aux)] -= 1
            if not self.uses[id(part.aux)]:
                del self.uses[id(part.aux)]
                self.held -= part.aux.nbytes
        return pending


def _formed(pending: list[Pending]) -> States:
    return joined([part.formed() for part in pending])
