"""Metrics of timed runs: token-by-token comparison, speed ratios, acceptance, time split, agreement."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from outpace.bench.run import Runs, Timed
from outpace.decode.acceptance import SamplingState, coupled, key_of
from outpace.decode.request import Request
from outpace.decode.trace import Trace
from outpace.models.decoder import Decoder
from outpace.ops import sampling as noise

PLAIN = "plain"  # the method name of autoregressive decoding
TIE = 1e-4  # largest distance, in float32 logits, between two tokens that rounding may exchange


# ---- token by token ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LosslessCheck:
    """checked: tokens compared, up to and including the first difference of a row; later tokens have another
    prefix and cannot be compared."""

    checked: int = 0
    violations: int = 0
    ties: int = 0

    def __add__(self, other: "LosslessCheck") -> "LosslessCheck":
        return LosslessCheck(
            checked=self.checked + other.checked,
            violations=self.violations + other.violations,
            ties=self.ties + other.ties,
        )


@contextmanager
def in_float32(target: Decoder) -> Iterator[None]:
    """Inside, the target computes in float32."""
    was = target.dtype
    target.dtype = torch.float32
    try:
        yield
    finally:
        target.dtype = was


@torch.inference_mode()
def is_tie(target: Decoder, prefix: Sequence[int], a: int, b: int, offset: int = 0) -> bool:
    """After `prefix`, are the float32 logits of both tokens within TIE of the largest one?"""
    with in_float32(target):
        hidden = target(torch.tensor([list(prefix)], device=target.device), offset=offset).hidden
        logits = target.logits(hidden[0, -1])
    return bool(logits.max() - torch.minimum(logits[a], logits[b]) <= TIE)


def compare_token(
    target: Decoder, prefix: Sequence[int], token: int, reference: int, offset: int = 0
) -> LosslessCheck:
    """What comes after `prefix`, by itself."""
    differs = token != reference
    tie = differs and is_tie(target, prefix, token, reference, offset)
    return LosslessCheck(checked=1, violations=int(differs and not tie), ties=int(tie))


def first_difference(tokens: list[int], reference: list[int]) -> int | None:
    pairs = enumerate(zip(tokens, reference, strict=False))
    return next((i for i, (a, b) in pairs if a != b), None)


def compare_exact(tokens: list[int], reference: list[int]) -> LosslessCheck:
    """One row, without allowance for ties. A different count is a violation."""
    i = first_difference(tokens, reference)
    if i is not None:
        return LosslessCheck(checked=i + 1, violations=1)
    shorter = min(len(tokens), len(reference))
    return LosslessCheck(checked=shorter, violations=int(len(tokens) != len(reference)))


def compare(
    target: Decoder, prompt: Sequence[int], tokens: list[int], reference: list[int], offset: int = 0
) -> LosslessCheck:
    """One row of greedy tokens against `reference`, autoregressive decoding's; a tie is no violation."""
    i = first_difference(tokens, reference)
    if i is not None and is_tie(target, [*prompt, *reference[:i]], tokens[i], reference[i], offset):
        return LosslessCheck(checked=i + 1, ties=1)
    return compare_exact(tokens, reference)


@torch.inference_mode()
def compare_coupled(
    target: Decoder,
    prompt: Sequence[int],
    tokens: list[int],
    reference: list[int],
    request: Request,
    rng: torch.Generator,
    row: int,
) -> LosslessCheck:
    """Row `row` of a coupled (gumbel) generation against `reference`, autoregressive decoding's; `rng`: the
    generator of both, freshly seeded. The first difference is a tie if the float32 scores of both tokens,
    noise included, are within TIE / temperature of the largest and neither token was cut off."""
    i = first_difference(tokens, reference)
    if i is None:
        return compare_exact(tokens, reference)
    text, sampling = [*prompt, *reference[:i]], request.sampling
    with in_float32(target):
        hidden = target(torch.tensor([text], device=target.device), offset=request.offset).hidden
        logits = target.logits(hidden[:, -1])
    state = SamplingState(sampling, [prompt])
    state.seen(logits)
    if i:
        state.add([reference[:i]])
    seen = state.seen(logits)
    stream = torch.tensor([(request.streams or range(row + 1))[row]], device=logits.device)
    keys = noise.keys(key_of(rng), stream, torch.full_like(stream, i))
    scores = coupled(logits, sampling, seen, keys)[0]
    lower = torch.minimum(scores[tokens[i]], scores[reference[i]])
    tie = bool(scores.max() - lower <= TIE / sampling.temperature)
    return LosslessCheck(checked=i + 1, violations=int(not tie), ties=int(tie))


