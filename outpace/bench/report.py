"""A report as files (JSON, Markdown, pictures) and as a table in the terminal."""

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from outpace.bench.plots import regime_name, write_plots
from outpace.checkpoint.save import write_atomically, write_json

COLUMNS = (
    "method",
    "batch",
    "tokens/s",
    "speedup",
    "tau",
    "accepted mean / p50 / p90",
    "accept rate",
    "draft / verify / overhead",
    "first token",
    "mismatched tokens",
)
LEGEND = """\
- tokens/s: from the first token to the last, all rows together, median of the repeats (in brackets: slowest
  and fastest).
- speedup: over `plain`, our own autoregressive decoding of the same target in the same run.
- tau: mean number of tokens committed per forward of the target, bonus token included.
- accepted: draft tokens accepted per step; accept rate: accepted over proposed draft tokens.
- draft / verify / overhead: shares of the decoding time.
- mismatched tokens: tokens that differ from autoregressive decoding and are no tie / tokens compared. A tie
  is two logits within 1e-4 in float32; ties are counted, not skipped.
"""


def write_report(report: dict[str, Any], folder: Path) -> None:
    """folder/report.json, report.md, speed.png, acceptance.png; each appears whole or not at all. Without
    matplotlib the pictures are left out and report.md reports it."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = importlib.util.find_spec("matplotlib") is not None
    write_json(folder / "report.json", report)
    if pictures:
        write_plots(report, folder)
    write_atomically(folder / "report.md", markdown(report, pictures).encode())


def markdown(report: dict[str, Any], pictures: bool = True) -> str:
    lines = ["# Decoding speed, side by side", "", *_header(report), ""]
    for regime in dict.fromkeys(r["regime"] for r in report["results"]):
        of = [r for r in report["results"] if r["regime"] == regime]
        temperature = of[0]["temperature"]
        lines += [f"## {regime_name(of[0]).capitalize()} tokens, temperature {temperature:g}", ""]
        lines += table(COLUMNS, map(_row, of))
    lines += [LEGEND]
    value = remarks(report)
    if not pictures:
        value.append("no pictures: they need matplotlib (pip install 'outpace[bench]')")
    if value:
        lines += ["## Remarks", "", *(f"- {line}" for line in value), ""]
    if pictures:
        lines += ["![Tokens per second](speed.png)", "", "![Acceptance by position](acceptance.png)", ""]
    return "\n".join(lines)


def print_report(report: dict[str, Any], console: Console) -> None:
    """The table at 80 columns; report.md has all of it."""
    for regime in dict.fromkeys(r["regime"] for r in report["results"]):
        of = [r for r in report["results"] if r["regime"] == regime]
        title = f"{regime_name(of[0])} tokens"
        shown = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for name in ("method", "batch", "tokens/s", "speedup", "tau", "accept", "differ", "ties"):
            shown.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
        for r in of:
            shown.add_row(
                r["method"],
                str(r["batch"]),
                f"{r['tokens_per_s']:.1f}",
                f"{r['speedup']:.2f}x",
                f"{r['tau']:.2f}",
                f"{r['accept_rate']:.2f}" if r["accept_by_position"] else "-",
                *_differ_and_ties(r["lossless"]),
            )
        console.print(shown)
    for line in remarks(report):
        console.print(f"- {line}", highlight=False, markup=False)


def _differ_and_ties(lossless: dict[str, int]) -> tuple[str, str]:
    if not lossless["checked"]:
        return "not checked", "-"
    return f"{lossless['violations']} / {lossless['checked']}", str(lossless["ties"])


def remarks(report: dict[str, Any]) -> list[str]:
    unrepeated = [
        f"{r['method']}, {r['regime']}, batch {r['batch']}: {rows} rows of repeats differ from the first"
        for r in report["results"]
        if (rows := r["lossless"]["unrepeated"])
    ]
    return [*report["remarks"], *(_agreed(a) for a in report["agreement"]), *unrepeated]


def machine_line(report: dict[str, Any]) -> str:
    m = report["machine"]
    where = m.get("accelerator", m["processor"])
    message = f"**Machine**: {where}, {m['cores']} cores ({m['threads']} threads), {m['memory_gib']} GiB"
    return message + (f"; load before the run {m['load_1min']}" if "load_1min" in m else "")


def versions_line(report: dict[str, Any]) -> str:
    return "**Versions**: " + ", ".join(f"{name} {v}" for name, v in report["versions"].items())


def target_line(t: dict[str, Any]) -> str:
    experts = f", {t['experts']} experts, {t['experts_per_token']} a token" if t["experts"] else ""
    return (
        f"**Target**: {t['architecture']}, {t['layers']} layers of width {t['hidden_size']}{experts}, "
        f"vocabulary {t['vocab_size']}, {t['bytes'] / 2**20:.1f} MiB, computed in {t['compute_dtype']} "
        f"(`{t['fingerprint'][:12]}`)"
    )


def run_line(report: dict[str, Any]) -> str:
    commit = f", commit {report['commit'][:12]}" if report["commit"] else ""
    return f"**Run**: {report['date']}{commit}, `{report['command']}`, {report['seconds']} s"


def lines_of(*message: str) -> list[str]:
    """Lines of one paragraph: two blanks at the end are a line break in Markdown."""
    return [line + "  " for line in message]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, a blank line behind it."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _header(report: dict[str, Any]) -> list[str]:
    d = report["draft"]
    lines = [machine_line(report), versions_line(report), target_line(report["target"])]
    if d is not None:
        lines.append(
            f"**Draft**: DFlash, {d['layers']} layers, block {d['block_size']}, "
            f"{d['parameters'] / 1e6:.2f} M parameters (`{d['fingerprint'][:12]}`)"
        )
    return lines_of(*lines, run_line(report))


def _row(r: dict[str, Any]) -> list[str]:
    total = sum(r["time"].values()) or 1.0
    repeats, accept = r["tokens_per_s_repeats"], r["accept_len"]
    spread = f" ({min(repeats):.0f}-{max(repeats):.0f})" if len(repeats) > 1 else ""
    guesses = bool(r["accept_by_position"])
    return [
        r["method"],
        str(r["batch"]),
        f"{r['tokens_per_s']:.1f}{spread}",
        f"{r['speedup']:.2f}x",
        f"{r['tau']:.2f}",
        f"{accept['mean']:.2f} / {accept['p50']} / {accept['p90']}" if guesses else "-",
        f"{r['accept_rate']:.2f}" if guesses else "-",
        " / ".join(f"{100 * r['time'][p] / total:.0f} %" for p in ("draft", "verify", "rest")),
        f"{1000 * r['first_token_s']:.0f} ms",
        _differences(r),
    ]


def _differences(r: dict[str, Any]) -> str:
    differ, ties = _differ_and_ties(r["lossless"])
    return f"{differ}, {ties} ties" if r["lossless"]["ties"] else differ


def _agreed(a: dict[str, Any]) -> str:
    ours, theirs = a["methods"]
    same = a["prompts"] - a["prompts_that_differ"]
    return (
        f"accepted lengths of {ours} and {theirs}, {a['regime']}: the same in {same} of {a['prompts']} "
        f"prompts ({a['rounds_compared']} rounds compared)"
    )
