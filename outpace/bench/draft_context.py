"""The cost of a draft against context: time per step, by operation, next to the roofline."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from outpace.bench.draft_shapes import SHAPES, check_memory, check_positions, describe, pairs
from outpace.bench.draft_walk import (
    ABOUT,
    OPERATIONS,
    SESSIONS,
    VARIANTS,
    DraftTimer,
    Recomputed,
    Remembering,
    Variant,
    Work,
    walk_round,
    work_of_round,
)
from outpace.bench.machine import read_bandwidth
from outpace.bench.report import Column, Page, Report, bare, context_axis, figure_of, short, table
from outpace.bench.run import Kept, Run, plain_json, progress
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.dflash import DFlash, DFlashSession
from outpace.drafts.sampler import Greedy
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.ops.sampling import seeded

K = 1024
CHUNK = 4096  # rows of made-up context appended at once


@dataclass(frozen=True, kw_only=True)
class DraftContextSettings:
    """`shapes`: the draft as it is; the same weights without its window (where it has one); the published
    draft of gpt-oss-20b with random weights. `observed`: verified tokens per step. A cell (shape, context,
    variant) is repeated until it has taken `cell_s` seconds, at most `repeats` times, and at least twice, or
    once where one step takes longer than that.
    `acceptance`: "P+D", prompts of P and answers of D tokens, over which the variants really decode."""

    shapes: tuple[str, ...] = SHAPES
    contexts: tuple[int, ...] = (2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 120 * K)
    variants: tuple[str, ...] = VARIANTS
    observed: int = 3
    repeats: int = 15
    cell_s: float = 20.0
    memory_gib: float = 24.0  # the most that weights, keys and values, and what is formed from them may take
    acceptance: tuple[str, ...] = ("256+256", "1024+512")
    prompts: int = 8
    seed: int = 1

    def __post_init__(self) -> None:
        for field, known in (("shapes", SHAPES), ("variants", VARIANTS)):
            asked = getattr(self, field)
            unknown = [x for x in asked if x not in known]
            if unknown or not asked:
                message = f"no {field[:-1]} {unknown[0]!r}" if unknown else f"name at least one of {field}"
                raise ValueError(f"draft-context: {message}; known: {', '.join(known)}")
        if not self.contexts or min(self.contexts) < 1 or list(self.contexts) != sorted(set(self.contexts)):
            raise ValueError(
                f"draft-context: contexts {list(self.contexts)}: give counts of tokens, ascending, each once"
            )
        for field in ("observed", "repeats", "prompts"):
            if getattr(self, field) < 1:
                raise ValueError(f"draft-context: {field} {getattr(self, field)} must be at least 1")
        for regime in self.acceptance:
            regime_lengths(regime)


QUICK: dict[str, Any] = {
    "contexts": [2 * K, 8 * K, 32 * K],
    "repeats": 5,
    "cell_s": 4.0,
    "acceptance": ["256+256"],
    "prompts": 2,
}


def regime_lengths(regime: str) -> tuple[int, int]:
    prompt, _, new = regime.partition("+")
    if prompt.isdigit() and new.isdigit() and int(prompt) and int(new) > 1:
        return int(prompt), int(new)
    raise ValueError(f'draft-context: acceptance {regime!r}: write "P+D", such as "256+256"')


def run_draft_context(
    target: Decoder,
    draft: DFlash,
    prompts: dict[str, list[list[int]]],
    settings: DraftContextSettings,
    folder: Path,
    console: Console,
) -> dict[str, Any]:
    """-> the report. `prompts`: for each regime of settings.acceptance. What was measured before a stop is
    read from folder/progress.jsonl, if it was measured with these settings, this target and this draft.
    The floor is the best reading rate seen before any cell.
    Raises ValueError where a shape does not fit the memory or a context its positions, and where the draft is
    another target's."""
    draft.bind(target)
    run = Run(
        target,
        folder,
        settings=plain_json(settings),
        draft=fingerprint(draft),  # type: ignore[arg-type]
        threads=torch.get_num_threads(),
    )
    kept, shapes = run.kept, {}
    with progress(console) as bar:
        total = len(settings.shapes) * len(settings.contexts) + len(settings.acceptance)
        task = bar.add_task("draft-context", total=total)
        for name, shape, ends in pairs(settings.shapes, draft, target, settings.seed):
            shapes[name] = describe(shape, ends, max(settings.contexts) + shape.block_size)
            check_positions(name, shape, max(settings.contexts))
            check_memory(name, shapes[name]["needed_bytes"], settings.memory_gib)
            for _ in measure_shape(name, shape, ends, settings, kept, bar):
                bar.advance(task)
            del shape, ends
        for regime, texts in prompts.items():
            bar.update(task, description=f"decoding, {regime}")
            if f"acceptance {regime}" not in kept:
                result = acceptance(draft, target, texts, regime_lengths(regime)[1], settings)
                kept[f"acceptance {regime}"] = [{"regime": regime, **row} for row in result]
            bar.advance(task)
    left_out = [f"{s} left out: this draft has no window" for s in settings.shapes if s not in shapes]
    floor = max(kept[name] for name in kept.names if name.startswith("floor "))
    cells = [cell for name in kept.names if name.startswith("cell ") for cell in kept[name]]
    return run.report(
        floor={"read_bytes_per_s": round(floor)},
        variants={v: ABOUT[v] for v in VARIANTS if v in settings.variants},
        shapes=shapes,
        cells=[with_rates(cell, floor) for cell in cells],
        acceptance=[row for regime in prompts for row in kept[f"acceptance {regime}"]],
        remarks=left_out,
    )


