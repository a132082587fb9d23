"""Autoregressive decoding against transformers on a random gpt-oss of 8 layers in float32.

The shape: width 512, 16 query heads of 64 on 2 kv heads, 16 experts of width 512 with top 4, vocabulary
8,192, window 128. Prints tokens/s, prefill, and the time of n tokens over a cache.
Run: python -m benchmarks.small_moe [--json FILE]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from examples.tiny_target.model import TargetShape, init_weights
from outpace.bench.machine import machine, provenance, versions
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.models.gpt_oss import GptOss
from outpace.models.load import load_target
from outpace.models.save import save_target

SHAPE = TargetShape(
    vocab_size=8192,
    hidden_size=512,
    num_layers=8,
    num_heads=16,
    num_kv_heads=2,
    head_dim=64,
    expert_size=512,
    num_experts=16,
    experts_per_token=4,
    sliding_window=128,
)
PROMPT, NEW, CACHE = 256, 128, 1024


def median(call: Callable[[], Any], times: int) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def make_target(folder: Path, shape: TargetShape = SHAPE) -> Any:
    model = GptOss(shape.config(1))
    init_weights(model, 1)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=rng) * p.shape[-1] ** -0.5)
    save_target(model, folder, eos_token_id=None)
    return load_target(folder)


def ours(target: Any, prompt: list[int], ids: torch.Tensor) -> dict[str, Any]:
    """One pass of everything measured on our side."""
    run = generate(target, [prompt], Request(max_new_tokens=NEW))
    decode = run.trace.seconds["verify"] + run.trace.seconds["rest"]
    values: dict[str, Any] = {"tokens": run.tokens[0], "decode": (NEW - 1) / decode, "over_cache": {}}
    with torch.inference_mode():
        cache = target.make_cache(1, CACHE + 32, slack=32)
        began = time.perf_counter()
        target(ids, cache)
        values["prefill"] = CACHE / (time.perf_counter() - began)
        for n in (1, 2, 4, 8, 16):
            block = ids[:, :n]

            def step(block: torch.Tensor = block) -> None:
                target.logits(target(block, cache).hidden)
                cache.rewind([CACHE])

            step()
            values["over_cache"][n] = median(step, 9)
    return values


def theirs(model: Any, prompt: list[int], ids: torch.Tensor) -> dict[str, Any]:
    with torch.inference_mode():
        start = torch.tensor([prompt])
        began = time.perf_counter()
        model.generate(start, max_new_tokens=1, do_sample=False)
        first = time.perf_counter() - began
        began = time.perf_counter()
        out = model.generate(start, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        decode = time.perf_counter() - began - first
        began = time.perf_counter()
        model(ids, logits_to_keep=1)
        prefill = CACHE / (time.perf_counter() - began)
    return {"tokens": out[0, PROMPT:].tolist(), "decode": (NEW - 1) / decode, "prefill": prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    from transformers import AutoModelForCausalLM

    rng = torch.Generator().manual_seed(2)
    ids = torch.randint(SHAPE.vocab_size, (1, CACHE), generator=rng)
    prompt = ids[0, :PROMPT].tolist()
    with tempfile.TemporaryDirectory() as folder:
        target = make_target(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours(target, prompt, ids)
    rounds = [(ours(target, prompt, ids), theirs(model, prompt, ids)) for _ in range(arguments.repeats)]
    mine, other = rounds[0]
    agree = sum(a == b for a, b in zip(mine["tokens"], other["tokens"], strict=True))

    def mid(side: int, key: str) -> float:
        return statistics.median(r[side][key] for r in rounds)

    report = {
        **provenance(),
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "tokens_agree": f"{agree}/{NEW}",
        "decode_tokens_per_s": {"outpace": mid(0, "decode"), "transformers": mid(1, "decode")},
        "decode_ratio": statistics.median(a["decode"] / b["decode"] for a, b in rounds),
        "prefill_tokens_per_s": {"outpace": mid(0, "prefill"), "transformers": mid(1, "prefill")},
        "n_tokens_over_cache_relative_to_1": {
            n: statistics.median(a["over_cache"][n] / a["over_cache"][1] for a, _ in rounds)
            for n in (2, 4, 8, 16)
        },
    }
    print(json.dumps(report, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
