"""Prompt lookup: propose what followed the last occurrence of the present n-gram. No training, no model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.drafts.base import Proposal
from outpace.drafts.sampler import DraftSampler


@dataclass(frozen=True)
class NGram:
    """Looks for the longest n-gram first, from `longest` down to `shortest`."""

    block_size: int = 8
    longest: int = 4
    shortest: int = 2
    target_layer_ids: tuple[int, ...] = ()

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> "NGramSession":
        return NGramSession(self, batch)


class NGramSession:
    def __init__(self, draft: NGram, batch: int) -> None:
        self.draft = draft
        self.history: list[list[int]] = [[] for _ in range(batch)]
        # per row and length: n-gram -> indices of the tokens after its occurrences, the latest last
        sizes = range(draft.shortest, draft.longest + 1)
        self.seen: list[dict[int, dict[tuple[int, ...], list[int]]]] = [
            {n: {} for n in sizes} for _ in range(batch)
        ]

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        for row, seen, ids, count in zip(self.history, self.seen, tokens.tolist(), counts, strict=True):
            for token in ids[:count]:
                for n, table in seen.items():
                    if len(row) >= n:
                        table.setdefault(tuple(row[-n:]), []).append(len(row))
                row.append(token)

    def propose(self, last: Tensor, width: int, choice: DraftSampler) -> Proposal:
        """The text has no logits: there is nothing to choose by."""
        guesses = [[token, *self._continuation(b, token)][:width] for b, token in enumerate(last.tolist())]
        counts = [len(g) for g in guesses]
        padded = [g + [0] * (max(counts) - len(g)) for g in guesses]
        return Proposal(torch.tensor(padded, device=last.device), counts)

    def rewind(self, lengths: list[int]) -> None:
        for row, seen, length in zip(self.history, self.seen, lengths, strict=True):
            while len(row) > length:
                row.pop()
                for n, table in seen.items():
                    if len(row) >= n:
                        table[tuple(row[-n:])].pop()

    def select(self, batch_indices: list[int]) -> None:
        self.history = [self.history[b] for b in batch_indices]
        self.seen = [self.seen[b] for b in batch_indices]

    def _continuation(self, b: int, last: int) -> list[int]:
        text = [*self.history[b][-self.draft.longest :], last]
        for n in sorted(self.seen[b], reverse=True):
            starts = self.seen[b][n].get(tuple(text[-n:])) if len(text) >= n else None
            if starts:
                return (self.history[b] + [last])[starts[-1] : starts[-1] + self.draft.block_size - 1]
        return []
