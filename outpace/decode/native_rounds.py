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
from outpace.drafts.dflash_native import NativeChain, NativeContext
from outpace.kv.base import KVCache
from outpace.models.decoder import Decoder, Target
from outpace.models.native_step import stop_ids, verify_passes
from outpace.ops.dispatch import ChainCut, Made, Rounds, Row

MOST = 8  # rounds of a call
MOST_TABLES = 16  # that are kept: one for each number of positions


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
        self.tables: dict[tuple[object, ...], Rounds] = {}  # by programs, which they keep alive
        self.seconds = SECONDS  # of a round

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
        passes = verify_passes(target, cache, width, session.draft.target_layer_ids)
        parts = session.native_chain(width) if passes else None
        if parts is None:
            return None
        assert isinstance(rule, Match)
        chain, contexts = parts
        rounds = self._table(chain, contexts, session)
        rounds.use(passes)
        most = min(MOST, max(int(SECONDS / self.seconds), 1), left)
        temperature, coupled = rule.sampling.temperature, isinstance(rule, Gumbel)
        keys = rule.keys_ahead(most * width) if temperature else None
        (start,), (remembered,) = cache.lengths, session.cache.lengths
        stops = stop_ids(frozenset(stop))
        row = Row(last, start, remembered, left, stops, keys, temperature, coupled)
        with ExitStack() as held:
            for lock in (target.native_steps.lock, chain.lock, chain.block.lock):
                held.enter_context(lock)
            for context in contexts:
                held.enter_context(context.lock)
            chain.temperatures.fill_(rule.sampler.temperature if coupled else 0)
            made = rounds.run(row, most, cut())
            return self._played(made, rounds, cache, session, rule, began)

    def _table(self, chain: NativeChain, contexts: list[NativeContext], session: DFlashSession) -> Rounds:
        key = chain, *contexts
        known = self.tables.get(key)
        if known is None:
            if len(self.tables) == MOST_TABLES:
                del self.tables[next(iter(self.tables))]
            softness = session.draft.config.temperatures[: len(contexts) - 1]
            known = Rounds(chain.of_round, [c.of_round for c in contexts], softness, MOST)
            self.tables[key] = known
        return known

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
        session.cache.extend([written if made.offered else written - kept[-1]])
        self.seconds = (time.perf_counter() - began) / len(kept)
        besides = self.seconds - sum(map(sum, made.seconds)) / len(kept)
        played = [
            Round(offered[i], n, made.kept[i], (draft, verify + besides))
            for i, (n, (draft, verify)) in enumerate(zip(made.verified, made.seconds, strict=False))
        ]
        last, states = rounds.passes[made.verified[-1]], None
        if not made.offered:
            states = States(last.tokens.view(1, -1).clone(), last.aux.clone(), [kept[-1]])
        return Played(played, drafted, states, not last.odd.value)
