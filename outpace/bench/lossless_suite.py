"""Every method against autoregressive decoding, token by token: greedy, and gumbel at T = 1."""

from dataclasses import asdict, replace
from typing import Any

import torch

from outpace.bench.lossless import LosslessCheck, compare, compare_coupled
from outpace.bench.methods import PLAIN, Case
from outpace.bench.report import Column, Page, Report, table
from outpace.bench.run import progress, seed_of
from outpace.bench.suite import SuiteRecipe, SuiteRequest, begin
from outpace.models.decoder import Decoder

WAYS = ((0.0, "match"), (1.0, "gumbel"))  # temperature and rule under which a text is a function of the seed


def run_lossless(asked: SuiteRequest) -> dict[str, Any]:
    """-> the report; cases counted before a stop are read from progress.jsonl. A difference is excused
    by a tie alone, and ties are counted."""
    target, recipe = asked.target, asked.recipe
    batch = recipe.lossless_batch
    ways = [[*_cases(recipe, *way)] for way in WAYS]
    suite = begin(asked, [case for cases in ways for case in cases], batch, exact=False)
    groups = suite.prompts("held-out", recipe.lossless_prompts, batch)
    entries: list[dict[str, Any]] = []
    with progress(asked.console) as bar:
        task = bar.add_task("lossless", total=sum(len(w) + 1 for w in ways) * len(groups))
        for (temperature, rule), cases in zip(WAYS, ways, strict=True):
            plain = suite.method(Case(method=PLAIN, temperature=temperature, rule=rule))
            runs = {c: suite.method(c) for c in cases}
            totals, partial = dict.fromkeys(cases, LosslessCheck()), {c: [0, 0] for c in cases}
            for group, texts in enumerate(groups):
                key = f"T={temperature:g}, group {group}"
                if key not in suite.run.kept:
                    seed = seed_of(recipe.seed, 0, group)
                    answers = plain(texts, recipe.lossless_tokens, seed).tokens
                    counted = {}
                    for case, run in runs.items():
                        bar.update(task, description=case.label)
                        done = run(texts, recipe.lossless_tokens, seed)
                        check = count(target, case, texts, done.tokens, answers, seed)
                        counted[case.label] = [asdict(check), done.trace.confirmed]
                    suite.run.kept[key] = counted
                for case in cases:
                    check, output = suite.run.kept[key][case.label]
                    totals[case] += LosslessCheck(**check)
                    partial[case] = [a + b for a, b in zip(partial[case], output, strict=True)]
                bar.advance(task, len(cases) + 1)
            entries += [
                {**asdict(c), "label": c.label, **asdict(totals[c])}
                | (
                    {"confirmed": partial[c][0], "passed": partial[c][1]}
                    if recipe.specs[c.method].near
                    else {}
                )
                for c in cases
            ]
    return suite.run.report(
        prompts=recipe.lossless_prompts,
        new_tokens=recipe.lossless_tokens,
        batch=batch,
        results=entries,
        violations=sum(r["violations"] for r in entries),
        ties=sum(r["ties"] for r in entries),
        checked=sum(r["checked"] for r in entries),
    )


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
    items: list[list[int]],
    answers: list[list[int]],
    seed: int,
) -> LosslessCheck:
    """One batch of `case` against autoregressive decoding's `answers`, both with this seed."""
    request = replace(case.request, max_new_tokens=len(answers[0]))
    total = LosslessCheck()
    for row, (prompt, tokens, answer) in enumerate(zip(prompts, items, answers, strict=True)):
        if case.temperature:
            rng = torch.Generator(target.device).manual_seed(seed)
            total += compare_coupled(target, prompt, tokens, answer, request, rng, row)
        else:
            total += compare(target, prompt, tokens, answer)
    return total


LOSSLESS: tuple[Column, ...] = (
    ("method", lambda r: r["method"] + (" + controller" if r["steered"] else ""), "{}"),
    ("T", "temperature", "{:g}"),
    ("acceptance rule", lambda r: r["rule"] if r["temperature"] else "greedy", "{}"),
    ("violations", "violations", "{:,}"),
    ("ties", "ties", "{:,}"),
    ("tokens compared", "checked", "{:,}"),
)
CONFIRMED: Column = (
    "confirmed, of those that passed on partial KV",
    lambda r: [r["confirmed"], r["passed"]] if "passed" in r else None,
    "{:,} of {:,}",
)
TIES = """\
- violations: rows that differ from autoregressive decoding's and are no tie; what follows a row's first
  difference has another prefix and is not compared. A tie is two logits within 1e-4 in float32, the noise of
  their position added where there is any.
- gumbel: noise that is a function of seed, row and position: the same seed must give autoregressive
  decoding's text.
"""


def lossless_table(report: Report) -> list[str]:
    partial = any("passed" in r for r in report["results"])
    return table((*LOSSLESS, CONFIRMED) if partial else LOSSLESS, report["results"])


def _measured(report: Report) -> str:
    return (
        f"{report['prompts']} held-out prompts x {report['new_tokens']} tokens, batch "
        f"{report['batch']}: {report['violations']:,} violations, {report['ties']:,} ties, "
        f"{report['checked']:,} tokens compared"
    )


PAGE = Page(
    "Every method against autoregressive decoding, token by token",
    lambda report: [*lossless_table(report), TIES],
    _measured,
)
