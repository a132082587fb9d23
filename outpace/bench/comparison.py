"""The suites drafts, lossless and controller: methods of one recipe on equal prompts."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from outpace.bench import plots
from outpace.bench.methods import Case
from outpace.bench.metrics import (
    PLAIN,
    LosslessCheck,
    ResultCell,
    compare,
    compare_coupled,
    joined,
    ratio_error,
    result,
    speed_ratio,
)
from outpace.bench.report import (
    METHOD,
    MISMATCHED,
    PREDICTED,
    RATE,
    RULE,
    SPEEDUP,
    TAU,
    Column,
    Columns,
    Page,
    Report,
    by_name,
    mismatches,
    nested,
    table,
    table_of,
)
from outpace.bench.run import Bar, Prompts, Runs, interleave, seed_for
from outpace.bench.suite import BenchSetup, SuiteRecipe, SuiteRequest, set_up
from outpace.decode.costs import Costs
from outpace.decode.trace import Trace
from outpace.models.decoder import Decoder


def plain_case(temperature: float, rule: str = "match") -> Case:
    return Case(method=PLAIN, temperature=temperature, rule=rule)


# ---- drafts: every method at every temperature under its rules -----------------------------------------


def run_comparison(request: SuiteRequest) -> Report:
    """-> the report. A stopped run continues from progress.jsonl if recipe, target and drafts are the same.
    Raises ValueError for a draft that does not exist or belongs to another target, and for too few
    documents."""
    recipe = request.recipe
    plans = {t: [*_plain_cases(recipe, t), *recipe.cases(t)] for t in recipe.temperatures}
    setup = set_up(request, [case for cases in plans.values() for case in cases], recipe.batch)
    groups = setup.prompts("held-out", recipe.prompts, recipe.batch)
    rows = []
    with Bar(request.console, "drafts", sum(map(len, plans.values())) * recipe.repeats * len(groups)) as bar:
        for t, cases in plans.items():
            cell = _timed_cell(setup, f"T={t:g}", cases, groups, bar)
            rows += [method_row(setup, cell, case, plain_case(t)) for case in cases]
    return setup.run.report(results=rows, remarks=remarks(setup.run.header["methods"]))


def _plain_cases(recipe: SuiteRecipe, temperature: float) -> list[Case]:
    """Autoregressive decoding; with coupled noise too where a method is verified with it."""
    coupled = temperature > 0 and any("gumbel" in spec.rules for spec in recipe.specs.values())
    return [plain_case(temperature, rule) for rule in ("match", "gumbel")[: 1 + coupled]]


def _timed_cell(
    setup: BenchSetup, name: str, cases: list[Case], groups: list[list[list[int]]], bar: Bar, text: str = ""
) -> ResultCell:
    recipe, methods = setup.request.recipe, setup.methods(cases)
    runs = interleave(name, methods, groups, recipe.new_tokens, recipe, setup.run, bar.step)
    return ResultCell(text or name, recipe.batch, recipe.new_tokens, groups, runs)


def method_row(setup: BenchSetup, cell: ResultCell, case: Case, baseline: Case) -> dict[str, Any]:
    """One row of a comparison. The speedup is over `baseline`; with coupled noise the tokens must be those of
    autoregressive decoding with the same seed."""
    coupled = plain_case(case.temperature, "gumbel").label if case.rule == "gumbel" else None
    args = setup.request.target, cell, case.label, case.temperature
    values = result(*args, baseline=baseline.label, reference=coupled)
    trace, costs = joined(run.trace for run in cell.runs[case.label].values()), setup.costs(case)
    done = zip(trace.nodes, trace.accepted, strict=True)
    rows = (row for nodes, accepted in done for row in zip(nodes, accepted, strict=True))
    positions = [verified for verified, accepted in rows if accepted >= 0]
    steps, lens = max(len(trace.accepted), 1), trace.accept_lens
    return values | {
        "method": case.method,
        "rule": case.rule,
        "width": case.width,
        "controller": case.steered,
        "label": case.label,
        "columns": round(statistics.fmean(positions), 3) if positions else 1.0,
        "reached": [round(share, 4) for share in share_accepting(lens)],
        "round_ms": {p: round(1000 * trace.seconds[p] / steps, 4) for p in ("draft", "verify", "rest")},
        "predicted": None if costs is None else _predicted(trace, cell, costs, values["speedup"]),
    }


def _predicted(trace: Trace, cell: ResultCell, costs: Costs, speedup: float) -> dict[str, float]:
    """The controller's expectation and its error: of the speedup, where both sides meet the same state of the
    machine, and of tokens/s, where the cost table is from another moment."""
    context = statistics.fmean(len(prompt) for group in cell.groups for prompt in group) + cell.new_tokens / 2
    plain = costs.plain_seconds(context, cell.batch) + costs.rest_seconds(1, cell.batch)
    expected = trace.predicted_tokens_per_s * plain / cell.batch
    return {
        "speedup": round(expected, 4),
        "speedup_error": round(expected / speedup - 1, 4),
        "tokens_per_s": round(trace.predicted_tokens_per_s, 2),
        "error": round(trace.prediction_error, 4),
        "rounds": len(trace.predicted),
    }


def share_accepting(accepted: list[int]) -> list[float]:
    """Share of all steps that accepted at least 1, 2, .. draft tokens. A chain verified to n positions would
    commit 1 + the sum of the first n - 1 per step."""
    most = max(accepted, default=0)
    return [sum(a >= k for a in accepted) / len(accepted) for k in range(1, most + 1)]


def remarks(methods: dict[str, dict[str, Any]]) -> list[str]:
    """Differences between the training data of the drafts."""
    lines = []
    trained = {name: m["trained"] for name, m in methods.items() if m["trained"]}
    unknown = [name for name, m in methods.items() if m["kind"] != "n-gram" and not m["trained"]]
    if unknown:
        lines.append(f"no provenance next to the draft of {', '.join(unknown)}: training data unknown")
    for what, key in (("teacher caches", "cache_sha256"), ("training budgets in tokens", "tokens")):
        values = {name: t[key] for name, t in trained.items()}
        if key == "tokens":  # suffix lookup has no training steps
            values = {name: n for name, n in values.items() if methods[name]["kind"] != "suffix"}
        if len(set(values.values())) > 1:
            parts = ", ".join(f"{name}: {str(value)[:12]}" for name, value in values.items())
            lines.append(f"not on equal data: {what} differ ({parts})")
    return lines


training_table = table_of(
    by_name("methods"),
    ("method", "name", "{}"),
    ("kind", "kind", "{}"),
    ("longest draft", "columns", "{}"),
    ("parameters", lambda m: m["parameters"] / 1e6 or None, "{:.2f} M"),
    ("size", lambda m: m["bytes"] / 2**20 or None, "{:.1f} MiB"),
    ("training tokens", "trained.tokens", "{:,}"),
    ("training hours", "trained.hours", "{:.2f}"),
)
SPEED: Columns = (
    METHOD,
    RULE,
    TAU,
    ("draft length", "columns", "{:.1f}"),
    (
        "draft / verify / overhead, ms",
        lambda r: [r["round_ms"][p] for p in ("draft", "verify", "rest")],
        "{:.2f} / {:.2f} / {:.2f}",
    ),
    RATE,
    SPEEDUP,
    ("with controller", "controller.speedup", "{:.2f}x"),
    *(nested("controller", column) for column in PREDICTED),
    (
        "mismatched tokens",
        lambda r: mismatches(r["lossless"], r["controller"] and r["controller"]["lossless"]),
        "{}",
    ),
)
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


def _with_controller(report: Report, temperature: float) -> list[dict[str, Any]]:
    """Rows of one temperature without the controller; under "controller" the row of the same method and rule
    with it, or None. A method that only ran with it is its own "controller"."""
    rows = [r for r in report["results"] if r["temperature"] == temperature]
    steered = {(r["method"], r["rule"]): r for r in rows if r["controller"]}
    fixed = {(r["method"], r["rule"]): r for r in rows if not r["controller"]}
    only = [
        r | {"controller": r, "name": f"{r['method']}, controller"}
        for k, r in steered.items()
        if k not in fixed
    ]
    return [r | {"controller": steered.get(k), "name": r["method"]} for k, r in fixed.items()] + only


def speed_table(report: Report, temperature: float) -> list[str]:
    return table(SPEED, _with_controller(report, temperature))


def _share(k: int, r: dict[str, Any]) -> float | None:
    shares = r["accept_by_position"]
    return shares[k] if k < len(shares) else None


def position_table(report: Report, temperature: float) -> list[str]:
    rows = [r for r in _with_controller(report, temperature) if r["accept_by_position"]]
    if not rows:
        return ["No method of this run offered a draft token.", ""]
    widest = min(8, max(len(r["accept_by_position"]) for r in rows))
    shares: list[Column] = [(f"k = {k + 1}", partial(_share, k), "{:.0%}") for k in range(widest)]
    return table((METHOD, RULE, *shares), rows)


def _comparison_body(report: Report) -> list[str]:
    lines = ["## The drafts", "", *training_table(report)]
    for temperature in report["recipe"]["temperatures"]:
        lines += [f"## Temperature {temperature:g}", "", *speed_table(report, temperature)]
        lines += ["Draft token k accepted, of the steps that offered it:", ""]
        lines += position_table(report, temperature)
    return [*lines, LEGEND]


def _recipe_line(prompts: str, interleaved: str, report: Report) -> str:
    recipe = report["recipe"]
    return (
        f"{recipe[prompts]} prompts of {recipe['prompt_tokens']} tokens, {recipe['new_tokens']} new tokens "
        f"each, batch {recipe['batch']}, {recipe['repeats']} repeats, {interleaved} interleaved"
    )


def _speedup_plot(report: Report) -> Any:
    """A panel per temperature and rule; per method a bar without and one with the controller."""
    drafted = [r for r in report["results"] if r["method"] != PLAIN]
    settings = list(dict.fromkeys((r["temperature"], r["rule"]) for r in drafted))
    names = list(report["methods"])
    height = 1.0 + len(settings) * (0.7 + 0.34 * len(names))
    figure, panels = plots.figure(len(settings), 1, height, "Speedup over autoregressive decoding")
    for axes, (temperature, rule) in zip(panels, settings, strict=True):
        for steered, shift, colour in ((False, -0.2, plots.BLUE), (True, 0.2, plots.YELLOW)):
            key = temperature, rule, steered
            rows = [r for r in drafted if (r["temperature"], r["rule"], r["controller"]) == key]
            places = [names.index(r["method"]) + shift for r in rows]
            name = "with the controller" if steered else "the draft's own length"
            bars = axes.barh(places, [r["speedup"] for r in rows], 0.38, color=colour, label=name)
            axes.bar_label(bars, [f"{r['speedup']:.2f}" for r in rows], fontsize=7, padding=2)
        axes.axvline(1, color="#3f3f3f", linewidth=0.8)
        axes.set_xlim(0, 1.12 * max(1.0, *(r["speedup"] for r in report["results"])))
        plots.named_rows(axes, names)
        plots.label(axes, title=f"T = {temperature:g}" + (f", rule {rule}" if temperature else ""))
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def _tau_plot(report: Report) -> Any:
    """At the first temperature: a chain's tau if only its first positions were verified, computed from the
    accepted positions of the same steps; a tree's as one point."""
    temperature = report["recipe"]["temperatures"][0]
    title = f"tau against positions verified per step, T = {temperature:g}"
    figure, (axes,) = plots.figure(1, 1, 4.2, title)
    colours = dict(zip(report["methods"], plots.PALETTE * len(report["methods"]), strict=False))
    for r in _with_controller(report, temperature):
        name = r["method"]
        if not r["accept_by_position"] or r["name"] != name:
            continue
        if report["methods"][name]["num_draft_tokens"]:
            axes.plot([r["columns"]], [r["tau"]], "D", color=colours[name], label=name)
        else:
            taus = list(accumulate(r["reached"], initial=1.0))
            taus += taus[-1:] * (report["methods"][name]["columns"] - len(taus))
            axes.plot(range(1, len(taus) + 1), taus, "o-", color=colours[name], markersize=3, label=name)
    plots.integer_axis(axes)
    plots.label(axes, "positions verified per step, root included", "tau", legend=True)
    return figure


