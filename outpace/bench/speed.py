"""The suite speed: methods interleaved in one run; tokens/s, speedup, acceptance, losslessness."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench import baselines, llama_cpp, plots
from outpace.bench.machine import describe_draft
from outpace.bench.methods import Case, run_case
from outpace.bench.metrics import PLAIN, ResultCell, agreement, result, speed_ratio
from outpace.bench.prompts import answer_lengths, held_out_prompts
from outpace.bench.report import (
    METHOD,
    SPEEDUP,
    TAU,
    Columns,
    Page,
    Report,
    get,
    print_remarks,
    print_table,
    scaled,
    table,
)
from outpace.bench.run import Bar, Method, Run, Runs, at_least, check_known, interleave, prompt_and_answer
from outpace.config import cache_folder
from outpace.decode.auto import auto_controller
from outpace.decode.controller import Adaptive
from outpace.drafts.base import Draft
from outpace.drafts.dflash import DFlash
from outpace.drafts.lookup import NGram
from outpace.drafts.tree import DDTree
from outpace.models.decoder import Decoder
from outpace.tasks.prompts import harmony_of, problem_prompts
from outpace.text.corpus import Document
from outpace.text.harmony import HarmonyTokens

LLAMA_CPP = llama_cpp.NAME
COLOURS = {  # of every method, in the order of tables and plots
    LLAMA_CPP: "#4a4a4a",
    "transformers": "#b0b0b0",
    "transformers-dflash": "#7a7a7a",
    "plain": "#8fb8de",
    "default": "#1b4965",
    "ngram": "#e3a857",
    "dflash": "#2a6f97",
    "dflash-tree": "#4f9d69",
}
MARKS = {
    "default": "*-",
    "dflash": "o-",
    "transformers-dflash": "x--",
    "ngram": "s-",
    "dflash-tree": "D-",
}
METHODS = tuple(COLOURS)
BASELINES = ("transformers", "transformers-dflash")
REGIMES = {"short": (256, 256), "long": (1024, 2048)}  # prompt tokens, decoded tokens
PROBLEMS, LONGEST = "problems", 1024  # whole answers, and the tokens of a prompt or an answer at most
DEFAULT = "default"
NGRAM_BLOCK = 8  # where there is no draft to take the block size from
TREE = 16  # nodes of the tree of `dflash-tree`, root included


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """A regime is "problems" for whole answers to held-out problems, one at a time, or "short", "long" and
    "P+D" for D tokens after P of held-out text. None named: "problems" where the target speaks Harmony, else
    "short" and "long".

    The baselines (the transformers methods) are slow: they run the first `baseline_prompts` prompts,
    `baseline_repeats` times, in `baseline_regimes`; their speedup is over the same runs of plain.
    With `budget_s`, further repeats are skipped once a cell's share of it is spent.
    """

    methods: tuple[str, ...] = METHODS
    regimes: tuple[str, ...] = ()
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
        check_known("bench", "methods", self.methods, METHODS)
        at_least(self, "bench", repeats=1, prompts=1, long_prompts=1, baseline_prompts=1, baseline_repeats=1)
        for regime in self.regimes or REGIMES:
            if regime != PROBLEMS:
                lengths(regime)
            count, batches = self.prompts_and_batches(regime)
            if not batches or min(batches) < 1 or max(batches) > count:
                raise ValueError(
                    f"bench: batches {batches} of regime {regime!r} must lie in 1..{count}, its number of "
                    "prompts: ask for more prompts or smaller batches"
                )

    def prompts_and_batches(self, regime: str) -> tuple[int, tuple[int, ...]]:
        """-> number of prompts, batch sizes."""
        if regime == PROBLEMS:
            return self.prompts, (1,)
        return (self.long_prompts, self.long_batches) if regime == "long" else (self.prompts, self.batches)

    def has_baseline(self, regime: str) -> bool:
        return self.baseline_regimes is None or regime in self.baseline_regimes

    def skips(self, cell: ResultCell, method: str, repeat: int, group: int) -> bool:
        """The baselines run a part of the prompts and repeats."""
        return method in BASELINES and (
            not self.has_baseline(cell.regime)
            or group >= max(1, self.baseline_prompts // cell.batch)
            or repeat >= self.baseline_repeats
            or (method == "transformers-dflash" and cell.batch > 1)
        )


def lengths(regime: str) -> tuple[int, int]:
    """-> prompt tokens, decoded tokens. Raises ValueError for a name that is neither known nor "P+D"."""
    if regime in REGIMES:
        return REGIMES[regime]
    if "+" not in regime:
        raise ValueError(
            f'bench: no regime {regime!r}; known: {PROBLEMS}, {", ".join(REGIMES)}, or "P+D" such as "64+128"'
        )
    return prompt_and_answer("bench", regime)


def run_bench(
    target: Decoder,
    draft: DFlash | None,
    tokenizer: Tokenizer,
    held_out_documents: Sequence[Document],
    settings: BenchSettings,
    folder: Path,
    console: Console,
) -> Report:
    """-> the report. A stopped run continues from folder/progress.jsonl. Raises ValueError for too few
    prompts, for prompts that the model cannot take, and for problems that it has no chat format for."""
    if not settings.regimes:
        known = tuple(REGIMES) if harmony_of(tokenizer) is None else (PROBLEMS,)
        settings = replace(settings, regimes=known)
    run = Run(target, folder, draft=None if draft is None else describe_draft(draft), settings=settings)
    remarks: list[str] = []
    methods = _methods(target, tokenizer, draft, settings, remarks)
    cells = _cells(target, tokenizer, held_out_documents, settings)
    planned = [planned_runs(cell, methods, settings) for cell in cells]
    with Bar(console, "bench", sum(planned)) as bar:
        for n, cell in enumerate(cells):
            name = f"{cell.regime}, batch {cell.batch}"
            deadline = settings.budget_s and run.began + settings.budget_s * (n + 1) / len(cells)
            runs = interleave(
                name,
                methods,
                cell.groups,
                cell.counts or cell.new_tokens,
                settings,
                run,
                lambda method, name=name: bar.step(f"{name}: {method}"),  # type: ignore[misc]
                partial(settings.skips, cell),
                deadline,
            )
            cell.runs.update(runs)
            repeats = len({repeat for repeat, _ in runs[PLAIN]})
            if repeats < settings.repeats:
                remarks.append(
                    f"{name}: {repeats} of {settings.repeats} repeats, limited by {settings.budget_s} s"
                )
            bar.at(sum(planned[: n + 1]))
    single = {c.regime: c.runs[PLAIN] for c in reversed(cells) if c.batch == 1}
    results = [
        _result(target, cell, method, settings.temperature, single.get(cell.regime))
        for cell in cells
        for method in settings.methods
        if method in cell.runs
    ]
    remarks += getattr(methods.get(LLAMA_CPP), "remarks", [])
    agreements = [a for c in cells if (a := agreement(c)) is not None]
    remarks += [*map(_agreement_remark, agreements), *filter(None, map(unrepeated_remark, results))]
    return run.report(results=results, agreement=agreements, remarks=remarks)


def _result(
    target: Decoder, cell: ResultCell, method: str, temperature: float, single: Runs | None
) -> dict[str, Any]:
    """With `over_llama_cpp`, tokens/s over llama.cpp's in the same turns, where it ran."""
    theirs = cell.runs.get(LLAMA_CPP)
    row = result(target, cell, method, temperature, single, compared=method != LLAMA_CPP)
    if theirs is None:
        return row
    turns = {turn: run for turn, run in cell.runs[method].items() if turn in theirs}
    return row | {"over_llama_cpp": round(speed_ratio(turns, theirs), 3)}


