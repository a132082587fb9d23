"""The suite draft-context: time of a draft step against context, by operation, next to the roofline."""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outpace.bench import plots
from outpace.bench.draft_steps import (
    OPERATIONS,
    SESSIONS,
    SHAPES,
    VARIANTS,
    Recomputed,
    StepTimer,
    Variant,
    VariantDraft,
    check_fits,
    describe,
    shapes_of,
    taken_apart,
    work_of_step,
)
from outpace.bench.machine import multiply_rate, read_bandwidth
from outpace.bench.metrics import joined, spread
from outpace.bench.report import Column, Columns, Page, Report, scaled, table, table_of
from outpace.bench.run import Bar, Results, Run, at_least, check_contexts, check_known, prompt_and_answer
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.decode.trace import Trace
from outpace.drafts.dflash import DFlash, DFlashSession
from outpace.drafts.sampler import Greedy
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.ops.sampling import seeded

K = 1024
CHUNK = 4096  # rows of random context appended at once
Sessions = dict[Variant, DFlashSession]


@dataclass(frozen=True, kw_only=True)
class DraftContextSettings:
    """`shapes`: the draft as it is; the same weights without its window (where it has one); the published
    draft of gpt-oss-20b with random weights. `observed`: verified tokens per step. A cell (shape, context,
    variant) is repeated for `cell_s` seconds, at most `repeats` times and at least twice, or once where one
    step takes longer. `acceptance`: "P+D", prompts of P and answers of D tokens (problems: of up to so
    many) that every variant decodes."""

    shapes: tuple[str, ...] = SHAPES
    contexts: tuple[int, ...] = (2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 120 * K)
    variants: tuple[str, ...] = tuple(VARIANTS)
    observed: int = 3
    repeats: int = 15
    cell_s: float = 20.0
    memory_gib: float = 24.0  # limit for weights, keys and values, and what is computed from them
    acceptance: tuple[str, ...] = ("256+256", "1024+512")
    prompts: int = 8
    seed: int = 1

    def __post_init__(self) -> None:
        check_known("draft-context", "shapes", self.shapes, SHAPES)
        check_known("draft-context", "variants", self.variants, tuple(VARIANTS))
        check_contexts("draft-context", self.contexts)
        at_least(self, "draft-context", observed=1, repeats=1, prompts=1)
        for regime in self.acceptance:
            regime_lengths(regime)


QUICK: dict[str, Any] = {
    "contexts": [2 * K, 8 * K, 32 * K],
    "repeats": 5,
    "cell_s": 4.0,
    "acceptance": ["256+256"],
    "prompts": 2,
}
regime_lengths = partial(prompt_and_answer, "draft-context")


def run_draft_context(
    target: Decoder,
    draft: DFlash,
    prompts: dict[str, list[list[int]]],
    settings: DraftContextSettings,
    folder: Path,
    console: Console,
) -> Report:
    """-> the report. `prompts`: for each regime of settings.acceptance. A stopped run continues from
    folder/progress.jsonl. The roofline is the highest memory bandwidth read before any cell, and the rate of
    float32 products. Raises ValueError for a shape too large for the memory, a context past its positions,
    and a draft of another target."""
    draft.bind(target)
    draft_fingerprint = fingerprint(draft)  # type: ignore[arg-type]
    threads = torch.get_num_threads()
    run = Run(target, folder, settings=settings, draft=draft_fingerprint, threads=threads)
    shapes: dict[str, dict[str, Any]] = {}
    steps = len(settings.shapes) * len(settings.contexts) + len(settings.acceptance)
    with Bar(console, "draft-context", steps) as bar:
        for name, shape, ends in shapes_of(settings.shapes, draft, target, settings.seed):
            shapes[name] = describe(shape, ends, max(settings.contexts) + shape.block_size)
            check_fits(name, shape, max(settings.contexts), shapes[name]["needed_bytes"], settings.memory_gib)
            for context in measure_shape(name, shape, ends, settings, run):
                bar.step(f"{name}, context {context}")
            del shape, ends
        decoded = []
        for regime, texts in prompts.items():
            bar.step(f"decoding, {regime}")
            new_tokens = regime_lengths(regime)[1]
            measure_acceptance = partial(acceptance, draft, target, texts, new_tokens, settings)
            rows = run.once(f"acceptance {regime}", measure_acceptance)
            decoded += [{"regime": regime, **row} for row in rows]
    left_out = [f"{s} left out: this draft has no window" for s in settings.shapes if s not in shapes]
    bandwidth = max(run.named("floor ").values())
    products = run.once("products", multiply_rate)
    return run.report(
        floor={"read_bytes_per_s": round(bandwidth), "flops_per_s": round(products)},
        variants={v: about for v, about in VARIANTS.items() if v in settings.variants},
        shapes=shapes,
        cells=[with_rates(c, bandwidth, products) for cells in run.named("cell ").values() for c in cells],
        acceptance=decoded,
        remarks=left_out,
    )


