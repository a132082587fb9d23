"""Tables in documentation pages, generated from reports between two markers.

    <!-- table: answers ../reports/answers/report.json -->
    ...generated...
    <!-- end -->

The path is relative to the page. Where the report does not exist, the page says "Not measured yet.". The kind
"pictures" shows the plots next to the report. A report marked as not for publication is refused; one that is
older than this mark and does not state how it was measured is shown as preliminary.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from outpace.bench import (
    answers,
    comparison,
    context,
    draft_context,
    memory_answers,
    recall,
    retrofits,
    serve,
    soak,
    synthetic,
    tasks,
)
from outpace.bench.machine import unpublishable
from outpace.bench.report import METHOD, TAU, Columns, Report, by_name, table_of
from outpace.bench.speed import regime_name
from outpace.checkpoint.save import write_atomically

MARKED = re.compile(r"(<!-- table: (\S+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PICTURES = "pictures"
real_size_table = table_of(  # of a report of benchmarks/real_size.py
    lambda report: [report],
    ("size", "checkpoint_gib", "{:.1f} GiB"),
    ("load", "load_seconds", "{:.1f} s"),
    ("peak memory", "peak_rss_gib", "{:.1f} GiB"),
    ("prompt", "warm_median.prefill_tokens_per_s", "{:.0f} tokens/s"),
    ("decode", "warm_median.tokens_per_s", "{:.1f} tokens/s"),
    ("of the bandwidth", "warm_median.share_of_floor", "{:.0%}"),
)
BOTH_ENGINES: Columns = (
    ("Outpace", "outpace_ms", "{:,.2f} ms"),
    ("llama.cpp", "llama_cpp_ms", "{:,.2f} ms"),
    ("llama.cpp's time over ours", "ratio", "{:.2f}"),
)
ROUNDED: Columns = (
    ("bfloat16 activations", "outpace_rounded_ms", "{:,.2f} ms"),
    ("llama.cpp's time over that", "ratio_rounded", "{:.2f}"),
)
llama_cpp_steps = table_of(  # of a report of benchmarks/against_llama_cpp.py
    by_name("steps"),
    ("step", "name", "{}"),
    ("Outpace, float32 KV", "outpace_float32_ms", "{:,.2f} ms"),
    ("float16 KV", "outpace_float16_ms", "{:,.2f} ms"),
    *BOTH_ENGINES[1:],
    *ROUNDED,
)
llama_cpp_text = table_of(
    by_name("text"),
    ("method", "name", "{}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("over llama.cpp", "ratio", "{:.2f}x"),
)
llama_cpp_shapes = table_of(  # of a report of benchmarks/llama_cpp_shapes.py
    lambda report: [
        {"shape": shape.replace(":", ", "), "name": name, **row}
        for shape, values in report["shapes"].items()
        for name, row in values["steps"].items()
    ],
    ("shape", "shape", "{}"),
    ("step", "name", "{}"),
    *BOTH_ENGINES,
    *ROUNDED,
)
speed_table = table_of(  # of the suite speed
    lambda report: [{"text": regime_name(row), **row} for row in report["results"]],
    ("text", "text", "{}"),
    ("batch", "batch", "{}"),
    METHOD,
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("over llama.cpp", "over_llama_cpp", "{:.2f}x"),
    ("over autoregressive", "speedup", "{:.2f}x"),
    TAU,
)
start_up_table = table_of(  # of a report of benchmarks/start_up.py
    by_name("seconds"),
    ("engine", "name", "{}"),
    ("import", "import", "{:.2f} s"),
    ("load", "load", "{:.2f} s"),
    ("first token", "first token", "{:.2f} s"),
    ("all", "all", "{:.2f} s"),
)
llama_cpp_context = table_of(  # of a report of benchmarks/llama_cpp_context.py
    "rows",
    ("context", "context", "{:,}"),
    ("step", "step", "{}"),
    *BOTH_ENGINES,
)
draft_training_table = table_of(  # of a report of benchmarks/draft_training.py
    "rows",
    ("anchors of a step", "anchors", "{}"),
    ("products", "dtype", "{}"),
    ("trainer", "engine", "{}"),
    ("loss", "loss", "{}"),
    ("steps/s", "steps_per_s", "{:.2f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("Outpace's speed over it", "outpace_over_it", "{:.2f}x"),
    ("peak memory", "peak_gib", "{:.2f} GiB"),
    ("steps", "steps", "{}"),
    TAU,
)
TABLES: dict[str, Callable[[Report], list[str]]] = {
    "drafts": comparison.training_table,
    "greedy": partial(comparison.speed_table, temperature=0.0),
    "sampled": partial(comparison.speed_table, temperature=1.0),
    "positions": partial(comparison.position_table, temperature=0.0),
    "lossless": comparison.lossless_table,
    "controller": comparison.controller_table,
    "context": draft_context.times_tables,
    "operations": draft_context.operations_table,
    "noise": draft_context.acceptance_table,
    "steps": context.cost_table,
    "latents": context.latent_table,
    "loss": recall.loss_table,
    "needles": recall.needle_table,
    "memory": retrofits.memory_table,
    "pareto": retrofits.pareto_table,
    "mass": retrofits.mass_table,
    "held": retrofits.held_out_table,
    "llama-cpp-steps": llama_cpp_steps,
    "llama-cpp-text": llama_cpp_text,
    "llama-cpp-shapes": llama_cpp_shapes,
    "llama-cpp-context": llama_cpp_context,
    "start-up": start_up_table,
    "speed": speed_table,
    "real-size": real_size_table,
    "draft-training": draft_training_table,
    "serve": serve.serve_table,
    "soak": soak.soak_table,
    "synthetic": synthetic.synthetic_table,
    "tasks": tasks.task_table,
    "memory-answers": memory_answers.memory_answers_table,
    "needles-by-depth": memory_answers.needles_by_depth,
    "memory-answers-by-family": memory_answers.memory_answers_by_family,
    "answers": partial(answers.method_table, temperature=0.0),
    "answers-sampled": partial(answers.method_table, temperature=0.8),
    "answers-by-family": partial(answers.family_table, temperature=0.0),
    "answers-positions": partial(answers.positions, temperature=0.0),
}


def render(text: str, folder: Path) -> str:
    """The page's text with every marked table generated again. Raises ValueError for an unknown kind of
    table, for markers that are not closed, and for a report that is not for publication."""
    if text.count("<!-- table: ") != len(MARKED.findall(text)):
        raise ValueError("a marked table is not closed by <!-- end -->, or names no report")

    def rendered(match: re.Match[str]) -> str:
        opening, kind, path, _, closing = match.groups()
        if kind not in (*TABLES, PICTURES):
            raise ValueError(f"no table {kind!r}; known: {', '.join(TABLES)}, {PICTURES}")
        file = folder / path
        if not file.is_file():
            return f"{opening}\nNot measured yet.\n\n{closing}"
        report = json.loads(file.read_text(encoding="utf-8"))
        reason = unpublishable(report)
        preliminary = reason is not None and "not_for_publication" not in report
        if reason is not None and not preliminary:
            raise ValueError(f"{path}: {reason}; measure it again from a clean commit")
        if kind == PICTURES:
            names = sorted(picture.name for picture in file.parent.glob("*.png"))
            lines = [f"![{name.removesuffix('.png')}]({Path(path).with_name(name)})\n" for name in names]
        else:
            lines = TABLES[kind](report)
        note = [f"*Preliminary, to be measured again: {reason}.*", ""] if preliminary else []
        return f"{opening}\n" + "\n".join([*note, *lines]) + closing

    return MARKED.sub(rendered, text)


def update_page(page: Path) -> bool:
    """Rewrites the page's tables; -> whether anything changed. Raises ValueError where none is marked."""
    text = page.read_text(encoding="utf-8")
    if MARKED.search(text) is None:
        raise ValueError(
            f"{page} marks no table: `<!-- table: KIND REPORT -->` begins one and `<!-- end -->` ends it"
        )
    new = render(text, page.parent)
    if new != text:
        write_atomically(page, new.encode())
    return new != text
