"""Rounds of one row, several in one native call: a round of a small target is not to wait for Python."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from outpace.decode.acceptance import AcceptanceRule, Gumbel, Match
from outpace.decode.ahead import SECONDS
from outpace.drafts.base import DraftSession, HostProposal
from outpace.drafts.deferred import Deferred, States
from outpace.drafts.dflash import DFlashSession
from outpace.drafts.dflash_native import NativeChain, NativeContext
from outpace.kv.base import KVCache
from outpace.models.decoder import Decoder, Target
from outpace.models.native_step import stop_ids, verify_passes
from outpace.ops.dispatch import ChainCut, Made, Rounds, Row

MOST = 8  # rounds of a call


class Round(NamedTuple):
    """offered: the whole chain; verified: how many of its positions were; tokens: what it adds to the text,
    one for each accepted position; seconds of draft and verify pass."""

    offered: HostProposal
    verified: int
    tokens: list[int]
    seconds: tuple[float, float]


class Played(NamedTuple):
    """offered: a chain that was drafted after these rounds, and its seconds, where none of its tokens was
    worth verifying; finite: whether all of the target's logits were."""

    rounds: list[Round]
    offered: tuple[HostProposal, float] | None
    finite: bool


class NativeRounds:
    """Of a DFlash with a selector, whose chains are as they would be one by one, under a rule that goes by
    the target's own tokens. What is cut goes by what was learnt before the call."""

    def __init__(
        self,
        target: Decoder,
        cache: KVCache,
        deferred: Deferred,
        session: DFlashSession,
        rule: Match,
        aux: Sequence[int],
        stop: Iterable[int],
    ) -> None:
        self.target, self.cache, self.rule = target, cache, rule
        self.deferred, self.session = deferred, session
        self.aux, self.stops = aux, stop_ids(frozenset(stop))
        self.coupled = isinstance(rule, Gumbel)
        self.tables: dict[tuple[NativeChain, int], Rounds] = {}
        self.seconds = SECONDS  # of a round

    @staticmethod
    def of(
        target: Target,
        cache: KVCache,
        deferred: Deferred | None,
        session: DraftSession | None,
        rule: AcceptanceRule,
        aux: Sequence[int],
        stop: Iterable[int],
    ) -> "NativeRounds | None":
        """None where a round needs Python, as far as can be seen before the first. `rule` draws by logits and
        noise alone."""
        if not isinstance(target, Decoder) or not isinstance(session, DFlashSession) or cache.batch > 1:
            return None
        if deferred is None or type(rule) not in (Match, Gumbel) or not target.native:
            return None
        assert isinstance(rule, Match)
        return NativeRounds(target, cache, deferred, session, rule, aux, stop)

    def play(self, last: int, width: int, cut: ChainCut | None, left: int) -> Played | None:
        """Rounds of chains of `width` positions after `last`, until they took SECONDS, or the text got `left`
        more tokens; at least the draft of one. None where programs do not draft so, or no verify pass was
        made yet: a pass is made where Python first needs one of its size."""
        self.deferred.flush()
        parts = self.session.native_chain(width)
        passes = verify_passes(self.target, self.cache, width, self.aux)
        if parts is None or not passes:
            return None
        chain, contexts = parts
        rounds = self._table(chain, contexts, width)
        rounds.use(passes)
        most = min(MOST, max(int(SECONDS / self.seconds), 1), left)
        with ExitStack() as held:
            for lock in (self.target.native_steps.lock, chain.lock, chain.block.lock):
                held.enter_context(lock)
            for context in contexts:
                held.enter_context(context.lock)
            chain.temperatures.fill_(self.rule.sampler.temperature if self.coupled else 0)
            return self._played(rounds.run(self._row(last, left, most * width), most, cut), rounds)

    def _table(self, chain: NativeChain, contexts: list[NativeContext], width: int) -> Rounds:
        known = self.tables.get((chain, width))
        if known is None:
            softness = self.session.draft.config.temperatures[: width - 1]
            known = Rounds(chain.of_round, [c.of_round for c in contexts], softness, MOST)
            self.tables[chain, width] = known
        return known

    def _row(self, last: int, left: int, most: int) -> Row:
        """`most`: tokens of a call."""
        (start,), (remembered,) = self.cache.lengths, self.session.cache.lengths
        temperature = self.rule.sampling.temperature
        keys = self.rule.keys_ahead(most) if temperature else None
        return Row(last, start, remembered, left, self.stops, keys, temperature, self.coupled)

    def _played(self, made: Made, rounds: Rounds) -> Played:
        """What the caches, the rule and the draft know of them afterwards."""
        target = self.target.device
        offered = [
            HostProposal([tokens], [len(tokens)], None, [survival], target)
            for tokens, survival in zip(made.chains, made.survival, strict=True)
        ]
        drafted = (offered[-1], made.seconds[-1][0]) if made.offered else None
        played = [
            Round(*parts) for parts in zip(offered, made.verified, made.kept, made.seconds, strict=False)
        ]
        if not played:
            return Played([], drafted, True)
        kept = [len(tokens) for tokens in made.kept]
        written = sum(kept)
        reached = max(sum(kept[:i]) + n for i, n in enumerate(made.verified))
        (start,) = self.cache.lengths
        self.cache.extend([reached])
        self.cache.rewind([start + written])
        self.rule.went_ahead(written)
        self.session.cache.extend([written if made.offered else written - kept[-1]])
        last = rounds.passes[made.verified[-1]]
        if not made.offered:
            tokens = last.tokens.view(1, -1).clone()
            self.deferred.add(States(tokens, last.aux.clone(), [kept[-1]]))
        self.seconds = sum(map(sum, made.seconds)) / len(played)
        return Played(played, drafted, not last.odd.value)
