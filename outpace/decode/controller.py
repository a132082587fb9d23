"""The draft length of each step: fixed, or the one with the most tokens/s by a cost table.

A decision depends on earlier steps, and on the survival that the draft states for tokens that were not
sampled. It is made before the target runs: it changes the speed and, at temperature 0 or under the Gumbel
rule, nothing else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from outpace.decode.costs import Costs
from outpace.decode.draft_use import DraftUse
from outpace.decode.step_times import StepTimes
from outpace.drafts.base import Proposal
from outpace.drafts.tree import cut
from outpace.kv.tree import depths
from outpace.ops.dispatch import ChainCut

FADE = 0.9  # weight that a drafting step leaves to earlier counts
REST_FADE = 0.85  # the same for GAP autoregressive steps
SLOW_FADE = 0.99  # and for the mean acceptance rate of all positions
TRUST_FADE = 0.96  # and for the draft's stated survival, which changes with the draft, not the text
PRIOR_TRIALS = 3.0  # weight of a prior, in trials
PARENT_TRIALS = 1.5  # and of the parent's rate, for positions that follow another draft token
OFFERED_TRIALS = 0.25  # and of the position before, for survival that the draft states
CALIBRATION_TRIALS = 6.0  # and of the calibration's acceptance rate

PROBE_SHARE = 0.01  # of the time, spent on probes and on showing the draft the tokens it missed
SHOW_SHARE = 0.75  # of that, at most for showing
CREDIT = 2.0  # probes that may be lost at the beginning of a text ..
CREDIT_STEPS = 2.0  # .. where they cost no more than so many autoregressive steps ..
CREDIT_SHARE = 0.01  # .. and than this share of all that the text can have
BANK = 8.0  # probes that gains of the same text can pay for
DEBT = 5.0  # probes of loss, within CREDIT_SHARE, before drafting rests although it is predicted to pay
SLOWEST = 4.0  # times the predicted seconds: longer steps were held up by something else
MARGIN = 1.25  # by which drafting must be faster among others: prompts and clients wait for longer steps
GAP, LONGEST = 8, 32  # autoregressive steps between two decisions while drafting rests: least, most
STRETCH = 256  # tokens of context with equal costs


class Controller(Protocol):
    """The decoding loop calls these once per step, in this order. `predicted`: tokens of all rows and seconds
    of the step, where the controller predicts them."""

    @property
    def predicted(self) -> tuple[float, float] | None: ...

    def begin(self, block: int, tokens: int | None = None) -> None:
        """A generation begins, of at most `tokens` for a row; `block` is the draft's longest proposal, root
        included."""
        ...

    def width(self, lengths: Sequence[int], running: int = 0) -> int:
        """Positions to draft, root included: 2 to `block`, or 1 for an autoregressive step. lengths: cached
        tokens of each row; `running`: rows that decode together once the prompts of the others are read."""
        ...

    def rest(self, most: int) -> int:
        """Where one position is verified: how many autoregressive steps come now, at most `most`, as one to
        `learn` of; the next decision is after them."""
        ...

    def cut(self, proposal: Proposal) -> Proposal:
        """The part of the proposal to verify: its first positions."""
        ...

    def chain_cut(self) -> ChainCut | None:
        """What `cut` would do to chains of one row, before any of them is learnt of; None: nothing."""
        ...

    def was_cut(self, proposal: Proposal, positions: int, again: bool) -> None:
        """For `cut`, where `chain_cut` decided it. `again`: without a `width` before it, the one before it
        being of as many positions."""
        ...

    def learn(self, proposal: Proposal, path: list[list[int]], seconds: float | None = None) -> None:
        """The verified proposal and the accepted positions of each row. `seconds`: what the step took, where
        the clock may have a say; None: what was predicted."""
        ...

    def learn_chain(self, n: int, kept: Sequence[int]) -> None:
        """For `cut` and `learn`, where a device verified n positions of every row by itself, root included:
        kept[b] of them continue row b. The next step's `width` came before."""
        ...

    def joins(self, running: int) -> bool:
        """Of a server, once a request: whether it brings its draft, where so many run then."""
        ...


