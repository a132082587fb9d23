"""Rounds of one row, several in one native call: a round of a small target is not to wait for Python."""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import NamedTuple

from outpace.decode.acceptance import AcceptanceRule, Gumbel, Match
from outpace.decode.ahead import SECONDS
from outpace.drafts.base import DraftSession, HostProposal
from outpace.drafts.deferred import States
from outpace.drafts.dflash import DFlashSession
from outpace.kv.base import KVCache
from outpace.models.decoder import Decoder, Target
from outpace.models.native_step import stop_ids, verify_passes
from outpace.ops.dispatch import ChainCut, Made, Rounds, Row

MOST = 16  # rounds of a call


class Round(NamedTuple):
    """offered: the whole chain; verified: how many of its positions were; tokens: what it adds to the text,
    one for each accepted position; seconds of draft and verify pass."""

    offered: HostProposal
    verified: int
    tokens: list[int]
    seconds: tuple[float, float]


class Played(NamedTuple):
    """offered: a chain that was drafted after these rounds, and its seconds, where none of its tokens was
    worth verifying; states: what the draft has yet to observe; finite: whether all of the target's logits
    were."""

    rounds: list[Round]
    offered: tuple[HostProposal, float] | None
    states: States | None
    finite: bool


class NativeRounds:
    """Of a DFlash with a selector, with chains as they would be one by one, under a rule that goes by
    the target's own tokens. What is cut goes by what was learnt before the call."""

    def __init__(self, target: Target, wanted: bool = True) -> None:
        """`wanted`: logits and noise alone say what comes."""
        self.target = target if wanted and isinstance(target, Decoder) and target.native else None

    def play(
        self,
        cache: KVCache,
        session: DraftSession,
        rule: AcceptanceRule,
        last: int,
        left: int,
        stop: Iterable[int],
        width: int,
        cut: Callable[[], ChainCut | None],
    ) -> Played | None:
        """Rounds of the one row of `cache`, of chains of `width` positions after `last`, until they took
        SECONDS, or the text got `left` more tokens or one of `stop`; at least the draft of one. `session` has
        observed all but the states of the last. None where programs do not draft so, or no verify pass was
        made yet: a pass is made where Python first needs one of its size."""
        began, target = time.perf_counter(), self.target
        if target is None or type(session) is not DFlashSession or type(rule) not in (Match, Gumbel):
            return None
        parts = session.native_chain(width)
        if parts is None:
            return None
        assert isinstance(rule, Match)
        chain, contexts = parts
        with ExitStack() as held:
            for lock in (target.native_steps.lock, chain.lock, chain.block.lock, *(c.lock for c in contexts)):
                held.enter_context(lock)
            passes = verify_passes(target, cache, width, session.draft.target_layer_ids)
            if not passes:
                return None
            session.point_to(chain, contexts)
            rounds = chain.rounds(contexts, session.draft.config.temperatures[: width - 1], MOST)
            rounds.use(passes)
            most, temperature, coupled = min(MOST, left), rule.sampling.temperature, isinstance(rule, Gumbel)
            keys = rule.keys_ahead(most * width) if temperature else None
            (start,), (remembered,) = cache.lengths, session.cache.lengths
            row = Row(last, start, remembered, left, stop_ids(frozenset(stop)), keys, temperature, coupled)
            chain.temperatures.fill_(rule.sampler.temperature if coupled else 0)
            made = rounds.run(row, most, SECONDS, cut())
            return self._played(made, rounds, cache, session, rule, began)

    def _played(
        self,
        made: Made,
        rounds: Rounds,
        cache: KVCache,
        session: DFlashSession,
        rule: Match,
        began: float,
    ) -> Played:
        """What the caches and the rule know of them afterwards. Each round bears its share of what the call
        took besides."""
        offered = [
            HostProposal([tokens], [len(tokens)], None, [survival], cache.device)
            for tokens, survival in zip(made.chains, made.survival, strict=True)
        ]
        drafted = (offered[-1], made.seconds[-1][0]) if made.offered else None
        if not made.kept:
            return Played([], drafted, None, True)
        kept = [len(tokens) for tokens in made.kept]
        (start,), written = cache.lengths, sum(kept)
        # a ring has lost what the longest chain overwrote
        cache.extend([max(sum(kept[:i]) + n for i, n in enumerate(made.verified))])
        cache.rewind([start + written])
        rule.went_ahead(written)
        session.cache.extend([made.observed])
        besides = (time.perf_counter() - began - sum(map(sum, made.seconds))) / len(kept)
        played = [
            Round(offered[i], n, made.kept[i], (draft, verify + besides))
            for i, (n, (draft, verify)) in enumerate(zip(made.verified, made.seconds, strict=False))
        ]
        last, states = rounds.passes[made.verified[-1]], None
        if made.observed < written:
            states = States(last.tokens.view(1, -1).clone(), last.aux.clone(), [kept[-1]])
        return Played(played, drafted, states, not last.odd.value)
