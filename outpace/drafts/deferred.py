"""Verified tokens that a draft has yet to observe, and a session that observes them when it is to propose."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.drafts.base import DraftSession, HostProposal, Proposal
from outpace.drafts.sampler import DraftSampler

MAX_PENDING = 512  # positions; the hidden states of a whole text would fill the memory


class States(NamedTuple):
    """tokens [B, T], the target's hidden states aux [n, B, T, C], and the number of verified tokens of each
    row; what follows them is padding."""

    tokens: Tensor
    aux: Tensor | None
    counts: list[int]

    def select(self, batch_indices: list[int]) -> "States":
        aux = None if self.aux is None else self.aux[:, batch_indices]
        return States(self.tokens[batch_indices], aux, [self.counts[b] for b in batch_indices])

    def at(self, positions: list[list[int]]) -> "States":
        """These positions of each row, in this order."""
        counts, padded = [len(row) for row in positions], _padded(positions)
        aux = None if self.aux is None else _picked(self.aux, 1, padded)
        return States(_picked(self.tokens, 0, padded), aux, counts)


def _padded(rows: list[list[int]]) -> list[list[int]]:
    widest = max(map(len, rows))
    return [row + [0] * (widest - len(row)) for row in rows]


def _picked(x: Tensor, dim: int, positions: list[list[int]]) -> Tensor:
    """x [.., B, T, ..], where B is dimension `dim` -> these positions of each row. By one list of places: two
    would take four times as long."""
    places = [b * x.shape[dim + 1] + i for b, row in enumerate(positions) for i in row]
    chosen = x.flatten(dim, dim + 1).index_select(
        dim, torch.tensor(places, dtype=torch.int64, device=x.device)
    )
    return chosen.unflatten(dim, (len(positions), len(positions[0])))


def _first(x: Tensor, n: int, dim: int) -> Tensor:
    """Without a view where it is all of them, as after an autoregressive step."""
    return x if x.shape[dim] == n else x.narrow(dim, 0, n)


def _concatenated(parts: list[Tensor], dim: int) -> Tensor:
    """Of one alone a view: every step has one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def joined(parts: list[States]) -> States:
    """The parts concatenated row by row, without the padding between them."""
    lengths = [max(part.counts) for part in parts]
    tokens = [_first(part.tokens, n, 1) for part, n in zip(parts, lengths, strict=True)]
    states = [_first(part.aux, n, 2) for part, n in zip(parts, lengths, strict=True) if part.aux is not None]
    counts = [sum(row) for row in zip(*(part.counts for part in parts), strict=True)]
    whole = States(_concatenated(tokens, 1), _concatenated(states, 2) if states else None, counts)
    if len(parts) == 1 or min(counts) == sum(lengths):
        return whole
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    return whole.at(
        [
            [begin + i for begin, part in zip(begins, parts, strict=True) for i in range(part.counts[b])]
            for b in range(len(counts))
        ]
    )


def stacked(rows: Sequence[States | None]) -> States:
    """One row each, packed from its first position on, as rows of a batch; None: no verified token."""
    some = next(states for states in rows if states is not None)
    counts = [0 if states is None else states.counts[0] for states in rows]
    B, T = len(rows), max(counts)
    tokens = some.tokens.new_zeros(B, T)
    aux = None if some.aux is None else some.aux.new_empty(some.aux.shape[0], B, T, some.aux.shape[3])
    for b, (states, n) in enumerate(zip(rows, counts, strict=True)):
        if states is not None and n:
            tokens[b, :n] = states.tokens[0, :n]
            if aux is not None and states.aux is not None:
                aux[:, b, :n] = states.aux[:, 0, :n]
    return States(tokens, aux, counts)


def accepted_states(proposal: Proposal, aux: Tensor | None, path: list[list[int]]) -> States:
    """The accepted positions `path` of each row, packed; aux [n, B, N, C]."""
    if proposal.chain:  # those of a chain are contiguous
        return States(proposal.tokens, aux, [len(row) for row in path])
    if aux is None and isinstance(proposal, HostProposal):
        named = [[row[i] for i in at] for row, at in zip(proposal.host_tokens, path, strict=True)]
        tokens = torch.tensor(_padded(named), device=proposal.device)
        return States(tokens, None, [len(row) for row in path])
    return States(proposal.tokens, aux, proposal.counts).at(path)


class Deferred:
    """A draft session that observes verified tokens when it is to propose, so that a draft that is switched
    off costs nothing. While every step drafts, each proposal first observes the step before it."""

    def __init__(self, session: DraftSession) -> None:
        self.session = session
        self.pending: list[States] = []
        self.positions = 0  # of `pending`

    def add(self, states: States) -> None:
        """The verified tokens of one step. At MAX_PENDING positions all are observed; without hidden states,
        as of a lookup, they are at once: to keep a token costs more than to observe it."""
        if states.aux is None:
            self.session.observe(*states)
            return
        self.pending.append(states)
        self.positions += max(states.counts)
        if self.positions >= MAX_PENDING:
            self.flush()

    def flush(self) -> None:
        """Observe everything pending, as one text."""
        if self.pending:
            states = joined(self.pending)
            self.pending, self.positions = [], 0
            self.session.observe(states.tokens, states.aux, states.counts)

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        """See `DraftSession.propose`."""
        self.flush()
        return self.session.propose(last, width, sampler)

    def select(self, batch_indices: list[int]) -> None:
        """Keep only these batch indices, in this order."""
        self.pending = [states.select(batch_indices) for states in self.pending]
        self.session.select(batch_indices)
