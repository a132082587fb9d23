"""Tables of a documentation page, made from reports: what is between two markers is not written by hand.

    <!-- table: lossless ../reports/drafts/gpt-oss/lossless/report.json -->
    ...made...
    <!-- end -->

The path is relative to the page. Where there is no such report yet, the table reports it. The kind "pictures"
shows what lies next to the report.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outpace.bench import comparison as comparison_report
from outpace.bench import context as context_report
from outpace.bench import draft_context as draft_context_report
from outpace.bench import lossless_suite as suites_report
from outpace.bench import memory as memory_report
from outpace.bench import pareto as pareto_report
from outpace.bench import pareto as retrofit_tables
from outpace.bench import recall as recall_report
from outpace.checkpoint.save import write_atomically

MARKED = re.compile(r"(<!-- table: (\S+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def _at(temperature: float) -> Callable[[dict[str, Any]], list[str]]:
    return lambda report: comparison_report.speed_table(report, temperature)


def _times(report: dict[str, Any]) -> list[str]:
    lines = []
    for shape in report["shapes"]:
        lines += [f"**{shape}**", "", *draft_context_report.time_table(report, shape)]
    return lines


def _real_size(report: dict[str, Any]) -> list[str]:
    """A report of benchmarks/real_size.py."""
    warm = report["warm_median"]
    cells = (
        f"{report['checkpoint_gib']:.1f} GiB",
        f"{report['load_seconds']:.1f} s",
        f"{report['peak_rss_gib']:.1f} GiB",
        f"{warm['prefill_tokens_per_s']:.0f} tokens/s",
        f"{warm['tokens_per_s']:.1f} tokens/s",
        f"{warm['share_of_floor']:.0%}",
    )
    heading = "| size | load | peak memory | prompt | decode | of the bandwidth |"
    return [heading, "|---" * len(cells) + "|", "| " + " | ".join(cells) + " |", ""]


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "drafts": comparison_report.training_table,
    "greedy": _at(0.0),
    "sampled": _at(1.0),
    "positions": lambda report: comparison_report.position_table(report, 0.0),
    "lossless": suites_report.lossless_table,
    "controller": suites_report.controller_table,
    "context": _times,
    "steps": context_report.cost_table,
    "latents": context_report.latent_table,
    "loss": recall_report.loss_table,
    "needles": recall_report.needle_table,
    "memory": memory_report.memory_table,
    "pareto": pareto_report.pareto_table,
    "mass": retrofit_tables.mass_table,
    "held": retrofit_tables.held_table,
    "noise": draft_context_report.acceptance_table,
    "real-size": _real_size,
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
