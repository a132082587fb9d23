"""The report of the memory suite as files: JSON, Markdown, and a picture."""

import importlib.util
from pathlib import Path
from typing import Any

from outpace.bench.plots import bare, figure_of, save_figure
from outpace.bench.report import lines_of, machine_line, run_line, table, target_line, versions_line
from outpace.checkpoint.save import write_atomically, write_json

LEGEND = """\
- tokens/s, speedup: decoding alone, prompts one by one, rows interleaved; over autoregressive decoding of
the original.
- KV, bytes: what a token adds to the memory of layers with full attention, keys of an index included.
- read: what a step looks at, for each token of the text; partial KV reads its budget between full passes.
- loss, KL, same top-1: held-out text against the original. agrees: greedy answers, up to the first
difference.
- lossless: against autoregressive decoding of the target as the row has it, named in the last column.
"""
COLUMNS = (
    *("", "tokens/s", "speedup", "tau", "KV, bytes", "read", "loss", "KL", "same top-1", "agrees", "needles"),
    *("violations, ties", "lossless against"),
)


def write_memory(report: dict[str, Any], folder: Path) -> None:
    """folder/report.json, report.md and memory.png; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = importlib.util.find_spec("matplotlib") is not None
    write_json(folder / "report.json", report)
    if pictures:
        save_figure(_picture(report), folder / "memory.png")
    write_atomically(folder / "report.md", memory_markdown(report, pictures).encode())


def memory_markdown(report: dict[str, Any], pictures: bool = True) -> str:
    lines = machine_line(report), versions_line(report), target_line(report["target"]), run_line(report)
    s = report["settings"]
    message = (
        f"Draft: `{report['draft']}`. {s['prompts']} held-out prompts of {s['prompt_tokens']:,} tokens, "
    )
    message += f"{s['new_tokens']} new ones, {s['repeats']} times; partial KV of {s['partial']:,} tokens."
    page = [
        "# What a target has to remember",
        "",
        *lines_of(*lines),
        message,
        "",
        *memory_table(report),
        LEGEND,
    ]
    return "\n".join([*page, *(["![Speed and memory](memory.png)", ""] if pictures else [])])


def memory_table(report: dict[str, Any]) -> list[str]:
    return table(COLUMNS, [_cells(row) for row in report["rows"]])


def _cells(row: dict[str, Any]) -> list[str]:
    quality, memory, lossless = row["quality"], row["memory"], row["lossless"]
    items = [f"{n['found']} of {n['of']}" for n in quality["needles"]]
    return [
        row["name"],
        f"{row['tokens_per_s']:.1f}",
        f"{row['over_plain']:.2f}",
        "-" if row["tau"] is None else f"{row['tau']:.2f}",
        f"{memory['bytes_per_token']:,.0f}",
        f"{memory['bytes_read']:,.0f}",
        f"{quality['nats']:.4f}",
        f"{quality['kl']:.3f}",
        f"{100 * quality['same_likeliest']:.1f} %",
        f"{100 * quality['agreement']:.0f} %",
        ", ".join(items) or "-",
        f"{lossless['violations']}, {lossless['ties']}",
        "itself" if row["lossless_against"] == row["name"] else row["lossless_against"],
    ]


def _picture(report: dict[str, Any]) -> Any:
    figure, (left, right) = figure_of(1, 2, 3.8, "Remembering less")
    rows = report["rows"]
    names, place = [row["name"] for row in rows], range(len(rows))
    left.barh(place, [row["over_plain"] for row in rows], color="#2a6f97")
    left.set_yticks(place, names)
    left.axvline(1.0, color="#888888", linewidth=0.8)
    left.set_xlabel("speed over autoregressive decoding")
    right.barh(place, [row["memory"]["bytes_per_token"] for row in rows], color="#c1666b")
    right.barh(place, [row["memory"]["bytes_read"] for row in rows], color="#61304b", height=0.4)
    right.set_yticks(place, [""] * len(rows))
    right.set_xlabel("bytes per token: kept, and (dark) read")
    for axes in (left, right):
        axes.invert_yaxis()
        bare(axes)
    return figure
