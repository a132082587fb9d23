"""Steps without draft tokens, several in one native call: a short step is not to wait for Python."""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.decode.acceptance import AcceptanceRule, Match, VerifyResult
from outpace.drafts.base import Proposal
from outpace.drafts.deferred import States, accepted_states
from outpace.kv.base import KVCache
from outpace.models.decoder import Decoder, Target
from outpace.ops.dispatch import Draws

MOST = 8  # steps of a call: rows that have ended wait for its end, and so do requests that arrive
ALONE = 32  # of a single row, which ends the call when it ends
SECONDS = 16e-3  # that a call may take: a text is streamed in pieces of so long, a frame of most screens


class Verified(NamedTuple):
    """A proposal that the target has judged: aux [n, B, N, C] and logits [B, N, V] of its positions. `logits`
    is None of steps that ran ahead, whose tokens stand as a proposal that was accepted whole; `finite` then
    says whether all of theirs were."""

    proposal: Proposal
    aux: Tensor | None
    result: VerifyResult
    logits: Tensor | None = None
    finite: bool = True

    @property
    def states(self) -> States:
        """What a draft observes of it."""
        return accepted_states(self.proposal, self.aux, self.result.path)


class RunAhead:
    """How many steps a call makes, and whether one can."""

    def __init__(self, target: Target, wanted: bool = True, alone: bool = False) -> None:
        self.target = target if wanted and isinstance(target, Decoder) else None
        self.limit = ALONE if alone else MOST
        self.seconds = SECONDS  # of a step

    def most(self, left: int) -> int:
        """Steps that a call may make of the `left` ones, in SECONDS; 0: it cannot make any."""
        if self.target is None:
            return 0
        return min(self.limit, max(int(SECONDS / self.seconds), 1), left)  # one slow step says little

    def make(
        self,
        last: Tensor,
        cache: KVCache,
        most: int,
        stop: Iterable[int],
        aux: Sequence[int],
        rules: Sequence[AcceptanceRule],
    ) -> Verified | None:
        """Up to `most` steps after `last` [B], where they are one native call; fewer up to a token of `stop`
        in every row. None: the next one is to be made as any other. `rules`: one, or one for every row."""
        began = time.perf_counter()
        drawing = [rule for rule in rules if isinstance(rule, Match)]
        assert len(drawing) == len(rules), "no other rule goes by logits alone"
        draws = _draws(drawing, most)
        many = None if self.target is None else self.target.run_ahead(last, cache, most, stop, aux, draws)
        if many is None:
            self.target = None
            return None
        B, n = many.tokens.shape
        for rule in drawing:
            rule.went_ahead(n)
        self.seconds = (time.perf_counter() - began) / n
        result = VerifyResult([list(range(n))] * B, many.tokens.tolist())
        return Verified(Proposal(many.given, [n] * B), many.aux, result, finite=many.finite)


def _draws(rules: Sequence[Match], steps: int) -> Draws | None:
    """None where all rows take the argmax."""
    each = [rule.sampling.temperature for rule in rules for _ in rule.places]
    if not any(each):
        return None
    return Draws(torch.cat([rule.keys_ahead(steps) for rule in rules], 1), torch.tensor(each))
