"""The report of the recall suite as files: JSON, Markdown, and a picture."""

import importlib.util
from pathlib import Path
from typing import Any

from outpace.bench.plots import bare, figure_of, save_figure
from outpace.bench.report import lines_of, machine_line, run_line, table, target_line, versions_line
from outpace.checkpoint.save import write_atomically, write_json

LEGEND = """\
- loss: nats per token of held-out files, read from their beginning: the mean over files of a stretch's mean.
- the last quarter: what text far back is worth to what follows.
- needles: a line `name = value` is so many tokens of a held-out file ahead of its name; found where
  greedy decoding states all six digits of the value. One digit in ten is right by chance.
"""


def write_recall(report: dict[str, Any], folder: Path) -> None:
    """folder/report.json, report.md and recall.png; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = importlib.util.find_spec("matplotlib") is not None
    write_json(folder / "report.json", report)
    if pictures:
        save_figure(_over_distance(report), folder / "recall.png")
    write_atomically(folder / "report.md", recall_markdown(report, pictures).encode())


def recall_markdown(report: dict[str, Any], pictures: bool = True) -> str:
    lines = machine_line(report), versions_line(report), target_line(report["target"]), run_line(report)
    page = ["# What a target makes of a long context", "", *lines_of(*lines), "", *loss_table(report)]
    near, last = report["settings"]["near"], report["last_quarter"]
    both = f"{last['all']:.3f} nats with all of the text, {last['near']:.3f} with"
    message = f"The last quarter: {both} the {near:,} to {2 * near:,} tokens before each token."
    page += [message, "", *needle_table(report), LEGEND]
    return "\n".join([*page, *(["![Needles and loss](recall.png)", ""] if pictures else [])])


def loss_table(report: dict[str, Any]) -> list[str]:
    rows = [[f"{r['begin']:,} .. {r['end']:,}", f"{r['nats']:.3f}"] for r in report["loss"]]
    return table(("position", "loss, nats"), rows)


def needle_table(report: dict[str, Any]) -> list[str]:
    rows = [
        [f"{r['distance']:,}", f"{r['found']} of {r['of']}", f"{100 * r['digits']:.0f} %"]
        for r in report["needles"]
    ]
    return table(("needle, tokens back", "found", "digits right"), rows)


def _over_distance(report: dict[str, Any]) -> Any:
    figure, (left, right) = figure_of(1, 2, 3.6, "A long context")
    loss, needles = report["loss"], report["needles"]
    left.plot([r["end"] for r in loss], [r["nats"] for r in loss], "o-", color="#2a6f97", markersize=3.5)
    left.set_ylabel("held-out loss, nats")
    left.set_xlabel("position")
    items = [100 * r["found"] / r["of"] for r in needles]
    right.plot([r["distance"] for r in needles], items, "o-", color="#c1666b", markersize=3.5)
    right.set_ylabel("needles found, %")
    right.set_xlabel("tokens back")
    right.set_ylim(-3, 103)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        bare(axes)
    return figure
