"""Verified tokens that a draft's session has not been shown: handed over at once when it is to guess."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.drafts.base import DraftSession, Proposal

# columns that wait: a draft may rest for a whole text, and states of all of it would fill the memory
MOST = 512


@dataclass(frozen=True)
class PendingPart:
    """tokens [B, T], aux [n, B, T, C], and how many of each row were verified; what follows is noise."""

    tokens: Tensor
    aux: Tensor | None
    counts: list[int]

    def select(self, batch_indices: list[int]) -> "PendingPart":
        aux = None if self.aux is None else self.aux[:, batch_indices]
        return PendingPart(self.tokens[batch_indices], aux, [self.counts[b] for b in batch_indices])


@dataclass
class PendingStates:
    """A round adds what it verified; while rounds draft, each hands over what the one before it added."""

    parts: list[PendingPart] = field(default_factory=list)
    columns: int = 0

    def add(self, part: PendingPart) -> None:
        self.parts.append(part)
        self.columns += max(part.counts)

    @property
    def full(self) -> bool:
        return self.columns >= MOST

    def show(self, session: DraftSession) -> None:
        """Everything that waits, as one stretch of text."""
        if self.parts:
            whole = joined(self.parts)
            self.parts, self.columns = [], 0
            session.observe(whole.tokens, whole.aux, whole.counts)

    def select(self, batch_indices: list[int]) -> None:
        """Keep only these batch indices, in this order."""
        self.parts = [part.select(batch_indices) for part in self.parts]


def joined(parts: list[PendingPart]) -> PendingPart:
    """One part after the other, every row without the noise between them."""
    if len(parts) == 1:
        return parts[0]
    counts = [sum(row) for row in zip(*(part.counts for part in parts), strict=True)]
    most = [max(part.counts) for part in parts]
    tokens = torch.cat([part.tokens[:, :n] for part, n in zip(parts, most, strict=True)], dim=1)
    states = [part.aux[:, :, :n] for part, n in zip(parts, most, strict=True) if part.aux is not None]
    aux = torch.cat(states, dim=2) if states else None
    if min(counts) == sum(most):
        return PendingPart(tokens, aux, counts)
    # per row, the columns that are real, then column 0 where the row has fewer than the longest
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
    """The accepted columns, moved together."""
    counts = [len(columns) for columns in path]
    if proposal.parents is None:  # they stand together
        return PendingPart(proposal.tokens, aux, counts)
    padded = [columns + [0] * (max(counts) - len(columns)) for columns in path]
    at = torch.tensor(padded, device=proposal.tokens.device)
    row = torch.arange(len(path), device=at.device)[:, None]
    return PendingPart(proposal.tokens[row, at], None if aux is None else aux[:, row, at], counts)
