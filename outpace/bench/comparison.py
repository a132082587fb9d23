"""Drafts of one target side by side on equal prompts: acceptance, speed, where time goes, violations."""

import dataclasses
import statistics
from functools import partial
from itertools import accumulate
from typing import Any

from outpace.bench.methods import PLAIN, Case
from outpace.bench.report import Column, Page, Report, bare, differ, dig, figure_of, table
from outpace.bench.results import ResultCell, joined, result
from outpace.bench.run import advancing, progress, take_turns
from outpace.bench.suite import SuiteRequest, begin, cases_of
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
                suite.run.kept,
                advancing(bar, task),
            )
            cell = ResultCell(f"T={temperature:g}", recipe.batch, recipe.new_tokens, groups, runs)
            results += [row(target, cell, case, suite.costs(case)) for case in cases]
    return suite.run.report(results=results, remarks=remarks(suite.run.frame["methods"]))


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
    """Of all steps, the share that accepted at least 1, 2, .. draft tokens: what a chain verified to n
    positions would commit is 1 + the sum of the first n - 1, as far as its steps would be these."""
    most = max(accepted, default=0)
    return [sum(a >= k for a in accepted) / len(accepted) for k in range(1, most + 1)]


def remarks(about: dict[str, dict[str, Any]]) -> list[str]:
    """In what respect the drafts were not trained on equal data."""
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


LEGEND = """\
- tau: mean number of tokens committed per forward of the target, bonus token included.
- draft length: mean number of tokens verified per step and row, the last verified token included.
- tokens/s: from the first token to the last, median of the repeats. speedup: over autoregressive decoding of
  the same prompts at the same temperature in the same run (rule match).
- predicted speedup: what the controller expected, from a cost table measured before the first run and the
  draft's confidence, with its error. error in tokens/s: the same for tokens/s, which also contains changes of
  the machine's speed since the cost table.
- mismatched tokens: tokens that differ from autoregressive decoding and are no tie / tokens compared. Under
  gumbel the seed determines the text and ties are no excuse; under the other rules at T > 0 nothing can be
  compared.
"""
PALETTE = ("#2a6f97", "#e3a857", "#c1666b", "#5b8c5a", "#8c5a7c", "#8fb8de", "#b0813d", "#7a7a7a", "#3f3f3f")


def _measured(report: Report) -> str:
    recipe = report["recipe"]
    return (
        f"{recipe['prompts']} held-out prompts of {recipe['prompt_tokens']} tokens, "
        f"{recipe['new_tokens']} new tokens each, batch {recipe['batch']}, {recipe['repeats']} repeats, "
        "methods interleaved"
    )


def _body(report: Report) -> list[str]:
    lines = ["## The drafts", "", *training_table(report)]
    for temperature in report["recipe"]["temperatures"]:
        lines += [f"## Temperature {temperature:g}", "", *speed_table(report, temperature)]
        lines += ["Draft token k accepted, of the steps that offered it:", ""]
        lines += position_table(report, temperature)
    return [*lines, LEGEND]


TRAINING: tuple[Column, ...] = (
    ("method", "name", "{}"),
    ("kind", "kind", "{}"),
    ("longest draft", "columns", "{}"),
    ("parameters", lambda a: a["parameters"] / 1e6 if a["parameters"] else None, "{:.2f} M"),
    ("size", lambda a: a["bytes"] / 2**20 if a["bytes"] else None, "{:.1f} MiB"),
    ("training tokens", "trained.tokens", "{:,}"),
    ("training hours", "trained.hours", "{:.2f}"),
)


def training_table(report: Report) -> list[str]:
    return table(TRAINING, ({"name": name, **about} for name, about in report["methods"].items()))


def pairs_of(
    report: dict[str, Any], temperature: float
) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Rows of one temperature without the controller, each with its twin that has one. A method that is only
    ever steered is by itself."""
    rows = [r for r in report["results"] if r["temperature"] == temperature]
    steered = {(r["method"], r["rule"]): r for r in rows if r["controller"]}
    free = [r for r in rows if not r["controller"]]
    alone = [r for key, r in steered.items() if key not in {(r["method"], r["rule"]) for r in free}]
    return [(r, steered.get((r["method"], r["rule"]))) for r in free] + [(r, r) for r in alone]


PREDICTED: tuple[Column, ...] = (  # what a controller expected, and by how much it was wrong
    (
        "predicted speedup",
        lambda r: (p := r["predicted"]) and [p["speedup"], p["speedup_error"]],
        "{:.2f}x, {:+.0%}",
    ),
    ("error in tokens/s", "predicted.error", "{:+.0%}"),
)


def of_controller(column: Column) -> Column:
    """The same column, of what a row's key "controller" holds."""
    heading, value, form = column

    def read(r: dict[str, Any]) -> Any:
        held = r["controller"]
        return held and (value(held) if callable(value) else dig(held, value))

    return heading, read, form


def _rule_name(r: dict[str, Any]) -> str:
    return r["rule"] if r["temperature"] else "greedy"


