"""Drawing with matplotlib in the house style: figures, labels, bars and axes of a report's plots."""

from collections.abc import Mapping, Sequence
from typing import Any

DPI = 200  # 8 inches wide: sharp at the 800 pixels a README shows
BLUE, RED, YELLOW, GREEN, PURPLE, GREY = "#2a6f97", "#c1666b", "#e3a857", "#5b8c5a", "#8c5a7c", "#8f8f8f"
PALETTE = (BLUE, YELLOW, RED, GREEN, PURPLE, "#8fb8de", "#b0813d", GREY, "#3f3f3f", "#b4c7a0", "#d0d0d0")


def figure(rows: int, columns: int, height: float, title: str) -> tuple[Any, list[Any]]:
    """A figure 8 inches wide, and its panels. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, height), dpi=DPI, layout="constrained")
    drawn.suptitle(title, fontsize=12)
    panels = list(drawn.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
    return drawn, panels


def label(axes: Any, x: str = "", y: str = "", title: str = "", legend: bool = False) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    if legend:
        axes.legend(frameon=False, fontsize=8)


def named_rows(axes: Any, names: Sequence[str]) -> None:
    """Horizontal bars 0, 1, ..: their names, the first on top."""
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def stacked_bars(axes: Any, parts: Mapping[str, Sequence[float]], horizontal: bool = False) -> None:
    """Bars 0, 1, .. of several parts each: part -> its size in every bar."""
    ends = [0.0] * len(next(iter(parts.values())))
    for (name, sizes), colour in zip(parts.items(), PALETTE, strict=False):
        place = {"left" if horizontal else "bottom": ends}
        draw = axes.barh if horizontal else axes.bar
        draw(range(len(sizes)), sizes, 0.7, color=colour, label=name, **place)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]


def context_axis(axes: Any, contexts: Sequence[int]) -> None:
    """Both axes logarithmic; contexts in tokens, as 4k where they are multiples of 1,024."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [short(n) for n in contexts], fontsize=8)
    axes.set_xlabel("context, tokens")


def integer_axis(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
