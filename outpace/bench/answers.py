"""The suite answers: held-out problems of every family, answered whole by every method of a recipe."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from outpace.bench import llama_cpp, plots
from outpace.bench.comparison import method_row, plain_case, position_table, remarks, training_table
from outpace.bench.methods import Case
from outpace.bench.metrics import PLAIN, ResultCell, result, speed_ratio
from outpace.bench.report import (
    MISMATCHED,
    PREDICTED,
    RATE,
    SPEEDUP,
    TAU,
    Columns,
    Page,
    Report,
    print_remarks,
    print_table,
    table,
)
from outpace.bench.run import Bar, Method, interleave, seed_for
from outpace.bench.suite import BenchSetup, SuiteRequest, set_up
from outpace.bench.tasks import calls
from outpace.decode.generate import generate
from outpace.tasks.problem import Problem
from outpace.tasks.prompts import draw, draw_mixed, problem_text
from outpace.text.harmony import HarmonyTokens, prompt_ids
from outpace.text.harmony_parser import HarmonyParser, answer

ALL = "all"  # in place of a family
# for the cost tables, of other problems than those that are answered: a text of so many tokens, and prompts,
# for the acceptance rates, of so many problems of a family
MEASURED, CALIBRATED = 16384, 8


def run_answers(request: SuiteRequest) -> Report:
    """-> the report. Above temperature 0 the noise is coupled: every method writes the same answer. A stopped
    run continues from progress.jsonl. Raises ValueError for a draft that does not exist or belongs to another
    target, and for a target without Harmony's tokens."""
    recipe = replace(request.recipe, repeats=1)  # more problems instead
    tokens = HarmonyTokens(request.tokenizer)
    text = problem_text(tokens, MEASURED, recipe.seed + 1, recipe.effort, recipe.families)
    others = draw_mixed(CALIBRATED * len(recipe.families), recipe.seed + 1, recipe.families)
    prompts = [prompt_ids(problem.prompt(recipe.effort), tokens) for problem in others]
    request = replace(request, recipe=recipe, calibration_text=text, calibration_prompts=prompts)
    plans = {t: [plain_case(t, _rule(t)), *recipe.cases(t, (_rule(t),))] for t in recipe.temperatures}
    setup = set_up(request, [case for cases in plans.values() for case in cases], batch=1)
    about, rows = remarks(setup.run.header["methods"]), list[dict[str, Any]]()
    theirs = llama_cpp.baseline(request.target, request.tokenizer, about)
    with Bar(request.console, "answers", len(plans) * len(recipe.families)) as bar:
        for t, cases in plans.items():
            methods: dict[str, Method] = setup.methods(cases)
            if theirs is not None and t == 0:
                methods[llama_cpp.NAME] = theirs
            cells = []
            for family in recipe.families:
                bar.step(f"T={t:g}, {family}")
                cell, right = _answered(setup, family, cases[0], methods, tokens)
                cells.append(cell)
                rows += [row | {"right": right} for row in _rows(setup, cell, cases)]
            rows += _rows(setup, _together(cells), cases)
    return setup.run.report(results=rows, remarks=about + getattr(theirs, "remarks", []))


def _rule(temperature: float) -> str:
    """Every method writes the same answer."""
    return "gumbel" if temperature else "match"


def _answered(
    setup: BenchSetup, family: str, plain: Case, methods: dict[str, Method], tokens: HarmonyTokens
) -> tuple[ResultCell, int]:
    """-> the runs of one family, and how many of the answers are right. Every method decodes as many tokens
    as autoregressive decoding needs up to the end of its answer."""
    recipe, name = setup.request.recipe, f"T={plain.temperature:g}, {family}"
    problems = draw(family, recipe.problems, recipe.seed)
    prompts = [prompt_ids(problem.prompt(recipe.effort), tokens) for problem in problems]
    known = setup.run.once(f"{name}, answers", partial(_answers, setup, plain, problems, prompts, tokens))
    groups, counts = [[prompt] for prompt in prompts], [count for count, _ in known]
    runs = interleave(name, methods, groups, counts, recipe, setup.run, lambda method: None)
    return ResultCell(family, 1, max(counts), groups, runs), sum(right for _, right in known)


