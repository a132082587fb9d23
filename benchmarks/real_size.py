"""A checkpoint of real size on this machine: load time, peak memory, and plain decoding beside the floor.

outpace synth --like gpt-oss-20b work/gpt-oss-20b
python benchmarks/real_size.py work/gpt-oss-20b --json reports/gpt_oss_20b.json
"""

import argparse
import json
import resource
import time
from pathlib import Path

import torch

from outpace.bench.floor import bytes_per_token, read_bandwidth
from outpace.bench.machine import machine, provenance, versions
from outpace.decode.plain import generate
from outpace.decode.request import Request
from outpace.load import open_target
from outpace.models.load import named_tensors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--runs", type=int, default=4, help="the first is reported by itself")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = measure(options.target, options.prompt, options.tokens, options.runs)
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(path: str, prompt: int, tokens: int, runs: int) -> dict[str, object]:
    """Memory is the process's peak, mapped pages of the checkpoint included."""
    bandwidth = read_bandwidth()
    before = _peak()
    began = time.perf_counter()
    target, _ = open_target(path)
    loaded = time.perf_counter() - began
    ids = torch.randint(20, 4000, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for _ in range(runs):
        seconds = generate(target, [ids], Request(max_new_tokens=tokens)).trace.seconds
        found.append(
            {"prefill_seconds": seconds["prefill"], "tokens_per_s": (tokens - 1) / seconds["verify"]}
        )
    floor = bandwidth / bytes_per_token(target)
    best = max(run["tokens_per_s"] for run in found[1:])
    return {
        "target": Path(path).name,
        "checkpoint_gib": round(sum(t.nbytes for _, t in named_tensors(target)) / 2**30, 2),
        "load_seconds": round(loaded, 2),
        "peak_rss_gib": round(_peak() / 2**30, 2),
        "peak_rss_before_gib": round(before / 2**30, 2),
        "prompt_tokens": prompt,
        "new_tokens": tokens,
        "first_run": {key: round(value, 3) for key, value in found[0].items()},
        "warm_runs": [{key: round(value, 3) for key, value in run.items()} for run in found[1:]],
        "bytes_per_token": bytes_per_token(target),
        "read_bandwidth_gb_per_s": round(bandwidth / 1e9, 1),
        "floor_tokens_per_s": round(floor, 2),
        "best_tokens_per_s": round(best, 2),
        "share_of_floor": round(best / floor, 3),
        "machine": machine(target.device),
        "versions": versions(),
        "provenance": provenance(),
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
