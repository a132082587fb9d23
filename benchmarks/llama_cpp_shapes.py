"""Steps of other shapes than the embedded model's against llama.cpp's on the same GGUF file, interleaved.

Random weights: a mixture of 16 experts in MXFP4 (`small_moe.py`), and the shape of a published model as
`outpace synth` makes it. One token and several over a cache of 256, and a prompt of 512 tokens. Needs
llama-cpp-python (make oracle), and 4 GB of disk for Qwen3-0.6B. A shape may also be a GGUF file.
Run: python -m benchmarks.llama_cpp_shapes --out reports/llama-cpp/shapes [--shape small-moe:bf16 ..]
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import outpace  # noqa: F401 - before torch is loaded: it sets how long torch's threads spin

# isort: split
import torch

from benchmarks.against_llama_cpp import (
    CONTEXT,
    Kinds,
    best,
    collect,
    count_of,
    measured,
    our_steps,
    report_header,
    rounded_row,
    step_row,
    their_steps,
)
from benchmarks.small_moe import make_target
from outpace.bench import llama_cpp
from outpace.bench.llama_cpp import PROMPT, SETTINGS, LlamaCpp, load_model
from outpace.bench.machine import describe_target
from outpace.checkpoint.open import open_checkpoint
from outpace.checkpoint.save import write_json
from outpace.formats.convert import convert_target, write_gguf
from outpace.formats.random_weights import plan, synthesise
from outpace.models.load import load_target
from outpace.models.save import save_target

SMALL_MOE = "small-moe"
SHAPES = (f"{SMALL_MOE}:bf16", f"{SMALL_MOE}:f16", "qwen3-0.6b:bf16", "qwen3-0.6b:q8_0")
ROUNDED = ", bfloat16 activations"  # the end of such a setting's name
KINDS = Kinds(widths=(1, 8, 16), batches=(), times=7, prompts=1)


@contextmanager
def gguf_file(shape: str, type: str) -> Iterator[Path]:
    if shape.endswith(".gguf"):
        yield Path(shape)
        return
    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name), Path(name) / "target.gguf"
        if shape == SMALL_MOE:
            save_target(make_target(folder / "dense"), folder / "target", pack=True, eos_token_id=None)
            write_gguf(load_target(folder / "target"), path, type=type)
        else:
            synthesise(folder / "target", plan(shape))
            convert_target(str(folder / "target"), path, type)
        yield path


Times = dict[str, dict[str, float]]  # by setting: seconds of each kind of step


def our_times(path: Path, threads: list[int], repeats: int) -> Iterator[Times]:
    """A repeat at a time."""
    target: Any = load_target(open_checkpoint(path))
    ids = prompt_of(target.config.vocab_size)
    for _ in range(repeats):
        times: Times = {}
        for n in threads:
            torch.set_num_threads(n)
            times[count_of(n, "thread")] = our_steps(target, ids, KINDS)
            target.use_activation_dtype(torch.bfloat16)
            times[f"{count_of(n, 'thread')}{ROUNDED}"] = our_steps(target, ids, KINDS)
            target.use_activation_dtype(torch.float32)
        yield times


def their_times(path: Path, threads: list[int], repeats: int) -> Iterator[Times]:
    model = load_model(path)
    engines = {name: LlamaCpp(model, 1, CONTEXT + PROMPT, *how) for name, how in SETTINGS.items()}
    ids = prompt_of(next(iter(engines.values())).vocab)
    for _ in range(repeats):
        times: Times = {}
        for n, (setting, engine) in product(threads, engines.items()):
            engine.use_threads(n)
            times[f"{count_of(n, 'thread')}, {setting}"] = their_steps(engine, engine, ids, KINDS)
        yield times


def prompt_of(vocab_size: int) -> list[int]:
    rng = torch.Generator().manual_seed(1)
    ids: list[int] = torch.randint(vocab_size, (PROMPT,), generator=rng).tolist()
    return ids


def all_times(times: Callable[..., Iterator[Times]], *arguments: Any) -> list[Times]:
    return list(times(*arguments))


def in_turn(path: Path, threads: list[int], repeats: int, apart: bool) -> Iterator[tuple[Times, Times]]:
    """Both engines' repeats: interleaved, or each engine in its own process, one after the other."""
    sides = our_times, their_times
    if not apart:
        return zip(*(side(path, threads, repeats) for side in sides), strict=True)
    done = []
    for side in sides:  # a process that has ended holds no memory
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            done.append(process.submit(all_times, side, path, threads, repeats).result())
    return zip(*done, strict=True)


def compare(path: Path, threads: list[int], repeats: int, apart: bool) -> dict[str, Any]:
    """-> rows of both engines by kind of step, each with the setting that suits it best."""
    mine, theirs = measured(), measured()
    for pair in in_turn(path, threads, repeats, apart):
        for into, times in zip((mine, theirs), pair, strict=True):
            for setting, values in times.items():
                collect(into[setting], values)
    kinds = next(iter(mine.values()))
    rounded = measured()
    for setting in [name for name in mine if name.endswith(ROUNDED)]:
        rounded[setting] = mine.pop(setting)
    steps = {
        kind: step_row(best(mine, kind, min), best(theirs, kind, min))
        | rounded_row(best(rounded, kind, min), best(theirs, kind, min))
        for kind in kinds
    }
    return {"target": describe_target(load_target(open_checkpoint(path))), "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="NAME:TYPE of the matrices, or a file")
    counts = sorted({1, len(os.sched_getaffinity(0))})
    parser.add_argument("--threads", type=int, nargs="+", default=counts, help="numbers of threads to try")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help="not interleaved: a model that fits memory once")
    parser.add_argument("--out", type=Path, help="folder for report.json")
    options = parser.parse_args()
    if not llama_cpp.installed():
        parser.error(f"llama-cpp-python is not installed: {llama_cpp.HOW_TO_GET}")
    report = report_header() | {"shapes": {}}
    for asked in options.shape:
        shape, _, type = asked.partition(":")
        name = Path(shape).stem if shape.endswith(".gguf") else asked
        try:
            with gguf_file(shape, type or "bf16") as path:
                report["shapes"][name] = compare(path, options.threads, options.repeats, options.apart)
        except ValueError as error:
            parser.error(f"{asked}: {error}")
        print(name, json.dumps(report["shapes"][name]["steps"], indent=2), flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "report.json", report)


if __name__ == "__main__":
    main()
