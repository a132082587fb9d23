"""Methods side by side, interleaved in one run: tokens/s, speedup, acceptance, time split, losslessness."""

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from outpace.bench import baselines
from outpace.bench.interleave import progress
from outpace.bench.machine import describe_draft, describe_target, machine, provenance, versions
from outpace.bench.prompts import held_out_prompts
from outpace.bench.results import ResultCell, agreement, result
from outpace.bench.timing import Method, our_methods
from outpace.drafts.base import Draft
from outpace.drafts.dflash import DFlash
from outpace.models.decoder import Decoder
from outpace.text.corpus import Document

METHODS = ("transformers", "transformers-dflash", "plain", "ngram", "suffix", "dflash", "dflash-tree")
YARDSTICKS = METHODS[:2]
REGIMES = {"short": (256, 256), "long": (1024, 2048)}  # prompt tokens, decoded tokens
NGRAM_BLOCK = 8  # where there is no draft where the block to equal


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
    console: Console,
    suffix: Draft | None = None,
) -> dict[str, Any]:
    """-> the report, the content of report.json. `suffix`: a suffix index of the target's answers.

    Raises ValueError where there are too few prompts or the model cannot take them.
    """
    began = time.perf_counter()
    before = machine(target.device)
    items: list[str] = []
    methods = _methods(target, draft, suffix, settings, items)
    cells = _cells(tokenizer, held_out_documents, settings)
    with progress(console) as bar:
        task = bar.add_task("bench", total=sum(len(_plan(c, methods, settings)) for c in cells))
        for n, cell in enumerate(cells):
            limit = settings.budget_s and settings.budget_s * (n + 1) / len(cells)
            deadline = None if limit is None else began + limit
            repeats = _measure(cell, methods, settings, deadline, bar, task)
            if repeats < settings.repeats:
                name = f"{cell.regime}, batch {cell.batch}"
                items.append(
                    f"{name}: {repeats} of {settings.repeats} repeats, to keep to {settings.budget_s} s"
                )
    alone = {c.regime: c.runs["plain"] for c in reversed(cells) if c.batch == 1}
    results = [
        result(target, cell, method, settings.temperature, alone.get(cell.regime))
        for cell in cells
        for method in settings.methods
        if method in cell.runs
    ]
    return {
        **provenance(),
        "machine": before,
        "versions": versions(),
        "target": describe_target(target),
        "draft": None if draft is None else describe_draft(draft),
        "settings": json.loads(json.dumps(dataclasses.asdict(settings))),  # as it reads back
        "results": results,
        "agreement": [a for c in cells if (a := agreement(c)) is not None],
        "remarks": items,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _methods(
    target: Decoder,
    draft: DFlash | None,
    suffix: Draft | None,
    settings: BenchSettings,
    entries: list[str],
) -> dict[str, Method]:
    """The methods that can run, `plain` always among them; the list gets a line for each that cannot."""
    block = draft.block_size if draft is not None else NGRAM_BLOCK
    result = our_methods(target, draft, suffix, settings.temperature, block)
    asked = [m for m in settings.methods if m in YARDSTICKS]
    if draft is None and "dflash" in settings.methods:
        entries.append("dflash left out: no draft was given")
    if suffix is None and "suffix" in settings.methods:
        entries.append("suffix left out: no suffix index was given")
    if asked and settings.temperature > 0:
        entries.append("transformers left out: it is compared at temperature 0 alone")
    elif asked and not baselines.installed():
        entries.append("transformers left out: it is not installed (pip install 'outpace[baselines]')")
    elif asked:
        used = {b for r in settings.regimes for b in settings.of(r)[1] if settings.has_baseline(r)}
        opened = baselines.open_baseline(
            target, draft if "transformers-dflash" in asked else None, tuple(sorted(used))
        )
        result |= opened.methods()
        entries += opened.remarks
        if "transformers-dflash" in result:
            entries.append("transformers-dflash runs batch 1 only: its generate takes no other")
    return {m: run for m, run in result.items() if m in settings.methods or m == "plain"}


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


def _plan(
    cell: ResultCell, methods: dict[str, Method], settings: BenchSettings
) -> list[tuple[int, int, str]]:
    """(repeat, group, method) in the order of running: the methods take turns, and the first of a turn
    changes, so that a slow minute of the machine meets all of them."""
    slow_groups = max(1, settings.baseline_prompts // cell.batch)
    plan = []
    for repeat in range(settings.repeats):
        for group in range(len(cell.groups)):
            order = list(methods)
            shift = (repeat + group) % len(order)
            for method in order[shift:] + order[:shift]:
                if method in YARDSTICKS:
                    if not settings.has_baseline(cell.regime) or group >= slow_groups:
                        continue
                    if repeat >= settings.baseline_repeats:
                        continue
                if method == "transformers-dflash" and cell.batch > 1:
                    continue
                plan.append((repeat, group, method))
    return plan


def _measure(
    cell: ResultCell,
    methods: dict[str, Method],
    settings: BenchSettings,
    deadline: float | None,
    bar: Progress,
    task: Any,
) -> int:
    """Fill cell.runs; -> repeats done. One short unmeasured run of every method goes first."""
    plan = _plan(cell, methods, settings)
    for method in dict.fromkeys(m for _, _, m in plan):
        methods[method](cell.groups[0], min(8, cell.new_tokens), settings.seed)
        cell.runs[method] = {}
    done = 0
    for repeat, group, method in plan:
        if repeat and repeat != done and deadline is not None and time.perf_counter() > deadline:
            bar.advance(task, sum(r >= repeat for r, _, _ in plan))
            return done + 1
        done = repeat
        bar.update(task, description=f"{cell.regime}, batch {cell.batch}: {method}")
        seed = settings.seed * 1_000_003 + repeat * 1009 + group
        cell.runs[method][repeat, group] = methods[method](cell.groups[group], cell.new_tokens, seed)
        bar.advance(task)
    return settings.repeats
