"""The cost of a step against the context, ours and llama.cpp's on the same GGUF file, with a plot.

A gpt-oss of two layers, one windowed and one full, with random weights, since llama.cpp has to read every
token of the context first. One token and eight over caches of 256 to 131,072 tokens; llama.cpp with the
setting that is fastest at the context before, and with all of them at the first two. Needs llama-cpp-python
(make oracle).
Run: python -m benchmarks.llama_cpp_context --out reports/llama-cpp/context
"""

import argparse
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import outpace  # noqa: F401 - before torch is loaded: it sets how long torch's threads spin

# isort: split
import torch

from benchmarks.against_llama_cpp import chosen, count_of, timed
from benchmarks.small_moe import make_target
from examples.tiny_target.model import TargetShape
from outpace.bench import llama_cpp, plots
from outpace.bench.llama_cpp import PROMPT, SETTINGS, LlamaCpp, load_model
from outpace.bench.machine import describe_target, machine, provenance, versions
from outpace.checkpoint.open import open_checkpoint
from outpace.checkpoint.save import write_atomically, write_json
from outpace.formats.convert import write_gguf
from outpace.models.load import load_target

CONTEXTS, WIDTHS, TIMES = (256, 4096, 32768, 131072), (1, 8), 9
SHAPE = TargetShape(
    vocab_size=1024,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=64,
    expert_size=256,
    num_experts=4,
    experts_per_token=2,
    sliding_window=128,
    rope_factor=64.0,
)


@torch.inference_mode()
def ours(target: Any, context: int, tokens: torch.Tensor) -> dict[str, float]:
    """Seconds by kind of step, over a cache of random keys and values."""
    cache = target.make_cache(1, context + max(WIDTHS), slack=max(WIDTHS))
    for memory in cache.layers:
        memory.k.normal_()
        memory.v.normal_()
    cache.advance(cache.begin(context))
    result = {}
    for n in WIDTHS:

        def step(n: int = n) -> None:
            chosen(target(tokens[:, :n], cache, logits=True)).tolist()
            cache.rewind([context])

        result[count_of(n, "token")] = timed(step, TIMES)
    return result


def theirs(model: Any, setting: str, context: int, ids: list[int]) -> dict[str, float]:
    engine = LlamaCpp(model, 1, context + 64, *SETTINGS[setting])
    engine.use_threads(torch.get_num_threads())
    for begin in range(0, context, PROMPT):
        part = ids[begin : min(begin + PROMPT, context)]
        engine.decode(part, begin, logits=False)
    result = {}
    for n in WIDTHS:

        def step(n: int = n) -> None:
            engine.decode(ids[:n], context)
            for i in range(n):
                engine.choice(i)
            engine.forget(context)

        result[count_of(n, "token")] = timed(step, TIMES)
    engine.close()
    return result


def compare(path: Path, contexts: Sequence[int]) -> dict[str, Any]:
    target = load_target(open_checkpoint(path))
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(SHAPE.vocab_size, (max(contexts),), generator=rng)
    model, rows = load_model(path), []
    settings = list(SETTINGS)
    for i, context in enumerate(contexts):
        mine = ours(target, context, ids[None])
        by_setting = {name: theirs(model, name, context, ids.tolist()) for name in settings}
        if i:  # longer ones take minutes each
            settings = [min(by_setting, key=lambda name: sum(by_setting[name].values()))]
        for kind, seconds in mine.items():
            best = min(values[kind] for values in by_setting.values())
            milliseconds = {"outpace_ms": round(seconds * 1e3, 3), "llama_cpp_ms": round(best * 1e3, 3)}
            rows.append({"context": context, "step": kind, **milliseconds, "ratio": round(best / seconds, 3)})
            print(json.dumps(rows[-1]), flush=True)
    return {"target": describe_target(target), "rows": rows}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure, (axes,) = plots.figure(1, 1, 3.6, "A step against its context, two layers")
    for kind, style in zip(dict.fromkeys(row["step"] for row in rows), ("o-", "s--"), strict=True):
        of = [row for row in rows if row["step"] == kind]
        contexts = [row["context"] for row in of]
        for name, colour in (("outpace", plots.BLUE), ("llama_cpp", plots.GREY)):
            label = f"{'Outpace' if name == 'outpace' else llama_cpp.NAME}, {kind}"
            axes.plot(contexts, [row[f"{name}_ms"] for row in of], style, color=colour, label=label)
        plots.context_axis(axes, contexts)
    axes.set_ylabel("milliseconds")
    axes.legend(frameon=False, fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--out", type=Path, help="folder for report.json and context.png")
    options = parser.parse_args()
    if not llama_cpp.installed():
        parser.error(f"llama-cpp-python is not installed: {llama_cpp.HOW_TO_GET}")
    report: dict[str, Any] = {**provenance(), "machine": machine(torch.device("cpu")), "versions": versions()}
    report["versions"]["llama-cpp-python"] = llama_cpp.llama.__version__
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "target.gguf"
        write_gguf(make_target(Path(name) / "target", SHAPE), path)
        report |= compare(path, options.contexts)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "report.json", report)
        draw(report["rows"], options.out / "context.png")


if __name__ == "__main__":
    main()