def _methods(
    target: Decoder,
    tokenizer: Tokenizer,
    draft: DFlash | None,
    settings: BenchSettings,
    remarks: list[str],
) -> dict[str, Method]:
    """The methods that can run, always with `plain`; `remarks` gets a line for each that cannot."""
    drafts: dict[str, Draft | None] = {PLAIN: None}
    drafts["ngram"] = NGram(block_size=NGRAM_BLOCK if draft is None else draft.block_size)
    own = None if draft is None else draft.bind(target)
    if own is not None:
        drafts |= {"dflash": own, "dflash-tree": DDTree(own, TREE)}
    elif "dflash" in settings.methods:
        remarks.append(f"dflash and {DEFAULT} left out: no draft was given")
    methods = {
        name: run_case(Case(method=name, temperature=settings.temperature), target, bound)
        for name, bound in drafts.items()
    }
    if own is not None and DEFAULT in settings.methods:
        methods[DEFAULT] = _default(target, tokenizer, own, settings, remarks)
    methods |= _llama_cpp(target, tokenizer, settings, remarks)
    methods |= _baselines(target, draft, settings, remarks)
    return {m: run for m, run in methods.items() if m in settings.methods or m == PLAIN}


def _default(
    target: Decoder, tokenizer: Tokenizer, draft: Draft, settings: BenchSettings, remarks: list[str]
) -> Method:
    """As `outpace generate` decodes where nothing is said."""
    case = Case(method=DEFAULT, temperature=settings.temperature)
    rule = case.request.effective_rule
    controller, note = auto_controller(target, tokenizer, draft, rule, cache_folder())
    remarks.append(f"{DEFAULT}: the draft, {note}")
    if isinstance(controller, Adaptive):
        return run_case(replace(case, steered=True), target, draft, controller.costs)
    return run_case(case if controller is None else replace(case, width=1), target, draft)


