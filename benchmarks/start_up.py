"""Seconds of a new process until the first token, against llama.cpp's on the same GGUF file.

Ours: the import of torch, then `outpace.load` and the first piece of `outpace.stream` without a draft; with
kernels that are compiled already, and once with an empty cache, where they are compiled first. llama.cpp: the
file, a context, and the first token. The prompt has a few tokens. Needs llama-cpp-python (make oracle).
Run: python -m benchmarks.start_up [--target default] [--out reports/start-up]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from outpace.bench import llama_cpp
from outpace.bench.machine import machine, provenance, versions
from outpace.checkpoint.save import write_json
from outpace.formats.convert import convert_target

PROMPT = "import os\n"
OURS = """
import time; began = time.perf_counter()
import outpace, torch
imported = time.perf_counter()
model = outpace.load({path!r})
loaded = time.perf_counter()
next(iter(outpace.stream(model, {prompt!r}, draft=False, sampling=outpace.SamplingParams(max_tokens=2))))
done = time.perf_counter()
print(imported - began, loaded - imported, done - loaded)
"""
THEIRS = """
import time; began = time.perf_counter()
from pathlib import Path
import llama_cpp
imported = time.perf_counter()
from outpace.bench.llama_cpp import LlamaCpp, SETTINGS, load_model
other = time.perf_counter() - imported  # torch, which llama.cpp does not need
model = load_model(Path({path!r}))
engine = LlamaCpp(model, 1, 512, *SETTINGS["defaults"])
loaded = time.perf_counter() - other
engine.generate([{ids}], 1)
done = time.perf_counter() - other
print(imported - began, loaded - imported, done - loaded)
"""
PARTS = ("import", "load", "first token")


def times(code: str, cache: Path | None = None) -> list[float]:
    """Of one new process."""
    environment = dict(os.environ) if cache is None else os.environ | {"OUTPACE_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    return [float(x) for x in done.stdout.split()]


def row(runs: list[list[float]]) -> dict[str, float]:
    values = {part: round(statistics.median(run[i] for run in runs), 3) for i, part in enumerate(PARTS)}
    return values | {"all": round(statistics.median(map(sum, runs)), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="default", help="a folder")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder for report.json")
    options = parser.parse_args()
    if not llama_cpp.installed():
        parser.error(f"llama-cpp-python is not installed: {llama_cpp.HOW_TO_GET}")
    report = {**provenance(), "machine": machine(torch.device("cpu")), "versions": versions()}
    report["versions"]["llama-cpp-python"] = llama_cpp.llama.__version__
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "target.gguf"
        try:
            convert_target(options.target, path, "bf16")
        except ValueError as error:
            parser.error(str(error))
        ours = OURS.format(path=str(path), prompt=PROMPT)
        theirs = THEIRS.format(path=str(path), ids=list(range(10, 20)))
        times(ours), times(theirs)  # files into memory
        pairs = [(times(ours), times(theirs)) for _ in range(options.repeats)]
        report["seconds"] = {
            "Outpace": row([a for a, _ in pairs]),
            "llama.cpp": row([b for _, b in pairs]),
            "Outpace, the first time on a machine": row([times(ours, Path(name) / "empty")]),
        }
    print(json.dumps(report["seconds"], indent=2))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "report.json", report)


if __name__ == "__main__":
    main()
