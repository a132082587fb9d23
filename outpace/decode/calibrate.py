"""Measuring a cost table: steps over real text at every draft length, interleaved."""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from outpace.decode.acceptance import AcceptanceRule
from outpace.decode.ahead import MOST, RunAhead
from outpace.decode.controller import Adaptive, Fixed
from outpace.decode.costs import Costs, Point, Touched, fingerprint, machine, rising
from outpace.decode.generate import generate, next_token
from outpace.decode.request import COST_RULES, GREEDY, Request, acceptance_rule
from outpace.decode.trace import Trace
from outpace.drafts.base import Draft, Proposal, roots
from outpace.drafts.deferred import Deferred, accepted_states
from outpace.kv.base import KVCache
from outpace.models.decoder import Decoder, Target
from outpace.ops.sampling import Sampling, generator

MIN_REPEATS, MAX_REPEATS = 3, 12
ATTEMPTS = 3  # measurements of a point, while the machine is busy
ROUNDS = 3  # consecutive steps of a width; the first is not counted
RESTS = 2  # of MOST steps without draft tokens each, one after the other; the first is not counted
PREFILL, SHOWN = 512, 4  # positions of a prefill chunk at most, and chunks at least
# tokens of the runs that measure the acceptance rate and the overhead of a step; places of a text, at most
STEADY, PLACES = 48, 16
TURNS, TURN = 3, 96  # texts, of so many tokens at most, by which the timed steps are scaled
SEED = 1
ROUTED = 512  # tokens over which the experts are counted
OnProgress = Callable[[float], None]  # share of the work that is done, 0 to 1


