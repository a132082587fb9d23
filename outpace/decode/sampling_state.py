"""How the target speaks: its sampling, and which tokens each row holds, for the repetition penalty."""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from outpace.drafts.base import Proposal
from outpace.kv.tree import Tree
from outpace.ops.sampling import Sampling


class SamplingState:
    """Without a repetition penalty it remembers nothing, and states None of what was seen."""

    def __init__(self, sampling: Sampling, prompts: Sequence[Sequence[int]]) -> None:
        self.sampling = sampling
        self.listens = sampling.repetition_penalty != 1
        self._prompts = [list(set(p)) for p in prompts] if self.listens else []
        self._seen: Tensor | None = None

    def seen(self, logits: Tensor) -> Tensor | None:
        """logits [B, V] -> [B, V] bool: which tokens are in the prompt or were emitted."""
        if not self.listens:
            return None
        if self._seen is None:
            self._seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
            held = [(b, token) for b, row in enumerate(self._prompts) for token in row]
            at = torch.tensor(held, device=logits.device)
            self._seen[at[:, 0], at[:, 1]] = True
        return self._seen

    def seen_at(self, proposal: Proposal, logits: Tensor) -> Tensor | None:
        """logits [B, N, V] after each position -> [B, N, V] bool: emitted before, or on the way to the
        position, which is in it."""
        if not self.listens:
            return None
        seen, tokens = self.seen(logits[:, 0]), proposal.tokens
        assert seen is not None
        N = tokens.shape[1]
        tree = proposal.tree or Tree(
            (torch.arange(N, device=tokens.device) - 1).clamp(min=0).expand_as(tokens)
        )
        root = tokens[:, :1, None]  # the last verified token: seen already, so it may mean any other
        way = torch.where(tree.sees, tokens[:, None], root)
        return seen[:, None].repeat(1, N, 1).scatter_(2, way, True)

    def add(self, tokens: Tensor | list[list[int]]) -> None:
        """What every row has emitted since: [B, n], or lists of at least one."""
        if self._seen is None:
            return
        if isinstance(tokens, list):
            most = max(map(len, tokens))
            tokens = torch.tensor([t + t[-1:] * (most - len(t)) for t in tokens], device=self._seen.device)
        self._seen.scatter_(1, tokens, True)

    def fork(self) -> "SamplingState":
        """One that goes on from here by itself."""
        forked = copy(self)
        forked._seen = None if self._seen is None else self._seen.clone()
        return forked

    def select(self, batch_indices: list[int]) -> None:
        if self._seen is not None:
            self._seen = self._seen[batch_indices]
