"""The controller beside every fixed length and plain decoding, on text that drafts foresee and on noise."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from outpace.bench.comparison import COLUMNS, advancing, describe_method, row, said_by
from outpace.bench.described import describe_target
from outpace.bench.machine import machine, provenance, versions
from outpace.bench.methods import PLAIN, Case, Opened, run_case
from outpace.bench.results import Cell, over
from outpace.bench.resume import Kept
from outpace.bench.suite import SuiteRecipe, cost_tables, grouped, open_methods, texts_of
from outpace.bench.turns import take_turns
from outpace.corpus import Document
from outpace.models.decoder import Decoder


def run_controller(
    target: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    recipe: SuiteRecipe,
    drafts: Path,
    text: Sequence[int],
    folder: Path,
    console: Console,
) -> dict[str, Any]:
    """-> the report. Turns measured before a stop are read from folder/progress.jsonl. Methods whose recipe
    wants no controller are left out; raises ValueError where that is all of them."""
    began = time.perf_counter()
    before = machine(target.device)
    opened = open_methods(recipe, drafts, target, tokenizer)
    opened = {name: o for name, o in opened.items() if True in o.spec.controller}
    if not opened:
        raise ValueError("controller: no method of this recipe has a controller to measure")
    about = {name: describe_method(o) for name, o in opened.items()}
    whose = describe_target(target)
    kept = Kept(folder, {"recipe": said_by(recipe), "target": whose["fingerprint"], "methods": about})
    tables = cost_tables(recipe, target, opened, text, recipe.batch, kept, console)
    scenes = [(kind, temperature) for kind in recipe.texts for temperature in recipe.temperatures]
    results = []
    with Progress(*COLUMNS, console=console) as bar:
        plans = {(t, name): cases(recipe, opened[name], t) for t in recipe.temperatures for name in opened}
        turns = recipe.repeats * (recipe.controller_prompts // recipe.batch)
        total = len(recipe.texts) * sum(map(len, plans.values())) * turns
        task = bar.add_task("controller", total=total)
        for kind, temperature in scenes:
            groups = grouped(
                texts_of(kind, recipe.controller_prompts, recipe, target, tokenizer, documents), recipe.batch
            )
            for name, method in opened.items():
                plan = plans[temperature, name]
                runs = take_turns(
                    f"{kind}, T={temperature:g}, {name}",
                    {c.label: run_case(c, target, opened.get(c.method), tables[name]) for c in plan},
                    groups,
                    recipe.new_tokens,
                    recipe.repeats,
                    recipe.seed,
                    kept,
                    advancing(bar, task),
                )
                cell = Cell(kind, recipe.batch, recipe.new_tokens, groups, runs)
                results.append(scene(target, cell, plan, kind, name, method))
    report = {
        **provenance(),
        "machine": before,
        "versions": versions(),
        "target": whose,
        "recipe": said_by(recipe),
        "methods": about,
        "costs": {name: kept[f"costs of {name}"] for name in tables},
        "results": results,
        "seconds": round(time.perf_counter() - began, 1),
    }
    kept.done()
    return report


def cases(recipe: SuiteRecipe, opened: Opened, temperature: float) -> list[Case]:
    """Plain, the widths that this draft has, its own whole width, and the controller."""
    how = {"temperature": temperature, "rule": "match"}
    own = opened.draft.block_size
    widths = sorted({*(w for w in recipe.widths if w < own), own})
    fixed = [Case(method=opened.name, width=w, **how) for w in widths]  # type: ignore[arg-type]
    steered = Case(method=opened.name, steered=True, **how)  # type: ignore[arg-type]
    return [Case(method=PLAIN, **how), *fixed, steered]  # type: ignore[arg-type]


def scene(
    target: Decoder, cell: Cell, plan: list[Case], text: str, name: str, opened: Opened
) -> dict[str, Any]:
    """One method on one kind of text: every length, the best of them, and what the controller makes of it."""
    rows = [row(target, cell, case) for case in plan]
    fixed = [r for r in rows if r["width"]]
    steered = next(r for r in rows if r["controller"])
    plain = next(r for r in rows if r["method"] == PLAIN)
    best = max([*fixed, plain], key=lambda r: r["tokens_per_s"])
    return {
        "text": text,
        "temperature": steered["temperature"],
        "method": name,
        "plain_tokens_per_s": plain["tokens_per_s"],
        "fixed": [
            {key: r[key] for key in ("width", "tokens_per_s", "speedup", "tau", "lossless")} for r in fixed
        ],
        "best_width": best["width"] or 1,
        "best_tokens_per_s": best["tokens_per_s"],
        "controller": {
            key: steered[key]
            for key in ("tokens_per_s", "speedup", "tau", "columns", "foreseen", "lossless", "round_ms")
        },
        "best_speedup": best["speedup"],
        "over_plain": steered["speedup"],
        "over_best": round(over(steered["tokens_per_s_repeats"], best["tokens_per_s_repeats"]), 3),
    }
