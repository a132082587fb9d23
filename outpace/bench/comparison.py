"""Drafts of one target side by side on equal prompts: acceptance, speed, where time goes, violations."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from rich.progress import Progress, TaskID

from outpace.bench.interleave import take_turns
from outpace.bench.methods import PLAIN, Case
from outpace.bench.progress import progress
from outpace.bench.results import ResultCell, joined, result
from outpace.bench.setup import SuiteRequest, begin
from outpace.bench.suite import cases_of
from outpace.decode.costs import Costs
from outpace.decode.trace import Trace
from outpace.models.decoder import Decoder


def run_comparison(asked: SuiteRequest) -> dict[str, Any]:
    """-> the report. Turns measured before a stop are read from progress.jsonl, if recipe, target
    and drafts are the same. Raises ValueError for a draft that is not there or another target's, and for
    prompts that the documents do not hold."""
    target, recipe = asked.target, asked.recipe
    plans = {t: cases_of(recipe, t) for t in recipe.temperatures}
    suite = begin(asked, [case for cases in plans.values() for case in cases], recipe.batch)
    groups = suite.prompts("held-out", recipe.prompts, recipe.batch)
    results = []
    with progress(asked.console) as bar:
        task = bar.add_task("drafts", total=sum(map(len, plans.values())) * recipe.repeats * len(groups))
        for temperature, cases in plans.items():
            runs = take_turns(
                f"T={temperature:g}",
                {c.label: suite.method(c) for c in cases},
                groups,
                recipe.new_tokens,
                recipe.repeats,
                recipe.seed,
                suite.kept,
                advancing(bar, task),
            )
            cell = ResultCell(f"T={temperature:g}", recipe.batch, recipe.new_tokens, groups, runs)
            results += [row(target, cell, case, suite.costs(case)) for case in cases]
    return suite.report(results=results, remarks=remarks(suite.frame["methods"]))


def advancing(bar: Progress, task: TaskID) -> Callable[[str], None]:
    def on_method(method: str) -> None:
        bar.update(task, description=method, advance=1)

    return on_method


def row(
    target: Decoder, cell: ResultCell, case: Case, costs: Costs | None, against: str = "match"
) -> dict[str, Any]:
    """One line of the comparison. Speedup is over autoregressive decoding at the same temperature under the
    rule `against`, match being the ordinary way; with coupled noise the text must be plain's of the same
    seed."""
    plain = Case(method=PLAIN, temperature=case.temperature, rule=against)
    coupled = Case(method=PLAIN, temperature=case.temperature, rule="gumbel").label
    answer = coupled if case.rule == "gumbel" else None
    beside = dataclasses.replace(cell, runs={**cell.runs, PLAIN: cell.runs[plain.label]})
    output = result(target, beside, case.label, case.temperature, None, answer)
    trace = joined(run.trace for run in cell.runs[case.label].values())
    columns = [
        n
        for nodes, taken in zip(trace.nodes, trace.accepted, strict=True)
        for n, a in zip(nodes, taken, strict=True)
        if a >= 0
    ]
    rounds = len(trace.accepted)
    parts = {p: 1000 * trace.seconds[p] / max(rounds, 1) for p in ("draft", "verify", "rest")}
    return output | {
        "method": case.method,
        "rule": case.rule,
        "width": case.width,
        "controller": case.steered,
        "label": case.label,
        "columns": round(statistics.fmean(columns), 3) if columns else 1.0,
        "reached": [round(share, 4) for share in reached(trace.accept_lens)],
        "round_ms": {part: round(ms, 4) for part, ms in parts.items()},
        "predicted": None if costs is None else predicted(trace, cell, costs, output["speedup"]),
    }


def predicted(trace: Trace, cell: ResultCell, costs: Costs, speedup: float) -> dict[str, float]:
    """Against what was measured, twice: the speedup, both sides of which meet the machine's slow minutes, and
    tokens/s, of which what was predicted knows nothing of them."""
    middle = statistics.fmean(len(prompt) for group in cell.groups for prompt in group) + cell.new_tokens / 2
    plain = cell.batch / costs.plain_seconds(middle, cell.batch)
    expected = trace.predicted_tokens_per_s / plain
    return {
        "speedup": round(expected, 4),
        "speedup_error": round(expected / speedup - 1, 4),
        "tokens_per_s": round(trace.predicted_tokens_per_s, 2),
        "error": round(trace.prediction_error, 4),
        "rounds": len(trace.predicted),
    }


def reached(accepted: list[int]) -> list[float]:
    """Of all rounds, the share that accepted at least 1, 2, .. draft tokens: what a chain verified to n
    positions would commit is 1 + the sum of the first n - 1, as far as its rounds would be these."""
    most = max(accepted, default=0)
    return [sum(a >= k for a in accepted) / len(accepted) for k in range(1, most + 1)]


def remarks(about: dict[str, dict[str, Any]]) -> list[str]:
    """Where the comparison is not on equal data, it reports it."""
    entries = []
    trained = {name: a["trained"] for name, a in about.items() if a["trained"]}
    unknown = [name for name, a in about.items() if a["kind"] != "n-gram" and not a["trained"]]
    if unknown:
        entries.append(
            f"no provenance next to the draft of {', '.join(unknown)}: trained on nobody knows what"
        )
    for what, key in (("teacher caches", "cache_sha256"), ("training budgets in tokens", "tokens")):
        per_draft = {name: t[key] for name, t in trained.items()}
        if key == "tokens":  # answers are looked up without steps
            per_draft = {name: n for name, n in per_draft.items() if about[name]["kind"] != "suffix"}
        if len(set(per_draft.values())) > 1:
            parts = ", ".join(f"{name}: {str(value)[:12]}" for name, value in per_draft.items())
            entries.append(f"not on equal data: {what} differ ({parts})")
    return entries
