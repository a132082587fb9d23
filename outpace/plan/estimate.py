"""Memory, speed and training cost of a model, a retrofit and a draft on given hardware, with assumptions."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from outpace.kv.topk import TopKConfig
from outpace.models.indexer import usual_heads
from outpace.plan.devices import Device
from outpace.plan.sizes import Sizes, retrofitted, trainable

EFFICIENCY = (0.3, 0.75)  # share of the memory bandwidth that measured engines reach, one sequence at a time
TYPICAL = 0.47  # their geometric mean
MFU = (0.15, 0.45)  # share of the products a second, in training
ADAMW = 16  # bytes of a trained parameter: float32 master, gradient and two moments
BLOCK_STATES = 32  # states of a token, each as wide as the model, that a block's backward needs
# seconds of Outpace's calls: `outpace plan default --hardware this` on one core of an AMD EPYC with AVX-512
LAYER_OVERHEAD = 6e-6
# rho of `Sizes.experts_touched`, fitted to how the embedded model routes 1 to 8 tokens of code (8 experts, 2
# each): `touched` in reports/drafts/embedded/report.json, as `outpace calibrate default` measures it
EXPERT_OVERLAP = 0.83


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is planned. Raises ValueError for values out of range."""

    context: int = 131072
    batch: int = 1
    rank: int = 0  # of latent KV, 0: none
    index_dim: int = 0  # of sparse attention, 0: none
    index_heads: int = 0  # 0: as many as a retrofit takes
    top_k: int = 2048
    kv_bits: float = 16.0
    draft_parameters: float = 0.0  # 0: no draft
    draft_bits: float = 16.0
    columns: int = 8  # positions verified in a step
    tau: float = 0.0  # tokens per step; 0: unknown, and no speed with the draft is reported
    tokens: float = 0.0  # to train on; 0: nothing is trained
    row_tokens: int = 4096
    cached_layers: int = 5  # of the target, in a teacher cache
    cache_bits: float = 16.0
    layer_overhead: float = LAYER_OVERHEAD  # seconds per layer and forward, besides reading memory
    expert_overlap: float = EXPERT_OVERLAP  # 1: tokens choose their experts independently

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("context", "batch", "columns", "row_tokens") else 0
            if not least <= value <= 1e18:
                raise ValueError(f"plan: {field.name} {value}: it must be {least} to 1e18")
        if self.expert_overlap > 1:
            raise ValueError(f"plan: expert_overlap {self.expert_overlap}: it must be at most 1")
        if self.tau and not self.draft_parameters:
            raise ValueError("plan: tau without a draft: give draft_parameters too")


def plan(sizes: Sizes, device: Device, devices: int, choices: Choices) -> dict[str, Any]:
    """Bytes, seconds and dollars; `after` is with latents and index, `before` without."""
    if choices.index_dim and not choices.index_heads:
        choices = replace(choices, index_heads=usual_heads(sizes.config.num_heads))
    keep = TopKConfig(top_k=choices.top_k, min_context=choices.top_k) if choices.index_dim else None
    made = retrofitted(sizes, choices.rank, choices.index_dim, choices.index_heads, keep)
    sides = {"before": sizes, "after": made if choices.rank or choices.index_dim else None}
    memory = {name: side and _memory(side, choices) for name, side in sides.items()}
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
        "memory": memory,
        "decode": {name: side and _decode(side, device, devices, choices) for name, side in sides.items()},
        "fits": _memory(made, choices)["total"] <= device.memory * devices,
        "training": _training(sizes, made, device, devices, choices) if choices.tokens else None,
        # per token: its id, the states of some layers and the last one
        "teacher_cache_bytes": choices.tokens
        * (4 + (choices.cached_layers + 1) * config.hidden_size * choices.cache_bits / 8),
        "trainable_parameters": trainable(made.config),
        "assumptions": assumptions(device, choices),
    }


def _memory(sizes: Sizes, choices: Choices) -> dict[str, float]:
    number = choices.kv_bits / 8
    kv = choices.batch * sizes.kv_bytes(choices.context, number)
    draft = choices.draft_parameters * choices.draft_bits / 8
    return {
        "weights": sizes.nbytes,
        "kv_bytes_per_token": sizes.kv_growing(number),
        "kv": kv,
        "draft": draft,
        "total": sizes.nbytes + kv + draft,
    }


