"""The picture on the first page: speedup of each draft over autoregressive decoding, from a report.

    python benchmarks/overview.py reports/drafts/embedded/report.json docs/overview.png

The values are stored in the file as well (PNG text "Description"); tests/test_front_door.py compares them
with the report.
"""

import io
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from outpace.checkpoint.save import write_atomically

LABELS = {"n-gram": "n-gram lookup", "suffix": "suffix lookup"}


def speedups(report: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Method -> (speedup, tau) at temperature 0, without the controller."""
    return {
        row["method"]: (round(row["speedup"], 2), round(row["tau"], 2))
        for row in report["results"]
        if row["temperature"] == 0 and not row.get("controller") and row["method"] != "plain"
    }


def _label(method: str) -> str:
    for short, long in LABELS.items():
        method = method.replace(short, long, 1)
    return method


def draw(report: dict[str, Any]) -> bytes:
    """The PNG's bytes."""
    values = sorted(speedups(report).items(), key=lambda item: item[1][0])
    figure = Figure(figsize=(8, 0.42 * len(values) + 1.1), layout="constrained")
    axes = figure.subplots()
    names = [_label(name) for name, _ in values]
    bars = axes.barh(names, [speedup for _, (speedup, _) in values], color="#2a6f97", height=0.62)
    axes.bar_label(bars, [f"{s:.2f}x   tau {t:.2f}" for _, (s, t) in values], padding=4, fontsize=9)
    axes.axvline(1, color="#444444", linewidth=1)
    axes.set_xlim(0, 1.28 * values[-1][1][0])
    axes.set_title("Speedup over autoregressive decoding, temperature 0, identical output", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160, metadata={"Description": json.dumps(dict(values))})
    return file.getvalue()


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    write_atomically(target, draw(json.loads(source.read_text(encoding="utf-8"))))
    print(f"written: {target}")


if __name__ == "__main__":
    main()