def measure_shape(
    name: str, draft: DFlash, target: Decoder, settings: DraftContextSettings, kept: Kept, bar: Progress
) -> Iterator[None]:
    """Every context of one shape, ascending; one yield for each."""
    sessions = None
    for context in settings.contexts:
        bar.update(bar.task_ids[0], description=f"{name}, context {context}")
        if f"cell {name} {context}" not in kept:
            if sessions is None:
                sessions = open_sessions(draft, target, settings)
                rehearse(sessions, settings)
            with torch.inference_mode():
                grow(sessions, context, settings.seed)
                kept[f"floor {name} {context}"] = read_bandwidth(repeats=3)
                kept[f"cell {name} {context}"] = measure(name, sessions, context, settings)
        yield


def open_sessions(
    draft: DFlash, target: Decoder, settings: DraftContextSettings
) -> dict[Variant, DFlashSession]:
    """One of each variant, over one and the same memory."""
    longest = max(settings.contexts) + max(draft.block_size, settings.observed)
    served = DFlashSession(draft, target, 1, longest, 0)
    values: dict[Variant, DFlashSession] = {}
    for variant in VARIANTS:
        if variant in settings.variants:
            values[variant] = SESSIONS[variant](draft, target, 1, 1, 0)
            values[variant].cache = served.cache
    forgetful = values.get("recomputed")
    if isinstance(forgetful, Recomputed):
        forgetful.features = torch.zeros(1, longest, draft.config.hidden_size, dtype=target.dtype)
    return values