def _llama_cpp(
    target: Decoder, tokenizer: Tokenizer, settings: BenchSettings, remarks: list[str]
) -> dict[str, Method]:
    if LLAMA_CPP not in settings.methods:
        return {}
    if settings.temperature > 0:
        remarks.append(f"{LLAMA_CPP} left out: it is compared at temperature 0 alone")
        return {}
    theirs = llama_cpp.baseline(target, tokenizer, remarks)
    return {} if theirs is None else {LLAMA_CPP: theirs}


def _baselines(
    target: Decoder, draft: DFlash | None, settings: BenchSettings, remarks: list[str]
) -> dict[str, Method]:
    if not set(settings.methods) & set(BASELINES):
        return {}
    if settings.temperature > 0:
        remarks.append("transformers left out: it is compared at temperature 0 alone")
        return {}
    if not baselines.installed():
        remarks.append("transformers left out: it is not installed (pip install 'outpace[baselines]')")
        return {}
    regimes = filter(settings.has_baseline, settings.regimes)
    batches = sorted({batch for regime in regimes for batch in settings.prompts_and_batches(regime)[1]})
    theirs = draft if "transformers-dflash" in settings.methods else None
    opened = baselines.open_baseline(target, theirs, tuple(batches))
    methods = opened.methods()
    remarks += opened.remarks
    if "transformers-dflash" in methods:
        remarks.append("transformers-dflash runs batch 1 only: its generate takes no other")
    return methods


def _cells(
    target: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], settings: BenchSettings
) -> list[ResultCell]:
    cells = []
    for regime in settings.regimes:
        if regime == PROBLEMS:
            cells.append(_problems(target, tokenizer, settings))
            continue
        length, new_tokens = lengths(regime)
        count, batches = settings.prompts_and_batches(regime)
        prompts = held_out_prompts(tokenizer, documents, count, length)
        for batch in batches:
            groups = [prompts[i : i + batch] for i in range(0, count - batch + 1, batch)]
            cells.append(ResultCell(regime, batch, new_tokens, groups, {}))
    return cells


def _problems(target: Decoder, tokenizer: Tokenizer, settings: BenchSettings) -> ResultCell:
    """One at a time, since no two answers are equally long."""
    tokens = HarmonyTokens(tokenizer)
    prompts = problem_prompts(tokens, settings.prompts, settings.seed, LONGEST)
    counts = answer_lengths(target, prompts, tokens.stop, LONGEST)
    return ResultCell(PROBLEMS, 1, max(counts), [[prompt] for prompt in prompts], {}, counts)


def planned_runs(cell: ResultCell, methods: dict[str, Method], settings: BenchSettings) -> int:
    turns = [(repeat, group) for repeat in range(settings.repeats) for group in range(len(cell.groups))]
    return sum(not settings.skips(cell, method, *turn) for turn in turns for method in methods)


def _agreement_remark(a: dict[str, Any]) -> str:
    ours, theirs = a["methods"]
    same = a["prompts"] - a["prompts_that_differ"]
    return (
        f"accepted lengths of {ours} and {theirs}, {a['regime']}: the same in {same} of {a['prompts']} "
        f"prompts ({a['rounds_compared']} steps compared)"
    )


