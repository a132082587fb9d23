"""Tables of a documentation page, made from reports: what is between two markers is not written by hand.

    <!-- table: lossless ../reports/drafts/gpt-oss/lossless/report.json -->
    ...made...
    <!-- end -->

The path is relative to the page. Where there is no such report yet, the page says so. The kind "pictures"
shows what lies next to the report.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outpace.bench import comparison, context, draft_context, memory, pareto, recall
from outpace.bench.controller_suite import controller_table
from outpace.bench.lossless_suite import lossless_table
from outpace.bench.report import Column, table
from outpace.checkpoint.save import write_atomically

MARKED = re.compile(r"(<!-- table: (\S+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def _at(temperature: float) -> Callable[[dict[str, Any]], list[str]]:
    return lambda report: comparison.speed_table(report, temperature)


def _times(report: dict[str, Any]) -> list[str]:
    lines = []
    for shape in report["shapes"]:
        lines += [f"**{shape}**", "", *draft_context.time_table(report, shape)]
    return lines


REAL_SIZE: tuple[Column, ...] = (  # of a report of benchmarks/real_size.py
    ("size", "checkpoint_gib", "{:.1f} GiB"),
    ("load", "load_seconds", "{:.1f} s"),
    ("peak memory", "peak_rss_gib", "{:.1f} GiB"),
    ("prompt", "warm_median.prefill_tokens_per_s", "{:.0f} tokens/s"),
    ("decode", "warm_median.tokens_per_s", "{:.1f} tokens/s"),
    ("of the bandwidth", "warm_median.share_of_floor", "{:.0%}"),
)


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "drafts": comparison.training_table,
    "greedy": _at(0.0),
    "sampled": _at(1.0),
    "positions": lambda report: comparison.position_table(report, 0.0),
    "lossless": lossless_table,
    "controller": controller_table,
    "context": _times,
    "steps": context.cost_table,
    "latents": context.latent_table,
    "loss": recall.loss_table,
    "needles": recall.needle_table,
    "memory": memory.memory_table,
    "pareto": pareto.pareto_table,
    "mass": pareto.mass_table,
    "held": pareto.held_table,
    "noise": draft_context.acceptance_table,
    "real-size": lambda report: table(REAL_SIZE, [report]),
}


PICTURES = "pictures"


def filled(text: str, folder: Path) -> str:
    """The page's text with every marked table made again. Raises ValueError for a table nobody knows, and
    where markers are not closed."""
    if text.count("<!-- table: ") != len(MARKED.findall(text)):
        raise ValueError("a marked table is not closed by <!-- end -->, or names no report")

    def made(result: re.Match[str]) -> str:
        opening, kind, path, _, closing = result.groups()
        if kind not in (*TABLES, PICTURES):
            raise ValueError(f"no table {kind!r}; known: {', '.join(TABLES)}, {PICTURES}")
        report = folder / path
        if not report.is_file():
            return f"{opening}\nNot measured yet.\n\n{closing}"
        if kind == PICTURES:
            beside = sorted(picture.name for picture in report.parent.glob("*.png"))
            lines = [f"![{name.removesuffix('.png')}]({Path(path).with_name(name)})\n" for name in beside]
        else:
            lines = TABLES[kind](json.loads(report.read_text(encoding="utf-8")))
        return f"{opening}\n" + "\n".join(lines) + closing

    return MARKED.sub(made, text)


def update_page(page: Path) -> bool:
    """Rewrite the page's tables; -> whether anything changed."""
    text = page.read_text(encoding="utf-8")
    wanted = filled(text, page.parent)
    if wanted != text:
        write_atomically(page, wanted.encode())
    return wanted != text