# ---- ratios of runs ----------------------------------------------------------------------------------


def speed_ratio(runs: Runs, baseline: Runs) -> float:
    """Speed of `runs` over `baseline`, from the same turns, since both runs of a turn meet the same state of
    the machine. The median over repeats of each group of prompts, weighted by the baseline's time for the
    group: with equal repeats this is the ratio of total times, whatever the groups' lengths."""
    theirs = ours = 0.0
    for group in {group for _, group in runs}:
        turns = [turn for turn in runs if turn[1] == group]
        weight = statistics.median(baseline[turn].decode_s for turn in turns)
        theirs += weight
        ours += weight * statistics.median(
            _seconds_per_token(runs[turn]) / _seconds_per_token(baseline[turn]) for turn in turns
        )
    return theirs / ours


def ratio_error(runs: Runs, baseline: Runs) -> float:
    """Approximate standard error of `speed_ratio`: that of the mean of the turns' ratios; 0 for one turn."""
    ratios = [_seconds_per_token(baseline[turn]) / _seconds_per_token(run) for turn, run in runs.items()]
    return statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0


def _seconds_per_token(run: Timed) -> float:
    return run.decode_s / run.decoded


def _speeds(runs: Runs, end_to_end: bool = False) -> list[float]:
    """Tokens/s of every repeat over all its groups: decoding alone, or with prefill."""
    speeds = []
    for repeat in sorted({r for r, _ in runs}):
        timed = [run for (r, _), run in runs.items() if r == repeat]
        tokens = sum(sum(map(len, x.tokens)) if end_to_end else x.decoded for x in timed)
        speeds.append(tokens / sum(x.decode_s + end_to_end * x.first_s for x in timed))
    return speeds


