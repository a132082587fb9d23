"""A draft session that observes verified tokens late: all at once, when it is to propose."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.drafts.base import DraftSession, Proposal
from outpace.drafts.sampler import DraftSampler

MOST = 512  # pending positions: a draft may be off for a whole text; its states would fill the memory


@dataclass(frozen=True)
class PendingPart:
    """tokens [B, T], aux [n, B, T, C], and how many of each row were verified; the rest is padding."""

    tokens: Tensor
    aux: Tensor | None
    counts: list[int]

    def select(self, batch_indices: list[int]) -> "PendingPart":
        aux = None if self.aux is None else self.aux[:, batch_indices]
        return PendingPart(self.tokens[batch_indices], aux, [self.counts[b] for b in batch_indices])


class Deferred:
    """A draft session that observes verified tokens only when it is to propose: a draft that is switched off
    costs nothing. While every step drafts, each proposal first observes the step before it."""

    def __init__(self, session: DraftSession) -> None:
        self.session = session
        self.parts: list[PendingPart] = []
        self.positions = 0  # in `parts`

    def add(self, part: PendingPart) -> None:
        """The verified tokens of one step; everything pending is observed when MOST positions wait."""
        self.parts.append(part)
        self.positions += max(part.counts)
        if self.positions >= MOST:
            self.flush()

    def flush(self) -> None:
        """Observes everything pending as one stretch of text."""
        if self.parts:
            whole = joined(self.parts)
            self.parts, self.positions = [], 0
            self.session.observe(whole.tokens, whole.aux, whole.counts)

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        """See `DraftSession.propose`."""
        self.flush()
        return self.session.propose(last, width, sampler)

    def select(self, batch_indices: list[int]) -> None:
        """Keep only these batch indices, in this order."""
        self.parts = [part.select(batch_indices) for part in self.parts]
        self.session.select(batch_indices)


def joined(parts: list[PendingPart]) -> PendingPart:
    """The parts concatenated, without the padding between them."""
    if len(parts) == 1:
        return parts[0]
    counts = [sum(row) for row in zip(*(part.counts for part in parts), strict=True)]
    most = [max(part.counts) for part in parts]
    tokens = torch.cat([part.tokens[:, :n] for part, n in zip(parts, most, strict=True)], dim=1)
    states = [part.aux[:, :, :n] for part, n in zip(parts, most, strict=True) if part.aux is not None]
    aux = torch.cat(states, dim=2) if states else None
    if min(counts) == sum(most):
        return PendingPart(tokens, aux, counts)
    # per row the positions that are real, then position 0 where the row has fewer than the longest
    real = [
        [begin + i for begin, part in zip(_begins(most), parts, strict=True) for i in range(part.counts[b])]
        for b in range(len(counts))
    ]
    at = torch.tensor([row + [0] * (max(counts) - len(row)) for row in real], device=tokens.device)
    row = torch.arange(len(counts), device=at.device)[:, None]
    return PendingPart(tokens[row, at], None if aux is None else aux[:, row, at], counts)


def _begins(most: list[int]) -> list[int]:
    return [sum(most[:i]) for i in range(len(most))]


def verified(proposal: Proposal, aux: Tensor | None, path: list[list[int]]) -> PendingPart:
    """The accepted positions, packed."""
    counts = [len(positions) for positions in path]
    if proposal.parents is None:  # a chain's are contiguous
        return PendingPart(proposal.tokens, aux, counts)
    padded = [positions + [0] * (max(counts) - len(positions)) for positions in path]
    at = torch.tensor(padded, device=proposal.tokens.device)
    row = torch.arange(len(path), device=at.device)[:, None]
    return PendingPart(proposal.tokens[row, at], None if aux is None else aux[:, row, at], counts)
