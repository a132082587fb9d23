"""Memory, speed and cost of a model, a draft and a retrofit on given hardware, with assumptions."""

from dataclasses import asdict, replace
from typing import Any

from outpace.kv.topk import TopKConfig
from outpace.models.indexer import usual_heads
from outpace.plan.choices import ADAMW, EFFICIENCY, LAYER_OVERHEAD, MFU, TYPICAL, USABLE, Choices
from outpace.plan.devices import DEVICES, Device
from outpace.plan.jobs import decoding_memory, decoding_rate, jobs
from outpace.plan.sizes import Sizes, divided, retrofitted, trainable
from outpace.plan.speed import HIGH, LOW, overhead, step_bytes


def plan(sizes: Sizes, device: Device, devices: int, choices: Choices) -> dict[str, Any]:
    """Bytes, seconds and dollars; `after` is with latents and index, `before` without. `memory` and `decode`
    are of one rank and of the ranks that hold one target. Raises ValueError for what cannot be divided."""
    ranks = choices.tensor_parallel_size
    if devices % ranks:
        raise ValueError(
            f"--tensor-parallel-size {ranks}: {devices} devices are no multiple of it; take {ranks} devices, "
            f"or {-(-devices // ranks) * ranks}"
        )
    if choices.index_dim and not choices.index_heads:
        choices = replace(choices, index_heads=usual_heads(sizes.config.num_heads))
    keep = TopKConfig(top_k=choices.top_k, min_context=choices.top_k) if choices.index_dim else None
    made = retrofitted(sizes, choices.rank, choices.index_dim, choices.index_heads, keep)
    changed = divided(made, ranks) if choices.rank or choices.index_dim else None
    sides = {"before": divided(sizes, ranks), "after": changed}
    config = sizes.config
    return {
        "model": {
            "name": sizes.name,
            "layers": config.num_layers,
            "full_attention_layers": len(sizes.full_layers),
            "parameters": sizes.parameters,
            "active_parameters": round(sizes.active),
            "weight_bytes": sizes.nbytes,
            "kv_bytes_per_token": sizes.kv_growing(),
            "step_bytes": sizes.weights_read(),
        },
        "hardware": asdict(device) | {"devices": devices},
        "choices": asdict(choices),
        "memory": {name: side and _memory(side, choices) for name, side in sides.items()},
        "decode": {name: side and _decode(side, device, choices) for name, side in sides.items()},
        "jobs": jobs(sizes, made, device, devices, choices),
        # per token: its id, the states of some layers and the last one
        "teacher_cache_bytes": choices.tokens
        * (4 + (choices.cached_layers + 1) * config.hidden_size * choices.cache_bits / 8),
        "trainable_parameters": trainable(made.config),
        "assumptions": assumptions(device, choices),
    }


def _memory(sizes: Sizes, choices: Choices) -> dict[str, float]:
    parts = decoding_memory(sizes, choices)
    growing = sizes.kv_growing(choices.kv_bits / 8)
    return parts | {"kv_bytes_per_token": growing, "total": sum(parts.values())}


def _decode(sizes: Sizes, device: Device, choices: Choices) -> dict[str, Any]:
    """Tokens/s of one target without a draft; what a draft adds."""
    alone = replace(choices, tau=0.0)
    ideal = replace(alone, layer_overhead=0.0, sum_seconds=0.0)
    step, usual = step_bytes(sizes, choices), decoding_rate(sizes, device, alone, TYPICAL)
    values: dict[str, Any] = {
        "bytes_per_step": step,
        "overhead_seconds": overhead(sizes, device, choices, choices.batch),
        "bound_tokens_per_s": decoding_rate(sizes, device, ideal, (1.0, 1.0)),
        "expected_tokens_per_s": [decoding_rate(sizes, device, alone, shares) for shares in (LOW, HIGH)],
        "estimated_tokens_per_s": usual,
    }
    if choices.draft_parameters:
        draft = choices.draft_parameters * choices.draft_bits / 8
        verify = step_bytes(sizes, choices, choices.columns)
        values |= {"verify_over_step": verify / step, "draft_over_step": draft / step}
        if choices.tau:
            values["speedup"] = decoding_rate(sizes, device, choices, TYPICAL) / usual
    return values


def assumptions(device: Device, choices: Choices) -> list[str]:
    """One line each, which begins with what it rests on."""
    rate, memory, flops = device.bandwidth / 1e9, device.memory / 1e9, device.flops / 1e12
    peaks = "measured here" if device.name == "this" else "published peaks"
    calls = f"{1e6 * choices.layer_overhead:,.0f} us per layer and forward"
    measured = "measured here, or set" if device.name == "this" else "set"
    if choices.layer_overhead == LAYER_OVERHEAD:
        measured = "measured on one CPU core by outpace plan default --hardware this"
    read, products = (" to ".join(f"{share:.0%}" for share in pair) for pair in (EFFICIENCY, MFU))
    lines = [
        f"{peaks}: {rate:,.0f} GB/s, {memory:,.0f} GB, {flops:,.1f} TFLOP/s in bfloat16",
        f"assumed: {read} of the bandwidth, {products} of the products a second; {USABLE:.0%} of the memory",
        f"{measured}: {calls}",
        f"assumed: experts of n tokens are K + {choices.expert_overlap:.2f} (E (1 - (1 - K/E)^n) - K)",
    ]
    if choices.tensor_parallel_size > 1:
        link = f"{device.link / 1e9:,.0f} GB/s one way" if device.link else "not known, so sums send for free"
        lines.append(
            f"assumed: two sums a layer of {1e6 * choices.sum_seconds:,.0f} us each; link: {link}; experts "
            "chosen at random among the ranks"
        )
        lines.append("assumed: every target is a torchrun of its own, with a cache folder of its own")
    if choices.rank:
        lines.append("not counted: the products that make keys and values of latents, only bytes")
    if choices.tokens:
        lines.append(_price(device))
        lines.append(
            f"assumed: AdamW, {ADAMW} bytes a trained parameter; rows of {choices.row_tokens}, one at a "
            f"time; {choices.positions_per_token:g} positions of the draft per token; one epoch"
        )
        lines.append("not counted: reading the cache, sums of gradients, prompts that are not answered")
    if choices.draft_parameters and not choices.tau:
        lines.append("not known: tau, so no speed with the draft is reported")
    if device.tpu:
        lines.append(
            "not there on a TPU: all but decoding by one process, which was seen on XLA's CPU alone; the "
            "other rows are what they would take"
        )
    return lines


def _price(device: Device) -> str:
    if device.price is None:
        return f"not known: a price of {device.name}; give --price"
    known = DEVICES.get(device.name)
    basis = "assumed market price" if known and known.price == device.price else "given price"
    low, high = device.price
    return f"{basis}: ${low:g}{f' to ${high:g}' * (high > low)} per device-hour"