class Fixed:
    """The same number of positions in every step, at most the draft's; 1 is autoregressive decoding."""

    predicted = None

    def __init__(self, positions: int) -> None:
        if positions < 1:
            raise ValueError(f"{positions} positions per step: the last verified token is always one")
        self.positions = self.block = positions

    def begin(self, block: int, tokens: int | None = None) -> None:
        self.block = block

    def width(self, lengths: Sequence[int], running: int = 0) -> int:
        return min(self.positions, self.block)

    def rest(self, most: int) -> int:
        return most if min(self.positions, self.block) == 1 else 1

    def cut(self, proposal: Proposal) -> Proposal:
        return proposal

    def chain_cut(self) -> None:
        return None

    def was_cut(self, proposal: Proposal, positions: int, again: bool) -> None:
        pass

    def learn(self, proposal: Proposal, path: list[list[int]], seconds: float | None = None) -> None:
        pass

    def joins(self, running: int) -> bool:
        return True

    def learn_chain(self, n: int, kept: Sequence[int]) -> None:
        pass


class AcceptanceHistory:
    """Fading counts of accepted draft tokens. `steps` and `survival` predict a proposal from them;
    `corrected` scales the survival that a draft states by what was accepted of it, depth by depth."""

    def __init__(self, block: int, prior: float) -> None:
        """block: positions of the longest proposal. prior: acceptance rate of a draft token whose parent was
        accepted, from the calibration."""
        self.prior = prior
        self.mean_taken, self.mean_tried = 0.0, 0.0
        self.parents = [max(i - 1, 0) for i in range(block)]  # of the last proposal
        self.tried, self.taken = [0.0] * block, [0.0] * block  # by position, where the parent was accepted
        self.stated, self.observed = [0.0] * block, [0.0] * block  # survival, by depth
        self.offered, self.offered_survival = [0.0] * block, [0.0] * block  # by position, of all proposals

    def fade(self, share: float) -> None:
        """Counts by position keep `share` of their weight."""
        for part in (self.tried, self.taken, self.offered, self.offered_survival):
            part[:] = [share * x for x in part]

    def begin_step(self) -> None:
        self.fade(FADE)
        self.mean_taken, self.mean_tried = SLOW_FADE * self.mean_taken, SLOW_FADE * self.mean_tried
        self.stated, self.observed = ([TRUST_FADE * x for x in part] for part in (self.stated, self.observed))

    def steps(self) -> list[float]:
        """By position: acceptance rate where the parent was accepted."""
        mean = self.mean_taken + CALIBRATION_TRIALS * self.prior
        mean /= self.mean_tried + CALIBRATION_TRIALS
        rates = [1.0]
        for tried, taken, parent in zip(self.tried[1:], self.taken[1:], self.parents[1:], strict=True):
            prior, weight = (rates[parent], PARENT_TRIALS) if parent else (mean, PRIOR_TRIALS)
            rates.append((taken + weight * prior) / (tried + weight))
        return rates

    def survival(self, parents: Sequence[int]) -> list[float]:
        """By position: probability that it is accepted, the product of the steps to it; 1 at the root."""
        steps, result = self.steps(), [1.0]
        for i in range(1, len(parents)):
            result.append(result[parents[i]] * steps[i])
        return result

    def corrected(self, stated: Sequence[float], parents: Sequence[int], depth: Sequence[int]) -> list[float]:
        """The survival that the draft states, times observed over stated survival at that depth; at most the
        parent's."""
        trust, result = self.trust(max(depth)), [1.0]
        for i in range(1, len(parents)):
            result.append(min(stated[i] * trust[depth[i]], result[parents[i]]))
        return result

    def trust(self, deepest: int) -> list[float]:
        """Observed over stated survival, by depth; 1 at the root."""
        result = [1.0]
        for stated, observed in zip(self.stated[1 : deepest + 1], self.observed[1:], strict=False):
            result.append((observed + PRIOR_TRIALS * result[-1]) / (stated + PRIOR_TRIALS))
        return result

    def forecast(self, states_survival: bool) -> list[float]:
        """By position: expected survival in the next proposal. For a draft that states survival, the mean
        over its last proposals; positions not proposed lately follow the one before as that one follows its
        own."""
        if not states_survival:
            return self.survival(self.parents)
        result, step = [1.0], self.steps()[1]
        for count, total in zip(self.offered[1:], self.offered_survival[1:], strict=True):
            before = result[-1]
            value = min(before, (total + OFFERED_TRIALS * before * step) / (count + OFFERED_TRIALS))
            step = value / before if before else 0.0
            result.append(value)
        return result

    def add(self, row: "Row", width: int, verified: int, path: Sequence[int]) -> None:
        """One row of a step: `width` positions were requested and `verified` of them verified."""
        accepted = set(path)
        for i in range(1, verified):
            if row.parents[i] in accepted:
                self.tried[i] += 1
                self.taken[i] += i in accepted
                self.mean_tried += 1
                self.mean_taken += i in accepted
            if row.stated is not None:
                self.stated[row.depth[i]] += row.stated[i]
                self.observed[row.depth[i]] += i in accepted
        for i in range(1, width if row.stated is not None else 0):
            self.offered[i] += 1
            self.offered_survival[i] += row.survival[i] if i < len(row.survival) else 0.0


