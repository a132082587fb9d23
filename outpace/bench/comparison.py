"""Drafts of one target side by side on equal prompts: acceptance, speed, where time goes, violations."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer
from torch import nn

from outpace.bench.described import describe_target, parameters
from outpace.bench.machine import machine, provenance, versions
from outpace.bench.methods import PLAIN, Case, Opened, run_case
from outpace.bench.results import Cell, joined, result
from outpace.bench.resume import Kept
from outpace.bench.suite import SuiteRecipe, cases_of, cost_tables, grouped, open_methods, texts_of
from outpace.bench.turns import take_turns
from outpace.corpus import Document
from outpace.models.decoder import Decoder
from outpace.models.load import named_tensors

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def run_comparison(
    target: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    recipe: SuiteRecipe,
    drafts: Path,
    text: Sequence[int],
    folder: Path,
    console: Console,
) -> dict[str, Any]:
    """-> the report. Turns measured before a stop are read from folder/progress.jsonl, if recipe, target and
    drafts are the same. Raises ValueError for a draft that is not there or another target's, and for
    prompts that the documents do not hold."""
    began = time.perf_counter()
    before = machine(target.device)
    opened = open_methods(recipe, drafts, target, tokenizer)
    about = {name: describe_method(o) for name, o in opened.items()}
    whose = describe_target(target)
    kept = Kept(folder, {"recipe": said_by(recipe), "target": whose["fingerprint"], "methods": about})
    tables = cost_tables(recipe, target, opened, text, recipe.batch, kept, console)
    groups = grouped(texts_of("held-out", recipe.prompts, recipe, target, tokenizer, documents), recipe.batch)
    results = []
    with Progress(*COLUMNS, console=console) as bar:
        plans = {t: cases_of(recipe, t) for t in recipe.temperatures}
        task = bar.add_task("drafts", total=sum(map(len, plans.values())) * recipe.repeats * len(groups))
        for temperature, cases in plans.items():
            runs = take_turns(
                f"T={temperature:g}",
                {c.label: run_case(c, target, opened.get(c.method), tables.get(c.method)) for c in cases},
                groups,
                recipe.new_tokens,
                recipe.repeats,
                recipe.seed,
                kept,
                advancing(bar, task),
            )
            cell = Cell(f"T={temperature:g}", recipe.batch, recipe.new_tokens, groups, runs)
            results += [row(target, cell, case) for case in cases]
    report = {
        **provenance(),
        "machine": before,
        "versions": versions(),
        "target": whose,
        "recipe": said_by(recipe),
        "methods": about,
        "costs": {name: kept[f"costs of {name}"] for name in tables},
        "results": results,
        "said": remarks(about),
        "seconds": round(time.perf_counter() - began, 1),
    }
    kept.done()
    return report


def advancing(bar: Progress, task: TaskID) -> Callable[[str], None]:
    def told(method: str) -> None:
        bar.update(task, description=method, advance=1)

    return told


def said_by(recipe: SuiteRecipe) -> dict[str, Any]:
    """The recipe as it was asked for, as it reads back from JSON."""
    found = dataclasses.asdict(recipe)
    del found["specs"]
    read: dict[str, Any] = json.loads(json.dumps(found))
    return read


def row(target: Decoder, cell: Cell, case: Case) -> dict[str, Any]:
    """One line of the comparison. Speedup is over plain decoding at the same temperature, drawn the ordinary
    way; with coupled noise the text must be plain's of the same seed."""
    plain = Case(method=PLAIN, temperature=case.temperature, rule="match")
    coupled = Case(method=PLAIN, temperature=case.temperature, rule="gumbel").label
    answer = coupled if case.rule == "gumbel" else None
    beside = dataclasses.replace(cell, runs={**cell.runs, PLAIN: cell.runs[plain.label]})
    found = result(target, beside, case.label, case.temperature, None, answer)
    trace = joined(run.trace for run in cell.runs[case.label].values())
    columns = [
        n
        for nodes, taken in zip(trace.nodes, trace.accepted, strict=True)
        for n, a in zip(nodes, taken, strict=True)
        if a >= 0
    ]
    rounds = len(trace.accepted)
    parts = {p: 1000 * trace.seconds[p] / max(rounds, 1) for p in ("draft", "verify", "rest")}
    foreseen = None
    if trace.foreseen:
        foreseen = {
            "tokens_per_s": round(trace.foreseen_tokens_per_s, 2),
            "error": round(trace.foresight_error, 4),
            "rounds": len(trace.foreseen),
        }
    return found | {
        "method": case.method,
        "rule": case.rule,
        "width": case.width,
        "controller": case.steered,
        "label": case.label,
        "columns": round(statistics.fmean(columns), 3) if columns else 1.0,
        "reached": [round(share, 4) for share in reached(trace.accept_lens)],
        "round_ms": {part: round(ms, 4) for part, ms in parts.items()},
        "foreseen": foreseen,
    }


def reached(accepted: list[int]) -> list[float]:
    """Of all rounds, the share that accepted at least 1, 2, .. guesses: what a chain verified to n columns
    would commit is 1 + the sum of the first n - 1, as far as its rounds would be these."""
    most = max(accepted, default=0)
    return [sum(a >= k for a in accepted) / len(accepted) for k in range(1, most + 1)]


def describe_method(opened: Opened) -> dict[str, Any]:
    """What a reader needs to judge a row: the draft's kind and weights, and what it was trained on."""
    trained = opened.trained
    modules = [m for m in walk(opened.draft) if isinstance(m, nn.Module) and not isinstance(m, Decoder)]
    return {
        "kind": opened.kind,
        "draft": opened.spec.draft,
        "weights": opened.spec.weights,
        "tree": opened.spec.tree,
        "columns": opened.draft.block_size,
        "parameters": sum(map(parameters, modules)),
        "bytes": sum(t.nbytes for m in modules for _, t in named_tensors(m)),
        "trained": {
            "tokens": trained.get("training_tokens"),
            "hours": trained.get("training_hours"),
            "steps": trained.get("steps"),
            "cache_sha256": trained.get("cache_sha256"),
        }
        if trained
        else None,
    }


def walk(draft: Any) -> list[Any]:
    """The fields of a bound draft, and of what it wraps."""
    found = []
    for value in vars(draft).values():
        found += [value, *(walk(value) if dataclasses.is_dataclass(value) else [])]
    return found


def remarks(about: dict[str, dict[str, Any]]) -> list[str]:
    """Where the comparison is not on equal data, it says so."""
    said = []
    trained = {name: a["trained"] for name, a in about.items() if a["trained"]}
    unknown = [name for name, a in about.items() if a["kind"] != "n-gram" and not a["trained"]]
    if unknown:
        said.append(f"no provenance beside the draft of {', '.join(unknown)}: trained on nobody knows what")
    for what, key in (("teacher caches", "cache_sha256"), ("training budgets in tokens", "tokens")):
        values = {t[key] for t in trained.values()}
        if len(values) > 1:
            parts = ", ".join(f"{name}: {str(t[key])[:12]}" for name, t in trained.items())
            said.append(f"not on equal data: {what} differ ({parts})")
    return said