def joined(traces: Iterable[Trace]) -> Trace:
    """One trace with the steps of all."""
    total = Trace()
    for trace in traces:
        for name in ("proposed", "accepted", "nodes", "predicted", "provisional"):
            getattr(total, name).extend(getattr(trace, name))
        total.partial_forwards += trace.partial_forwards
        for part, seconds in trace.seconds.items():
            total.seconds[part] = total.seconds.get(part, 0.0) + seconds
    return total


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Of the repeats of one step."""
    return {
        "repeats": len(seconds),
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
    }


# ---- one row of a report -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ResultCell:
    """One regime at one batch size: groups of prompts, the runs of each method, and how many tokens are
    decoded: `new_tokens` at most, `counts` of each group where they differ."""

    regime: str
    batch: int
    new_tokens: int
    groups: list[list[list[int]]]
    runs: dict[str, Runs]
    counts: list[int] | None = None


def result(
    target: Decoder,
    cell: ResultCell,
    method: str,
    temperature: float,
    single: Runs | None = None,
    baseline: str = PLAIN,
    reference: str | None = None,
    compared: bool = True,
) -> dict[str, Any]:
    """Metrics of one method. `baseline`: the method that the speedup compares with. `single`: autoregressive
    runs at batch 1, which check autoregressive decoding at larger batches. `reference`: the method whose
    tokens must be repeated exactly, seed by seed; None: at temperature 0 the baseline's, otherwise nothing
    is compared, as where the method is not to be `compared`."""
    runs = cell.runs[method]
    plain = {turn: cell.runs[baseline][turn] for turn in runs}
    speeds, prompt_tokens = _speeds(runs), len(cell.groups[0][0])
    trace = joined(run.trace for run in runs.values())
    lens = sorted(trace.accept_lens)
    decode = statistics.fmean(r.decode_s for r in runs.values())
    parts = {p: statistics.fmean(r.trace.seconds[p] for r in runs.values()) for p in ("draft", "verify")}
    parts["rest"] = max(0.0, decode - sum(parts.values()))
    first = statistics.median(r.first_s for r in runs.values())
    if not compared:
        lossless = dataclasses.asdict(LosslessCheck()) | {"unrepeated": 0}
    elif temperature == 0:
        lossless = _greedy_check(target, cell, method, baseline, single)
    else:
        answers = cell.runs[reference] if reference else {}
        lossless = dataclasses.asdict(_exact_check(runs, answers)) | {"unrepeated": 0}
    return {
        "method": method,
        "regime": cell.regime,
        "batch": cell.batch,
        "temperature": temperature,
        "tokens_per_s": round(statistics.median(speeds), 2),
        "speedup": round(speed_ratio(runs, plain), 3),
        "plain_tokens_per_s": round(statistics.median(_speeds(plain)), 2),  # same prompts and repeats
        "tau": round(trace.tau, 4),
        "accept_len": {
            "mean": round(statistics.fmean(lens), 4) if lens else 0.0,
            "p50": _quantile(lens, 0.5),
            "p90": _quantile(lens, 0.9),
        },
        "accept_rate": round(trace.accept_rate, 4),
        "accept_by_position": [round(x, 4) for x in trace.accept_by_position()],
        "time": {part: round(seconds, 4) for part, seconds in parts.items()},
        "lossless": lossless,
        "prompt_tokens": prompt_tokens,
        "new_tokens": cell.new_tokens,
        "prompts": cell.batch * len({group for _, group in runs}),
        "repeats": len({repeat for repeat, _ in runs}),
        "tokens_per_s_repeats": [round(s, 2) for s in speeds],
        "end_to_end_tokens_per_s": round(statistics.median(_speeds(runs, end_to_end=True)), 2),
        "first_token_s": round(first, 4),
        "prefill": {
            "seconds": round(first, 4),
            "tokens_per_s": round(cell.batch * prompt_tokens / first, 1),
        },
    }


def _quantile(ordered: list[int], q: float) -> int:
    """Nearest rank."""
    return ordered[math.ceil(q * len(ordered)) - 1] if ordered else 0


def _greedy_check(
    target: Decoder, cell: ResultCell, method: str, baseline: str, single: Runs | None
) -> dict[str, int]:
    """The first repeat against autoregressive decoding of the same batch; autoregressive decoding itself at
    batch > 1 against batch 1. `unrepeated`: rows of later repeats that differ from the first."""
    runs, total, unrepeated = cell.runs[method], LosslessCheck(), 0
    for (repeat, group), run in runs.items():
        if repeat:
            unrepeated += sum(a != b for a, b in zip(run.tokens, runs[0, group].tokens, strict=True))
            continue
        for row, tokens in enumerate(run.tokens):
            reference = tokens
            if method != baseline:
                reference = cell.runs[baseline][0, group].tokens[row]
            elif single is not None:
                reference = single[0, group * cell.batch + row].tokens[0]
            total += compare(target, cell.groups[group][row], tokens, reference)
    return dataclasses.asdict(total) | {"unrepeated": unrepeated}


def _exact_check(runs: Runs, reference: Runs) -> LosslessCheck:
    """Tokens that must be equal for equal seeds, at any temperature."""
    total = LosslessCheck()
    for turn, answers in reference.items():
        for tokens, answer in zip(runs[turn].tokens, answers.tokens, strict=True):
            total += compare_exact(tokens, answer)
    return total


def agreement(cell: ResultCell) -> dict[str, Any] | None:
    """Accepted lengths of our DFlash and of transformers' DFlash, step by step, up to the first difference of
    each prompt: later steps start from other tokens."""
    theirs, ours = cell.runs.get("transformers-dflash"), cell.runs.get("dflash")
    if theirs is None or ours is None:
        return None
    rounds, prompts_that_differ = 0, 0
    for key in theirs:
        pairs = list(zip(ours[key].trace.accept_lens, theirs[key].trace.accept_lens, strict=False))
        first = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        rounds += len(pairs) if first is None else first + 1
        prompts_that_differ += first is not None
    return {
        "methods": ["dflash", "transformers-dflash"],
        "regime": cell.regime,
        "prompts": len(theirs),
        "rounds_compared": rounds,
        "prompts_that_differ": prompts_that_differ,
    }
