"""A report as files (JSON, Markdown, pictures) and as a table in the terminal."""

import importlib.util
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from outpace.checkpoint.save import write_atomically, write_json

COLOURS = {
    "transformers": "#b0b0b0",
    "transformers-dflash": "#7a7a7a",
    "plain": "#8fb8de",
    "ngram": "#e3a857",
    "suffix": "#c1666b",
    "dflash": "#2a6f97",
    "dflash-tree": "#4f9d69",
}
MARKS = {"dflash": "o", "transformers-dflash": "x", "ngram": "s", "suffix": "^", "dflash-tree": "D"}
DPI = 200  # 8 inches wide: sharp at the 800 pixels a README shows


def write_plots(report: dict[str, Any], folder: Path) -> None:
    """folder/speed.png and folder/acceptance.png. Raises ImportError without matplotlib."""
    save_figure(_speed(report["results"]), folder / "speed.png")
    save_figure(_acceptance(report["results"]), folder / "acceptance.png")


def figure_of(rows: int, columns: int, height: float, title: str) -> tuple[Any, list[Any]]:
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


def _order(names: set[str]) -> list[str]:
    return [m for m in COLOURS if m in names]


def _rank(result: dict[str, Any]) -> int:
    return list(COLOURS).index(result["method"])


def regime_name(result: dict[str, Any]) -> str:
    return f"prompt {result['prompt_tokens']}, decode {result['new_tokens']}"


def _regimes(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    values: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        values.setdefault(result["regime"], []).append(result)
    return values


def _speed(results: list[dict[str, Any]]) -> Any:
    """One panel per regime, one group of bars per batch size, the speedup over `plain` above each bar."""
    regimes = _regimes(results)
    figure, panels = figure_of(
        len(regimes), 1, 1.4 + 2.7 * len(regimes), "Tokens per second, and speedup over plain"
    )
    widest = len({r["method"] for r in results})
    for axes, of in zip(panels, regimes.values(), strict=True):
        batches = sorted({r["batch"] for r in of})
        for place, batch in enumerate(batches):
            here = sorted((r for r in of if r["batch"] == batch), key=_rank)
            for i, r in enumerate(here):
                left = place + (i - (len(here) - 1) / 2) * 0.88 / widest
                bar = axes.bar(left, r["tokens_per_s"], 0.8 / widest, color=COLOURS[r["method"]])
                message = "" if r["method"] == "plain" else f"{r['speedup']:.2f}x"
                axes.bar_label(bar, [message], fontsize=8, padding=1.5)
        axes.set_xticks(range(len(batches)), [f"batch {b}" for b in batches])
        axes.set_xlim(-0.6, len(batches) - 0.4)
        axes.set_title(regime_name(of[0]), fontsize=10)
        axes.set_ylabel("tokens/s")
        axes.margins(y=0.12)
        bare(axes)
    _legend(figure, _order({r["method"] for r in results}))
    return figure


def _legend(figure: Any, methods: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[m], label=m) for m in methods]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(methods), frameon=False, fontsize=9)


def _acceptance(results: list[dict[str, Any]]) -> Any:
    """How often draft token k of a proposal is accepted, at the smallest batch measured."""
    regimes = _regimes([r for r in results if r["accept_by_position"]])
    figure, panels = figure_of(
        1, max(1, len(regimes)), 3.8, "Share of proposals where the draft token k was accepted"
    )
    for axes, of in zip(panels, regimes.values(), strict=False):
        smallest = min(r["batch"] for r in of)
        for result in sorted(of, key=_rank):
            if result["batch"] != smallest:
                continue
            method, shares = result["method"], result["accept_by_position"]
            axes.plot(
                range(1, len(shares) + 1),
                shares,
                MARKS[method] + ("--" if method == "transformers-dflash" else "-"),
                color="black" if method == "transformers-dflash" else COLOURS[method],
                zorder=5 if method == "transformers-dflash" else 3,  # it should lie exactly on dflash
                clip_on=False,
                label=f"{method} (tau {result['tau']:.2f})",
            )
        axes.set_title(f"{regime_name(of[0])}, batch {smallest}", fontsize=10)
        axes.set_xlabel("position k in the block")
        axes.set_ylim(0, 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(frameon=False, fontsize=9)
        bare(axes)
    if not regimes:
        panels[0].text(0.5, 0.5, "no method of this run proposes anything", ha="center")
        panels[0].set_axis_off()
    else:
        panels[0].set_ylabel("accepted")
    return figure


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
