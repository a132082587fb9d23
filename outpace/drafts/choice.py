"""How guesses are chosen from a draft's logits: by likelihood, by drawing, or by the target's own noise."""

from typing import Protocol

from torch import Tensor

from outpace.ops.sampling import greedy


class Choice(Protocol):
    """`depth` is how many tokens after the last verified one a guess stands (>= 1)."""

    def tokens(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """logits [B, n, V] of guesses at depth .. depth + n - 1 -> tokens [B, n] int64, and q [B, n, V]
        float32 where they were drawn from it."""
        ...

    def scores(self, logits: Tensor, depth: int) -> Tensor:
        """[B, n, V] -> [B, n, V] float32 by which a tree ranks the followers of a node: log-probabilities,
        or what stands for them."""
        ...


class Likeliest:
    """The argmax."""

    def tokens(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        return greedy(logits), None

    def scores(self, logits: Tensor, depth: int) -> Tensor:
        return logits.float().log_softmax(-1)
