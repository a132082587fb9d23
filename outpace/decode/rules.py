"""Which guesses live: the rules that judge a proposal, for chains and trees alike."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outpace.drafts.choice import Choice, Likeliest
from outpace.drafts.proposal import Proposal
from outpace.ops.sampling import Sampling, sample


@dataclass(frozen=True)
class Verdict:
    """Per row: path, the accepted columns in order, column 0 first; tokens, what the row emits: the accepted
    guesses and then the target's own next token, as many as the path has columns."""

    path: list[list[int]]
    tokens: list[list[int]]


class Judge(Protocol):
    """One generation's rule. `choice`: how the draft must choose its guesses."""

    @property
    def choice(self) -> Choice: ...

    def draw(self, logits: Tensor) -> Tensor:
        """[B, V] -> the next token of every row [B] int64, as plain decoding draws it."""
        ...

    def verdict(self, proposal: Proposal, logits: Tensor) -> Verdict:
        """logits [B, N, V], the target's after each column of the proposal."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows alone, in this order."""
        ...


def exact_match(
    candidates: list[list[int]],
    parents: list[list[int]] | None,
    predict: list[list[int]],
    counts: list[int],
) -> list[list[int]]:
    """candidates (column 0: the last verified token), predict (the target's token after each column) ->
    the accepted path of each row: from the root on to the child that equals the target's token, while
    one does.
    Row b offers counts[b] - 1 guesses; without `parents` each follows the one before it.
    """
    found = []
    for b, (tokens, said, count) in enumerate(zip(candidates, predict, counts, strict=True)):
        path = [0]
        for column in range(1, count):
            parent = column - 1 if parents is None else parents[b][column]
            if parent == path[-1] and tokens[column] == said[parent]:
                path.append(column)
        found.append(path)
    return found


@dataclass(frozen=True)
class Match:
    """The target draws its own token at every node, and a guess is accepted while it equals that draw.

    Lossless at temperature 0, and at any temperature in distribution: what is emitted was drawn from the
    target's own distribution given a prefix that equals the emitted text.
    """

    sampling: Sampling
    rng: torch.Generator | None

    @property
    def choice(self) -> Choice:
        return Likeliest()

    def draw(self, logits: Tensor) -> Tensor:
        return sample(logits, self.sampling, self.rng)

    def verdict(self, proposal: Proposal, logits: Tensor) -> Verdict:
        predict = sample(logits, self.sampling, self.rng).tolist()  # the round's one wait for the device
        parents = None if proposal.parents is None else proposal.parents.tolist()
        path = exact_match(proposal.tokens.tolist(), parents, predict, proposal.counts)
        return Verdict(path, [[said[i] for i in row] for row, said in zip(path, predict, strict=True)])

    def keep(self, rows: list[int]) -> None:
        pass