@torch.inference_mode()
def rehearse(sessions: dict[Variant, DFlashSession], settings: DraftContextSettings) -> None:
    """One cheap step of each: kernels are built at their first use, and weights come from the disk."""
    context = min(CHUNK // 64, settings.contexts[0])
    grow(sessions, context, settings.seed)
    measure("rehearsal", sessions, context, replace(settings, repeats=1, cell_s=0.0))


def grow(sessions: dict[Variant, DFlashSession], context: int, seed: int) -> None:
    """Lengthen the memory to `context` with made-up rows: their content costs nothing, their number does."""
    session = next(iter(sessions.values()))
    config, cache = session.draft.config, session.cache
    rng = seeded(seed, context)
    forgetful = sessions.get("recomputed")
    rows = torch.randn(1, CHUNK, config.hidden_size, generator=rng)
    kv = torch.randn(1, config.num_kv_heads, CHUNK, config.head_dim, generator=rng)
    while cache.lengths[0] < context:
        begin = cache.lengths[0]
        T = min(CHUNK, context - begin)
        step = cache.begin(T)
        for memory in cache.layers:
            memory.append(kv[:, :, :T], kv[:, :, :T], step)
        cache.advance(step)
        if isinstance(forgetful, Recomputed):
            forgetful.store(rows[:, :T], [T])


def measure(
    name: str, sessions: dict[Variant, DFlashSession], context: int, settings: DraftContextSettings
) -> list[dict[str, Any]]:
    """One context: the variants take turns, first their step as it is, then taken apart."""
    some = next(iter(sessions.values()))
    config, target = some.draft.config, some.target
    rng = seeded(settings.seed, context, 1)
    last = torch.randint(0, config.vocab_size, (1,), generator=rng)
    tokens = torch.randint(0, config.vocab_size, (1, settings.observed), generator=rng)
    aux = torch.randn(
        len(config.target_layer_ids), 1, settings.observed, config.hidden_size, generator=rng
    ).to(target.dtype)
    wholes: dict[str, list[float]] = {variant: [] for variant in sessions}
    clocks: dict[str, list[DraftTimer]] = {variant: [] for variant in sessions}
    for repeat in range(-1, settings.repeats):
        for variant, session in sessions.items():
            spent = sum(wholes[variant]) + sum(sum(c.seconds.values()) for c in clocks[variant])
            dear = min(wholes[variant], default=0.0) > settings.cell_s
            if len(wholes[variant]) >= (1 if dear else 2) and spent > settings.cell_s:
                continue
            began = time.perf_counter()
            session.propose(last, config.block_size, Greedy())
            session.observe(tokens, aux, [settings.observed])
            whole, clock = time.perf_counter() - began, DraftTimer()
            put_back(session, context)
            walk_round(session, last, aux, clock)
            put_back(session, context)
            if repeat >= 0 or whole > settings.cell_s:  # the first is a rehearsal, unless it is dear
                wholes[variant].append(whole)
                clocks[variant].append(clock)
    return [
        cell(name, context, variant, session, wholes[variant], clocks[variant], settings.observed)
        for variant, session in sessions.items()
    ]


def put_back(session: DFlashSession, context: int) -> None:
    session.cache.rewind([context])
    if isinstance(session, Recomputed):
        session.seen = [context]


def cell(
    name: str,
    context: int,
    variant: Variant,
    session: DFlashSession,
    wholes: list[float],
    clocks: list[DraftTimer],
    observed: int,
) -> dict[str, Any]:
    work = work_of_round(session.draft, session.target, variant, context, observed)
    operations = [
        {
            "operation": operation,
            "seconds": statistics.median(c.seconds[operation] for c in clocks),
            "bytes": round(done.nbytes),
            "flops": round(done.flops),
        }
        for operation, done in work.items()
    ]
    return {
        "shape": name,
        "context": context,
        "variant": variant,
        "repeats": len(wholes),
        "seconds": statistics.median(wholes),
        "fastest": min(wholes),
        "slowest": max(wholes),
        "operations": operations,
    }


def with_rates(cell: dict[str, Any], floor: float) -> dict[str, Any]:
    """Next to every time its rate and the share of it that reading the bytes at the machine's rate takes."""
    rated = []
    for row in cell["operations"]:
        seconds = row["seconds"]
        rated.append(
            row
            | {
                "bytes_per_s": round(row["bytes"] / seconds) if seconds else 0,
                "flops_per_s": round(row["flops"] / seconds) if seconds else 0,
                "share_of_floor": round(row["bytes"] / floor / seconds, 4) if seconds else 0.0,
            }
        )
    total = sum((Work(r["bytes"], r["flops"]) for r in rated), Work())
    return cell | {
        "operations": rated,
        "taken_apart_seconds": sum(r["seconds"] for r in rated),
        "bytes": total.nbytes,
        "flops": total.flops,
        "share_of_floor": round(total.nbytes / floor / cell["seconds"], 4),
    }


def acceptance(
    draft: DFlash,
    target: Decoder,
    prompts: list[list[int]],
    new_tokens: int,
    settings: DraftContextSettings,
) -> list[dict[str, Any]]:
    """The variants really decode at temperature 0, one prompt at a time and interleaved."""
    request = Request(max_new_tokens=new_tokens)
    runs: dict[str, list[Any]] = {variant: [] for variant in settings.variants}
    differ = dict.fromkeys(settings.variants, 0)
    for prompt in prompts:
        answer = generate(target, [prompt], request).tokens[0]
        for variant in settings.variants:
            bound = Remembering(draft, target, variant)  # type: ignore[arg-type]
            out = generate(target, [prompt], request, bound)
            runs[variant].append(out.trace)
            differ[variant] += out.tokens[0] != answer
    entries = []
    for variant, traces in runs.items():
        lens = [n for t in traces for n in t.accept_lens]
        seconds = [sum(t.seconds[p] for p in ("draft", "verify", "rest")) for t in traces]
        entries.append(
            {
                "variant": variant,
                "prompts": len(prompts),
                "tau": round((sum(lens) + len(lens)) / len(lens), 4),
                "accepted_first": round(sum(n > 0 for n in lens) / len(lens), 4),
                "rounds": len(lens),
                "draft_ms": round(1000 * sum(t.seconds["draft"] for t in traces) / len(lens), 3),
                "tokens_per_s": round(len(prompts) * (new_tokens - 1) / sum(seconds), 1),
                "texts_that_differ_from_plain": differ[variant],
            }
        )
    return entries


COLOURS = {"cached": "#2a6f97", "recomputed": "#c1666b", "noise cached": "#e3a857"}
SHADES = (
    "#0b3c5d",
    "#2a6f97",
    "#9ec5e0",
    "#e3a857",
    "#c1666b",
    "#8c5a7c",
    "#5b8c5a",
    "#b4c7a0",
    "#3f3f3f",
    "#8f8f8f",
    "#d0d0d0",
)
LEGEND = """\
- ms: median of the repeats of a whole step at batch 1: a block drafted, then the verified tokens observed.
- share of the floor: the bytes that must be read, over the machine's reading rate, over the measured time.
  Above 100%, they lie in a cache of the processor; far below, arithmetic or many small calls take the time.
- bytes: weights once, as stored, activations, and remembered keys and values. Norm weights are left out.
- taken apart: the sum of the operations, each under its own clock; the rest of a step is what lies between.
- tau: tokens committed per forward of the target, the bonus token included; all tokens over all steps.
"""


def _body(report: Report) -> list[str]:
    lines = [f"- **{variant}**: {about}." for variant, about in report["variants"].items()] + [""]
    for shape, about in report["shapes"].items():
        cells = [c for c in report["cells"] if c["shape"] == shape]
        lines += [f"## {shape}", "", describe_shape(about), "", *time_table(report, shape)]
        longest = max(c["context"] for c in cells)
        for variant in report["variants"]:
            result = next(c for c in cells if (c["context"], c["variant"]) == (longest, variant))
            lines += [f"**{variant}, context {longest:,}**", "", *operations_table(result)]
    if report["acceptance"]:
        lines += ["## What it does to acceptance", "", *acceptance_table(report)]
    return [*lines, LEGEND]


def _measured(report: Report) -> str:
    return f"all threads together read {report['floor']['read_bytes_per_s'] / 1e9:.1f} GB/s"


def describe_shape(about: dict[str, Any]) -> str:
    windows = about["windows"]
    seen = f"windows {sorted(set(windows))}" if any(windows) else "full attention"
    kv = about["needed_bytes"]["keys and values"]
    held = f"{kv / 2**30:.2f} GiB" if kv >= 2**28 else f"{kv / 2**20:.1f} MiB"
    return (
        f"{about['layers']} layers of width {about['hidden_size']}, {about['heads']} heads of "
        f"{about['head_dim']} over {about['kv_heads']}, MLP {about['intermediate_size']}, {seen}, blocks of "
        f"{about['block_size']}, vocabulary {about['vocab_size']:,}; {about['parameters'] / 1e6:.1f} M "
        f"parameters in {', '.join(about['weights'])}; keys and values in {about['keys_and_values']}, {held} "
        "at the longest context."
    )


def _ms(variant: str, row: dict[str, Any]) -> float:
    return 1000 * float(row[variant]["seconds"])


def time_table(report: Report, shape: str) -> list[str]:
    """ms of a step by context and variant, and what the served one reaches of the floor."""
    rows: dict[int, dict[str, Any]] = {}
    for c in report["cells"]:
        if c["shape"] == shape:
            rows.setdefault(c["context"], {"context": c["context"]})[c["variant"]] = c
    variants = list(report["variants"])
    times: list[Column] = [(f"{v}, ms", partial(_ms, v), "{:,.2f}") for v in variants]
    floor: Column = (f"{variants[0]}, share of the floor", f"{variants[0]}.share_of_floor", "{:.0%}")
    columns: list[Column] = [("context", "context", "{:,}"), *times, floor]
    return table(columns, (rows[context] for context in sorted(rows)))


OPERATION_COLUMNS: tuple[Column, ...] = (
    ("operation", "operation", "{}"),
    ("MB", lambda r: significant(r["bytes"] / 1e6), "{}"),
    ("GFLOP", lambda r: significant(r["flops"] / 1e9), "{}"),
    ("ms", lambda r: 1000 * r["seconds"], "{:,.3f}"),
    ("GB/s", lambda r: r["bytes_per_s"] / 1e9, "{:.1f}"),
    ("share of the floor", "share_of_floor", "{:.0%}"),
)


def operations_table(cell: dict[str, Any]) -> list[str]:
    whole = cell | {
        "operation": f"whole step (taken apart {1000 * cell['taken_apart_seconds']:,.2f} ms)",
        "bytes_per_s": cell["bytes"] / cell["seconds"],
    }
    return table(OPERATION_COLUMNS, [*(r for r in cell["operations"] if r["seconds"] or r["bytes"]), whole])


def significant(x: float) -> str:
    """Three digits that count."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


ACCEPTANCE: tuple[Column, ...] = (
    ("prompt + decode", "regime", "{}"),
    ("variant", "variant", "{}"),
    ("tau", "tau", "{:.2f}"),
    ("first draft token taken", "accepted_first", "{:.0%}"),
    ("draft ms per step", "draft_ms", "{:.2f}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    (
        "texts that differ from plain",
        lambda r: [r["texts_that_differ_from_plain"], r["prompts"]],
        "{} of {}",
    ),
)


def acceptance_table(report: Report) -> list[str]:
    return table(ACCEPTANCE, report["acceptance"])


def _over_context(report: dict[str, Any]) -> Any:
    """One panel per shape: a step's time against context, both on logarithmic scales."""
    shapes = list(report["shapes"])
    figure, panels = figure_of(1, len(shapes), 4.2, "One drafting step against context")
    for axes, shape in zip(panels, shapes, strict=True):
        for variant in report["variants"]:
            items = [c for c in report["cells"] if (c["shape"], c["variant"]) == (shape, variant)]
            at = [c["context"] for c in items], [1000 * c["seconds"] for c in items]
            axes.plot(*at, "o-", color=COLOURS[variant], label=variant, markersize=3.5)
        axes.set_title(shape, fontsize=10)
        context_axis(axes, sorted({c["context"] for c in report["cells"]}))
    panels[0].set_ylabel("ms per step")
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def _stacked(report: dict[str, Any]) -> Any:
    """One row per shape: bars of the served variant's operations at every context, in ms."""
    shapes, variant = list(report["shapes"]), next(iter(report["variants"]))
    title = f"Where the time of a step goes ({variant})"
    figure, panels = figure_of(len(shapes), 1, 1.2 + 2.4 * len(shapes), title)
    for axes, shape in zip(panels, shapes, strict=True):
        items = [c for c in report["cells"] if (c["shape"], c["variant"]) == (shape, variant)]
        below = [0.0] * len(items)
        for name, colour in zip(OPERATIONS, SHADES, strict=True):
            ms = [1000 * next(o["seconds"] for o in c["operations"] if o["operation"] == name) for c in items]
            axes.bar(range(len(items)), ms, 0.7, bottom=below, color=colour, label=name)
            below = [a + b for a, b in zip(below, ms, strict=True)]
        axes.set_xticks(range(len(items)), [short(c["context"]) for c in items], fontsize=8)
        axes.set_title(shape, fontsize=10)
        axes.set_ylabel("ms")
        bare(axes)
    panels[-1].set_xlabel("context, tokens")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    return figure


PAGE = Page(
    "The cost of a draft against context",
    _body,
    _measured,
    {
        "context.png": ("Time against context", _over_context),
        "operations.png": ("Operations", _stacked),
    },
)