def _answers(
    setup: BenchSetup,
    plain: Case,
    problems: Sequence[Problem],
    prompts: Sequence[list[int]],
    tokens: HarmonyTokens,
) -> list[tuple[int, bool]]:
    """Length of each answer of autoregressive decoding, and whether it is right: the call of a function is,
    where the problem wants one."""
    target, recipe, answers = setup.request.target, setup.request.recipe, []
    request = replace(plain.request, max_new_tokens=recipe.longest_answer, stop=tokens.stop)
    for i, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
        rng = torch.Generator(target.device).manual_seed(seed_for(recipe.seed, 0, i))
        written = generate(target, [prompt], request, rng=rng).tokens[0]
        parser = HarmonyParser(tokens)
        parser.feed_all(written)
        messages = parser.finish()
        right = calls(messages, problem.call) if problem.call else problem.is_right(answer(messages))
        answers.append((max(len(written), 2), right))  # what follows the first token is timed
    return answers


def _together(cells: Sequence[ResultCell]) -> ResultCell:
    """All families as one."""
    whole = ResultCell(ALL, 1, max(cell.new_tokens for cell in cells), [], {})
    for cell in cells:
        for method, runs in cell.runs.items():
            moved = {(repeat, group + len(whole.groups)): run for (repeat, group), run in runs.items()}
            whole.runs.setdefault(method, {}).update(moved)
        whole.groups.extend(cell.groups)
    return whole


