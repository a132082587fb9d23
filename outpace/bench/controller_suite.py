"""The controller compared with every fixed draft length, on held-out and on random text."""

from typing import Any

from outpace.bench.comparison import PREDICTED, of_controller, row
from outpace.bench.methods import PLAIN, Case, Opened
from outpace.bench.report import Column, Page, Report, differ, table
from outpace.bench.results import ResultCell, error, over
from outpace.bench.run import Runs, advancing, progress, take_turns
from outpace.bench.suite import BenchSetup, SuiteRecipe, SuiteRequest, begin


def run_controller(asked: SuiteRequest) -> dict[str, Any]:
    """-> the report. Turns measured before a stop are read from progress.jsonl. Methods where the recipe
    wants no controller are left out; raises ValueError where that is all of them."""
    recipe = asked.recipe
    names = [name for name, spec in recipe.specs.items() if True in spec.controller]
    if not names:
        raise ValueError("controller: no method of this recipe has a controller to measure")
    steered = [
        Case(method=name, temperature=t, rule=rule(t), steered=True)
        for t in recipe.temperatures
        for name in names
    ]
    suite = begin(asked, steered, recipe.batch)
    plans = {(t, name): cases(recipe, o, t) for t in recipe.temperatures for name, o in suite.opened.items()}
    turns = recipe.repeats * (recipe.controller_prompts // recipe.batch)
    results = []
    with progress(asked.console) as bar:
        task = bar.add_task("controller", total=len(recipe.texts) * sum(map(len, plans.values())) * turns)
        for kind in recipe.texts:
            groups = suite.prompts(kind, recipe.controller_prompts, recipe.batch)
            for (temperature, name), plan in plans.items():
                runs = take_turns(
                    f"{kind}, T={temperature:g}, {name}",
                    {c.label: suite.method(c) for c in plan},
                    groups,
                    recipe.new_tokens,
                    recipe.repeats,
                    recipe.seed,
                    suite.run.kept,
                    advancing(bar, task),
                )
                cell = ResultCell(kind, recipe.batch, recipe.new_tokens, groups, runs)
                results.append(scene(suite, cell, plan, kind, name))
    return suite.run.report(results=results)


def cases(recipe: SuiteRecipe, opened: Opened, temperature: float) -> list[Case]:
    """Plain, the widths that this draft has, its own whole width, and the controller."""
    own, drawn = opened.draft.block_size, rule(temperature)
    fixed = [
        Case(method=opened.name, temperature=temperature, rule=drawn, width=n)
        for n in sorted({*(w for w in recipe.widths if w < own), own})
    ]
    steered = Case(method=opened.name, temperature=temperature, rule=drawn, steered=True)
    return [Case(method=PLAIN, temperature=temperature, rule=drawn), *fixed, steered]


def rule(temperature: float) -> str:
    """Every length generates the same text, so that lengths alone differ."""
    return "gumbel" if temperature else "match"


def scene(suite: BenchSetup, cell: ResultCell, plan: list[Case], text: str, name: str) -> dict[str, Any]:
    """One method on one kind of text: every length, the best of them, and what the controller makes of it."""
    rows = [row(suite.asked.target, cell, case, suite.costs(case), case.rule) for case in plan]
    fixed = [r for r in rows if r["width"]]
    steered = next(r for r in rows if r["controller"])
    plain = next(r for r in rows if r["method"] == PLAIN)
    lengths = {r["label"]: cell.runs[r["label"]] for r in (*fixed, plain)}
    chosen = fastest(lengths, lengths[plain["label"]])
    best = next(r for r in rows if r["label"] == chosen)
    ours, note = cell.runs[steered["label"]], foretold(lengths, plain["label"])
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
            for key in ("tokens_per_s", "speedup", "tau", "columns", "predicted", "lossless", "round_ms")
        },
        "best_speedup": best["speedup"],
        "over_plain": steered["speedup"],
        "over_best": round(over(ours, note), 3),
        "over_best_error": round(error(ours, note), 3),
    }


def fastest(lengths: dict[str, Runs], plain: Runs) -> str:
    """The label of the length that is furthest ahead of autoregressive decoding."""
    return max(lengths, key=lambda label: over(lengths[label], plain))


def foretold(lengths: dict[str, Runs], plain: str) -> Runs:
    """In every repeat the runs of the length that was fastest in the others: to be it in its own is partly
    luck, and of many lengths one is lucky. A lone repeat has no others."""
    result: Runs = {}
    repeats = {repeat for repeat, _ in lengths[plain]}
    for repeat in repeats:
        known = repeats - {repeat} or repeats
        seen = {label: {t: r for t, r in runs.items() if t[0] in known} for label, runs in lengths.items()}
        best = lengths[fastest(seen, seen[plain])]
        result |= {turn: run for turn, run in best.items() if turn[0] == repeat}
    return result


CONTROLLER: tuple[Column, ...] = (
    ("text", "text", "{}"),
    ("T", "temperature", "{:g}"),
    ("method", "method", "{}"),
    ("best fixed", "best_width", "{}"),
    ("its speedup", "best_speedup", "{:.2f}x"),
    ("controller", "over_plain", "{:.2f}x"),
    ("over the best", lambda r: [r["over_best"], r["over_best_error"]], "{:.2f} ±{:.2f}"),
    *map(of_controller, PREDICTED),
    ("draft length", "controller.columns", "{:.1f}"),
)
WIDTHS: tuple[Column, ...] = (
    ("draft length", lambda r: r.get("width") or f"controller ({r['columns']:.1f})", "{}"),
    ("tau", "tau", "{:.2f}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("speedup", "speedup", "{:.2f}x"),
    ("mismatched tokens", lambda r: differ(r["lossless"]), "{}"),
)
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


def controller_table(report: Report) -> list[str]:
    return table(CONTROLLER, report["results"])


def _measured(report: Report) -> str:
    recipe = report["recipe"]
    return (
        f"{recipe['controller_prompts']} prompts of {recipe['prompt_tokens']} tokens, "
        f"{recipe['new_tokens']} new tokens each, batch {recipe['batch']}, {recipe['repeats']} repeats, "
        "lengths interleaved"
    )


def _body(report: Report) -> list[str]:
    lines = [*controller_table(report), MEANING]
    for r in report["results"]:
        lines += [f"## {r['method']}, {r['text']} text, T = {r['temperature']:g}", ""]
        lines += table(WIDTHS, [*r["fixed"], r["controller"]])
    return lines


PAGE = Page("The controller alongside fixed lengths", _body, _measured)
