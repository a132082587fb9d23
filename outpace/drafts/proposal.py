"""What a draft proposes, and what a decoding loop asks of a draft."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """tokens [B, N] int64; column 0 is the last verified token, the rest are guesses for what follows.

    Row b proposes counts[b] - 1 guesses (counts[b] >= 1); columns past counts[b] are padding.
    """

    tokens: Tensor
    counts: list[int]


class Session(Protocol):
    """One generation's use of a draft: what it has seen so far, for every sequence of the batch."""

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        """The next counts[b] verified tokens of row b: tokens [B, T], with the target's hidden states
        aux [n, B, T, C] of `target_layer_ids` at them."""
        ...

    def propose(self, last: Tensor) -> Proposal:
        """Guess what follows `last` [B], the verified token after all observed ones."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows alone, in this order."""
        ...


class Draft(Protocol):
    """Weights, or none. `block_size` is the widest proposal, anchor included."""

    @property
    def target_layer_ids(self) -> tuple[int, ...]: ...

    @property
    def block_size(self) -> int: ...

    def begin(self, batch: int, length: int, offset: int = 0) -> Session: ...
