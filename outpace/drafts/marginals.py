"""A block's logits as a tree: the second best draft tokens of a block are verified next to the best."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outpace.drafts.base import Draft, Proposal, RewindableSession
from outpace.drafts.sampler import DraftSampler
from outpace.drafts.tree import Pairs, best_first, check_nodes
from outpace.drafts.vocab import DraftVocabulary


class BlockSession(RewindableSession, Protocol):
    """A session where the draft proposes a whole block at once. `words`: its vocabulary."""

    @property
    def words(self) -> DraftVocabulary: ...

    def block(self, last: Tensor, width: int) -> tuple[Tensor, Pairs | None]:
        """last [B] -> logits [B, width - 1, N] of its words, 1 .. width - 1 tokens after it, blind to each
        other; and what a token adds to the logits of the next one, where the draft knows."""
        ...


class BlockDraft(Draft, Protocol):
    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> BlockSession: ...


@dataclass(frozen=True)
class DDTree:
    """A block draft that proposes trees of `nodes` positions, root included (DDTree, arXiv 2604.12989): as
    deep as its block, and as wide as the scores say. `branch`: how many followers of a depth are looked at.

    Nothing is drawn: q is None, so rejection rules take its draft tokens as certain ones.
    Raises ValueError for sizes that make no tree.
    """

    draft: BlockDraft
    nodes: int = 16
    branch: int = 16

    def __post_init__(self) -> None:
        check_nodes(self.nodes)
        if self.branch < 1:
            raise ValueError(f"branch {self.branch}: at least 1 follower of each depth")

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.draft.target_layer_ids

    @property
    def block_size(self) -> int:
        return self.nodes

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> "DDTreeSession":
        session = self.draft.begin(batch, length, offset, slack)
        return DDTreeSession(session, self.draft.block_size, self.branch)


class DDTreeSession:
    def __init__(self, session: BlockSession, block: int, branch: int) -> None:
        self.session, self.block, self.branch = session, block, branch

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        self.session.observe(tokens, aux, counts)

    def propose(self, last: Tensor, width: int, choice: DraftSampler) -> Proposal:
        """Positions in descending order of survival: the first n of them are the best tree of n."""
        logits, pairs = self.session.block(last, min(width, self.block))
        words, sharper = self.session.words, 1 / choice.temperature
        added = None if pairs is None else lambda previous, ids: pairs(previous, ids) * sharper
        return best_first(last, words.scores(choice, logits, 1), width, self.branch, added, words)

    def rewind(self, lengths: list[int]) -> None:
        self.session.rewind(lengths)

    def select(self, batch_indices: list[int]) -> None:
        self.session.select(batch_indices)