def _time_plot(report: Report) -> Any:
    """At the first temperature: milliseconds per committed token, by part."""
    temperature, batch = report["recipe"]["temperatures"][0], report["recipe"]["batch"]
    rows = _with_controller(report, temperature)
    title = f"Milliseconds per committed token, T = {temperature:g}"
    figure, (axes,) = plots.figure(1, 1, 1.4 + 0.34 * len(rows), title)
    ms = {p: [r["round_ms"][p] / r["tau"] / batch for r in rows] for p in ("verify", "draft", "rest")}
    plots.stacked_bars(axes, ms, horizontal=True)
    plots.named_rows(axes, [r["name"] for r in rows])
    axes.legend(frameon=False, fontsize=8)
    return figure


COMPARISON_PAGE = Page(
    "Drafts on equal data",
    _comparison_body,
    partial(_recipe_line, "prompts", "methods"),
    {
        "speedup.png": ("Speedup", _speedup_plot),
        "tau.png": ("tau and verify length", _tau_plot),
        "time.png": ("Where the time goes", _time_plot),
    },
)


# ---- lossless: token by token, greedy and coupled ------------------------------------------------------

DETERMINISTIC = ((0.0, "match"), (1.0, "gumbel"))  # temperature and rule where the seed determines the text


def run_lossless(request: SuiteRequest) -> Report:
    """-> the report. A stopped run continues from progress.jsonl. Only ties excuse a difference, and they are
    counted."""
    recipe, batch = request.recipe, request.recipe.lossless_batch
    plans = {(t, rule): recipe.cases(t, (rule,)) for t, rule in DETERMINISTIC}
    setup = set_up(request, [c for cases in plans.values() for c in cases], batch, precise=False)
    groups = setup.prompts("held-out", recipe.lossless_prompts, batch)
    rows: list[dict[str, Any]] = []
    with Bar(request.console, "lossless", sum(map(len, plans.values())) * len(groups)) as bar:
        for (t, rule), cases in plans.items():
            methods = setup.methods([plain_case(t, rule), *cases])
            counted = []
            for n, prompts in enumerate(groups):
                seed = seed_for(recipe.seed, 0, n)
                compare_group = partial(_compare_group, request, cases, methods, prompts, seed, bar)
                counted.append(setup.run.once(f"T={t:g}, group {n}", compare_group))
            for case in cases:
                checks, confirmed = zip(*(group[case.label] for group in counted), strict=True)
                total = sum((LosslessCheck(**check) for check in checks), LosslessCheck())
                row = {**asdict(case), "label": case.label, **asdict(total)}
                if recipe.specs[case.method].partial:
                    row |= dict(
                        zip(("confirmed", "passed"), map(sum, zip(*confirmed, strict=True)), strict=True)
                    )
                rows.append(row)
    totals = {key: sum(r[key] for r in rows) for key in ("violations", "ties", "checked")}
    sizes = {"prompts": recipe.lossless_prompts, "new_tokens": recipe.lossless_tokens, "batch": batch}
    return setup.run.report(**sizes, results=rows, **totals)