@dataclass(frozen=True)
class Row:
    """One row of a proposal, by position. `stated`: the draft's survival, None where it may not be read;
    `survival`: the predicted one."""

    parents: list[int]
    depth: list[int]
    stated: list[float] | None
    survival: list[float]


class Adaptive:
    """The rate at which tokens come is the larger of autoregressive decoding's and that of the best number of
    positions n, (1 + E[accepted](n)) / (C_draft + C_verify(n) + rest), summed over the rows, which share a
    forward (CaDDTree, arXiv 2606.01813; DSpark's scheduler, 2607.05147). Of each proposal as many positions
    are verified as are worth more than the time they take at that rate.

    Where no n beats autoregressive decoding, drafting rests and is probed. An account of the seconds lost
    against autoregressive decoding bounds the probes to PROBE_SHARE of the time. One controller can serve
    many generations: acceptance counts are kept at half their weight, the account starts anew. `step_times`:
    of each kind of step, where the clock has a say.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.predicted: tuple[float, float] | None = None
        self.history = AcceptanceHistory(2, costs.acceptance)
        self.always = False  # draft in every step, whatever it costs
        self.states_survival = True  # of the draft; assumed until its first proposal
        # autoregressive steps since the last proposal, and before the next decision
        self.rested = self.wait = 0
        self._pause = GAP  # steps of the last rest
        self._plain = 0  # steps to learn of next that were made without looking at a proposal
        self._fruitless = 0  # steps of the last look of which nothing was verified
        self.verified = 1  # positions a row in the last step
        self.account: float | None = None  # seconds that may still be lost
        self.step_times: dict[tuple[int, bool], StepTimes] = {}
        self.use: dict[int, DraftUse] = {}  # by how many run, rounded up
        self._running = 1
        # of the last step: its rows, rounded up, and whether the prompts of others were read
        self._kind = 1, False
        self.tokens: float = math.inf  # of this generation, at most
        self._costs = StepCosts.of(costs, 1, 0.0, 2)
        self._rows: list[Row] = []
        self._width, self._draft_seconds = 1, 0.0
        self._rate = 0.0  # tokens/s of all rows that are expected anyway

    def begin(self, block: int, tokens: int | None = None) -> None:
        if len(self.history.tried) != block:
            self.history = AcceptanceHistory(block, self.costs.acceptance)
        self.history.fade(0.5)
        self.rested = self.wait = self._fruitless = 0
        self.verified = 1
        self.account, self.tokens = None, math.inf if tokens is None else tokens

    def width(self, lengths: Sequence[int], running: int = 0) -> int:
        rows = len(lengths)
        kind, self._running = (_rounded_up(rows), running > rows), max(rows, running)
        # as in the step before: a rest is to cost nothing
        if self.wait and rows == self._costs.rows and kind == self._kind:
            self.wait -= 1
            self.rested += 1
            self._width, self._plain, self.predicted = 1, 1, self._costs.resting(1)
            return 1
        if kind != self._kind and self.step_times:  # the losses of one must not hold up the other
            self.step_times.setdefault(self._kind, StepTimes()).account = self.account
            self.account = self.step_times.setdefault(kind, StepTimes()).account
        self.wait, self._kind, context = 0, kind, sum(lengths) / rows
        now, own = self._step_costs(rows, context, kind), self.step_times.get(kind)
        timed, worth = own is None or own.known, now.worth
        if running > rows:
            together = _rounded_up(running), False
            worth = self._step_costs(running, context, together).worth
            timed = together in self.step_times and self.step_times[together].known
        if running > 1:
            now = replace(now, worth=worth / MARGIN)
        self._costs = now
        if timed or self.always:
            width = self._decide(now)
        else:
            width, self._pause, self.wait = 1, GAP, GAP - 1
        self._width, self._draft_seconds = width, now.draft[width] + (now.wake if self.rested else 0.0)
        if width == 1:
            self.rested += 1
            self.verified = self._plain = 1
            self.predicted = now.resting(1)
            return 1
        self.rested = self._plain = 0
        self.history.begin_step()
        return width

    def rest(self, most: int) -> int:
        assert self.predicted is not None, "width comes first"
        left = self.wait + 1
        calls = math.ceil(left / most)  # of about as many steps each
        if left >= GAP > most:  # and of as many as there may be, where a rest may end a little early
            calls = max(1, round(left / most))
        n = min(most, math.ceil(left / calls))
        self.wait = self.wait - (n - 1) if calls > 1 else 0
        self.rested += n - 1
        self._plain += n - 1
        tokens, seconds = self._costs.resting(n - 1)
        self.predicted = self.predicted[0] + tokens, self.predicted[1] + seconds
        return n

    def _decide(self, now: "StepCosts") -> int:
        if self.rested:
            self.history.fade(REST_FADE ** (self._pause / GAP))
        gains = [now.rows * x for x in self.history.forecast(self.states_survival)]
        best = fastest(gains, now.step, least=2)
        plain, drafting = 1 / now.worth, sum(gains[:best]) / now.step[best]
        pays, self._rate = drafting > plain, max(drafting, plain)
        settle = self._settle
        # by the clock a step with draft tokens may be the shorter
        price = max(now.step[best] - now.step[1], now.draft[best])
        price += settle + (now.wake if self.rested else 0.0)
        share = CREDIT_SHARE * self.tokens * now.step[1]
        if self.account is None:
            self.account = min(CREDIT * price, CREDIT_STEPS * now.step[1], share)
        self.account = min(self.account, BANK * price)
        # where the draft itself expects too little of a probe, nothing of it is verified
        unverified = 0.0
        if self.states_survival:
            unverified = now.step[best] - now.draft[best] - now.others[1] + settle
        least = -min(DEBT * price, share) if pays else price - unverified
        if not self.always and self.account < least:
            enough = (least - self.account) / now.allowed if now.allowed else math.inf
            self._pause = self._next_pause(enough, pays)
            self.wait = self._pause - 1
            return 1
        if not self.states_survival:
            return best
        # a longer proposal may turn out to be worth more than the average one, where it costs almost nothing
        affordable = now.draft[best] + 0.02 * now.step[best]
        return max(w for w in range(best, len(now.draft)) if now.draft[w] <= affordable)

    def _next_pause(self, enough: float, pays: bool) -> int:
        """Steps of a rest, after `enough` of which the account can pay for a probe. Where drafting is not
        predicted to pay, counts fade until it is: such rests grow with what has rested already."""
        if not pays:
            enough = min(enough, 2 * self._pause, max(2 * GAP, self.rested // 4)) if self.rested else GAP
        return max(GAP, math.ceil(min(enough, LONGEST)))

    def cut(self, proposal: Proposal) -> Proposal:
        gains = self._gains(proposal)
        # without stated survival only verified tokens teach the controller: at least one draft token
        least = 1 if self.states_survival else min(2, len(gains))
        positions = best_at(self._rate, gains, self._seconds, least)
        self._verify(gains, positions)
        return cut(proposal, positions)

    def chain_cut(self) -> ChainCut:
        now = self._costs
        return ChainCut(self._rate, now.others, self._settle, self.history.trust(len(now.draft) - 1))

    def was_cut(self, proposal: Proposal, positions: int, again: bool) -> None:
        if again:
            self.history.begin_step()
            self._plain, self._draft_seconds = 0, self._costs.draft[self._width]
        self._verify(self._gains(proposal), positions)

    def _gains(self, proposal: Proposal) -> list[float]:
        """Tokens expected of each position, of all rows together."""
        # the survival of sampled tokens may depend on which they are; the number verified may not
        stated = None if proposal.q is not None else proposal.stated
        self.states_survival = stated is not None
        self._rows, gains = [], [0.0] * proposal.width
        first = proposal.counts[0]  # positions of the first row; padding follows, which has no parent
        self.history.parents[:first] = proposal.above[0][:first]
        for b, (parents, n) in enumerate(zip(proposal.above, proposal.counts, strict=True)):
            row, depth, values = parents[:n], depths(parents[:n]), None if stated is None else stated[b]
            survival = (
                self.history.survival(row) if values is None else self.history.corrected(values, row, depth)
            )
            self._rows.append(Row(row, depth, values, survival))
            for i, x in enumerate(survival):
                gains[i] += x
        return gains

    @property
    def _seconds(self) -> list[float]:
        """Of a step with so many positions of its proposal."""
        others, settle = self._costs.others, self._settle
        seconds = [self._draft_seconds + other for other in others[:2]]
        return seconds + [self._draft_seconds + other + settle for other in others[2:]]

    def _verify(self, gains: list[float], positions: int) -> None:
        self.predicted = sum(gains[:positions]), self._seconds[positions]
        self.verified = positions
        self._fruitless = min(GAP, 2 * self._fruitless or 1) if positions == 1 and not self.always else 0
        if self._fruitless:  # it found nothing: twice as long until the next
            self._pause, self.wait = self._fruitless, self._fruitless - 1

    def learn(self, proposal: Proposal, path: list[list[int]], seconds: float | None = None) -> None:
        assert self.predicted is not None, "width comes first"
        now, expected = self._costs, self.predicted[1]
        if seconds is None:
            seconds = expected
        else:
            seconds = min(seconds, SLOWEST * expected)
            self._time(seconds)
        if self.account is None:  # nothing was decided yet: autoregressive steps are timed first
            return
        self.account += self._plain * now.allowed
        if self._width == 1:
            return
        tokens, besides = now.resting(self._plain)
        self.account += now.gained(sum(map(len, path)) - tokens, seconds - besides)
        for row, n, positions in zip(self._rows, proposal.counts, path, strict=True):
            self.history.add(row, self._width, min(n, self.verified), positions)

    def _time(self, seconds: float) -> None:
        assert self.predicted is not None
        (plain, drafting), expected = self._costs.ratios, self.predicted[1]
        own = self.step_times.setdefault(self._kind, StepTimes())
        self._use(self._running).add(max(1, self._plain), self._width > 1)
        if self._width == 1:
            own.rested(plain * seconds / expected, self._plain)
        else:
            own.drafted(drafting * seconds / expected)

    def _use(self, running: int) -> DraftUse:
        return self.use.setdefault(_rounded_up(running), DraftUse())

    def joins(self, running: int) -> bool:
        """A request that is alone gains most, and waits for nobody."""
        return running == 1 or self._use(running).joins()

    def learn_chain(self, n: int, kept: Sequence[int]) -> None:
        assert self.account is not None, "width comes first"
        now, self.states_survival, self.verified = self._costs, False, n
        if n == 1:
            self.account += now.allowed
            return
        self.account += now.gained(sum(kept), now.step[n])
        chain = [max(i - 1, 0) for i in range(n)]
        for accepted in filter(None, kept):
            self.history.add(Row(chain, list(range(n)), None, []), n, n, range(accepted))

    @property
    def _settle(self) -> float:
        """Seconds that a verify pass takes beyond the usual, after a step of one position."""
        return self._costs.settle if self.verified == 1 else 0.0

    def _step_costs(self, rows: int, context: float, kind: tuple[int, bool]) -> "StepCosts":
        """By the clock where it has a say. The table's are formed once for all controllers of these costs: it
        takes as long as a step of a small target."""
        key = rows, int(context) // STRETCH, len(self.history.tried)
        known: StepCosts | None = self.costs.derived.get(key)
        if known is None:
            known = StepCosts.of(self.costs, rows, (key[1] + 0.5) * STRETCH, key[2])
            self.costs.derived[key] = known
        own = self.step_times.get(kind)
        return known if own is None else known.at(*own.ratios)


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step of `rows` rows at one context, by number of positions (index 0 unused): of the draft,
    of all else after it, of a whole step (with 1, without the draft). `show`: of an autoregressive step's
    token, observed later; `wake`: of the first proposal after a rest, beyond `draft`; `settle`: of the first
    verify pass after steps without one; `worth`: of a token that is not drafted."""

    rows: int
    draft: list[float]
    others: list[float]
    step: list[float]
    show: float
    wake: float
    settle: float
    worth: float
    ratios: tuple[float, float] = (1.0, 1.0)  # to the table's, of autoregressive steps and of drafting ones

    @cached_property
    def allowed(self) -> float:
        """Seconds that an autoregressive step lets drafting lose, later."""
        share = PROBE_SHARE * self.step[1]
        return share - min(self.show, SHOW_SHARE * share)

    def resting(self, n: int) -> tuple[int, float]:
        """Tokens of all rows and seconds of n autoregressive steps."""
        return n * self.rows, n * (self.step[1] + self.show)

    def gained(self, tokens: int, seconds: float) -> float:
        """Seconds that a step with draft tokens is ahead of autoregressive ones for its `tokens`."""
        return PROBE_SHARE * seconds + self.worth * tokens - seconds

    def at(self, plain: float, drafting: float) -> "StepCosts":
        """With steps that take so many times as long."""
        draft, others, step = ([drafting * x for x in part] for part in (self.draft, self.others, self.step))
        step[1] = plain * self.step[1]
        lone, worth = (drafting * self.wake, drafting * self.settle), step[1] / self.rows
        return StepCosts(self.rows, draft, others, step, plain * self.show, *lone, worth, (plain, drafting))

    @staticmethod
    def of(costs: Costs, rows: int, context: float, block: int) -> "StepCosts":
        draft = [0.0, *(costs.draft_seconds(n, context, rows) for n in range(1, block + 1))]
        rest = costs.rest_seconds(2, rows)
        others = [0.0, *(costs.verify_seconds(n, context, rows) + rest for n in range(1, block + 1))]
        step = [d + o for d, o in zip(draft, others, strict=True)]
        step[1] = costs.round_seconds(1, context, rows)
        others[1] = costs.lone_seconds(context, rows) + rest
        show, wake, settle = (f(rows) for f in (costs.show_seconds, costs.wake_seconds, costs.settle_seconds))
        return StepCosts(rows, draft, others, step, show, wake, settle, step[1] / rows)


def _rounded_up(rows: int) -> int:
    """To a power of two."""
    return 1 << (rows - 1).bit_length()


def best_at(rate: float, gains: Sequence[float], seconds: Sequence[float], least: int = 1) -> int:
    """The n >= least with the largest sum(gains[:n]) - rate seconds[n], the smallest of equals: `rate`
    tokens/s come anyway, so that a step is worth its tokens less those of its time (Dinkelbach, 1967). The
    draft's seconds, which are spent when a proposal is here, change nothing."""
    worth = [tokens - rate * s for tokens, s in zip(accumulate(gains), seconds[1:], strict=False)]
    return max(range(least, len(worth) + 1), key=lambda n: worth[n - 1])


def fastest(gains: Sequence[float], seconds: Sequence[float], least: int = 1) -> int:
    """The n >= least with the most tokens/s, sum(gains[:n]) / seconds[n]; the smallest of equals.

    All are tried: a measured cost need not be convex, so that the first decrease need not be the last.
    """
    best, most = least, 0.0
    for n, tokens in enumerate(accumulate(gains), start=1):
        if n >= least and tokens > most * seconds[n]:
            best, most = n, tokens / seconds[n]
    return best
