"""What a draft proposes, and what a decoding loop asks of a draft."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from outpace.drafts.sampler import DraftSampler
from outpace.kv.tree import Tree, depths


@dataclass(frozen=True)
class Proposal:
    """tokens [B, N] int64; position 0 is the last verified token, the rest are draft tokens for what follows.

    Row b proposes counts[b] - 1 draft tokens (counts[b] >= 1); positions past counts[b] are padding.
    `parents` [B, N] int64 is the position that each draft token follows, always a smaller one (position 0
    and padding follow themselves); None: each follows the one before it.
    `q` [B, N, V] float32: the distribution that the draft token of a position was drawn from (position 0
    unused); None: nothing was drawn, the draft tokens are certain.
    `survival` [B, N] float32: how likely a position is accepted, as the draft sees it; None: it cannot say.
    It holds NaN wherever a score that the proposal was chosen by is NaN or infinite: `check_finite` looks.
    `provisional`: per row, how many of the first draft tokens, in a line, the target took on partial KV;
    None: nobody has looked at any.
    """

    tokens: Tensor
    counts: list[int]
    parents: Tensor | None = None
    q: Tensor | None = None
    survival: Tensor | None = None
    provisional: list[int] | None = None

    @cached_property
    def width(self) -> int:
        """N."""
        return self.tokens.shape[1]

    @cached_property
    def device(self) -> torch.device:
        return self.tokens.device

    @cached_property
    def chain(self) -> bool:
        """Whether each draft token follows the one before it."""
        return self.parents is None

    @cached_property
    def tree(self) -> Tree | None:
        return None if self.parents is None else Tree(self.parents)

    @cached_property
    def above(self) -> list[list[int]]:
        """`parents`, of a chain too, where the loop looks at them: they cross from the device once."""
        if self.parents is None:
            return [[max(i - 1, 0) for i in range(self.width)]] * len(self.counts)
        items: list[list[int]] = self.parents.tolist()
        return items

    @cached_property
    def stated(self) -> list[list[float]] | None:
        """`survival` on the host."""
        return None if self.survival is None else self.survival.tolist()

    @cached_property
    def host_tokens(self) -> list[list[int]]:
        items: list[list[int]] = self.tokens.tolist()
        return items

    @property
    def deepest(self) -> list[int]:
        """Per row: how many draft tokens the longest path has."""
        if self.chain:
            return [count - 1 for count in self.counts]
        return [max(depths(parents)) for parents in self.above]


class HostProposal(Proposal):
    """One that was made on the host, of lists: nothing has to cross from the device. Its tensors are formed
    where somebody asks for them."""

    def __init__(
        self,
        tokens: list[list[int]],
        counts: list[int],
        parents: list[list[int]] | None,
        survival: list[list[float]] | None,
        device: torch.device,
        provisional: list[int] | None = None,
    ) -> None:
        own = vars(self)  # a proposal is frozen
        own.update(host_tokens=tokens, counts=counts, stated=survival, device=device, provisional=provisional)
        own.update(width=len(tokens[0]), chain=parents is None)
        own["parents" if parents is None else "above"] = parents

    @cached_property
    def tokens(self) -> Tensor:
        return torch.tensor(self.host_tokens, device=self.device)

    @cached_property
    def parents(self) -> Tensor | None:
        return torch.tensor(self.above, device=self.device)

    @cached_property
    def survival(self) -> Tensor | None:
        if self.stated is None:
            return None
        return torch.tensor(self.stated, dtype=torch.float32, device=self.device)


def roots(last: Tensor) -> Proposal:
    """last [B], the last token of each row -> a step without draft tokens."""
    return Proposal(last[:, None], [1] * len(last))


def check_finite(
    where: str, logits: Tensor | None, offered: Proposal | None = None, finite: bool | None = None
) -> None:
    """Raises ValueError for NaN and infinity in the target's `logits`, and in the scores that a draft chose
    `offered` by; `where` is the step, `finite` what is known of the logits, which may be None then. One wait
    for the device, for both."""
    if logits is None and not finite:
        raise not_finite(where, "target")
    largest: dict[str, Tensor] = {} if finite or logits is None else {"target": logits.amax()}
    if isinstance(offered, HostProposal):
        stated = sum(map(sum, offered.stated or []))
        if not math.isfinite(stated):
            largest["draft"] = torch.tensor(stated, device=offered.device)
    elif offered is not None and offered.survival is not None:
        largest["draft"] = offered.survival.sum()
        if offered.q is not None:
            largest["draft"] = largest["draft"] + offered.q.amax()
    if not largest:
        return
    values = torch.stack([x.float() for x in largest.values()]).tolist()
    for model, value in zip(largest, values, strict=True):
        if not math.isfinite(value):
            raise not_finite(where, model)


def not_finite(where: str, model: str) -> ValueError:
    """The error of `check_finite`; `model`: target or draft."""
    return ValueError(
        f"{where}: the {model}'s logits are not finite: its weights are damaged, or overflow in this "
        "precision; `outpace inspect MODEL --scan` names the tensors"
    )


class DraftSession(Protocol):
    """One generation's use of a draft: what it has seen so far, for every sequence of the batch."""

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        """The next counts[b] verified tokens of row b: tokens [B, T], with the target's hidden states
        aux [n, B, T, C] of `target_layer_ids` at them."""
        ...

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        """Draft token what follows `last` [B], the verified token after all observed ones, in at most `width`
        positions (2 <= width <= block_size), draft tokens chosen by `sampler`."""
        ...

    def select(self, batch_indices: list[int]) -> None:
        """Keep only these batch indices, in this order."""
        ...


class RewindableSession(DraftSession, Protocol):
    """One that can forget again: what it observes may be provisional."""

    def rewind(self, lengths: list[int]) -> None:
        """Forget of every row what was observed after its first lengths[b] tokens; at least one proposal was
        made at that length. The next call observes how the text really goes on."""
        ...


class RowsSession(RewindableSession, Protocol):
    """One that many texts share, which come and go: each has a row of it."""

    @property
    def lengths(self) -> list[int]:
        """Per row: of how many tokens of its text the states are remembered."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory of all rows."""
        ...

    def of(self, rows: Sequence[int]) -> AbstractContextManager["RowsSession"]:
        """These rows as a session of their own; what it remembers of them is kept."""
        ...

    def flush(self) -> None:
        """Remember all that was observed, but for a newest state that lacks its next token."""
        ...

    def reuse(self, source: int, row: int, count: int) -> None:
        """A text begins in `row` like the one in row `source`: with its first `count` tokens."""
        ...


class Draft(Protocol):
    """Weights, or none. `block_size` is the widest proposal, anchor included. `slack`: how many observed
    tokens a session can forget again."""

    @property
    def target_layer_ids(self) -> tuple[int, ...]: ...

    @property
    def block_size(self) -> int: ...

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> RewindableSession: ...
