"""The report of draft-context as files: JSON, Markdown, and two pictures."""

import importlib.util
from pathlib import Path
from typing import Any

from outpace.bench.draft_walk import OPERATIONS
from outpace.bench.plots import bare, figure_of, save_figure
from outpace.bench.report import lines_of, machine_line, run_line, table, versions_line
from outpace.checkpoint.save import write_atomically, write_json

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
- ms: median of the repeats of a whole round at batch 1: a block drafted, then the verified tokens observed.
- share of the floor: the bytes that must be read, over the machine's reading rate, over the measured time.
  Above 100 %, they lie in a cache of the processor; far below, arithmetic or many small calls take the time.
- bytes: weights once, as stored, activations, and remembered keys and values. Norm weights are left out.
- taken apart: the sum of the operations, each under its own clock; the rest of a step is what lies between.
- tau: tokens committed per forward of the target, the bonus token included; all tokens over all rounds.
"""


def write_draft_context(report: dict[str, Any], folder: Path) -> None:
    """folder/report.json, report.md, context.png, operations.png; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = importlib.util.find_spec("matplotlib") is not None
    write_json(folder / "report.json", report)
    if pictures:
        save_figure(_over_context(report), folder / "context.png")
        save_figure(_stacked(report), folder / "operations.png")
    write_atomically(folder / "report.md", draft_context_markdown(report, pictures).encode())


def draft_context_markdown(report: dict[str, Any], pictures: bool = True) -> str:
    floor = f"**Floor**: {report['floor']['read_bytes_per_s'] / 1e9:.1f} GB/s read by all threads together"
    lines = ["# The cost of a draft against context", ""]
    lines += [*lines_of(machine_line(report), versions_line(report), floor, run_line(report)), ""]
    lines += [f"- **{variant}**: {about}." for variant, about in report["variants"].items()] + [""]
    for shape, about in report["shapes"].items():
        cells = [c for c in report["cells"] if c["shape"] == shape]
        lines += [f"## {shape}", "", describe_shape(about), "", *time_table(report, shape)]
        longest = max(c["context"] for c in cells)
        for variant in report["variants"]:
            result = next(c for c in cells if (c["context"], c["variant"]) == (longest, variant))
            lines += [f"**{variant}, context {longest:,}**", "", *operations_table(result)]
    if report["acceptance"]:
        lines += ["## What it does to acceptance", "", *acceptance_table(report)]
    lines += [LEGEND, *(f"- {line}" for line in report["remarks"])]
    if pictures:
        lines += ["", "![Time against context](context.png)", "", "![Operations](operations.png)", ""]
    return "\n".join(lines)


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


def time_table(report: dict[str, Any], shape: str) -> list[str]:
    """ms of a step by context and variant, and what the served one reaches of the floor."""
    cells = {(c["context"], c["variant"]): c for c in report["cells"] if c["shape"] == shape}
    variants = list(report["variants"])
    columns = [
        "context",
        *(f"{v}, ms" for v in variants),
        *(f"{v}, share of the floor" for v in variants[:1]),
    ]
    rows = []
    for context in sorted({context for context, _ in cells}):
        items = [cells[context, v] for v in variants]
        times = [f"{1000 * c['seconds']:,.2f}" for c in items]
        rows.append([f"{context:,}", *times, f"{100 * items[0]['share_of_floor']:.0f} %"])
    return table(columns, rows)


def operations_table(cell: dict[str, Any]) -> list[str]:
    rows = [
        [
            r["operation"],
            significant(r["bytes"] / 1e6),
            significant(r["flops"] / 1e9),
            f"{1000 * r['seconds']:,.3f}",
            f"{r['bytes_per_s'] / 1e9:.1f}",
            f"{100 * r['share_of_floor']:.0f} %",
        ]
        for r in cell["operations"]
        if r["seconds"] or r["bytes"]
    ]
    whole = (cell["bytes"], cell["flops"], cell["seconds"])
    rows.append(
        [
            f"whole round (taken apart {1000 * cell['taken_apart_seconds']:,.2f} ms)",
            significant(whole[0] / 1e6),
            significant(whole[1] / 1e9),
            f"{1000 * whole[2]:,.3f}",
            f"{whole[0] / whole[2] / 1e9:.1f}",
            f"{100 * cell['share_of_floor']:.0f} %",
        ]
    )
    return table(("operation", "MB", "GFLOP", "ms", "GB/s", "share of the floor"), rows)


def significant(x: float) -> str:
    """Three digits that count."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def acceptance_table(report: dict[str, Any]) -> list[str]:
    rows = [
        [
            r["regime"],
            r["variant"],
            f"{r['tau']:.2f}",
            f"{100 * r['accepted_first']:.0f} %",
            f"{r['draft_ms']:.2f}",
            f"{r['tokens_per_s']:.0f}",
            f"{r['texts_that_differ_from_plain']} of {r['prompts']}",
        ]
        for r in report["acceptance"]
    ]
    columns = (
        "prompt + decode",
        "variant",
        "tau",
        "first draft token taken",
        "draft ms per round",
        "tokens/s",
    )
    return table((*columns, "texts that differ from plain"), rows)


def _over_context(report: dict[str, Any]) -> Any:
    """One panel per shape: a round's time against context, both on logarithmic scales."""
    shapes = list(report["shapes"])
    figure, panels = figure_of(1, len(shapes), 4.2, "One drafting round against context")
    for axes, shape in zip(panels, shapes, strict=True):
        for variant in report["variants"]:
            items = [c for c in report["cells"] if (c["shape"], c["variant"]) == (shape, variant)]
            at = [c["context"] for c in items], [1000 * c["seconds"] for c in items]
            axes.plot(*at, "o-", color=COLOURS[variant], label=variant, markersize=3.5)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        contexts = sorted({c["context"] for c in report["cells"]})
        axes.set_xticks(contexts, [short(n) for n in contexts], fontsize=8)
        axes.set_title(shape, fontsize=10)
        axes.set_xlabel("context, tokens")
        bare(axes)
    panels[0].set_ylabel("ms per round")
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


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
