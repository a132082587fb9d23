"""The picture on the first page: tokens/s of llama.cpp and of every method on problems, from a report.

    python benchmarks/overview.py reports/answers/report.json docs/overview.png

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

LABELS = {"llama.cpp": "llama.cpp", "plain": "Outpace, without a draft"}


def rates(report: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """Method -> (tokens/s, over llama.cpp), at temperature 0, all families together."""
    rows = [row for row in report["results"] if row["family"] == "all" and row["temperature"] == 0]
    names = [row["method"] + ", controller" * row["controller"] for row in rows]
    values = [(round(row["tokens_per_s"]), round(row.get("over_llama_cpp", 1.0), 2)) for row in rows]
    return dict(zip(names, values, strict=True))


def draw(report: dict[str, Any]) -> bytes:
    """The PNG's bytes."""
    values = rates(report)
    figure = Figure(figsize=(8, 0.42 * len(values) + 1.1), layout="constrained")
    axes = figure.subplots()
    colours = ["#8d99ae" if name == "llama.cpp" else "#2a6f97" for name in values]
    names = [LABELS.get(name, f"Outpace, {name}") for name in values]
    bars = axes.barh(names, [rate for rate, _ in values.values()], color=colours, height=0.62)
    labels = [f"{rate:,}   {times:.2f}x" for rate, times in values.values()]
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.set_xlim(0, 1.25 * max(rate for rate, _ in values.values()))
    axes.invert_yaxis()
    axes.set_title("Tokens per second on one GGUF file, temperature 0, held-out problems", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160, metadata={"Description": json.dumps(values)})
    return file.getvalue()


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    write_atomically(target, draw(json.loads(source.read_text(encoding="utf-8"))))
    print(f"written: {target}")


if __name__ == "__main__":
    main()