def _rows(setup: BenchSetup, cell: ResultCell, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """One row for every method, llama.cpp first."""
    plain, theirs = cases[0], cell.runs.get(llama_cpp.NAME)
    rows = [method_row(setup, cell, case, plain) for case in cases]
    if theirs is not None:
        for row in rows:
            row["over_llama_cpp"] = round(speed_ratio(cell.runs[row["label"]], theirs), 3)
        other = result(
            setup.request.target,
            cell,
            llama_cpp.NAME,
            plain.temperature,
            baseline=plain.label,
            compared=False,
        )
        rows.insert(
            0, other | {"label": llama_cpp.NAME, "rule": plain.rule, "controller": False, "predicted": None}
        )
    answers = [len(run.tokens[0]) for run in cell.runs[plain.label].values()]
    kept = {"family": cell.regime, "answers": len(answers), "answer_tokens": sum(answers) / len(answers)}
    left_out = "regime", "prompt_tokens", "new_tokens", "prompts", "prefill"  # of prompts of one length
    return [{key: value for key, value in row.items() if key not in left_out} | kept for row in rows]


# ---- the report --------------------------------------------------------------------------------------

TERMINAL: Columns = (  # 80 columns wide
    ("method", lambda r: _name(r), "{}"),
    TAU,
    ("draft length", "columns", "{:.1f}"),
    RATE,
    SPEEDUP,
    ("over llama.cpp", "over_llama_cpp", "{:.2f}x"),
)
METHODS: Columns = (*TERMINAL, *PREDICTED, MISMATCHED)
LEGEND = """\
- tau: mean number of tokens committed per forward of the target, bonus token included.
- draft length: mean number of tokens verified per step, the last verified token included.
- tokens/s: from the first token of an answer to its last. speedup: over autoregressive decoding of the same
  answers in the same run; of all families, the ratio of total times.
- right: answers of autoregressive decoding, which every method repeats; for a function, its call.
- mismatched tokens: tokens that differ from autoregressive decoding and are no tie / tokens compared.
"""


def _name(row: dict[str, Any]) -> str:
    return f"{row['method']}, controller" if row["controller"] else str(row["method"])


def method_table(report: Report, temperature: float) -> list[str]:
    """All families together."""
    rows = _of(report, temperature)
    return table(METHODS, [row for row in rows if row["family"] == ALL])


def family_table(report: Report, temperature: float) -> list[str]:
    """Speedup and tau of every method that drafts, by family."""
    by_family: dict[str, dict[str, Any]] = {}
    for row in _of(report, temperature):
        by_family.setdefault(row["family"], {"first": row})[_name(row)] = row
    names = [name for name in by_family[ALL] if name not in ("first", PLAIN, llama_cpp.NAME)]
    columns: Columns = (
        ("family", "first.family", "{}"),
        ("right", lambda r: [r["first"]["right"], r["first"]["answers"]] if "right" in r["first"] else None,
         "{} of {}"),
        ("tokens an answer", "first.answer_tokens", "{:.0f}"),
        *((name, partial(_speed_and_tau, name), "{:.2f}x, {:.1f}") for name in names),
    )  # fmt: skip
    return table(columns, by_family.values())


def print_report(report: Report, console: Console) -> None:
    """The methods at 80 columns; report.md has the families, too."""
    for temperature in report["recipe"]["temperatures"]:
        rows = [row for row in _of(report, temperature) if row["family"] == ALL]
        print_table(console, f"{_measured(report)}, temperature {temperature:g}", TERMINAL, rows)
    print_remarks(console, report)


def positions(report: Report, temperature: float) -> list[str]:
    """Acceptance by position, all families together."""
    together = report | {"results": [r for r in report["results"] if r["family"] == ALL]}
    return position_table(together, temperature)


def _speed_and_tau(name: str, rows: dict[str, Any]) -> list[float]:
    return [rows[name]["speedup"], rows[name]["tau"]]


def _of(report: Report, temperature: float) -> list[dict[str, Any]]:
    return [row for row in report["results"] if row["temperature"] == temperature]


def _body(report: Report) -> list[str]:
    lines = ["## The drafts", "", *training_table(report)]
    for temperature in report["recipe"]["temperatures"]:
        lines += [f"## Temperature {temperature:g}", "", *method_table(report, temperature)]
        lines += ["Speedup over autoregressive decoding, and tau:", "", *family_table(report, temperature)]
        lines += ["Draft token k accepted, of the steps that offered it:", ""]
        lines += positions(report, temperature)
    return [*lines, LEGEND]


def _measured(report: Report) -> str:
    recipe = report["recipe"]
    return (
        f"{recipe['problems']} held-out problems of each of {len(recipe['families'])} families, reasoning "
        f"effort {recipe['effort']}, whole answers, batch 1, methods interleaved"
    )


def _plot(report: Report) -> Any:
    """At the first temperature: a bar for every family and method."""
    rows = [r for r in _of(report, report["recipe"]["temperatures"][0]) if r["method"] != PLAIN]
    names = list(dict.fromkeys(map(_name, rows)))
    families = [*report["recipe"]["families"], ALL]
    height = 1.0 + 0.13 * len(families) * (len(names) + 1)
    drawn, (axes,) = plots.figure(1, 1, height, "Speed over autoregressive decoding, whole answers")
    for i, name in enumerate(names):
        own = {row["family"]: row["speedup"] for row in rows if _name(row) == name}
        places = [j + 0.8 * ((i + 0.5) / len(names) - 0.5) for j in range(len(families))]
        colour = plots.GREY if name == llama_cpp.NAME else plots.PALETTE[i % len(plots.PALETTE)]
        axes.barh(places, [own[family] for family in families], 0.8 / len(names), color=colour, label=name)
    axes.axvline(1, color="#3f3f3f", linewidth=0.8)
    plots.named_rows(axes, families)
    plots.label(axes, "times as fast", legend=True)
    return drawn


PAGE = Page(
    "Answers, whole and checked",
    _body,
    _measured,
    {"answers.png": ("Speed of every family", _plot)},
)
