"""Every method against autoregressive decoding, token by token: greedy, and gumbel at T = 1."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from outpace.bench.comparison import PREDICTED, differ, predicted_cells
from outpace.bench.interleave import progress, seed_of
from outpace.bench.lossless import LosslessCheck, compare
from outpace.bench.lossless_coupled import compare_coupled
from outpace.bench.methods import PLAIN, Case
from outpace.bench.report import lines_of, machine_line, run_line, table, target_line, versions_line
from outpace.bench.suite import SuiteRecipe, SuiteRequest, begin
from outpace.checkpoint.save import write_atomically, write_json
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
                if key not in suite.kept:
                    seed = seed_of(recipe.seed, 0, group)
                    answers = plain(texts, recipe.lossless_tokens, seed).tokens
                    counted = {}
                    for case, run in runs.items():
                        bar.update(task, description=case.label)
                        done = run(texts, recipe.lossless_tokens, seed)
                        check = count(target, case, texts, done.tokens, answers, seed)
                        counted[case.label] = [asdict(check), done.trace.confirmed]
                    suite.kept[key] = counted
                for case in cases:
                    check, output = suite.kept[key][case.label]
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
    return suite.report(
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


def write_suite(report: dict[str, Any], folder: Path, markdown: str) -> None:
    """folder/report.json and report.md; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", report)
    write_atomically(folder / "report.md", markdown.encode())


def _head(title: str, report: dict[str, Any], measured: str) -> list[str]:
    lines = machine_line(report), versions_line(report), target_line(report["target"]), measured
    return [f"# {title}", "", *lines_of(*lines, run_line(report)), ""]


def lossless_markdown(report: dict[str, Any]) -> str:
    measured = (
        f"**Measured**: {report['prompts']} held-out prompts x {report['new_tokens']} tokens, batch "
        f"{report['batch']}: {report['violations']:,} violations, {report['ties']:,} ties, "
        f"{report['checked']:,} tokens compared"
    )
    lines = _head("Every method against autoregressive decoding, token by token", report, measured)
    return "\n".join([*lines, *lossless_table(report), TIES])


TIES = """\
- violations: rows that differ from autoregressive decoding's and are no tie; what follows a row's first
  difference has another prefix and is not compared. A tie is two logits within 1e-4 in float32, the noise of
  their place added where there is any.
- gumbel: noise that is a function of seed, row and place: the same seed must give autoregressive decoding's
text.
"""


def lossless_table(report: dict[str, Any]) -> list[str]:
    partial = any("passed" in r for r in report["results"])
    rows = [
        [
            r["method"] + (" + controller" if r["steered"] else ""),
            f"{r['temperature']:g}",
            r["rule"] if r["temperature"] else "greedy",
            f"{r['violations']:,}",
            f"{r['ties']:,}",
            f"{r['checked']:,}",
            *([f"{r['confirmed']:,} of {r['passed']:,}" if "passed" in r else "-"] if partial else []),
        ]
        for r in report["results"]
    ]
    columns = ["method", "T", "acceptance rule", "violations", "ties", "tokens compared"]
    return table([*columns, *(["confirmed, of those that passed on partial KV"] if partial else [])], rows)


def controller_markdown(report: dict[str, Any]) -> str:
    recipe = report["recipe"]
    measured = (
        f"**Measured**: {recipe['controller_prompts']} prompts of {recipe['prompt_tokens']} tokens, "
        f"{recipe['new_tokens']} new tokens each, batch {recipe['batch']}, {recipe['repeats']} repeats, "
        "lengths interleaved"
    )
    lines = _head("The controller alongside fixed lengths", report, measured)
    lines += [*controller_table(report), MEANING]
    for r in report["results"]:
        lines += [f"## {r['method']}, {r['text']} text, T = {r['temperature']:g}", "", *widths_table(r)]
    return "\n".join(lines)


MEANING = """\
- held-out: text that nothing was trained on. random: prompts of uniformly drawn tokens, which no draft
predicts.
- T = 1 uses the rule gumbel, for autoregressive decoding too: every draft length generates the same text.
- best fixed: the fastest fixed draft length, autoregressive decoding (1) included. over the best: speed of
  the controller over, in every repeat, that of the length which was fastest in the other repeats (the
  fastest of the same repeat is partly luck). ±: approximate standard error from the spread of the runs.
- predicted speedup: what the controller expected, from a cost table measured before the first run and the
  draft's confidence, with its error. error in tokens/s: the same for tokens/s.
"""


def controller_table(report: dict[str, Any]) -> list[str]:
    rows = [
        [
            r["text"],
            f"{r['temperature']:g}",
            r["method"],
            str(r["best_width"]),
            f"{r['best_speedup']:.2f}x",
            f"{r['over_plain']:.2f}x",
            f"{r['over_best']:.2f} ±{r['over_best_error']:.2f}",
            *predicted_cells(r["controller"]),
            f"{r['controller']['columns']:.1f}",
        ]
        for r in report["results"]
    ]
    columns = ("text", "T", "method", "best fixed", "its speedup", "controller", "over the best")
    return table((*columns, *PREDICTED, "draft length"), rows)


def widths_table(r: dict[str, Any]) -> list[str]:
    rows = [
        [
            str(f["width"]),
            f"{f['tau']:.2f}",
            f"{f['tokens_per_s']:.0f}",
            f"{f['speedup']:.2f}x",
            differ(f["lossless"]),
        ]
        for f in r["fixed"]
    ]
    c = r["controller"]
    own = [f"controller ({c['columns']:.1f})", f"{c['tau']:.2f}", f"{c['tokens_per_s']:.0f}"]
    rows.append([*own, f"{c['speedup']:.2f}x", differ(c["lossless"])])
    return table(("draft length", "tau", "tokens/s", "speedup", "mismatched tokens"), rows)
