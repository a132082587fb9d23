"""A report as files: report.json, a Markdown page whose tables are declared by their columns, and plots."""

import importlib.util
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outpace.checkpoint.save import write_atomically, write_json

Report = dict[str, Any]
Value = str | Callable[[Any], Any]  # a dotted path into a row, or a function of it
Column = tuple[str, Value, str]  # heading, value, format such as "{:.2f}x"
DPI = 200  # 8 inches wide: sharp at the 800 pixels a README shows


def cell(row: Mapping[str, Any], value: Value, form: str) -> str:
    """A path that is missing on the way, and None, give "-". A tuple or list fills several places of the
    format."""
    content = value(row) if callable(value) else dig(row, value)
    if content is None:
        return "-"
    return form.format(*content) if isinstance(content, tuple | list) else form.format(content)


def dig(row: Any, path: str) -> Any:
    for key in path.split("."):
        row = None if row is None else row.get(key)
    return row


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A Markdown table and a blank line."""
    lines = ["| " + " | ".join(heading for heading, _, _ in columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(cell(row, value, form) for _, value, form in columns) + " |")
    return [*lines, ""]


@dataclass(frozen=True)
class Page:
    """How one suite's report is shown. `measured`: the header line that says what ran; `body`: Markdown
    lines under the header; `plots`: file name -> caption and what draws it."""

    title: str
    body: Callable[[Report], list[str]]
    measured: Callable[[Report], str] | None = None
    plots: dict[str, tuple[str, Callable[[Report], Any]]] = field(default_factory=dict)

    def markdown(self, report: Report, plots: bool = True) -> str:
        lines = [machine_line(report), versions_line(report)]
        if isinstance(report.get("target"), dict):
            lines.append(target_line(report["target"]))
        lines += [f"**Measured**: {self.measured(report)}"] if self.measured else []
        # two blanks at the end are a line break in Markdown
        page = [f"# {self.title}", "", *(line + "  " for line in (*lines, run_line(report))), ""]
        page += self.body(report)
        remarks = list(report.get("remarks", ()))
        if self.plots and not plots:
            remarks.append("no plots: they need matplotlib (pip install 'outpace[bench]')")
        if remarks:
            page += ["## Remarks", "", *(f"- {line}" for line in remarks), ""]
        if plots:
            for name, (caption, _) in self.plots.items():
                page += [f"![{caption}]({name})", ""]
        return "\n".join(page)

    def write(self, report: Report, folder: Path) -> None:
        """folder/report.json, report.md and the plots; each appears whole or not at all. Without matplotlib
        there are no plots, and report.md says so."""
        folder.mkdir(parents=True, exist_ok=True)
        plots = importlib.util.find_spec("matplotlib") is not None
        write_json(folder / "report.json", report)
        if plots:
            for name, (_, draw) in self.plots.items():
                save_figure(draw(report), folder / name)
        write_atomically(folder / "report.md", self.markdown(report, plots).encode())


def machine_line(report: Report) -> str:
    m = report["machine"]
    where = m.get("accelerator", m["processor"])
    message = f"**Machine**: {where}, {m['cores']} cores ({m['threads']} threads), {m['memory_gib']} GiB"
    return message + (f"; load before the run {m['load_1min']}" if "load_1min" in m else "")


def versions_line(report: Report) -> str:
    return "**Versions**: " + ", ".join(f"{name} {v}" for name, v in report["versions"].items())


def target_line(t: dict[str, Any]) -> str:
    experts = f", {t['experts']} experts, {t['experts_per_token']} a token" if t["experts"] else ""
    return (
        f"**Target**: {t['architecture']}, {t['layers']} layers of width {t['hidden_size']}{experts}, "
        f"vocabulary {t['vocab_size']}, {t['bytes'] / 2**20:.1f} MiB, computed in {t['compute_dtype']} "
        f"(`{t['fingerprint'][:12]}`)"
    )


def run_line(report: Report) -> str:
    commit = f", commit {report['commit'][:12]}" if report["commit"] else ""
    return f"**Run**: {report['date']}{commit}, `{report['command']}`, {report['seconds']} s"


def differ(*counts: dict[str, int] | None) -> str:
    """Tokens that differ from autoregressive decoding's / tokens compared, and ties."""
    known = [c for c in counts if c is not None and c["checked"]]
    if not known:
        return "-"
    ties = sum(c["ties"] for c in known)
    message = f"{sum(c['violations'] for c in known):,} / {sum(c['checked'] for c in known):,}"
    return f"{message}, {ties} ties" if ties else message


def figure_of(rows: int, columns: int, height: float, title: str) -> tuple[Any, list[Any]]:
    """A figure 8 inches wide, and its panels. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=12)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def save_figure(figure: Any, path: Path) -> None:
    held = io.BytesIO()
    figure.savefig(held, format="png")
    write_atomically(path, held.getvalue())


def bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


def context_axis(axes: Any, contexts: Sequence[int]) -> None:
    """Both axes logarithmic; contexts in tokens, as 4k where they are multiples of 1,024."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [short(n) for n in contexts], fontsize=8)
    axes.set_xlabel("context, tokens")
    bare(axes)


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