def step_bytes(sizes: Sizes, choices: Choices, positions: int = 1) -> float:
    """Bytes that a forward over `positions` per sequence reads; a batch shares the weights, not the KV."""
    weights = sizes.weights_read(choices.batch * positions, choices.expert_overlap)
    return weights + choices.batch * sizes.kv_read(choices.context, choices.kv_bits / 8)


def _decode(sizes: Sizes, device: Device, devices: int, choices: Choices) -> dict[str, Any]:
    rate, batch = device.bandwidth * devices, choices.batch
    step, overhead = step_bytes(sizes, choices), choices.layer_overhead * sizes.config.num_layers

    def speed(efficiency: float) -> float:
        return batch / (step / (efficiency * rate) + overhead)

    values: dict[str, Any] = {
        "bytes_per_step": step,
        "overhead_seconds": overhead,
        "bound_tokens_per_s": batch * rate / step,
        "expected_tokens_per_s": [speed(efficiency) for efficiency in EFFICIENCY],
        "estimated_tokens_per_s": speed(TYPICAL),
    }
    if choices.draft_parameters:
        draft = choices.draft_parameters * choices.draft_bits / 8
        verify = step_bytes(sizes, choices, choices.columns)
        values |= {"verify_over_step": verify / step, "draft_over_step": draft / step}
        if choices.tau:
            seconds = (verify + draft) / (TYPICAL * rate) + overhead + choices.layer_overhead
            values["speedup"] = choices.tau * batch / seconds / speed(TYPICAL)
    return values


def _training(sizes: Sizes, made: Sizes, device: Device, devices: int, choices: Choices) -> dict[str, Any]:
    """The backbone is frozen: a teacher's forward, a student's, and a backward for the states alone."""
    learnt = trainable(made.config) + choices.draft_parameters
    config, T = sizes.config, choices.row_tokens
    # a token's products with the T / 2 before it, twice: scores, and values
    attended = 2 * config.num_heads * config.head_dim * T * len(sizes.full_layers)
    passes = 3 if trainable(made.config) else 1
    flops = choices.tokens * (passes * (2 * sizes.active + attended) + 6 * learnt)
    hours = [flops / (device.flops * devices * share) / 3600 for share in reversed(MFU)]
    values: dict[str, Any] = {
        "tokens": choices.tokens,
        "flops": flops,
        "weights": sizes.nbytes,
        "optimizer": ADAMW * learnt,
        # every block's input in 16 bits, and what one block forms again for its backward
        "activations": 2.0 * T * config.hidden_size * (config.num_layers + BLOCK_STATES),
        "device_hours": [h * devices for h in hours],
        "hours": hours,
    }
    if device.price is not None:
        values["cost"] = [h * devices * price for h, price in zip(hours, device.price, strict=True)]
    return values


def assumptions(device: Device, choices: Choices) -> list[str]:
    """One line each."""
    rate, memory, flops = device.bandwidth / 1e9, device.memory / 1e9, device.flops / 1e12
    overhead = f"{1e6 * choices.layer_overhead:,.0f} us per layer and forward"
    usual = ", measured on one CPU core by outpace plan default --hardware this"
    low, high = (f"{share:.0%}" for share in EFFICIENCY)
    lines = [
        f"a device: {rate:,.0f} GB/s, {memory:,.0f} GB, {flops:,.1f} TFLOP/s",
        f"speed: {low} to {high} of the bandwidth, estimate {TYPICAL:.0%}",
        f"call overhead: {overhead}{usual * (choices.layer_overhead == LAYER_OVERHEAD)}",
        f"experts of n tokens: K + {choices.expert_overlap:.2f} (E (1 - (1 - K/E)^n) - K)",
    ]
    if choices.rank:
        lines.append("the products that make keys and values of latents are not counted, only bytes")
    if choices.tokens:
        price = "no price is known" if device.price is None else "${} to ${} an hour".format(*device.price)
        lines.append(f"training at {MFU[0]:.0%} to {MFU[1]:.0%} of the products a second; {price}")
        lines.append(f"AdamW: {ADAMW} bytes a trained parameter; rows of {choices.row_tokens}, one at a time")
    if choices.draft_parameters and not choices.tau:
        lines.append("no tau was given, so no speed with the draft is reported")
    return lines
