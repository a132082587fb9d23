"""The two pictures of a report: speed bars, and acceptance by position."""

import io
from pathlib import Path
from typing import Any

from outpace.checkpoint.save import write_atomically

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