def measure_shape(
    name: str, draft: DFlash, target: Decoder, settings: DraftContextSettings, results: Results
) -> Iterator[int]:
    """Every context of one shape, ascending; yields each when it is measured."""
    sessions: Sessions = {}
    for context in settings.contexts:
        if f"cell {name} {context}" not in results:
            with torch.inference_mode():
                if not sessions:
                    sessions = open_sessions(draft, target, settings)
                    warm_up(sessions, settings)
                grow(sessions, context, settings.seed)
                results[f"floor {name} {context}"] = read_bandwidth(repeats=3)
                results[f"cell {name} {context}"] = measure(name, sessions, context, settings)
        yield context


def open_sessions(draft: DFlash, target: Decoder, settings: DraftContextSettings) -> Sessions:
    """One session per variant, all over the same cache."""
    longest = max(settings.contexts) + max(draft.block_size, settings.observed)
    cache = DFlashSession(draft, target, 1, longest, 0).cache
    sessions: Sessions = {}
    for variant, session_class in SESSIONS.items():
        if variant in settings.variants:
            sessions[variant] = session_class(draft, target, 1, 1, 0)
            sessions[variant].cache = cache
    recomputed = sessions.get("recomputed")
    if isinstance(recomputed, Recomputed):
        recomputed.features = torch.zeros(1, longest, draft.config.hidden_size, dtype=target.dtype)
    return sessions