def unrepeated_remark(r: dict[str, Any]) -> str:
    rows, name = r["lossless"]["unrepeated"], f"{r['method']}, {r['regime']}, batch {r['batch']}"
    return f"{name}: {rows} rows of repeats differ from the first" if rows else ""


# ---- the report --------------------------------------------------------------------------------------


def _speed_range(r: dict[str, Any]) -> str:
    repeats = r["tokens_per_s_repeats"]
    spread = f" ({min(repeats):.0f}-{max(repeats):.0f})" if len(repeats) > 1 else ""
    return f"{r['tokens_per_s']:.1f}{spread}"


def _of_drafts(*paths: str) -> Any:
    """The values of a method that proposed anything."""
    return lambda r: [get(r, path) for path in paths] if r["accept_by_position"] else None


def _time_shares(r: dict[str, Any]) -> list[float]:
    total = sum(r["time"].values()) or 1.0
    return [r["time"][part] / total for part in ("draft", "verify", "rest")]


def _mismatches(r: dict[str, Any]) -> str:
    c = r["lossless"]
    return f"{c['violations']} / {c['checked']}" if c["checked"] else "not checked"


def _mismatches_and_ties(r: dict[str, Any]) -> str:
    ties = r["lossless"]["ties"]
    return f"{_mismatches(r)}, {ties} ties" if ties else _mismatches(r)


BATCH = ("batch", "batch", "{}")
OVER_LLAMA_CPP = (LLAMA_CPP, "over_llama_cpp", "{:.2f}x")
COLUMNS: Columns = (
    METHOD,
    BATCH,
    ("tokens/s", _speed_range, "{}"),
    OVER_LLAMA_CPP,
    SPEEDUP,
    TAU,
    (
        "accepted mean / p50 / p90",
        _of_drafts("accept_len.mean", "accept_len.p50", "accept_len.p90"),
        "{:.2f} / {} / {}",
    ),
    ("accept rate", _of_drafts("accept_rate"), "{:.2f}"),
    ("draft / verify / overhead", _time_shares, "{:.0%} / {:.0%} / {:.0%}"),
    ("first token", scaled("first_token_s", 1000), "{:.0f} ms"),
    ("mismatched tokens", _mismatches_and_ties, "{}"),
)
TERMINAL: Columns = (  # 80 columns wide
    METHOD,
    BATCH,
    ("tokens/s", "tokens_per_s", "{:.1f}"),
    OVER_LLAMA_CPP,
    SPEEDUP,
    TAU,
    ("differ", _mismatches, "{}"),
)
LEGEND = """\
- tokens/s: from the first token to the last, all rows together, median of the repeats (in brackets: slowest
  and fastest).
- llama.cpp: tokens/s over those of llama.cpp, on the same weights in the same run, with the setting and the
  number of threads that suit it best.
- default: as `outpace generate` decodes: the draft, its length chosen by measured costs.
- speedup: over `plain`, our own autoregressive decoding of the same target in the same run.
- tau: mean number of tokens committed per forward of the target, bonus token included.
- accepted: draft tokens accepted per step; accept rate: accepted over proposed draft tokens.
- draft / verify / overhead: shares of the decoding time.
- mismatched tokens: tokens that differ from autoregressive decoding and are no tie / tokens compared. A tie
  is two logits within 1e-4 in float32; ties are counted, not skipped.
"""


def _known(columns: Columns, rows: list[dict[str, Any]]) -> Columns:
    """Without llama.cpp's where it did not run."""
    ran = any("over_llama_cpp" in row for row in rows)
    return tuple(column for column in columns if ran or column is not OVER_LLAMA_CPP)


def _body(report: Report) -> list[str]:
    lines = []
    for rows in _by_regime(report["results"]).values():
        title = f"{regime_name(rows[0]).capitalize()} tokens, temperature {rows[0]['temperature']:g}"
        lines += [f"## {title}", "", *table(_known(COLUMNS, rows), rows)]
    return [*lines, LEGEND]


