"""A checkpoint of real size: load time, peak memory, autoregressive decoding, roofline.

outpace synth --like gpt-oss-20b work/gpt-oss-20b
python benchmarks/real_size.py work/gpt-oss-20b --json report.json
"""

import argparse
import json
import resource
import time
from pathlib import Path
from statistics import median

import torch

from outpace.bench.machine import machine, provenance, read_bandwidth, versions, weight_bytes
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.loading import open_target
from outpace.models.load import named_tensors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--runs", type=int, default=6, help="the first is reported by itself")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = measure(options.target, options.prompt, options.tokens, options.runs)
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(path: str, prompt: int, tokens: int, runs: int) -> dict[str, object]:
    """Memory is the process's peak, mapped pages of the checkpoint included. The bandwidth is taken again
    before every run: on a shared machine it drifts."""
    before = _peak()
    began = time.perf_counter()
    target, _ = open_target(path)
    loaded = time.perf_counter() - began
    ids = torch.randint(20, 4000, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    read = weight_bytes(target) + sum(t.nbytes for n, t in named_tensors(target) if n.startswith("lm_head"))
    entries = []
    for _ in range(runs):
        bandwidth = read_bandwidth(0.25)
        seconds = generate(target, [ids], Request(max_new_tokens=tokens)).trace.seconds
        rate = (tokens - 1) / seconds["verify"]
        run = {"prefill_tokens_per_s": prompt / seconds["prefill"], "tokens_per_s": rate}
        floor = bandwidth / read
        run |= {"read_gb_per_s": bandwidth / 1e9, "floor_tokens_per_s": floor, "share_of_floor": rate / floor}
        entries.append({key: round(value, 3) for key, value in run.items()})
    warm = entries[1:]
    return {
        "target": Path(path).name,
        "checkpoint_gib": round(sum(t.nbytes for _, t in named_tensors(target)) / 2**30, 2),
        "load_seconds": round(loaded, 2),
        "peak_rss_gib": round(_peak() / 2**30, 2),
        "rss_before_gib": round(before / 2**30, 2),
        "prompt_tokens": prompt,
        "new_tokens": tokens,
        "bytes_per_token": read,
        "first_run": entries[0],
        "warm_median": {key: median(run[key] for run in warm) for key in warm[0]},
        "warm_runs": warm,
        "machine": machine(target.device),
        "versions": versions(),
        **provenance(),
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
