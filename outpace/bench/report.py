"""A report as files: report.json, a Markdown page with tables declared as columns, and the plots."""

import importlib.util
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from outpace.checkpoint.save import write_atomically, write_json

Report = dict[str, Any]
Value = str | Callable[[Any], Any]  # a dotted path into a row, or a function of the row
Column = tuple[str, Value, str]  # heading, value, format such as "{:.2f}x"
Columns = tuple[Column, ...]


def cell(row: Mapping[str, Any], value: Value, form: str) -> str:
    """None and a missing path give "-"; a tuple or list fills several places of the format."""
    content = value(row) if callable(value) else get(row, value)
    if content is None:
        return "-"
    return form.format(*content) if isinstance(content, tuple | list) else form.format(content)


def get(row: Any, path: str) -> Any:
    """The value at a dotted path; None where a key is missing."""
    for key in path.split("."):
        row = None if row is None else row.get(key)
    return row


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A Markdown table and a blank line."""
    lines = ["| " + " | ".join(heading for heading, _, _ in columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(cell(row, value, form) for _, value, form in columns) + " |")
    return [*lines, ""]


def print_table(console: Console, title: str, columns: Columns, rows: Iterable[Mapping[str, Any]]) -> None:
    shown = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading, _, _ in columns:
        shown.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(cell(row, value, form) for _, value, form in columns))
    console.print(shown)


def print_remarks(console: Console, report: Report) -> None:
    for line in report["remarks"]:
        console.print(f"- {line}", highlight=False, markup=False)


def table_of(rows: Value, *columns: Column) -> Callable[[Report], list[str]]:
    """The table of some rows of a report: those at a dotted path, or computed from it."""
    return lambda report: table(columns, rows(report) if callable(rows) else get(report, rows))


def by_name(path: str) -> Callable[[Report], list[dict[str, Any]]]:
    """Rows of a mapping at a dotted path, each with its key as "name"."""
    return lambda report: [{"name": name, **row} for name, row in get(report, path).items()]


def nested(key: str, column: Column) -> Column:
    """The same column, read from row[key]."""
    heading, value, form = column
    return (
        heading,
        lambda row: row[key] and (value(row[key]) if callable(value) else get(row[key], value)),
        form,
    )


def scaled(path: str, factor: float) -> Callable[[Any], float | None]:
    def read(row: Any) -> float | None:
        value = get(row, path)
        return None if value is None else factor * value

    return read


# ---- columns that several suites share ---------------------------------------------------------------


def mismatches(*checks: dict[str, int] | None) -> str | None:
    """Tokens that differ from autoregressive decoding / tokens compared, and ties."""
    known = [c for c in checks if c is not None and c["checked"]]
    if not known:
        return None
    ties = sum(c["ties"] for c in known)
    message = f"{sum(c['violations'] for c in known):,} / {sum(c['checked'] for c in known):,}"
    return f"{message}, {ties} ties" if ties else message


METHOD: Column = ("method", "method", "{}")
TAU: Column = ("tau", "tau", "{:.2f}")
SPEEDUP: Column = ("speedup", "speedup", "{:.2f}x")
RATE: Column = ("tokens/s", "tokens_per_s", "{:.0f}")
RULE: Column = ("acceptance rule", lambda r: r["rule"] if r["temperature"] else "greedy", "{}")
MISMATCHED: Column = ("mismatched tokens", lambda r: mismatches(r["lossless"]), "{}")
PREDICTED: Columns = (  # the controller's expectation and its error
    (
        "predicted speedup",
        lambda r: (p := r["predicted"]) and [p["speedup"], p["speedup_error"]],
        "{:.2f}x, {:+.0%}",
    ),
    ("error in tokens/s", "predicted.error", "{:+.0%}"),
)
QUALITY: Columns = (
    ("same top-1", "quality.same_likeliest", "{:.1%}"),
    ("agrees", "quality.agreement", "{:.0%}"),
    (
        "needles",
        lambda r: ", ".join(f"{n['found']} of {n['of']}" for n in r["quality"]["needles"]) or None,
        "{}",
    ),
)
KV_BYTES: Columns = (
    ("KV, bytes", "memory.bytes_per_token", "{:,.0f}"),
    ("read", "memory.bytes_read", "{:,.0f}"),
)


# ---- the page ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Page:
    """The report of one suite. `measured`: the header line that describes the run; `body`: Markdown lines
    below the header; `plots`: file name -> caption and drawing function."""

    title: str
    body: Callable[[Report], list[str]]
    measured: Callable[[Report], str] | None = None
    plots: dict[str, tuple[str, Callable[[Report], Any]]] = field(default_factory=dict)

    def markdown(self, report: Report, plots: bool = True) -> str:
        lines = header(report)
        lines[-1:-1] = [f"**Measured**: {self.measured(report)}"] if self.measured else []
        # two blanks at the end are a line break in Markdown
        page = [f"# {self.title}", "", *(line + "  " for line in lines), "", *self.body(report)]
        remarks = list(report.get("remarks", ()))
        if self.plots and not plots:
            remarks.append("no plots: they need matplotlib (pip install 'outpace[bench]')")
        if remarks:
            page += ["## Remarks", "", *(f"- {line}" for line in remarks), ""]
        for name, (caption, _) in self.plots.items() if plots else ():
            page += [f"![{caption}]({name})", ""]
        return "\n".join(page)

    def write(self, report: Report, folder: Path) -> None:
        """folder/report.json, report.md and the plots, each written atomically. Without matplotlib there are
        no plots, and report.md notes it. Removes progress.jsonl last: a stop before loses no measurement."""
        folder.mkdir(parents=True, exist_ok=True)
        plots = importlib.util.find_spec("matplotlib") is not None
        write_json(folder / "report.json", report)
        for name, (_, draw) in self.plots.items() if plots else ():
            image = io.BytesIO()
            draw(report).savefig(image, format="png")
            write_atomically(folder / name, image.getvalue())
        write_atomically(folder / "report.md", self.markdown(report, plots).encode())
        (folder / "progress.jsonl").unlink(missing_ok=True)


def header(report: Report) -> list[str]:
    """Machine, versions, target and command of a run."""
    m, t = report["machine"], report.get("target")
    chip = f"{m['processor']} ({m['vector']})" if "vector" in m else m["processor"]
    load = f"; load before the run {m['load_1min']}" if "load_1min" in m else ""
    cores = f"{m['cores']} cores ({m['threads']} threads)"
    lines = [
        f"**Machine**: {m.get('accelerator', chip)}, {cores}, {m['memory_gib']} GiB{load}",
        "**Versions**: " + ", ".join(f"{name} {v}" for name, v in report["versions"].items()),
    ]
    if isinstance(t, dict):
        experts = f", {t['experts']} experts, {t['experts_per_token']} per token" if t["experts"] else ""
        dtype = t.get("kv_cache_dtype", t["compute_dtype"])
        kv = f", keys and values in {dtype}" if dtype != t["compute_dtype"] else ""
        rounded = t.get("activation_dtype", t["compute_dtype"])
        kv += f", activations in {rounded}" if rounded != t["compute_dtype"] else ""
        lines.append(
            f"**Target**: {t['architecture']}, {t['layers']} layers of width {t['hidden_size']}{experts}, "
            f"vocabulary {t['vocab_size']}, {t['bytes'] / 2**20:.1f} MiB, computed in {t['compute_dtype']}"
            f"{kv} (`{t['fingerprint'][:12]}`)"
        )
    commit = f", commit {report['commit'][:12]}" if report["commit"] else ""
    lines.append(f"**Run**: {report['date']}{commit}, `{report['command']}`, {report['seconds']} s")
    if report.get("not_for_publication"):
        lines.insert(0, f"**Not for publication**: {report['not_for_publication']}")
    return lines
