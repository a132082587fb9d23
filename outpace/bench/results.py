"""What ran -> what the report states: medians, acceptance, time split, losslessness, agreement."""

import dataclasses
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outpace.bench.lossless import LosslessCheck, compare, same
from outpace.bench.run import Runs, Timed
from outpace.decode.trace import Trace
from outpace.models.decoder import Decoder


@dataclass(frozen=True)
class ResultCell:
    """One regime at one batch size: groups of prompts, and what ran of each method."""

    regime: str
    batch: int
    new_tokens: int
    groups: list[list[list[int]]]
    runs: dict[str, Runs]


def result(
    target: Decoder,
    cell: ResultCell,
    method: str,
    temperature: float,
    alone: Runs | None,
    answer: str | None = None,
) -> dict[str, Any]:
    """`answer`: the method whose text this one must repeat, token by token; None: at temperature 0
    plain's."""
    runs, plain = cell.runs[method], cell.runs["plain"]
    speeds = _speeds(runs)
    beside = _speeds({key: plain[key] for key in runs})
    trace = joined(run.trace for run in runs.values())
    lens = sorted(trace.accept_lens)
    decode = statistics.fmean(r.decode_s for r in runs.values())
    parts = {p: statistics.fmean(r.trace.seconds[p] for r in runs.values()) for p in ("draft", "verify")}
    first = statistics.median(r.first_s for r in runs.values())
    prompt_tokens = len(cell.groups[0][0])
    return {
        "method": method,
        "regime": cell.regime,
        "batch": cell.batch,
        "temperature": temperature,
        "tokens_per_s": round(statistics.median(speeds), 2),
        "speedup": round(over(runs, plain), 3),
        "plain_tokens_per_s": round(statistics.median(beside), 2),  # of the same prompts and repeats
        "tau": round(trace.tau, 4),
        "accept_len": {
            "mean": round(statistics.fmean(lens), 4) if lens else 0.0,
            "p50": _quantile(lens, 0.5),
            "p90": _quantile(lens, 0.9),
        },
        "accept_rate": round(trace.accept_rate, 4),
        "accept_by_position": [round(x, 4) for x in trace.accept_by_position()],
        "time": {
            **{part: round(seconds, 4) for part, seconds in parts.items()},
            "rest": round(max(0.0, decode - sum(parts.values())), 4),
        },
        "lossless": _lossless(target, cell, method, temperature, alone, answer),
        "prompt_tokens": prompt_tokens,
        "new_tokens": cell.new_tokens,
        "prompts": cell.batch * len({group for _, group in runs}),
        "repeats": len({repeat for repeat, _ in runs}),
        "tokens_per_s_repeats": [round(s, 2) for s in speeds],
        "end_to_end_tokens_per_s": round(statistics.median(_speeds(runs, whole=True)), 2),
        "first_token_s": round(first, 4),
        "prefill": {
            "seconds": round(first, 4),
            "tokens_per_s": round(cell.batch * prompt_tokens / first, 1),
        },
    }


def joined(traces: Iterable[Trace]) -> Trace:
    """The steps of all of them."""
    whole = Trace()
    for trace in traces:
        whole.proposed += trace.proposed
        whole.accepted += trace.accepted
        whole.nodes += trace.nodes
        whole.predicted += trace.predicted
        whole.provisional += trace.provisional
        whole.partial_forwards += trace.partial_forwards
        for part, seconds in trace.seconds.items():
            whole.seconds[part] = whole.seconds.get(part, 0.0) + seconds
    return whole


def over(runs: Runs, others: Runs) -> float:
    """How much faster `runs` are than `others` of the same turns: two runs of a turn meet the same minute of
    the machine. Of a group of prompts the median of its repeats counts, by how long `others` take over it:
    were all repeats equal, this would be all seconds over all seconds."""
    theirs = ours = 0.0
    for group in {group for _, group in runs}:
        turns = [turn for turn in runs if turn[1] == group]
        scale = statistics.median(_machine_scale(others[turn]) for turn in turns)
        theirs += scale
        ours += scale * statistics.median(
            _machine_scale(runs[turn]) / _machine_scale(others[turn]) for turn in turns
        )
    return theirs / ours


def error(runs: Runs, others: Runs) -> float:
    """About the standard error of `over`: that of the mean of all turns' ratios; 0 of a lone turn."""
    ratios = [_machine_scale(others[turn]) / _machine_scale(run) for turn, run in runs.items()]
    return statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0


def _machine_scale(run: Timed) -> float:
    """Seconds per token."""
    return run.decode_s / run.decoded


def _speeds(runs: Runs, whole: bool = False) -> list[float]:
    """Tokens/s of every repeat, over all its groups: decoding alone, or the `whole` with its prefill."""
    speeds = []
    for repeat in sorted({r for r, _ in runs}):
        of_repeat = [run for (r, _), run in runs.items() if r == repeat]
        tokens = sum(sum(map(len, x.tokens)) if whole else x.decoded for x in of_repeat)
        speeds.append(tokens / sum(x.decode_s + whole * x.first_s for x in of_repeat))
    return speeds


def _quantile(ordered: list[int], q: float) -> int:
    """Nearest rank."""
    return ordered[math.ceil(q * len(ordered)) - 1] if ordered else 0


def _lossless(
    target: Decoder,
    cell: ResultCell,
    method: str,
    temperature: float,
    alone: Runs | None,
    answer: str | None,
) -> dict[str, int]:
    """Against autoregressive decoding of the same batch; plain itself at batch > 1 against plain at batch 1.

    `unrepeated`: rows of later repeats that differ from the first. At temperature > 0 the guarantee is about
    distributions and nothing is checked, except where an `answer` of the same seeds is named: every repeat
    is then checked against its own, and no tie excuses.
    """
    runs = cell.runs[method]
    if temperature > 0:
        if answer is None:
            return {"checked": 0, "violations": 0, "ties": 0, "unrepeated": 0}
        return dataclasses.asdict(coupled(runs, cell.runs[answer])) | {"unrepeated": 0}
    total, unrepeated = LosslessCheck(), 0
    for (repeat, group), run in runs.items():
        if repeat:
            unrepeated += sum(a != b for a, b in zip(run.tokens, runs[0, group].tokens, strict=True))
            continue
        for row, tokens in enumerate(run.tokens):
            if method != "plain":
                value = cell.runs["plain"][0, group].tokens[row]
            elif alone is not None:
                value = alone[0, group * cell.batch + row].tokens[0]
            else:
                value = tokens
            total += compare(target, cell.groups[group][row], tokens, value)
    return dataclasses.asdict(total) | {"unrepeated": unrepeated}


def coupled(runs: Runs, answers: Runs) -> LosslessCheck:
    """Texts that one seed must make equal, whatever the temperature."""
    total = LosslessCheck()
    for key, run in runs.items():
        for tokens, answer in zip(run.tokens, answers[key].tokens, strict=True):
            total += same(tokens, answer)
    return total


def agreement(cell: ResultCell) -> dict[str, Any] | None:
    """Do both DFlash implementations accept the same lengths, step by step? Each prompt is compared up
    to its first difference: later steps start from other tokens."""
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