def warm_up(sessions: Sessions, settings: DraftContextSettings) -> None:
    """One short step of each: kernels are built at first use, and weights are read from disk."""
    context = min(CHUNK // 64, settings.contexts[0])
    grow(sessions, context, settings.seed)
    measure("warm-up", sessions, context, replace(settings, repeats=1, cell_s=0.0))


def grow(sessions: Sessions, context: int, seed: int) -> None:
    """Extends the cache to `context` with random rows; their content does not influence the time."""
    session = next(iter(sessions.values()))
    config, cache, recomputed = session.draft.config, session.cache, sessions.get("recomputed")
    rng = seeded(seed, context)
    rows = torch.randn(1, CHUNK, config.hidden_size, generator=rng)
    kv = torch.randn(1, config.num_kv_heads, CHUNK, config.head_dim, generator=rng)
    while cache.lengths[0] < context:
        T = min(CHUNK, context - cache.lengths[0])
        step = cache.begin(T)
        for layer in cache.layers:
            layer.append(kv[:, :, :T], kv[:, :, :T], step)
        cache.advance(step)
        if isinstance(recomputed, Recomputed):
            recomputed.store(rows[:, :T], [T])


def measure(
    name: str, sessions: Sessions, context: int, settings: DraftContextSettings
) -> list[dict[str, Any]]:
    """One context: the variants interleaved, each step first as it is served, then taken apart."""
    first = next(iter(sessions.values()))
    config, target, observed = first.draft.config, first.target, settings.observed
    rng = seeded(settings.seed, context, 1)
    last = torch.randint(0, config.vocab_size, (1,), generator=rng)
    tokens = torch.randint(0, config.vocab_size, (1, observed), generator=rng)
    states = torch.randn(len(config.target_layer_ids), 1, observed, config.hidden_size, generator=rng)
    aux = states.to(target.dtype)
    seconds: dict[str, list[float]] = {variant: [] for variant in sessions}
    timers: dict[str, list[StepTimer]] = {variant: [] for variant in sessions}

    def step(session: DFlashSession) -> None:
        session.propose(last, config.block_size, Greedy())
        session.observe(tokens, aux, [observed])

    for repeat in range(-1, settings.repeats):
        for variant, session in sessions.items():
            spent = sum(seconds[variant]) + sum(sum(t.seconds.values()) for t in timers[variant])
            slow = min(seconds[variant], default=0.0) > settings.cell_s
            if len(seconds[variant]) >= (1 if slow else 2) and spent > settings.cell_s:
                continue
            began = time.perf_counter()
            step(session)
            whole, timer = time.perf_counter() - began, StepTimer()
            put_back(session, context)
            with taken_apart(session, timer):
                step(session)
            put_back(session, context)
            if repeat >= 0 or whole > settings.cell_s:  # the first is a warm-up, unless it is slow
                seconds[variant].append(whole)
                timers[variant].append(timer)
    cells = []
    for variant, session in sessions.items():
        work = work_of_step(session.draft, session.target, variant, context, observed)
        operations = [
            {
                "operation": operation,
                "seconds": statistics.median(t.seconds[operation] for t in timers[variant]),
                "bytes": round(amount.nbytes),
                "flops": round(amount.flops),
            }
            for operation, amount in work.items()
        ]
        cell = {"shape": name, "context": context, "variant": variant, **spread(seconds[variant])}
        cells.append(cell | {"operations": operations})
    return cells


def put_back(session: DFlashSession, context: int) -> None:
    session.cache.rewind([context])
    session.rewind([context])


def with_rates(cell: dict[str, Any], bandwidth: float, products: float) -> dict[str, Any]:
    """Adds rates, what reading the bytes at the memory bandwidth and making the float32 products at the
    processor's rate would take, and the share that the longer of the two is of the time."""

    def rates(nbytes: float, flops: float, seconds: float) -> dict[str, float]:
        seconds, limits = seconds or math.inf, (nbytes / bandwidth, flops / products)  # nothing was done
        return {
            "bytes_per_s": round(nbytes / seconds),
            "flops_per_s": round(flops / seconds),
            "read_seconds": limits[0],
            "multiply_seconds": limits[1],
            "share_of_floor": round(max(limits) / seconds, 4),
        }

    operations = [o | rates(o["bytes"], o["flops"], o["seconds"]) for o in cell["operations"]]
    nbytes, flops = (sum(o[key] for o in operations) for key in ("bytes", "flops"))
    return cell | {
        "operations": operations,
        "taken_apart_seconds": sum(o["seconds"] for o in operations),
        "bytes": nbytes,
        "flops": flops,
        **rates(nbytes, flops, cell["seconds"]),
    }


def acceptance(
    draft: DFlash, target: Decoder, prompts: list[list[int]], new_tokens: int, settings: DraftContextSettings
) -> list[dict[str, Any]]:
    """Acceptance and speed of every variant at temperature 0, one prompt at a time and interleaved."""
    request = Request(max_new_tokens=new_tokens, stop=frozenset(target.config.eos_token_ids))
    runs: dict[str, list[Trace]] = {variant: [] for variant in settings.variants}
    differ, decoded = dict.fromkeys(settings.variants, 0), 0
    for prompt in prompts:
        answer = generate(target, [prompt], request).tokens[0]
        decoded += len(answer) - 1
        for variant in settings.variants:
            out = generate(target, [prompt], request, VariantDraft(draft, target, variant))  # type: ignore[arg-type]
            runs[variant].append(out.trace)
            differ[variant] += out.tokens[0] != answer
    rows = []
    for variant, traces in runs.items():
        trace = joined(traces)
        lens = trace.accept_lens
        rows.append(
            {
                "variant": variant,
                "prompts": len(prompts),
                "tau": round(trace.tau, 4),
                "accepted_first": round(sum(n > 0 for n in lens) / len(lens), 4),
                "rounds": len(lens),
                "draft_ms": round(1000 * trace.seconds["draft"] / len(lens), 3),
                "tokens_per_s": round(decoded / trace.decode_seconds, 1),
                "texts_that_differ_from_plain": differ[variant],
            }
        )
    return rows


# ---- the report --------------------------------------------------------------------------------------

COLOURS = {"cached": plots.BLUE, "recomputed": plots.RED, "noise cached": plots.YELLOW}
LEGEND = """\
- ms: median of the repeats of a whole step at batch 1: a block drafted, then the verified tokens observed.
- by bytes, by flops: what reading the bytes at the machine's rate takes, and multiplying at that of torch's
  float32 products; share of the limit: the longer of the two, over the measured time. Above 100 %, the bytes
  lie in a cache of the processor, or matrix tiles multiply faster; far below, many small calls take the time.
- bytes: weights once, as stored, activations, and cached keys and values. Norm weights are left out.
- taken apart: the sum of the operations, each under its own timer and without fused kernels; the rest of a
  step is what lies between.
- tau: tokens committed per forward of the target, the bonus token included; all tokens over all steps.
"""
OPERATION: Columns = (
    ("operation", "operation", "{}"),
    ("MB", lambda r: three_digits(r["bytes"] / 1e6), "{}"),
    ("GFLOP", lambda r: three_digits(r["flops"] / 1e9), "{}"),
    ("ms", scaled("seconds", 1000), "{:,.3f}"),
    ("by bytes, ms", scaled("read_seconds", 1000), "{:,.3f}"),
    ("by flops, ms", scaled("multiply_seconds", 1000), "{:,.3f}"),
    ("share of the limit", "share_of_floor", "{:.0%}"),
)
acceptance_table = table_of(
    "acceptance",
    ("prompt + decode", "regime", "{}"),
    ("variant", "variant", "{}"),
    ("tau", "tau", "{:.2f}"),
    ("first draft token taken", "accepted_first", "{:.0%}"),
    ("draft ms per step", "draft_ms", "{:.2f}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("texts that differ from plain", lambda r: [r["texts_that_differ_from_plain"], r["prompts"]], "{} of {}"),
)


def three_digits(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _body(report: Report) -> list[str]:
    lines = [f"- **{variant}**: {about}." for variant, about in report["variants"].items()] + [""]
    for shape, about in report["shapes"].items():
        cells = [c for c in report["cells"] if c["shape"] == shape]
        lines += [f"## {shape}", "", _describe_line(about), "", *time_table(report, shape)]
        longest = max(c["context"] for c in cells)
        for c in cells:
            if c["context"] == longest:
                lines += [f"**{c['variant']}, context {longest:,}**", "", *_operations_table(c)]
    if report["acceptance"]:
        lines += ["## Acceptance", "", *acceptance_table(report)]
    return [*lines, LEGEND]


def _measured(report: Report) -> str:
    rates = report["floor"]["read_bytes_per_s"] / 1e9, report["floor"]["flops_per_s"] / 1e9
    return (
        f"all threads together read {rates[0]:.1f} GB/s and make {rates[1]:.0f} GFLOP/s in float32 products"
    )


def _describe_line(about: dict[str, Any]) -> str:
    windows, kv = about["windows"], about["needed_bytes"]["keys and values"]
    attention = f"windows {sorted(set(windows))}" if any(windows) else "full attention"
    size = f"{kv / 2**30:.2f} GiB" if kv >= 2**28 else f"{kv / 2**20:.1f} MiB"
    return (
        f"{about['layers']} layers of width {about['hidden_size']}, {about['heads']} heads of "
        f"{about['head_dim']} over {about['kv_heads']}, MLP {about['intermediate_size']}, {attention}, "
        f"blocks of {about['block_size']}, vocabulary {about['vocab_size']:,}; "
        f"{about['parameters'] / 1e6:.1f} M parameters in {', '.join(about['weights'])}; keys and values in "
        f"{about['keys_and_values']}, {size} at the longest context."
    )


def time_table(report: Report, shape: str) -> list[str]:
    """ms of a step by context and variant, and the first variant's share of the roofline."""
    rows: dict[int, dict[str, Any]] = {}
    for c in report["cells"]:
        if c["shape"] == shape:
            rows.setdefault(c["context"], {"context": c["context"]})[c["variant"]] = c
    variants = list(report["variants"])
    times: list[Column] = [(f"{v}, ms", scaled(f"{v}.seconds", 1000), "{:,.2f}") for v in variants]
    share: Column = (f"{variants[0]}, share of the limit", f"{variants[0]}.share_of_floor", "{:.0%}")
    return table([("context", "context", "{:,}"), *times, share], (rows[context] for context in sorted(rows)))


def times_tables(report: Report) -> list[str]:
    return [line for shape in report["shapes"] for line in (f"**{shape}**", "", *time_table(report, shape))]


def operations_table(report: Report) -> list[str]:
    """Of the largest shape, as served, at the longest context."""
    shape, variant = list(report["shapes"])[-1], next(iter(report["variants"]))
    return _operations_table(max(_cells(report, shape, variant), key=itemgetter("context")))


def _operations_table(cell: dict[str, Any]) -> list[str]:
    whole = cell | {"operation": f"whole step (taken apart {1000 * cell['taken_apart_seconds']:,.2f} ms)"}
    return table(OPERATION, [*(o for o in cell["operations"] if o["seconds"] or o["bytes"]), whole])


def _cells(report: Report, shape: str, variant: str) -> list[dict[str, Any]]:
    return [c for c in report["cells"] if (c["shape"], c["variant"]) == (shape, variant)]


def _context_plot(report: Report) -> Any:
    """One panel per shape: a step's time against context, both on logarithmic scales."""
    figure, panels = plots.figure(1, len(report["shapes"]), 4.2, "One drafting step against context")
    for axes, shape in zip(panels, report["shapes"], strict=True):
        for variant in report["variants"]:
            cells = _cells(report, shape, variant)
            contexts, ms = [c["context"] for c in cells], [1000 * c["seconds"] for c in cells]
            axes.plot(contexts, ms, "o-", color=COLOURS[variant], label=variant, markersize=3.5)
        plots.label(axes, y="ms per step", title=shape)
        plots.context_axis(axes, sorted({c["context"] for c in report["cells"]}))
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def _operations_plot(report: Report) -> Any:
    """One row per shape: stacked ms of the first variant's operations at every context."""
    shapes, variant = list(report["shapes"]), next(iter(report["variants"]))
    title = f"Where the time of a step goes ({variant})"
    figure, panels = plots.figure(len(shapes), 1, 1.2 + 2.4 * len(shapes), title)
    for axes, shape in zip(panels, shapes, strict=True):
        cells = _cells(report, shape, variant)
        seconds = [{o["operation"]: o["seconds"] for o in c["operations"]} for c in cells]
        plots.stacked_bars(axes, {name: [1000 * s[name] for s in seconds] for name in OPERATIONS})
        axes.set_xticks(range(len(cells)), [plots.short(c["context"]) for c in cells], fontsize=8)
        plots.label(axes, "context, tokens", "ms", shape)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    return figure


PAGE = Page(
    "The cost of a draft against context",
    _body,
    _measured,
    {
        "context.png": ("Time against context", _context_plot),
        "operations.png": ("Operations", _operations_plot),
    },
)
