"""Measuring a cost table: real steps over real text, of every width in turn."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outpace.decode.acceptance import AcceptanceRule
from outpace.decode.controller import Adaptive, Controller
from outpace.decode.costs import Costs, Point, Touched, fingerprint, machine, rising
from outpace.decode.deferred import Deferred, verified
from outpace.decode.generate import generate, next_token
from outpace.decode.request import COST_RULES, GREEDY, Request, acceptance_rule
from outpace.decode.trace import Trace
from outpace.drafts.base import Draft, Proposal
from outpace.kv.base import KVCache
from outpace.models.decoder import Decoder
from outpace.ops.sampling import Sampling, generator

LEAST_REPEATS, MOST_REPEATS = 3, 12
ROUNDS = 3  # of a width in a turn; the first is not counted
STEPS, SETTLED = 12, 4  # of one position, and of autoregressive decoding; those from SETTLED on are counted
PREFILL, SHOWN = 512, 4  # a prompt's positions in a forward, and forwards at least
# tokens of the run that measures what a step takes alongside, and how often draft tokens are right
STEADY = 48
SEED = 1  # of what is drawn while costs are measured
ROUTED = 512  # tokens where the experts are counted
OnNote = Callable[[float], None]  # how much of the work is done, 0 to 1


def width_grid(block: int) -> tuple[int, ...]:
    """1, 2, 3, 4, then in steps of an eighth to a quarter: no step that matters is missed."""
    items = [1]
    while items[-1] < block:
        items.append(min(block, items[-1] + max(1, items[-1] // 8, items[-1] // 4 if items[-1] > 15 else 0)))
    return tuple(items)


@torch.inference_mode()
def calibrate(
    target: Decoder,
    draft: Draft,
    text: Sequence[int],
    *,
    contexts: Sequence[int] = (256,),
    batches: Sequence[int] = (1,),
    seconds: float = 20.0,
    rule: str = GREEDY,
    on_progress: OnNote | None = None,
) -> Costs:
    """text: token ids, real text of the kind that will be decoded; rows of a batch take turns in it.
    seconds: about how long to measure, prefills not counted; at least six steps of every width are.
    rule: one of decode.request.COST_RULES; sampled rules run at temperature 1.

    Raises ValueError for a context, a batch, a text or a rule that cannot be measured.
    """
    widths, request = width_grid(draft.block_size), _asked(rule)
    _check(target, text, contexts, batches, widths)
    cells = [(batch, context) for context in sorted(set(contexts)) for batch in sorted(set(batches))]
    share = seconds / (len(cells) + 1)
    prompt = text[: min(contexts)]
    acceptance, rest = _steady(target, draft, prompt, request, share)
    points = []
    for i, (batch, context) in enumerate(cells):
        timings = Timings(widths)
        for part in _measure(target, draft, text, batch, context, request, timings, share):
            if on_progress is not None:
                on_progress((i + part) / len(cells))
        points.append(timings.point(batch, context, rest))
    shown = machine(target) | {
        "target": f"{target.config.architecture}, {target.config.num_layers} layers",
        "draft": f"{type(draft).__name__}, at most {draft.block_size} positions",
        "rule": rule,
    }
    costs = Costs(
        fingerprint=fingerprint(target, draft, rule),
        widths=widths,
        points=tuple(points),
        acceptance=acceptance,
        touched=touched_experts(target, text[:ROUTED], widths),
        described=shown,
    )
    _, rest = _steady(target, draft, prompt, request, share, Adaptive(costs))  # who decides takes time too
    return replace(costs, points=tuple(replace(p, rest=rest) for p in points))


@torch.inference_mode()
def quick(target: Decoder, draft: Draft, context: int = 256, enough: float = math.inf) -> float:
    """About how many seconds a calibration at one context would take, from a few small forwards: no more of
    them than show that it is above `enough`."""
    ids = torch.zeros(1, 32, dtype=torch.int64, device=target.device)

    def timed(n: int) -> float:
        began = time.perf_counter()
        target.logits(target(ids[:, :n], target.make_cache(1, 32)).hidden[:, -1:]).sum().item()
        return time.perf_counter() - began

    timed(1)  # the first one reads the weights, and may build the kernels
    one = timed(1)
    rounds = (LEAST_REPEATS + 1) * (len(width_grid(draft.block_size)) * ROUNDS + 2 * STEPS) + 2 * STEADY
    if rounds * one > enough:
        return rounds * one
    timed(32)
    many = timed(32)
    return rounds * (one + many) / 2 + 2 * context * many / 32


def _asked(rule: str) -> Request:
    if rule not in COST_RULES:
        raise ValueError(f"no rule {rule!r} to measure; known: {', '.join(COST_RULES)}")
    if rule == GREEDY:
        return Request(max_new_tokens=1)
    return Request(max_new_tokens=1, sampling=Sampling(temperature=1.0), rule=rule)


def _check(
    target: Decoder,
    text: Sequence[int],
    contexts: Sequence[int],
    batches: Sequence[int],
    widths: tuple[int, ...],
) -> None:
    if not contexts or min(contexts) < 1 or not batches or min(batches) < 1:
        raise ValueError(f"contexts {list(contexts)}, batches {list(batches)}: at least 1 of each, from 1 up")
    longest = max(contexts) + _most_rounds(widths) + widths[-1]
    if longest > target.config.max_position_embeddings:
        raise ValueError(
            f"context {max(contexts)} and what is measured behind it reach position {longest}; this "
            f"model's positions end at {target.config.max_position_embeddings}"
        )
    if len(text) < min(contexts) + STEADY:
        raise ValueError(f"{len(text)} tokens of text are too few for a context of {min(contexts)}")


def _most_rounds(widths: tuple[int, ...]) -> int:
    return (MOST_REPEATS + 1) * (len(widths) * ROUNDS + STEPS)


def _steady(
    target: Decoder,
    draft: Draft,
    prompt: Sequence[int],
    request: Request,
    seconds: float,
    controller: Controller | None = None,
) -> tuple[float, float]:
    """Real decoding: -> how often a draft token is right where the one before it is; seconds of a step
    alongside draft and verify. The second of two runs: the first warms up."""

    def run(tokens: int) -> Trace:
        asked = replace(request, max_new_tokens=tokens)
        rng = generator(SEED, target.device)
        return generate(target, [prompt], asked, draft, controller=controller, rng=rng).trace

    run(2)
    began = time.perf_counter()
    run(4)
    tokens = int(min(STEADY, max(8, 4 * seconds / (time.perf_counter() - began))))
    trace = run(tokens)
    offered = [p for row in trace.proposed for p in row]
    right = sum(trace.accept_lens)
    wrong = sum(a < p for a, p in zip(trace.accept_lens, offered, strict=True))
    return right / (right + wrong) if right + wrong else 0.0, trace.seconds["rest"] / len(trace.accepted)


class StepTimes:
    """Seconds of one repeat, by width. `plain`: of steps. `woken`: width and proposal after STEPS of rest."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.verify: dict[int, list[float]] = {n: [] for n in widths}
        self.draft: dict[int, list[float]] = {n: [] for n in widths}
        self.plain: list[float] = []
        self.woken: list[tuple[int, float]] = []

    @property
    def seconds(self) -> float:
        """Of all that comes equally often in every turn."""
        return sum(map(sum, (*self.verify.values(), *self.draft.values(), self.plain)))

    def add(self, other: "StepTimes", scale: float) -> None:
        """What `other` took, times `pace`."""
        for ours, theirs in ((self.verify, other.verify), (self.draft, other.draft)):
            for n, seconds in theirs.items():
                ours[n] += [scale * s for s in seconds]
        self.plain += [scale * s for s in other.plain]
        self.woken += [(n, scale * s) for n, s in other.woken]