def _compare_group(
    request: SuiteRequest, cases: list[Case], methods: dict[str, Any], prompts: Prompts, seed: int, bar: Bar
) -> dict[str, Any]:
    """case label -> its check, and the draft tokens that passed on partial KV and were confirmed."""
    plain, *drafted = methods.values()
    answers = plain(prompts, request.recipe.lossless_tokens, seed).tokens
    counted = {}
    for case, run in zip(cases, drafted, strict=True):
        bar.step(case.label)
        done = run(prompts, request.recipe.lossless_tokens, seed)
        check = compare_batch(request.target, case, prompts, done.tokens, answers, seed)
        counted[case.label] = [asdict(check), list(done.trace.confirmed)]
    return counted


def compare_batch(
    target: Decoder,
    case: Case,
    prompts: Prompts,
    tokens: list[list[int]],
    reference: list[list[int]],
    seed: int,
) -> LosslessCheck:
    """One batch of `case` against autoregressive decoding's `reference`, both with this seed."""
    request = replace(case.request, max_new_tokens=len(reference[0]))
    total = LosslessCheck()
    for row, (prompt, ours, theirs) in enumerate(zip(prompts, tokens, reference, strict=True)):
        if case.temperature:
            rng = torch.Generator(target.device).manual_seed(seed)
            total += compare_coupled(target, prompt, ours, theirs, request, rng, row)
        else:
            total += compare(target, prompt, ours, theirs)
    return total