SPEED: tuple[Column, ...] = (
    ("method", "method", "{}"),
    ("acceptance rule", _rule_name, "{}"),
    ("tau", "tau", "{:.2f}"),
    ("draft length", "columns", "{:.1f}"),
    (
        "draft / verify / overhead, ms",
        lambda r: [r["round_ms"][part] for part in ("draft", "verify", "rest")],
        "{:.2f} / {:.2f} / {:.2f}",
    ),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("speedup", "speedup", "{:.2f}x"),
    ("with controller", "controller.speedup", "{:.2f}x"),
    *map(of_controller, PREDICTED),
    (
        "mismatched tokens",
        lambda r: differ(r["lossless"], r["controller"] and r["controller"]["lossless"]),
        "{}",
    ),
)


def speed_table(report: Report, temperature: float) -> list[str]:
    pairs = pairs_of(report, temperature)
    return table(SPEED, (free | {"controller": steered} for free, steered in pairs))


def _share(k: int, r: dict[str, Any]) -> float | None:
    shares = r["accept_by_position"]
    return shares[k] if k < len(shares) else None


def position_table(report: Report, temperature: float) -> list[str]:
    rows = [r for r, _ in pairs_of(report, temperature) if r["accept_by_position"]]
    if not rows:
        return ["No method of this run offered a draft token.", ""]
    widest = min(8, max(len(r["accept_by_position"]) for r in rows))
    shares: list[Column] = [(f"k = {k + 1}", partial(_share, k), "{:.0%}") for k in range(widest)]
    return table((*SPEED[:2], *shares), rows)


def _colours(report: dict[str, Any]) -> dict[str, str]:
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(report["methods"])}


def _speedup(report: dict[str, Any]) -> Any:
    """A panel per temperature and rule; per method a bar without and one with the controller."""
    panels_of = [(t, r) for t in report["recipe"]["temperatures"] for r in _rules(report, t)]
    names = list(report["methods"])
    height = 1.0 + len(panels_of) * (0.7 + 0.34 * len(names))
    figure, panels = figure_of(len(panels_of), 1, height, "Speedup over autoregressive decoding")
    for axes, (temperature, rule) in zip(panels, panels_of, strict=True):
        items = [r for r in report["results"] if (r["temperature"], r["rule"]) == (temperature, rule)]
        for steered, shift, colour in ((False, -0.2, "#2a6f97"), (True, 0.2, "#e3a857")):
            rows = [r for r in items if r["controller"] == steered and r["method"] != PLAIN]
            at = [names.index(r["method"]) + shift for r in rows]
            label = "with the controller" if steered else "the draft's own length"
            bars = axes.barh(at, [r["speedup"] for r in rows], 0.38, color=colour, label=label)
            axes.bar_label(bars, [f"{r['speedup']:.2f}" for r in rows], fontsize=7, padding=2)
        axes.axvline(1, color="#3f3f3f", linewidth=0.8)
        axes.set_xlim(0, 1.12 * max(1.0, *(r["speedup"] for r in report["results"])))
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(f"T = {temperature:g}" + (f", rule {rule}" if temperature else ""), fontsize=10)
        bare(axes)
        axes.grid(axis="y", visible=False)
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def _rules(report: dict[str, Any], temperature: float) -> list[str]:
    rows = [r for r in report["results"] if r["temperature"] == temperature and r["method"] != PLAIN]
    return list(dict.fromkeys(r["rule"] for r in rows))


def _tau(report: dict[str, Any]) -> Any:
    """Greedy (or the first temperature's): a chain's tau if only its first positions were verified, read off
    the accepted positions of the same steps; a tree's as one point."""
    temperature = report["recipe"]["temperatures"][0]
    figure, panels = figure_of(1, 1, 4.2, f"tau against positions verified a round, T = {temperature:g}")
    axes, colours = panels[0], _colours(report)
    for r, _ in pairs_of(report, temperature):
        if not r["accept_by_position"] or r["controller"]:
            continue
        name = r["method"]
        if report["methods"][name]["tree"]:
            axes.plot([r["columns"]], [r["tau"]], "D", color=colours[name], label=name)
        else:
            taus = list(accumulate(r["reached"], initial=1.0))
            taus += taus[-1:] * (report["methods"][name]["columns"] - len(taus))
            axes.plot(range(1, len(taus) + 1), taus, "o-", color=colours[name], markersize=3, label=name)
    axes.set_xlabel("positions verified a round, the root included")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("tau")
    axes.legend(frameon=False, fontsize=8)
    bare(axes)
    return figure


def _time(report: dict[str, Any]) -> Any:
    """Greedy (or the first temperature's): milliseconds of a committed token, by part."""
    temperature = report["recipe"]["temperatures"][0]
    rows = [r for r, _ in pairs_of(report, temperature)]
    names = [r["method"] + (", controller" if r["controller"] else "") for r in rows]
    figure, panels = figure_of(
        1, 1, 1.4 + 0.34 * len(rows), f"Milliseconds a committed token, T = {temperature:g}"
    )
    axes, left = panels[0], [0.0] * len(rows)
    batch = report["recipe"]["batch"]
    for part, colour in (("draft", "#e3a857"), ("verify", "#2a6f97"), ("rest", "#b0b0b0")):
        ms = [r["round_ms"][part] / r["tau"] / batch for r in rows]
        axes.barh(range(len(rows)), ms, 0.7, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, ms, strict=True)]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=8)
    bare(axes)
    axes.grid(axis="y", visible=False)
    return figure


PAGE = Page(
    "Drafts on equal data",
    _body,
    _measured,
    {
        "speedup.png": ("Speedup", _speedup),
        "tau.png": ("tau and verify length", _tau),
        "time.png": ("Where the time goes", _time),
    },
)
