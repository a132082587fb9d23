"""Methods side by side, interleaved in one run: tokens/s, speedup, acceptance, time split, losslessness."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from outpace.bench import baselines
from outpace.bench.machine import describe_draft
from outpace.bench.methods import PLAIN, Case, run_case
from outpace.bench.prompts import held_out_prompts
from outpace.bench.report import Page, Report, bare, cell, dig, figure_of, table
from outpace.bench.results import ResultCell, agreement, result
from outpace.bench.run import Method, Run, advancing, plain_json, progress, take_turns
from outpace.drafts.base import Draft
from outpace.drafts.dflash import DFlash
from outpace.drafts.lookup import NGram
from outpace.drafts.tree import DDTree
from outpace.models.decoder import Decoder
from outpace.text.corpus import Document

METHODS = ("transformers", "transformers-dflash", "plain", "ngram", "suffix", "dflash", "dflash-tree")
BASELINES = METHODS[:2]
REGIMES = {"short": (256, 256), "long": (1024, 2048)}  # prompt tokens, decoded tokens
NGRAM_BLOCK = 8  # without a draft whose block size it could take
TREE = 16  # nodes of the tree that `dflash-tree` proposes, root included


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure. A regime is "short", "long", or "P+D" for prompts of P and answers of D tokens.

    The baselines (the transformers methods) are slow: they run the first `baseline_prompts` prompts,
    `baseline_repeats` times, in `baseline_regimes`; their speedup is over the same runs of plain.
    With `budget_s`, further repeats are skipped once a cell's share of it is spent.
    """

    methods: tuple[str, ...] = METHODS
    regimes: tuple[str, ...] = ("short", "long")
    batches: tuple[int, ...] = (1, 2, 4, 8)
    long_batches: tuple[int, ...] = (1, 2, 4, 8)
    repeats: int = 3
    prompts: int = 8
    long_prompts: int = 8
    temperature: float = 0.0
    seed: int = 1
    baseline_prompts: int = 2
    baseline_repeats: int = 1
    baseline_regimes: tuple[str, ...] | None = None  # None: in all
    budget_s: float | None = None

    def __post_init__(self) -> None:
        unknown = [m for m in self.methods if m not in METHODS]
        if unknown:
            raise ValueError(f"bench: no method {unknown[0]!r}; known: {', '.join(METHODS)}")
        if not self.methods or not self.regimes:
            raise ValueError("bench: name at least one method and one regime")
        for name in ("repeats", "prompts", "long_prompts", "baseline_prompts", "baseline_repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"bench: {name} {getattr(self, name)} must be at least 1")
        for regime in self.regimes:
            _, new = lengths(regime)
            if new < 2:
                raise ValueError(
                    f"bench: regime {regime!r} decodes {new} token: nothing to time after the first"
                )
            count, batches = self.of(regime)
            if not batches or min(batches) < 1 or max(batches) > count:
                raise ValueError(
                    f"bench: batches {batches} of regime {regime!r} must lie in 1..{count}, its number of "
                    "prompts: ask for more prompts or smaller batches"
                )

    def of(self, regime: str) -> tuple[int, tuple[int, ...]]:
        """-> number of prompts, batch sizes."""
        return (self.long_prompts, self.long_batches) if regime == "long" else (self.prompts, self.batches)

    def has_baseline(self, regime: str) -> bool:
        return self.baseline_regimes is None or regime in self.baseline_regimes


def demo_settings() -> BenchSettings:
    """About a minute on 2 cores with the embedded target: fewer and shorter runs, the same methods."""
    return BenchSettings(
        regimes=("128+128", "1024+512"), batches=(1,), prompts=4, repeats=2, baseline_prompts=1, budget_s=60.0
    )


def lengths(regime: str) -> tuple[int, int]:
    """-> prompt tokens, decoded tokens. Raises ValueError for a name that is neither known nor "P+D"."""
    if regime in REGIMES:
        return REGIMES[regime]
    prompt, _, new = regime.partition("+")
    if prompt.isdigit() and new.isdigit() and int(prompt) and int(new):
        return int(prompt), int(new)
    raise ValueError(f'bench: no regime {regime!r}; known: {", ".join(REGIMES)}, or "P+D" such as "64+128"')


def run_bench(
    target: Decoder,
    draft: DFlash | None,
    tokenizer: Tokenizer,
    held_out_documents: Sequence[Document],
    settings: BenchSettings,
    folder: Path,
    console: Console,
    suffix: Draft | None = None,
) -> Report:
    """-> the report, the content of report.json. `suffix`: a suffix index of the target's answers. What was
    measured before a stop is read from folder/progress.jsonl.

    Raises ValueError where there are too few prompts or the model cannot take them.
    """
    about = None if draft is None else describe_draft(draft)
    run = Run(target, folder, draft=about, settings=plain_json(settings))
    remarks: list[str] = []
    methods = _methods(target, draft, suffix, settings, remarks)
    cells = _cells(tokenizer, held_out_documents, settings)
    with progress(console) as bar:
        planned = [_planned(cell, methods, settings) for cell in cells]
        task = bar.add_task("bench", total=sum(planned))
        for n, cell in enumerate(cells):
            name = f"{cell.regime}, batch {cell.batch}"
            limit = settings.budget_s and settings.budget_s * (n + 1) / len(cells)
            done = take_turns(
                name,
                methods,
                cell.groups,
                cell.new_tokens,
                settings.repeats,
                settings.seed,
                run.kept,
                advancing(bar, task, f"{name}: "),
                partial(_left_out, cell, settings),
                None if limit is None else run.began + limit,
            )
            cell.runs.update(done)
            repeats = len({repeat for repeat, _ in cell.runs[PLAIN]})
            if repeats < settings.repeats:
                remarks.append(
                    f"{name}: {repeats} of {settings.repeats} repeats, to keep to {settings.budget_s} s"
                )
            bar.update(task, completed=sum(planned[: n + 1]))
    alone = {c.regime: c.runs[PLAIN] for c in reversed(cells) if c.batch == 1}
    results = [
        result(target, cell, method, settings.temperature, alone.get(cell.regime))
        for cell in cells
        for method in settings.methods
        if method in cell.runs
    ]
    agreements = [a for c in cells if (a := agreement(c)) is not None]
    remarks += [*map(_agreed, agreements), *map(_unrepeated, results)]
    return run.report(results=results, agreement=agreements, remarks=list(filter(None, remarks)))


def _methods(
    target: Decoder,
    draft: DFlash | None,
    suffix: Draft | None,
    settings: BenchSettings,
    remarks: list[str],
) -> dict[str, Method]:
    """The methods that can run, `plain` always among them; `remarks` gets a line for each that cannot."""
    drafts: dict[str, Draft | None] = {PLAIN: None}
    drafts["ngram"] = NGram(block_size=NGRAM_BLOCK if draft is None else draft.block_size)
    if suffix is not None:
        drafts["suffix"] = suffix
    elif "suffix" in settings.methods:
        remarks.append("suffix left out: no suffix index was given")
    if draft is not None:
        drafts |= {"dflash": draft.bind(target), "dflash-tree": DDTree(draft.bind(target), TREE)}
    elif "dflash" in settings.methods:
        remarks.append("dflash left out: no draft was given")
    methods = {
        name: run_case(Case(method=name, temperature=settings.temperature), target, bound)
        for name, bound in drafts.items()
    }
    methods |= _baselines(target, draft, settings, remarks)
    return {m: run for m, run in methods.items() if m in settings.methods or m == PLAIN}


def _baselines(
    target: Decoder, draft: DFlash | None, settings: BenchSettings, remarks: list[str]
) -> dict[str, Method]:
    asked = [m for m in settings.methods if m in BASELINES]
    if not asked:
        return {}
    if settings.temperature > 0:
        remarks.append("transformers left out: it is compared at temperature 0 alone")
        return {}
    if not baselines.installed():
        remarks.append("transformers left out: it is not installed (pip install 'outpace[baselines]')")
        return {}
    used = {b for r in settings.regimes for b in settings.of(r)[1] if settings.has_baseline(r)}
    opened = baselines.open_baseline(
        target, draft if "transformers-dflash" in asked else None, tuple(sorted(used))
    )
    methods = opened.methods()
    remarks += opened.remarks
    if "transformers-dflash" in methods:
        remarks.append("transformers-dflash runs batch 1 only: its generate takes no other")
    return methods


def _cells(tokenizer: Tokenizer, documents: Sequence[Document], settings: BenchSettings) -> list[ResultCell]:
    cells = []
    for regime in settings.regimes:
        length, new_tokens = lengths(regime)
        count, batches = settings.of(regime)
        prompts = held_out_prompts(tokenizer, documents, count, length)
        for batch in batches:
            groups = [prompts[i : i + batch] for i in range(0, count - batch + 1, batch)]
            cells.append(ResultCell(regime, batch, new_tokens, groups, {}))
    return cells


def _left_out(cell: ResultCell, settings: BenchSettings, method: str, repeat: int, group: int) -> bool:
    """The baselines run a part of the prompts and repeats."""
    if method not in BASELINES:
        return False
    return (
        not settings.has_baseline(cell.regime)
        or group >= max(1, settings.baseline_prompts // cell.batch)
        or repeat >= settings.baseline_repeats
        or (method == "transformers-dflash" and cell.batch > 1)
    )


def _planned(cell: ResultCell, methods: dict[str, Method], settings: BenchSettings) -> int:
    turns = [(repeat, group) for repeat in range(settings.repeats) for group in range(len(cell.groups))]
    return sum(not _left_out(cell, settings, method, *turn) for turn in turns for method in methods)


def _agreed(a: dict[str, Any]) -> str:
    ours, theirs = a["methods"]
    same = a["prompts"] - a["prompts_that_differ"]
    return (
        f"accepted lengths of {ours} and {theirs}, {a['regime']}: the same in {same} of {a['prompts']} "
        f"prompts ({a['rounds_compared']} steps compared)"
    )


def _unrepeated(r: dict[str, Any]) -> str:
    rows = r["lossless"]["unrepeated"]
    what = f"{r['method']}, {r['regime']}, batch {r['batch']}"
    return f"{what}: {rows} rows of repeats differ from the first" if rows else ""


# ---- the report --------------------------------------------------------------------------------------

COLOURS = {
    "transformers": "#b0b0b0",
    "transformers-dflash": "#7a7a7a",
    "plain": "#8fb8de",
    "ngram": "#e3a857",
    "suffix": "#c1666b",
    "dflash": "#2a6f97",
    "dflash-tree": "#4f9d69",
}
MARKS = {"dflash": "o", "transformers-dflash": "x", "ngram": "s", "suffix": "^", "dflash-tree": "D"}


def _speed_range(r: dict[str, Any]) -> str:
    repeats = r["tokens_per_s_repeats"]
    spread = f" ({min(repeats):.0f}-{max(repeats):.0f})" if len(repeats) > 1 else ""
    return f"{r['tokens_per_s']:.1f}{spread}"


def _if_drafting(value: str) -> Any:
    """The value, where the method proposed anything."""

    return lambda r: dig(r, value) if r["accept_by_position"] else None


def _time_shares(r: dict[str, Any]) -> list[float]:
    total = sum(r["time"].values()) or 1.0
    return [r["time"][part] / total for part in ("draft", "verify", "rest")]


def _differ(r: dict[str, Any]) -> str:
    c = r["lossless"]
    return f"{c['violations']} / {c['checked']}" if c["checked"] else "not checked"


def _differ_and_ties(r: dict[str, Any]) -> str:
    ties = r["lossless"]["ties"]
    return f"{_differ(r)}, {ties} ties" if ties else _differ(r)


def _accepted(r: dict[str, Any]) -> list[Any] | None:
    a = r["accept_len"]
    return [a["mean"], a["p50"], a["p90"]] if r["accept_by_position"] else None


COLUMNS = (
    ("method", "method", "{}"),
    ("batch", "batch", "{}"),
    ("tokens/s", _speed_range, "{}"),
    ("speedup", "speedup", "{:.2f}x"),
    ("tau", "tau", "{:.2f}"),
    ("accepted mean / p50 / p90", _accepted, "{:.2f} / {} / {}"),
    ("accept rate", _if_drafting("accept_rate"), "{:.2f}"),
    ("draft / verify / overhead", _time_shares, "{:.0%} / {:.0%} / {:.0%}"),
    ("first token", lambda r: 1000 * r["first_token_s"], "{:.0f} ms"),
    ("mismatched tokens", _differ_and_ties, "{}"),
)
TERMINAL = (  # 80 columns wide
    *(column for column in COLUMNS if column[0] in ("method", "batch")),
    ("tokens/s", "tokens_per_s", "{:.1f}"),
    *(column for column in COLUMNS if column[0] in ("speedup", "tau")),
    ("accept", _if_drafting("accept_rate"), "{:.2f}"),
    ("differ", _differ, "{}"),
    ("ties", lambda r: r["lossless"]["ties"] if r["lossless"]["checked"] else None, "{}"),
)
LEGEND = """\
- tokens/s: from the first token to the last, all rows together, median of the repeats (in brackets: slowest
  and fastest).
- speedup: over `plain`, our own autoregressive decoding of the same target in the same run.
- tau: mean number of tokens committed per forward of the target, bonus token included.
- accepted: draft tokens accepted per step; accept rate: accepted over proposed draft tokens.
- draft / verify / overhead: shares of the decoding time.
- mismatched tokens: tokens that differ from autoregressive decoding and are no tie / tokens compared. A tie
  is two logits within 1e-4 in float32; ties are counted, not skipped.
"""


def _body(report: Report) -> list[str]:
    lines = []
    for of in _regimes(report["results"]).values():
        title = f"{regime_name(of[0]).capitalize()} tokens, temperature {of[0]['temperature']:g}"
        lines += [f"## {title}", "", *table(COLUMNS, of)]
    return [*lines, LEGEND]


def _draft_line(report: Report) -> str:
    d = report["draft"]
    if d is None:
        return "methods interleaved, without a trained draft"
    return (
        f"methods interleaved; the draft is a DFlash of {d['layers']} layers, block {d['block_size']}, "
        f"{d['parameters'] / 1e6:.2f} M parameters (`{d['fingerprint'][:12]}`)"
    )


def print_report(report: Report, console: Console) -> None:
    """The tables at 80 columns; report.md has all of them."""
    for of in _regimes(report["results"]).values():
        title = f"{regime_name(of[0])} tokens"
        shown = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for heading, _, _ in TERMINAL:
            shown.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
        for r in of:
            shown.add_row(*(cell(r, value, form) for _, value, form in TERMINAL))
        console.print(shown)
    for line in report["remarks"]:
        console.print(f"- {line}", highlight=False, markup=False)


def _rank(r: dict[str, Any]) -> int:
    return list(COLOURS).index(r["method"])


def regime_name(r: dict[str, Any]) -> str:
    return f"prompt {r['prompt_tokens']}, decode {r['new_tokens']}"


def _regimes(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    values: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        values.setdefault(r["regime"], []).append(r)
    return values


def _speed(report: Report) -> Any:
    """One panel per regime, one group of bars per batch size, the speedup over `plain` above each bar."""
    results = report["results"]
    regimes = _regimes(results)
    figure, panels = figure_of(
        len(regimes), 1, 1.4 + 2.7 * len(regimes), "Tokens per second, and speedup over plain"
    )
    widest = len({r["method"] for r in results})
    for axes, of in zip(panels, regimes.values(), strict=True):
        batches = sorted({r["batch"] for r in of})
        for place, batch in enumerate(batches):
            here = sorted((r for r in of if r["batch"] == batch), key=_rank)
            for i, r in enumerate(here):
                left = place + (i - (len(here) - 1) / 2) * 0.88 / widest
                bar = axes.bar(left, r["tokens_per_s"], 0.8 / widest, color=COLOURS[r["method"]])
                message = "" if r["method"] == "plain" else f"{r['speedup']:.2f}x"
                axes.bar_label(bar, [message], fontsize=8, padding=1.5)
        axes.set_xticks(range(len(batches)), [f"batch {b}" for b in batches])
        axes.set_xlim(-0.6, len(batches) - 0.4)
        axes.set_title(regime_name(of[0]), fontsize=10)
        axes.set_ylabel("tokens/s")
        axes.margins(y=0.12)
        bare(axes)
    _legend(figure, [m for m in COLOURS if m in {r["method"] for r in results}])
    return figure


def _legend(figure: Any, methods: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[m], label=m) for m in methods]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(methods), frameon=False, fontsize=9)


def _acceptance(report: Report) -> Any:
    """How often draft token k of a proposal is accepted, at the smallest batch measured."""
    regimes = _regimes([r for r in report["results"] if r["accept_by_position"]])
    figure, panels = figure_of(
        1, max(1, len(regimes)), 3.8, "Share of proposals where the draft token k was accepted"
    )
    for axes, of in zip(panels, regimes.values(), strict=False):
        smallest = min(r["batch"] for r in of)
        for r in sorted(of, key=_rank):
            if r["batch"] != smallest:
                continue
            method, shares = r["method"], r["accept_by_position"]
            axes.plot(
                range(1, len(shares) + 1),
                shares,
                MARKS[method] + ("--" if method == "transformers-dflash" else "-"),
                color="black" if method == "transformers-dflash" else COLOURS[method],
                zorder=5 if method == "transformers-dflash" else 3,  # it should lie exactly on dflash
                clip_on=False,
                label=f"{method} (tau {r['tau']:.2f})",
            )
        axes.set_title(f"{regime_name(of[0])}, batch {smallest}", fontsize=10)
        axes.set_xlabel("position k in the block")
        axes.set_ylim(0, 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(frameon=False, fontsize=9)
        bare(axes)
    if not regimes:
        panels[0].text(0.5, 0.5, "no method of this run proposes anything", ha="center")
        panels[0].set_axis_off()
    else:
        panels[0].set_ylabel("accepted")
    return figure


PAGE = Page(
    "Decoding speed, side by side",
    _body,
    _draft_line,
    {"speed.png": ("Tokens per second", _speed), "acceptance.png": ("Acceptance by position", _acceptance)},
)
