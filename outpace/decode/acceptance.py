"""Which proposes live: what a judge of proposals is, and exact match, which chains and trees share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from outpace.decode.sampling_state import SamplingState
from outpace.drafts.base import Proposal
from outpace.drafts.sampler import DraftSampler, Greedy
from outpace.ops.sampling import Sampling, sample

RULES = ("match", "rejection", "block", "gumbel")


@dataclass(frozen=True)
class VerifyResult:
    """Per row: path, the accepted positions in order, position 0 first; tokens, what the row emits: the
    accepted draft tokens and then the target's own next token, as many as the path has positions."""

    path: list[list[int]]
    tokens: list[list[int]]


class AcceptanceRule(Protocol):
    """One generation's rule. `choice`: how the draft must choose its draft tokens in the coming round."""

    @property
    def choice(self) -> DraftSampler: ...

    def draw(self, logits: Tensor) -> Tensor:
        """[B, V] -> the next token of every row [B] int64, as autoregressive decoding draws it. Each call
        goes one token on in every row's text."""
        ...

    def verdict(self, proposal: Proposal, logits: Tensor) -> VerifyResult:
        """logits [B, N, V], the target's after each position of the proposal. What the verdict emits is taken
        as emitted."""
        ...

    def fork(self) -> "AcceptanceRule":
        """Goes on from here by itself, over text that may yet be taken back: what it lets pass is what this
        one is most likely to let pass. It draws nothing."""
        ...

    def select(self, batch_indices: list[int]) -> None:
        """Keep only these batch indices, in this order."""
        ...


def exact_match(
    candidates: list[list[int]],
    parents: list[list[int]],
    predict: list[list[int]],
    counts: list[int],
) -> list[list[int]]:
    """candidates (position 0: the last verified token), predict (the target's token after each position) ->
    the accepted path of each row: from the root on to the child that equals the target's token, while
    one does.
    Row b offers counts[b] - 1 draft tokens.
    """
    items = []
    for tokens, above, value, count in zip(candidates, parents, predict, counts, strict=True):
        path = [0]
        for column in range(1, count):
            parent = above[column]
            if parent == path[-1] and tokens[column] == value[parent]:
                path.append(column)
        items.append(path)
    return items


def follow(proposal: Proposal, predict: Tensor) -> VerifyResult:
    """predict [B, N], the target's token after each position: draft tokens live while they equal it."""
    tokens, value = torch.stack((proposal.tokens, predict)).tolist()  # the verdict's one wait for the device
    path = exact_match(tokens, proposal.above, value, proposal.counts)
    return VerifyResult(path, [[row[i] for i in columns] for columns, row in zip(path, value, strict=True)])


class Match:
    """The target draws its own token at every node, and a draft token is accepted while it equals that draw.

    Lossless at temperature 0, and at any temperature in distribution: what is emitted was drawn from the
    target's own distribution given a prefix that equals the emitted text. Any draft, any tree.
    """

    def __init__(
        self, sampling: Sampling, prompts: Sequence[Sequence[int]], rng: torch.Generator | None
    ) -> None:
        self.sampling, self.rng = sampling, rng
        self.state = SamplingState(sampling, prompts)

    @property
    def choice(self) -> DraftSampler:
        return Greedy(self.sampling.temperature or 1.0)

    def draw(self, logits: Tensor) -> Tensor:
        tokens = sample(logits, self.sampling, self.rng, self.state.seen(logits))
        self.state.add(tokens[:, None])
        return tokens

    def verdict(self, proposal: Proposal, logits: Tensor) -> VerifyResult:
        seen = self.state.seen_at(proposal, logits)
        result = follow(proposal, sample(logits, self.sampling, self.rng, seen))
        self.state.add(result.tokens)
        return result

    def fork(self) -> "Match":
        forked = Match(replace(self.sampling, temperature=0.0), (), None)
        forked.state = self.state.fork()
        return forked

    def select(self, batch_indices: list[int]) -> None:
        self.state.select(batch_indices)
