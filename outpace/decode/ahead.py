"""Steps without draft tokens, several in one native call: a short step is not to wait for Python."""

import time
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from outpace.decode.acceptance import VerifyResult
from outpace.drafts.base import Proposal, not_finite
from outpace.kv.base import KVCache
from outpace.models.decoder import Decoder, Target

MOST = 8  # steps of a call
SECONDS = 2e-3  # that a call may take: a text is streamed in pieces of so long

Verified = tuple[Proposal, Tensor | None, VerifyResult]  # with aux [n, B, N, C] of the proposal's positions


class RunAhead:
    """How many greedy steps a call makes, and whether one can."""

    def __init__(self, target: Target, wanted: bool = True) -> None:
        self.target = target if wanted and isinstance(target, Decoder) else None
        self.seconds = SECONDS  # of a step

    def steps(
        self,
        last: Tensor,
        cache: KVCache,
        left: int,
        rest: Callable[[int], int],
        stop: Iterable[int],
        aux: Sequence[int],
        done: int,
    ) -> Verified | None:
        """A step without draft tokens after `last` [B] and `done` steps, and some to come, as one of which
        all draft tokens were accepted: as many of the `left` ones as take no longer than SECONDS, and as the
        controller's `rest` allows. None: it is to be made as any other. Raises ValueError for logits that
        are not finite."""
        if self.target is None:
            return None
        most = min(MOST, max(int(SECONDS / self.seconds), 1))  # one slow step says little
        return self.make(last, cache, rest(min(most, left)), stop, aux, done)

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
