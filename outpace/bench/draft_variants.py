"""What a DFlash draft may remember of its context: as it is served, nothing, and the block's own rows too."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outpace.drafts.base import Proposal
from outpace.drafts.dflash import BoundDFlash, DFlash, DFlashLayer, DFlashSession
from outpace.drafts.dflash_decode import Head
from outpace.drafts.sampler import DraftSampler
from outpace.kv.metadata import StepMetadata
from outpace.models.decoder import Decoder

Variant = Literal["cached", "recomputed", "noise cached"]
VARIANTS: tuple[Variant, ...] = ("cached", "recomputed", "noise cached")
ABOUT = {
    "cached": "keys and values of verified tokens are kept, formed once (as it is served)",
    "recomputed": "the fused states c_s are kept; every round forms the whole context's keys and values",
    "noise cached": "the rows that an accepted draft token had in its block are kept, and nothing is formed",
}


class Recomputed(DFlashSession):
    """Keeps c_s [B, n, C] and forms every layer's keys and values again in each round. Drafts what the served
    session drafts."""

    def __init__(
        self,
        draft: DFlash,
        target: Decoder,
        batch: int,
        length: int,
        offset: int,
        head: Head | None = None,
        slack: int = 0,
    ) -> None:
        super().__init__(draft, target, batch, length, offset, head, slack)
        width = draft.config.hidden_size
        self.features = torch.zeros(batch, length, width, dtype=target.dtype, device=target.device)
        self.seen = [0] * batch

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        assert aux is not None, "DFlash reads the target's hidden states"
        self.store(self.draft.context(aux), counts)

    def store(self, features: Tensor, counts: list[int]) -> None:
        for b, (n, count) in enumerate(zip(self.seen, counts, strict=True)):
            self.features[b, n : n + count] = features[b, :count]
        self.seen = [n + count for n, count in zip(self.seen, counts, strict=True)]

    def propose(self, last: Tensor, width: int, choice: DraftSampler) -> Proposal:
        self.project()
        return super().propose(last, width, choice)

    def rewind(self, lengths: list[int]) -> None:
        self.seen = list(lengths)

    def select(self, batch_indices: list[int]) -> None:
        super().select(batch_indices)
        self.features, self.seen = self.features[batch_indices], [self.seen[b] for b in batch_indices]

    def project(self) -> None:
        """Keys and values of everything that a layer can still see; of a window not the whole context."""
        config, cache = self.draft.config, self.cache
        windows = [config.window(i) for i in range(config.num_layers)]
        reach = max(windows) if all(windows) else max(self.seen)
        first = max(0, min(self.seen) - reach)
        counts = tuple(n - first for n in self.seen)
        step = StepMetadata((first,) * len(counts), counts, max(counts), cache.device)
        form(self, self.features[:, first : first + step.T], step)
        cache.advance(step)


class NoiseCached(DFlashSession):
    """After the prompt nothing is formed from the target's states: an accepted token keeps the keys and
    values that its MASK had. Faster by `fc` and the k/v projections, and the context blurs: the paper's loop
    crops these rows away. The text stays the target's, as with any draft; fewer draft tokens are right."""

    drafted = False

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        if not self.drafted:
            super().observe(tokens, aux, counts)
        elif max(counts):
            self.cache.advance(self.cache.begin(max(counts), counts))

    def propose(self, last: Tensor, width: int, choice: DraftSampler) -> Proposal:
        self.drafted = True
        return super().propose(last, width, choice)


def form(session: DFlashSession, features: Tensor, step: StepMetadata) -> None:
    """Append the keys and values of features [B, T, C] in every layer."""
    cos, sin = session.draft.rope(step.storage + session.cache.offset)
    parts = zip(session.draft.layers, session.cache.layers, session.weights, strict=True)
    for layer, memory, weights in parts:
        assert isinstance(layer, DFlashLayer)
        memory.append(*layer.context_kv(features, cos, sin, weights), step)


SESSIONS: dict[Variant, type[DFlashSession]] = {
    "cached": DFlashSession,
    "recomputed": Recomputed,
    "noise cached": NoiseCached,
}


@dataclass(frozen=True)
class Remembering(BoundDFlash):
    """A DFlash bound to its target, with one of the three memories."""

    variant: Variant

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> DFlashSession:
        return SESSIONS[self.variant](self.draft, self.target, batch, length, offset, self.head, slack)
