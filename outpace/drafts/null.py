"""No draft tokens: with partial KV in between, the target drafts for itself (TriForce, arXiv 2404.11912)."""

from dataclasses import dataclass

from torch import Tensor

from outpace.drafts.base import Proposal
from outpace.drafts.sampler import DraftSampler


@dataclass(frozen=True)
class NullDraft:
    """Proposes the last verified token and nothing after it. Remembers nothing: it is its own session."""

    block_size: int = 1
    target_layer_ids: tuple[int, ...] = ()

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> "NullDraft":
        return self

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        pass

    def propose(self, last: Tensor, width: int, choice: DraftSampler) -> Proposal:
        return Proposal(last[:, None], [1] * len(last))

    def rewind(self, lengths: list[int]) -> None:
        pass

    def select(self, batch_indices: list[int]) -> None:
        pass