class Timings:
    """Seconds of every repeat, by width; what a cost table makes of them."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.widths = widths
        self.turns: list[StepTimes] = []
        self.show: list[float] = []  # of one position
        self.rounds = 0

    def point(self, batch: int, context: int, rest: float) -> Point:
        """Every turn as long as the mean of them, since a slow moment of the machine meets all widths of a
        turn; of each width the first quartile, which what else runs hardly moves; and all of them times one
        factor: decoding pays for slow steps too, so that together they take as long as all repeats took.
        They never fall as the width grows."""
        step_times, took = StepTimes(self.widths), [turn.seconds for turn in self.turns]
        for turn, seconds in zip(self.turns, took, strict=True):
            step_times.add(turn, statistics.fmean(took) / seconds)
        low = {n: _quartiles(step_times.verify[n])[0] for n in self.widths}
        drafted = {n: _quartiles(step_times.draft[n])[0] for n in self.widths}
        plain = _quartiles(step_times.plain)[0]
        calm = sum(len(step_times.verify[n]) * (low[n] + drafted[n]) for n in self.widths)
        slow = sum(took) / (calm + len(step_times.plain) * plain)
        spreads = [
            (high - first) / middle for first, middle, high in map(_quartiles, step_times.verify.values())
        ]
        show = statistics.median(self.show)
        more = [seconds - drafted[n] - STEPS * show for n, seconds in step_times.woken]
        return Point(
            batch=batch,
            context=context + self.rounds / 2,
            verify=tuple(slow * s for s in rising(list(low.values()))),
            draft=(0.0, *(slow * s for s in rising([drafted[n] for n in self.widths[1:]]))),
            rest=rest,
            plain=slow * plain,
            show=show,
            wake=max(0.0, statistics.median(more or [0.0])),
            spread=statistics.median(spreads),
        )


def _quartiles(seconds: list[float]) -> list[float]:
    return statistics.quantiles(seconds, n=4, method="inclusive")


def _measure(
    target: Decoder,
    draft: Draft,
    text: Sequence[int],
    batch: int,
    context: int,
    request: Request,
    timings: Timings,
    seconds: float,
) -> Iterator[float]:
    """Rounds over the text, each one token further, so that cache and draft see what they would see; the
    widths take turns, so that a slow moment of the machine meets all of them. In a turn a width has ROUNDS
    steps on end: steps of one kind are a little faster among their like. Rounds of one position, which come
    on end where drafting rests, and steps of autoregressive decoding, over a cache of their own, have STEPS
    of them: neighbours read the same experts, where a wide step has just read all. Yields how much is
    done."""
    widths, wanted = timings.widths, draft.target_layer_ids
    kinds = (0, *widths)  # 0: autoregressive decoding
    headroom = context + _most_rounds(widths) + widths[-1]
    rows = [_from(text, b * len(text) // batch, headroom) for b in range(batch)]
    tokens = torch.tensor(rows, device=target.device)
    cache = target.make_cache(batch, headroom, slack=draft.block_size)
    alone = target.make_cache(batch, headroom)
    session = draft.begin(batch, headroom)
    for chunk in tokens[:, :context].split(min(PREFILL, math.ceil(context / SHOWN)), dim=1):
        aux, columns = target(chunk, cache, aux=wanted).aux, chunk.shape[1]
        _wait(target)
        began = time.perf_counter()
        session.observe(chunk, aux, [columns] * batch)
        _wait(target)
        timings.show.append((time.perf_counter() - began) / columns)
        target(chunk, alone)
    rule, began = acceptance_rule(request, rows, generator(SEED, target.device)), 0.0
    deferred = Deferred(session)
    alone_at = context
    for repeat in range(MOST_REPEATS + 1):  # the first one warms up
        turn, first = StepTimes(widths), repeat % len(kinds)
        for n in kinds[first:] + kinds[:first]:
            if not n:
                steps = tokens[:, alone_at : alone_at + STEPS].split(1, dim=1)
                took_plain = [_plain_step(target, alone, rule, last) for last in steps]
                turn.plain += took_plain[SETTLED:]
                alone_at += STEPS
                continue
            times, settled = (STEPS, SETTLED) if n == 1 else (ROUNDS, 1)
            for nth in range(times):
                at = context + timings.rounds
                ahead, rested = tokens[:, at : at + widths[-1]], deferred.positions
                took = _round(target, deferred, cache, rule, ahead, n, wanted)
                timings.rounds += 1
                if nth >= settled:
                    turn.draft[n].append(took[0])
                    turn.verify[n].append(took[1])
                elif n > 1 and rested >= STEPS:
                    turn.woken.append((n, took[0]))
        if not repeat:
            began = time.perf_counter()
            continue
        timings.turns.append(turn)
        spent = (time.perf_counter() - began) / seconds
        yield min(1.0, max(spent, repeat / MOST_REPEATS))
        if repeat >= LEAST_REPEATS and spent > 1:
            return


def _plain_step(target: Decoder, cache: KVCache, rule: AcceptanceRule, last: Tensor) -> float:
    """last [B, 1]; -> seconds."""
    _wait(target)
    began = time.perf_counter()
    rule.draw(target.logits(target(last, cache).hidden[:, 0])).tolist()
    return time.perf_counter() - began


def _round(
    target: Decoder,
    deferred: Deferred,
    cache: KVCache,
    rule: AcceptanceRule,
    ahead: Tensor,
    n: int,
    wanted: Sequence[int],
) -> tuple[float, float]:
    """One step of n positions after ahead[:, 0], the last verified token; -> seconds of draft and verify.
    Only the root is kept, whatever was right: the text goes on as it is."""
    _wait(target)
    began = time.perf_counter()
    proposal = Proposal(ahead[:, :1], [1] * len(ahead))
    if n > 1:
        proposal = deferred.propose(ahead[:, 0], n, rule.sampler)
        _wait(target)  # a controller reads the proposal before the target runs
    drafted = time.perf_counter()
    proposal = widened(proposal, ahead, n)
    start = time.perf_counter()
    out = target(proposal.tokens, cache, counts=proposal.counts, tree=proposal.tree, aux=wanted)
    logits = target.logits(out.hidden)
    rule.verify(proposal, logits) if n > 1 else next_token(rule, logits)
    checked = time.perf_counter()
    path = [[0]] * len(ahead)
    cache.commit(path)
    deferred.add(verified(proposal, out.aux, path))
    return drafted - began, checked - start


def _wait(target: Decoder) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def widened(proposal: Proposal, ahead: Tensor, n: int) -> Proposal:
    """n positions in every row, as a step of that width has: what the draft did not fill, the text does,
    behind the last position. ahead [B, >= n], the text from the root on."""
    B, N = proposal.tokens.shape
    if N == n and min(proposal.counts) == n:
        return proposal
    columns = torch.arange(n, device=ahead.device).expand(B, -1)
    given = torch.tensor(proposal.counts, device=ahead.device)[:, None]
    tokens = torch.nn.functional.pad(proposal.tokens, (0, n - N))
    tokens = torch.where(columns < given, tokens, ahead[:, :n])
    parents = proposal.parents
    if parents is not None:
        before = (columns - 1).clamp(min=0)
        parents = torch.where(columns < given, torch.nn.functional.pad(parents, (0, n - N)), before)
    return Proposal(tokens, [n] * B, parents)


def _from(text: Sequence[int], begin: int, length: int) -> list[int]:
    """`length` tokens from `begin` on; the text begins again where it ends."""
    return [text[(begin + i) % len(text)] for i in range(length)]


@torch.inference_mode()
def touched_experts(target: Decoder, text: Sequence[int], widths: tuple[int, ...]) -> Touched | None:
    """How many distinct experts n consecutive tokens touch, counted in one forward; None without experts."""
    config = target.config
    if not config.num_experts:
        return None
    E, K = config.num_experts, config.experts_per_token
    out = target(torch.tensor([list(text)], device=target.device), routing=True)
    chosen = [logits.topk(K, dim=-1).indices for logits in out.routing]  # [T, K] of every layer
    used = torch.zeros(len(chosen), len(text), E, dtype=torch.bool, device=target.device)
    used.scatter_(2, torch.stack(chosen), True)
    widths = tuple(n for n in widths if n <= len(text))
    measured = []
    for n in widths:
        runs = used.unfold(1, n, 1).any(-1)  # [layers, T - n + 1, E]
        measured.append(float(runs.sum(-1).double().mean()))
    known = Touched(experts=E, per_token=K, widths=widths, measured=tuple(measured), rho=1.0)
    more = [known.independent(n) - K for n in widths]
    over = sum(x * x for x in more)
    rho = sum(x * (m - K) for x, m in zip(more, measured, strict=True)) / over if over else 1.0
    return Touched(experts=E, per_token=K, widths=widths, measured=tuple(measured), rho=rho)