def _measured(report: Report) -> str:
    d = report["draft"]
    if d is None:
        return "methods interleaved, without a trained draft"
    return (
        f"methods interleaved; the draft is a DFlash of {d['layers']} layers, block {d['block_size']}, "
        f"{d['parameters'] / 1e6:.2f} M parameters (`{d['fingerprint'][:12]}`)"
    )


def print_report(report: Report, console: Console) -> None:
    """The tables at 80 columns; report.md has all of them."""
    for rows in _by_regime(report["results"]).values():
        print_table(console, f"{regime_name(rows[0])} tokens", _known(TERMINAL, rows), rows)
    print_remarks(console, report)


def regime_name(r: dict[str, Any]) -> str:
    """ "prompt 256, decode 256", or what stands for it where no two prompts are as long."""
    if r["regime"] == PROBLEMS:
        return f"answers of up to {r['new_tokens']}"
    return f"prompt {r['prompt_tokens']}, decode {r['new_tokens']}"


def _by_regime(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by regime, each in the order of COLOURS."""
    regimes: dict[str, list[dict[str, Any]]] = {r["regime"]: [] for r in results}
    for r in results:
        regimes[r["regime"]].append(r)
    return regimes


def _rank(r: dict[str, Any]) -> int:
    return METHODS.index(r["method"])


def _speed_plot(report: Report) -> Any:
    """One panel per regime, one group of bars per batch size, the speedup over `plain` above each bar."""
    regimes = _by_regime(report["results"])
    methods = sorted({r["method"] for r in report["results"]}, key=METHODS.index)
    title = "Tokens per second, and speedup over plain"
    figure, panels = plots.figure(len(regimes), 1, 1.4 + 2.7 * len(regimes), title)
    for axes, rows in zip(panels, regimes.values(), strict=True):
        batches = sorted({r["batch"] for r in rows})
        for place, batch in enumerate(batches):
            group = sorted((r for r in rows if r["batch"] == batch), key=_rank)
            for i, r in enumerate(group):
                left = place + (i - (len(group) - 1) / 2) * 0.88 / len(methods)
                bar = axes.bar(left, r["tokens_per_s"], 0.8 / len(methods), color=COLOURS[r["method"]])
                speedup = "" if r["method"] == PLAIN else f"{r['speedup']:.2f}x"
                axes.bar_label(bar, [speedup], fontsize=8, padding=1.5)
        axes.set_xticks(range(len(batches)), [f"batch {b}" for b in batches])
        axes.set_xlim(-0.6, len(batches) - 0.4)
        axes.margins(y=0.12)
        plots.label(axes, y="tokens/s", title=regime_name(rows[0]))
    handles = [panels[0].bar(0, 0, color=COLOURS[m], label=m) for m in methods]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(methods), frameon=False, fontsize=9)
    return figure


def _acceptance_plot(report: Report) -> Any:
    """Share of the proposals where draft token k was accepted, at the smallest batch measured."""
    regimes = _by_regime([r for r in report["results"] if r["accept_by_position"]])
    title = "Share of proposals where the draft token k was accepted"
    figure, panels = plots.figure(1, max(1, len(regimes)), 3.8, title)
    if not regimes:
        panels[0].text(0.5, 0.5, "no method of this run proposes anything", ha="center")
        panels[0].set_axis_off()
    for axes, rows in zip(panels, regimes.values(), strict=False):
        smallest = min(r["batch"] for r in rows)
        for r in sorted((r for r in rows if r["batch"] == smallest), key=_rank):
            method, shares = r["method"], r["accept_by_position"]
            theirs = method == "transformers-dflash"  # it should lie exactly on dflash
            axes.plot(
                range(1, len(shares) + 1),
                shares,
                MARKS[method],
                color="black" if theirs else COLOURS[method],
                zorder=5 if theirs else 3,
                clip_on=False,
                label=f"{method} (tau {r['tau']:.2f})",
            )
        plots.integer_axis(axes)
        axes.set_ylim(0, 1)
        title = f"{regime_name(rows[0])}, batch {smallest}"
        plots.label(axes, "position k in the block", "accepted", title, legend=True)
    return figure


PAGE = Page(
    "Decoding speed, side by side",
    _body,
    _measured,
    {
        "speed.png": ("Tokens per second", _speed_plot),
        "acceptance.png": ("Acceptance by position", _acceptance_plot),
    },
)
