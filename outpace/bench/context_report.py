"""The report of the context suite as files: JSON, Markdown, and a picture."""

import importlib.util
from pathlib import Path
from typing import Any

from outpace.bench.context import (
    BOTH,
    BOTH_FULL,
    FULL,
    LATENT,
    LATENT_FULL,
    LATENTS,
    METHODS,
    PARTIAL,
    PLAIN,
    REFRESH,
    SETTLE,
    SPARSE,
    SPARSE_FULL,
)
from outpace.bench.draft_context_report import short
from outpace.bench.plots import bare, figure_of, save_figure
from outpace.bench.report import lines_of, machine_line, run_line, table, target_line, versions_line
from outpace.checkpoint.save import write_atomically, write_json

COLOURS = {PLAIN: "#8f8f8f", FULL: "#c1666b", PARTIAL: "#2a6f97", SETTLE: "#e3a857", REFRESH: "#5b8c5a"}
COLOURS |= {SPARSE: "#61304b", SPARSE_FULL: "#9a6fb0", LATENT: "#b8860b", LATENT_FULL: "#d9c27a"}
COLOURS |= {BOTH: "#2f4f2f", BOTH_FULL: "#8fae8f"}
LEGEND = """\
- ms: medians of the repeats at batch 1, of the layers alone: neither head nor draft.
- of the floor: the bytes that must be read (weights once, experts as touched, keys and values), over the
  machine's reading rate, over the time. Low where arithmetic takes the time, as verifying many positions does
  on a CPU.
- ms per token: what these times come to where a round brings tau tokens and all that passes on partial KV
  is: rounds on partial KV until the buffer is full, then a refresh and the full pass. Computed, not run.
"""


def write_context(report: dict[str, Any], folder: Path) -> None:
    """folder/report.json, report.md and context.png; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = importlib.util.find_spec("matplotlib") is not None
    write_json(folder / "report.json", report)
    if pictures:
        save_figure(_over_context(report), folder / "context.png")
    write_atomically(folder / "report.md", context_markdown(report, pictures).encode())


def context_markdown(report: dict[str, Any], pictures: bool = True) -> str:
    floor = f"**Floor**: {report['floor']['read_bytes_per_s'] / 1e9:.1f} GB/s read by all threads together"
    s = report["settings"]
    asked = (
        f"**Asked**: blocks of {s['columns']} positions, partial KV of {s['budget']:,} tokens chosen by "
        f"{s['selector']}, {s['n_spec_tokens_buf']} tokens buffered, tau {s['tau']:g}"
    )
    lines = machine_line(report), versions_line(report), target_line(report["target"]), floor, asked
    page = ["# The cost of a step against context", "", *lines_of(*lines, run_line(report)), ""]
    page += [*cost_table(report), *latent_table(report)]
    page += [f"- **{name}**: {about}." for name, about in report["methods"].items()]
    page += [LEGEND]
    if pictures:
        page += ["![Time against context](context.png)", ""]
    return "\n".join(page)


def cost_table(report: dict[str, Any]) -> list[str]:
    rows = []
    for cell in report["cells"]:
        m, a_token = cell["methods"], cell["seconds_per_token"]
        times = [f"{1000 * m[name]['seconds']:,.1f}" if name in m else "-" for name in METHODS]
        rows.append(
            [
                f"{cell['context']:,}",
                *times,
                *(
                    f"{x:.2f}x" if x else "-"
                    for x in (cell["verification_speedup"], cell.get("sparse_speedup"))
                ),
                *(f"{1000 * a_token[name]:,.1f}" if name in a_token else "-" for name in (FULL, PARTIAL)),
                *(f"{100 * m[name]['share_of_floor']:.0f} %" for name in (PLAIN, FULL)),
                f"{cell['kv_bytes'] / 1e6:,.0f}",
                f"{cell['partial_kv_bytes'] / 1e6:,.0f}" if cell["partial_kv_bytes"] else "-",
            ]
        )
    columns = ["context", *(f"{name}, ms" for name in METHODS), "full / partial", "plain / sparse"]
    columns += ["ms per token, full", "with partial", "of the floor, plain", "full", "KV, MB", "partial, MB"]
    return table(columns, rows)


def latent_table(report: dict[str, Any]) -> list[str]:
    rows = []
    for cell in report["cells"]:
        m = cell["methods"]
        times = [f"{1000 * m[name]['seconds']:,.1f}" if name in m else "-" for name in (PLAIN, *LATENTS)]
        sizes = [f"{cell[name] / 1e6:,.0f}" for name in ("kv_bytes", "latent_kv_bytes")]
        rows.append([f"{cell['context']:,}", *times, *sizes])
    return table(["context", *(f"{name}, ms" for name in (PLAIN, *LATENTS)), "KV, MB", "latents, MB"], rows)


def _over_context(report: dict[str, Any]) -> Any:
    figure, (axes,) = figure_of(1, 1, 4.2, "A step against context")
    for name in (*METHODS, *LATENTS):
        items = [cell for cell in report["cells"] if name in cell["methods"]]
        at = [c["context"] for c in items], [1000 * c["methods"][name]["seconds"] for c in items]
        axes.plot(*at, "o-", color=COLOURS[name], label=name, markersize=3.5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    contexts = [cell["context"] for cell in report["cells"]]
    axes.set_xticks(contexts, [short(n) for n in contexts], fontsize=8)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("ms")
    bare(axes)
    axes.legend(frameon=False, fontsize=8)
    return figure
