"""The report of the pareto suite as files: JSON, Markdown, and a picture."""

import importlib.util
from pathlib import Path
from typing import Any

from outpace.bench.plots import bare, figure_of, save_figure
from outpace.bench.report import lines_of, machine_line, run_line, table, target_line, versions_line
from outpace.checkpoint.save import write_atomically, write_json

LEGEND = """\
- KV, bytes: what a token adds to the memory of layers with full attention; read: what a step looks at, for
  each token of the text, keys of an index included.
- loss, KL, same top-1: held-out text against the original. agrees: greedy answers, up to the first
difference.
- needles: found at each distance, as the settings name them.
"""
COLUMNS = ("", "KV, bytes", "read", "loss", "change", "KL", "same top-1", "agrees", "needles")
MARKS = {
    "original": ("*", "#222222"),
    "trained": ("D", "#61304b"),
    "latents": ("o", "#c1666b"),
    "index": ("s", "#2a6f97"),
}


def write_pareto(report: dict[str, Any], folder: Path) -> None:
    """folder/report.json, report.md and pareto.png; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = importlib.util.find_spec("matplotlib") is not None
    write_json(folder / "report.json", report)
    if pictures:
        save_figure(_picture(report), folder / "pareto.png")
    write_atomically(folder / "report.md", pareto_markdown(report, pictures).encode())


def pareto_markdown(report: dict[str, Any], pictures: bool = True) -> str:
    lines = machine_line(report), versions_line(report), target_line(report["target"]), run_line(report)
    s = report["settings"]
    message = f"{s['texts']} held-out files of {s['length']:,} tokens; {s['prompts']} prompts of "
    message += f"{s['prompt_tokens']:,} tokens with {s['new_tokens']} greedy ones; needles at "
    message += ", ".join(f"{n:,}" for n in s["distances"]) + " tokens."
    page = [
        "# Bytes per token against damage",
        "",
        *lines_of(*lines),
        message,
        "",
        *pareto_table(report),
        LEGEND,
    ]
    return "\n".join([*page, *(["![Bytes against damage](pareto.png)", ""] if pictures else [])])


def pareto_table(report: dict[str, Any]) -> list[str]:
    base = report["points"][0]["quality"]["nats"]
    return table(COLUMNS, [_cells(point, base) for point in report["points"]])


def _cells(point: dict[str, Any], base: float) -> list[str]:
    quality, memory = point["quality"], point["memory"]
    return [
        point["name"],
        f"{memory['bytes_per_token']:,.0f}",
        f"{memory['bytes_read']:,.0f}",
        f"{quality['nats']:.4f}",
        f"{100 * (quality['nats'] / base - 1):+.2f} %",
        f"{quality['kl']:.4f}",
        f"{100 * quality['same_likeliest']:.1f} %",
        f"{100 * quality['agreement']:.0f} %",
        ", ".join(f"{n['found']} of {n['of']}" for n in quality["needles"]) or "-",
    ]


def _picture(report: dict[str, Any]) -> Any:
    figure, (left, right) = figure_of(1, 2, 3.8, "Bytes per token against damage")
    for axes, damage, label in (
        (left, lambda q: q["kl"], "KL to the original, nats"),
        (right, lambda q: 100 * (1 - q["agreement"]), "greedy answers that differ, %"),
    ):
        for kind, (mark, color) in MARKS.items():
            points = [p for p in report["points"] if p["kind"] == kind]
            x = [p["memory"]["bytes_read"] for p in points]
            axes.plot(x, [damage(p["quality"]) for p in points], mark, color=color, label=kind, markersize=5)
        axes.set_xlabel("bytes read a token of context")
        axes.set_ylabel(label)
        axes.set_xlim(left=0)
        bare(axes)
    left.legend(frameon=False, fontsize=8)
    return figure
