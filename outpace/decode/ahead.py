"""Steps without draft tokens, several in one native call: a short step is not to wait for Python."""

import time
from collections.abc import Iterable, Sequence

from torch import Tensor

from outpace.decode.acceptance import AcceptanceRule, Match, VerifyResult
from outpace.decode.controller import Controller
from outpace.decode.request import BatchRows
from outpace.drafts.base import Proposal, not_finite
from outpace.kv.base import KVCache
from outpace.models.decoder import Decoder, Target

MOST = 8  # steps of a call
SECONDS = 2e-3  # that a call may take: a text is streamed in pieces of so long

Verified = tuple[Proposal, Tensor | None, VerifyResult]  # with aux [n, B, N, C] of the proposal's positions


class RunAhead:
    """How many steps a call makes, and whether one can: greedy decoding, `wanted` by nobody else a step."""

    def __init__(self, target: Target, rule: AcceptanceRule, wanted: bool = True) -> None:
        greedy = isinstance(rule, Match) and rule.sampling.is_argmax
        self.target = target if wanted and greedy and isinstance(target, Decoder) else None
        self.seconds = SECONDS  # of a step

    def steps(
        self,
        last: Tensor,
        cache: KVCache,
        rows: BatchRows,
        active: Sequence[int],
        controller: Controller,
        aux: Sequence[int],
        done: int,
    ) -> Verified | None:
        """Where `controller` has chosen a step without draft tokens, after `last` [B] and `done` steps: that
        one and some to come, as one of which all draft tokens were accepted. None: it is to be made as any
        other. Raises ValueError for logits that are not finite."""
        if self.target is None:
            return None
        most = min(MOST, max(int(SECONDS / self.seconds), 1))  # one slow step says little
        left = min(rows.limits[b] - len(rows.emitted[b]) for b in active)
        return self.make(last, cache, controller.rest(min(most, left)), rows.request.stop, aux, done)

    def make(
        self, last: Tensor, cache: KVCache, most: int, stop: Iterable[int], aux: Sequence[int], done: int = 0
    ) -> Verified | None:
        """Up to `most` steps, where they are one native call; fewer up to a token of `stop` in every row."""
        began = time.perf_counter()
        many = None if self.target is None else self.target.run_ahead(last, cache, most, stop, aux)
        if many is None:
            self.target = None
            return None
        B, n = many.tokens.shape
        if not many.finite:
            raise not_finite(f"step {done + n}", "target")
        self.seconds = (time.perf_counter() - began) / n
        tokens = last.new_empty(B, n)
        tokens[:, 0], tokens[:, 1:] = last, many.tokens[:, :-1]
        result = VerifyResult([list(range(n))] * B, many.tokens.tolist())
        return Proposal(tokens, [n] * B), many.aux, result