LOSSLESS: Columns = (
    ("method", lambda r: r["method"] + " + controller" * r["steered"], "{}"),
    ("T", "temperature", "{:g}"),
    RULE,
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
    partial_kv = any("passed" in r for r in report["results"])
    return table((*LOSSLESS, CONFIRMED) if partial_kv else LOSSLESS, report["results"])


def _lossless_line(report: Report) -> str:
    return (
        f"{report['prompts']} held-out prompts x {report['new_tokens']} tokens, batch "
        f"{report['batch']}: {report['violations']:,} violations, {report['ties']:,} ties, "
        f"{report['checked']:,} tokens compared"
    )


LOSSLESS_PAGE = Page(
    "Every method against autoregressive decoding, token by token",
    lambda report: [*lossless_table(report), TIES],
    _lossless_line,
)


# ---- controller: against every fixed draft length ------------------------------------------------------


def run_controller(request: SuiteRequest) -> Report:
    """-> the report. A stopped run continues from progress.jsonl. Raises ValueError where no method of the
    recipe has a controller."""
    recipe = request.recipe
    names = [name for name, spec in recipe.specs.items() if True in spec.controller]
    if not names:
        raise ValueError("controller: no method of this recipe has a controller to measure")
    steered = [
        Case(method=name, temperature=t, rule=_rule(t), steered=True)
        for t in recipe.temperatures
        for name in names
    ]
    setup = set_up(request, steered, recipe.batch)
    plans = [
        (text, f"{text}, T={case.temperature:g}, {case.method}", _lengths(setup, case))
        for text in recipe.texts
        for case in steered
    ]
    runs = recipe.repeats * (recipe.controller_prompts // recipe.batch) * sum(len(plan[2]) for plan in plans)
    rows = []
    with Bar(request.console, "controller", runs) as bar:
        for text, name, cases in plans:
            groups = setup.prompts(text, recipe.controller_prompts, recipe.batch)
            cell = _timed_cell(setup, name, cases, groups, bar, text)
            rows.append(controller_row(setup, cell, cases))
    return setup.run.report(results=rows)


def _rule(temperature: float) -> str:
    """Every draft length generates the same text, so that only the lengths differ."""
    return "gumbel" if temperature else "match"


def _lengths(setup: BenchSetup, steered: Case) -> list[Case]:
    """Autoregressive decoding, the recipe's widths that this draft has, its own block size, the
    controller."""
    longest = setup.loaded[steered.method].draft.block_size
    widths = sorted({*(w for w in setup.request.recipe.widths if w < longest), longest})
    fixed = [replace(steered, steered=False, width=n) for n in widths]
    return [replace(steered, steered=False, method=PLAIN), *fixed, steered]


def controller_row(setup: BenchSetup, cell: ResultCell, cases: Sequence[Case]) -> dict[str, Any]:
    """One method on one kind of text: every fixed length, the best of them, and the controller."""
    rows = {case.label: method_row(setup, cell, case, cases[0]) for case in cases}
    plain, *fixed, steered = rows.values()
    lengths = {name: runs for name, runs in cell.runs.items() if name != steered["label"]}
    best = rows[fastest(lengths, cell.runs[plain["label"]])]
    ours, others = cell.runs[steered["label"]], best_of_other_repeats(lengths, plain["label"])
    measured = ("tokens_per_s", "speedup", "tau", "columns", "predicted", "lossless", "round_ms")
    return {
        "text": cell.regime,
        "temperature": steered["temperature"],
        "method": steered["method"],
        "plain_tokens_per_s": plain["tokens_per_s"],
        "fixed": [
            {key: r[key] for key in ("width", "tokens_per_s", "speedup", "tau", "lossless")} for r in fixed
        ],
        "best_width": best["width"] or 1,
        "best_tokens_per_s": best["tokens_per_s"],
        "controller": {key: steered[key] for key in measured},
        "best_speedup": best["speedup"],
        "over_plain": steered["speedup"],
        "over_best": round(speed_ratio(ours, others), 3),
        "over_best_error": round(ratio_error(ours, others), 3),
    }


def fastest(lengths: dict[str, Runs], plain: Runs) -> str:
    """The label of the length with the highest speedup over autoregressive decoding."""
    return max(lengths, key=lambda name: speed_ratio(lengths[name], plain))


def best_of_other_repeats(lengths: dict[str, Runs], plain: str) -> Runs:
    """In each repeat, the runs of the length that was fastest in the other repeats: the fastest of the same
    repeat would partly be luck. A single repeat is compared with itself."""
    runs: Runs = {}
    repeats = {repeat for repeat, _ in lengths[plain]}
    for repeat in repeats:
        others = repeats - {repeat} or repeats
        seen = {
            name: {turn: run for turn, run in of_length.items() if turn[0] in others}
            for name, of_length in lengths.items()
        }
        best = lengths[fastest(seen, seen[plain])]
        runs |= {turn: run for turn, run in best.items() if turn[0] == repeat}
    return runs


controller_table = table_of(
    "results",
    ("text", "text", "{}"),
    ("T", "temperature", "{:g}"),
    METHOD,
    ("best fixed", "best_width", "{}"),
    ("its speedup", "best_speedup", "{:.2f}x"),
    ("controller", "over_plain", "{:.2f}x"),
    ("over the best", lambda r: [r["over_best"], r["over_best_error"]], "{:.2f} ±{:.2f}"),
    *(nested("controller", column) for column in PREDICTED),
    ("draft length", "controller.columns", "{:.1f}"),
)
WIDTHS: Columns = (
    ("draft length", lambda r: r.get("width") or f"controller ({r['columns']:.1f})", "{}"),
    TAU,
    RATE,
    SPEEDUP,
    MISMATCHED,
)
CONTROLLER_LEGEND = """\
- held-out: text that nothing was trained on. random: prompts of uniformly drawn tokens, which no draft
  predicts.
- T = 1 uses the rule gumbel, for autoregressive decoding too: every draft length generates the same text.
- best fixed: the fastest fixed draft length, autoregressive decoding (1) included. over the best: speed of
  the controller over, in every repeat, that of the length which was fastest in the other repeats (the
  fastest of the same repeat is partly luck). ±: approximate standard error from the spread of the runs.
- predicted speedup: what the controller expected, from a cost table measured before the first run and the
  draft's confidence, with its error. error in tokens/s: the same for tokens/s.
"""


def _controller_body(report: Report) -> list[str]:
    lines = [*controller_table(report), CONTROLLER_LEGEND]
    for r in report["results"]:
        lines += [f"## {r['method']}, {r['text']} text, T = {r['temperature']:g}", ""]
        lines += table(WIDTHS, [*r["fixed"], r["controller"]])
    return lines


CONTROLLER_PAGE = Page(
    "The controller and fixed draft lengths",
    _controller_body,
    partial(_recipe_line, "controller_prompts", "lengths"),
)
SUITES = {  # name -> (run, page)
    "drafts": (run_comparison, COMPARISON_PAGE),
    "lossless": (run_lossless, LOSSLESS_PAGE),
    "controller": (run_controller, CONTROLLER_PAGE),
}
