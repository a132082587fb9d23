"""Every method against plain decoding, token by token: greedy, and with coupled noise at temperature 1."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from outpace.bench.comparison import COLUMNS, describe_method, said_by
from outpace.bench.described import describe_target
from outpace.bench.lossless import Check, compare
from outpace.bench.lossless_coupled import compare_coupled
from outpace.bench.machine import machine, provenance, versions
from outpace.bench.methods import PLAIN, Case, run_case
from outpace.bench.resume import Kept
from outpace.bench.suite import SuiteRecipe, cost_tables, grouped, open_methods, texts_of
from outpace.bench.turns import seed_of
from outpace.corpus import Document
from outpace.decode.request import Request
from outpace.models.decoder import Decoder
from outpace.ops.sampling import Sampling

WAYS = ((0.0, "match"), (1.0, "gumbel"))  # temperature and rule under which a text is a function of the seed


def run_lossless(
    target: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    recipe: SuiteRecipe,
    drafts: Path,
    text: Sequence[int],
    folder: Path,
    console: Console,
) -> dict[str, Any]:
    """-> the report; cases counted before a stop are read from folder/progress.jsonl. A difference is excused
    by a tie alone, and ties are counted."""
    began = time.perf_counter()
    before = machine(target.device)
    opened = open_methods(recipe, drafts, target, tokenizer)
    about = {name: describe_method(o) for name, o in opened.items()}
    whose = describe_target(target)
    kept = Kept(folder, {"recipe": said_by(recipe), "target": whose["fingerprint"], "methods": about})
    tables = cost_tables(recipe, target, opened, text, recipe.lossless_batch, kept, console)
    prompts = texts_of("held-out", recipe.lossless_prompts, recipe, target, tokenizer, documents)
    groups = grouped(prompts, recipe.lossless_batch)
    found: list[dict[str, Any]] = []
    with Progress(*COLUMNS, console=console) as bar:
        ways = [[*_cases(recipe, *way)] for way in WAYS]
        task = bar.add_task("lossless", total=sum(len(w) + 1 for w in ways) * len(groups))
        for (temperature, rule), cases in zip(WAYS, ways, strict=True):
            plain = run_case(Case(method=PLAIN, temperature=temperature, rule=rule), target, None)
            runs = {c: run_case(c, target, opened[c.method], tables.get(c.method)) for c in cases}
            totals = dict.fromkeys(cases, Check())
            for group, texts in enumerate(groups):
                key = f"T={temperature:g}, group {group}"
                if key not in kept:
                    seed = seed_of(recipe.seed, 0, group)
                    answers = plain(texts, recipe.lossless_tokens, seed).tokens
                    counted = {}
                    for case, run in runs.items():
                        bar.update(task, description=case.label)
                        said = run(texts, recipe.lossless_tokens, seed).tokens
                        counted[case.label] = asdict(count(target, case, texts, said, answers, seed))
                    kept[key] = counted
                for case in cases:
                    totals[case] += Check(**kept[key][case.label])
                bar.advance(task, len(cases) + 1)
            found += [{**asdict(c), "label": c.label, **asdict(totals[c])} for c in cases]
    report = {
        **provenance(),
        "machine": before,
        "versions": versions(),
        "target": whose,
        "recipe": said_by(recipe),
        "methods": about,
        "costs": {name: kept[f"costs of {name}"] for name in tables},
        "prompts": len(prompts),
        "new_tokens": recipe.lossless_tokens,
        "batch": recipe.lossless_batch,
        "results": found,
        "violations": sum(r["violations"] for r in found),
        "ties": sum(r["ties"] for r in found),
        "checked": sum(r["checked"] for r in found),
        "seconds": round(time.perf_counter() - began, 1),
    }
    kept.done()
    return report


def _cases(recipe: SuiteRecipe, temperature: float, rule: str) -> list[Case]:
    return [
        Case(method=name, temperature=temperature, rule=rule, steered=control)
        for name, spec in recipe.specs.items()
        for control in spec.controller
    ]


def count(
    target: Decoder,
    case: Case,
    prompts: list[list[int]],
    said: list[list[int]],
    answers: list[list[int]],
    seed: int,
) -> Check:
    """One batch of `case` against plain decoding's `answers`, both with this seed."""
    how = Sampling(temperature=case.temperature)
    request = Request(max_new_tokens=len(answers[0]), sampling=how, rule=case.rule)
    total = Check()
    for row, (prompt, tokens, answer) in enumerate(zip(prompts, said, answers, strict=True)):
        if case.temperature:
            rng = torch.Generator(target.device).manual_seed(seed)
            total += compare_coupled(target, prompt, tokens, answer, request, rng, row)
        else:
            total += compare(target, prompt, tokens, answer)
    return total