def width_grid(block: int) -> tuple[int, ...]:
    """1 to 16, then in steps of a quarter."""
    widths = [1]
    while widths[-1] < block:
        step = max(1, widths[-1] // 8, widths[-1] // 4 if widths[-1] > 15 else 0)
        widths.append(min(block, widths[-1] + step))
    return tuple(widths)


@torch.inference_mode()
def calibrate(
    target: Target,
    draft: Draft,
    text: Sequence[int],
    *,
    contexts: Sequence[int] = (256,),
    batches: Sequence[int] = (1,),
    seconds: float = 20.0,
    rule: str = GREEDY,
    prompts: Sequence[Sequence[int]] = (),
    on_progress: OnProgress | None = None,
) -> Costs:
    """text: token ids, real text of the kind that will be decoded; the rows of a batch begin at different
    places of it. seconds: about how long to measure, prefills not counted; at least six steps of every width
    are. rule: one of decode.request.COST_RULES; sampled rules run at temperature 1. prompts: the acceptance
    rate is that of what follows these; without any, of what follows several places of the text.

    A point that is measured while other processes use the processor (`Point.busy`) is measured again, up to
    ATTEMPTS times; if all of them are, the best one is returned with a RuntimeWarning, and `Costs.busy` is
    True.

    Raises ValueError for a context, a batch, a text or a rule that cannot be measured.
    """
    widths, request = width_grid(draft.block_size), _request(rule)
    _check(target, text, contexts, batches, widths)
    cells = [(batch, context) for context in sorted(set(contexts)) for batch in sorted(set(batches))]
    share = seconds / (len(cells) + 1)
    alone = _decode(target, draft, _rows(text, 1, min(contexts)), request, share)
    counted, rest = _counted(alone), _besides(alone)
    asked = prompts or _rows(text, PLACES, min(contexts))[1:]
    more = _accepted(target, draft, asked, request, share / 2)
    counted = more if prompts else counted + more  # one place of a text says little
    points = []
    for i, (batch, context) in enumerate(cells):
        attempts: list[Point] = []
        while not attempts or (attempts[-1].busy and len(attempts) < ATTEMPTS):
            timings = Timings(widths)
            for part in _measure(target, draft, text, batch, context, request, timings, share):
                if on_progress is not None and not attempts:
                    on_progress((i + part) / len(cells))
            attempts.append(timings.point(batch, context, rest, on_cpu=target.device.type == "cpu"))
        points.append(min(attempts, key=lambda p: (p.busy, -p.cpu)))
    described = machine(target.decoder) | {
        "target": f"{target.config.architecture}, {target.config.num_layers} layers",
        "draft": f"{type(draft).__name__}, at most {draft.block_size} positions",
        "rule": rule,
    }
    costs = Costs(
        fingerprint=fingerprint(target.decoder, draft, rule),
        widths=widths,
        points=tuple(points),
        acceptance=counted[True] / counted.total() if counted.total() else 0.0,
        touched=touched_experts(target.decoder, text[:ROUTED], widths),
        described=described,
    )
    if costs.busy:
        worst = min(p.cpu for p in points)
        warnings.warn(
            f"calibrate: other processes used the processor in {ATTEMPTS} measurements (the process ran "
            f"{worst:.0%} of the time), so the costs are too high: measure again on an idle machine",
            RuntimeWarning,
            stacklevel=3,  # past the wrapper of inference_mode
        )
    step = sum(alone.step_seconds) / len(alone.step_seconds)
    whole = replace(request, max_new_tokens=round(min(TURN, max(8, share / step / 2 / TURNS))))
    turns = dict[int, list[tuple[Trace, Trace]]]()
    for batch in sorted(set(batches)):
        places = _rows(text, batch * TURNS, min(contexts))
        turns[batch] = [_turn(target, draft, places[i::TURNS], whole, costs) for i in range(TURNS)]
    return replace(costs, points=tuple(_as_decoded(p, costs, turns[p.batch]) for p in points))


def _turn(
    target: Target, draft: Draft, prompts: list[list[int]], request: Request, costs: Costs
) -> tuple[Trace, Trace]:
    """Decoding with draft tokens in every step, and without: a controller's own time belongs to a step."""
    drafting, resting = (
        generate(target, prompts, request, draft, controller=c, rng=generator(SEED, target.device)).trace
        for c in (_drafting(costs), Fixed(1))
    )
    return drafting, resting


def _as_decoded(point: Point, costs: Costs, turns: list[tuple[Trace, Trace]]) -> Point:
    """The point with the rest of a step, and its seconds scaled to those of text that was decoded with draft
    tokens in every step, and without: timed alone, a pass finds other things in the caches than there."""
    batch = point.batch  # the texts began at the shortest context
    rest, idle = (median([_besides(trace) for trace in traces]) for traces in zip(*turns, strict=True))
    usual = median([t for _, trace in turns for t in trace.step_seconds[1:]]) - idle
    ratios, lone = list[float](), list[float]()
    for trace, _ in turns:
        # the first step warms up; of rounds that a device makes by itself nothing is predicted
        for nodes, step in zip(trace.nodes[1:], trace.predicted[1:], strict=False):
            drafting = step.seconds_taken - rest
            if max(nodes) > 1:
                ratios.append(drafting / (step.seconds - costs.rest_seconds(2, batch)))
            else:
                lone.append(drafting - costs.draft_seconds(2, 0, batch))
    single = usual / costs.verify_seconds(1, 0, batch) if usual > 0 else 1.0
    wide = median(ratios) if ratios else 1.0
    wide = wide if wide > 0 else 1.0  # steps of microseconds, of which the rest is most
    return replace(
        point,
        verify=tuple(rising([single * point.verify[0], *(wide * s for s in point.verify[1:])])),
        draft=tuple(wide * s for s in point.draft),
        plain=single * point.plain,
        rest=rest,
        idle=idle,
        lone=max(0.0, median(lone)) if lone else None,
    )


@torch.inference_mode()
def quick(target: Target, draft: Draft, context: int = 256, enough: float = math.inf) -> float:
    """Estimated seconds of a calibration at one context, from a few short forwards: no more of them than show
    that it is above `enough`."""
    ids = torch.zeros(1, 32, dtype=torch.int64, device=target.device)

    def timed(n: int) -> float:
        began = time.perf_counter()
        target.logits(target(ids[:, :n], target.make_cache(1, 32)).hidden[:, -1:]).sum().item()
        return time.perf_counter() - began

    timed(1)  # the first one reads the weights, and may build the kernels
    one = timed(1)
    steps = _max_steps(width_grid(draft.block_size), MIN_REPEATS, 2 * RESTS) + 2 * STEADY
    if steps * one > enough:
        return steps * one
    timed(32)
    many = timed(32)
    return steps * (one + many) / 2 + 2 * context * many / 32


def _request(rule: str) -> Request:
    if rule not in COST_RULES:
        raise ValueError(f"no rule {rule!r} to measure; known: {', '.join(COST_RULES)}")
    if rule == GREEDY:
        return Request(max_new_tokens=1)
    return Request(max_new_tokens=1, sampling=Sampling(temperature=1.0), rule=rule)


def _check(
    target: Target,
    text: Sequence[int],
    contexts: Sequence[int],
    batches: Sequence[int],
    widths: tuple[int, ...],
) -> None:
    if not contexts or min(contexts) < 1 or not batches or min(batches) < 1:
        raise ValueError(f"contexts {list(contexts)}, batches {list(batches)}: at least 1 of each, from 1 up")
    longest = max(contexts) + _max_steps(widths) + widths[-1]
    if longest > target.config.max_position_embeddings:
        raise ValueError(
            f"context {max(contexts)} and the steps measured after it reach position {longest}; this "
            f"model's positions end at {target.config.max_position_embeddings}"
        )
    if len(text) < min(contexts) + STEADY:
        raise ValueError(f"{len(text)} tokens of text are too few for a context of {min(contexts)}")


def _max_steps(widths: tuple[int, ...], repeats: int | None = None, rests: int = RESTS) -> int:
    lone = 1 + MOST
    return ((MAX_REPEATS if repeats is None else repeats) + 1) * (len(widths) * ROUNDS + rests * MOST + lone)


def _decode(
    target: Target,
    draft: Draft,
    prompts: list[list[int]],
    request: Request,
    seconds: float,
) -> Trace:
    """The last of three runs: the others warm up."""

    def run(tokens: int) -> Trace:
        rng = generator(SEED, target.device)
        return generate(target, prompts, replace(request, max_new_tokens=tokens), draft, rng=rng).trace

    run(2)
    began = time.perf_counter()
    run(4)
    return run(int(min(STEADY, max(8, 4 * seconds / (time.perf_counter() - began)))))


def _besides(trace: Trace) -> float:
    """Seconds of a step besides draft and verify, where a step without draft tokens has no draft."""
    drafting = any(proposed > 0 for step in trace.proposed for proposed in step)
    return (trace.seconds["rest"] + (0.0 if drafting else trace.seconds["draft"])) / len(trace.accepted)


def _counted(trace: Trace) -> Counter[bool]:
    """How many draft tokens whose parent was accepted were accepted, and how many were not."""
    steps = zip(trace.accepted, trace.proposed, strict=True)
    rows = [row for step in steps for row in zip(*step, strict=True) if row[0] >= 0]
    return Counter({True: sum(a for a, _ in rows), False: sum(a < p for a, p in rows)})


def _accepted(
    target: Target, draft: Draft, prompts: Sequence[Sequence[int]], request: Request, seconds: float
) -> Counter[bool]:
    """The same counts after as many of the prompts as there is time for, up to a stop token."""
    counted, rng, began = Counter[bool](), generator(SEED, target.device), time.perf_counter()
    request = replace(request, max_new_tokens=STEADY, stop=frozenset(target.config.eos_token_ids))
    for prompt in prompts:
        counted += _counted(generate(target, [prompt], request, draft, rng=rng).trace)
        if time.perf_counter() - began > seconds:
            break
    return counted


def _drafting(costs: Costs) -> Adaptive:
    """A controller that drafts in every step, whatever it costs."""
    controller = Adaptive(costs)
    controller.always = True
    return controller


Kind = tuple[str, int]  # of a timed step: one of these, and its number of positions
DRAFT, VERIFY, PLAIN, WAKE, SETTLE = "draft", "verify", "plain", "wake", "settle"
LONE = WAKE, SETTLE


@dataclass
class Timings:
    """Seconds of the steps of every repeat, by kind. WAKE: a proposal after RESTS * MOST steps without one;
    SETTLE: its verify pass, and the MOST steps of one position that follow. `show`, `prompt`: of one
    position that is observed, and that is read. `wall`, `cpu`: of all repeats, and the time the main thread
    ran in them."""

    widths: tuple[int, ...]
    repeats: list[dict[Kind, list[float]]] = field(default_factory=list)
    show: list[float] = field(default_factory=list)
    prompt: list[float] = field(default_factory=list)
    steps: int = 0
    wall: float = 0.0
    cpu: float = 0.0

    def point(self, batch: int, context: int, rest: float, on_cpu: bool = True) -> Point:
        """Each repeat is scaled to the mean duration, because a slow moment of the machine slows all widths
        of a repeat; of each width the first quartile is taken, which other processes hardly move; and all are
        scaled by one factor to take as long as the repeats took, because decoding includes slow steps too.
        Costs never fall as the width grows."""
        durations = [
            sum(sum(seconds) for (kind, _), seconds in repeat.items() if kind not in LONE)
            for repeat in self.repeats
        ]
        scaled, mean = dict[Kind, list[float]](), sum(durations) / len(durations)
        for repeat, duration in zip(self.repeats, durations, strict=True):
            factor = mean / duration
            for kind, seconds in repeat.items():
                scaled.setdefault(kind, []).extend(factor * s for s in seconds)
        quartiles = {
            kind: np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
            for kind, seconds in scaled.items()
            if kind[0] not in LONE
        }
        slow = sum(durations) / sum(len(scaled[kind]) * first for kind, (first, _, _) in quartiles.items())
        low = {kind: slow * first for kind, (first, _, _) in quartiles.items()}
        spreads = [
            (third - first) / median
            for (kind, _), (first, median, third) in quartiles.items()
            if kind == VERIFY
        ]
        first = {kind: quartile for kind, (quartile, _, _) in quartiles.items()}
        show = median(self.show)

        def beyond(kind: str, usual: Callable[[int], float]) -> float:
            """What a lone step takes beyond the usual."""
            more = [s - usual(n) for (k, n), seconds in scaled.items() if k == kind for s in seconds]
            return max(0.0, median(more or [0.0]))

        return Point(
            batch=batch,
            context=context + self.steps / 2,
            verify=tuple(rising([low[VERIFY, n] for n in self.widths])),
            draft=(0.0, *rising([low[DRAFT, n] for n in self.widths[1:]])),
            rest=rest,
            plain=low[PLAIN, 1],
            show=show,
            prompt=min(self.prompt, default=0.0),
            wake=beyond(WAKE, lambda n: first[DRAFT, n] + RESTS * MOST * show),
            settle=beyond(SETTLE, lambda n: first[VERIFY, n] + MOST * first[VERIFY, 1]),
            spread=median(spreads),
            cpu=min(1.0, self.cpu / self.wall) if on_cpu else 1.0,
        )


def median(values: list[float]) -> float:
    return float(np.median(values))


def _measure(
    target: Target,
    draft: Draft,
    text: Sequence[int],
    batch: int,
    context: int,
    request: Request,
    timings: Timings,
    seconds: float,
) -> Iterator[float]:
    """Steps over the text, each one token further, so that cache and draft hold what they hold in decoding;
    yields the share that is done.

    The widths are interleaved, so that a slow moment of the machine slows all of them. In a repeat a width
    has ROUNDS consecutive steps: a step is a little faster after one of its kind. Steps of one position, as
    in a rest, and steps of autoregressive decoding, over a cache of their own, are as many and made as there:
    consecutive tokens read the same experts, where a wide step has just read all. After those of one position
    there is a lone wider step, as a probe is: see `Point.wake` and `settle`.
    """
    widths = timings.widths
    length = context + _max_steps(widths) + widths[-1]
    rows = _rows(text, batch, length)
    tokens = torch.tensor(rows, device=target.device)
    cache = target.make_cache(batch, length, slack=draft.block_size)
    plain_cache = target.make_cache(batch, length)
    session = draft.begin(batch, length)
    for chunk in tokens[:, :context].split(min(PREFILL, math.ceil(context / SHOWN)), dim=1):
        n = chunk.shape[1]
        with Timer(target) as timer:
            aux = target(chunk, cache, aux=draft.target_layer_ids).aux
        timings.prompt.append(timer.seconds / (n * batch))
        with Timer(target) as timer:
            session.observe(chunk, aux, [n] * batch)
        timings.show.append(timer.seconds / n)
        target(chunk, plain_cache)
    rule = acceptance_rule(request, rows, generator(SEED, target.device))
    ahead, rules = RunAhead(target, request.runs_ahead), [rule]
    deferred = Deferred(session)
    kinds = (0, *widths)  # 0: autoregressive decoding
    plain_at = context

    def step(n: int) -> tuple[float, float]:
        at = context + timings.steps
        timings.steps += 1
        return _step(target, draft, deferred, cache, rule, tokens[:, at : at + widths[-1]], n)

    def resting() -> float:
        """Seconds of a step without draft tokens, of as many as are made one after the other."""
        at = context + timings.steps
        with Timer(target) as timer:
            many = ahead.make(tokens[:, at], cache, MOST, (), draft.target_layer_ids, rules)
        if many is None:
            return sum(sum(step(1)) for _ in range(MOST)) / MOST
        deferred.add(many.states)
        timings.steps += MOST
        return timer.seconds / MOST

    def autoregressive(at: int) -> float:
        """The same, without a draft that listens."""
        with Timer(target) as timer:
            if ahead.make(tokens[:, at], plain_cache, MOST, (), (), rules) is None:
                for i in range(at, at + MOST):
                    out = target(tokens[:, i : i + 1], plain_cache, logits=True)
                    next_token(rule, out.logits, out.best)
        return timer.seconds / MOST

    for repeat in range(MAX_REPEATS + 1):  # the first one warms up
        if repeat == 1:
            began, began_cpu = time.perf_counter(), time.thread_time()
        times: dict[Kind, list[float]] = {}
        first = repeat % len(kinds)
        for n in kinds[first:] + kinds[:first]:
            if not n:
                times[PLAIN, 1] = [autoregressive(plain_at + i * MOST) for i in range(RESTS)][1:]
                plain_at += RESTS * MOST
                continue
            if n == 1:
                times[VERIFY, 1] = [resting() for _ in range(RESTS)][1:]
                if len(widths) > 1:
                    lone = widths[1 + repeat % (len(widths) - 1)]
                    drafted, verified = step(lone)
                    times[WAKE, lone] = [drafted]
                    times[SETTLE, lone] = [verified + MOST * resting()]
                continue
            for i in range(ROUNDS):
                drafted, verified = step(n)
                if i:
                    times.setdefault((DRAFT, n), []).append(drafted)
                    times.setdefault((VERIFY, n), []).append(verified)
        if not repeat:
            continue
        timings.repeats.append(times)
        timings.wall, timings.cpu = time.perf_counter() - began, time.thread_time() - began_cpu
        yield min(1.0, max(timings.wall / seconds, repeat / MAX_REPEATS))
        if repeat >= MIN_REPEATS and timings.wall > seconds:
            return


def _step(
    target: Target,
    draft: Draft,
    deferred: Deferred,
    cache: KVCache,
    rule: AcceptanceRule,
    ahead: Tensor,
    n: int,
) -> tuple[float, float]:
    """One step of n positions after ahead[:, 0], the last verified token; -> seconds of draft and verify.
    Only the root is committed, whatever was accepted: the text is given."""
    proposal = roots(ahead[:, 0])
    with Timer(target) as drafting:  # waits for the device, as a controller does when it reads the proposal
        if n > 1:
            proposal = deferred.propose(ahead[:, 0], n, rule.sampler)
    proposal = widened(proposal, ahead, n)
    path = [[0]] * len(ahead)
    with Timer(target) as verifying:
        what = {"counts": proposal.counts, "tree": proposal.tree, "aux": draft.target_layer_ids}
        out = target(proposal.tokens, cache, **what, logits=True)
        if n > 1:
            rule.verify(proposal, out.logits, out.best)
        else:
            next_token(rule, out.logits, out.best)
    cache.commit(path)
    deferred.add(accepted_states(proposal, out.aux, path))
    return drafting.seconds, verifying.seconds


class Timer:
    """`with Timer(target) as timer: ...`, then `timer.seconds`; waits for a GPU before and after."""

    def __init__(self, target: Target) -> None:
        self.device = target.device

    def __enter__(self) -> "Timer":
        self._wait()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self.began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def widened(proposal: Proposal, ahead: Tensor, n: int) -> Proposal:
    """n positions in every row: those that the draft did not fill are filled with the text, as a chain after
    the last one. ahead [B, >= n], the text from the root on."""
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


def _rows(text: Sequence[int], batch: int, length: int) -> list[list[int]]:
    """`length` tokens for each row, from another place on, the text being repeated."""
    starts = [b * len(text) // batch for b in range(batch)]
    return [[text[(begin + i) % len(text)] for i in range(length)] for begin in starts]


@torch.inference_mode()
def touched_experts(target: Decoder, text: Sequence[int], widths: tuple[int, ...]) -> Touched | None:
    """Number of distinct experts that n consecutive tokens use, counted in one forward; None without
    experts."""
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
    touched = Touched(experts=E, per_token=K, widths=widths, measured=tuple(measured), rho=1.0)
    independent = [touched.independent(n) - K for n in widths]
    squares = sum(x * x for x in independent)
    products = sum(x * (m - K) for x, m in zip(independent, measured, strict=True))
    return replace(touched, rho=products / squares if squares else 1.0)
