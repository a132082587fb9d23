"""What a retrofit, a draft and decoding would take on given hardware, and what is assumed for that."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from outpace.kv.topk import TopKConfig
from outpace.models.indexer import usual_heads
from outpace.plan.devices import Device
from outpace.plan.sizes import Sizes, retrofitted, trainable

OF_BOUND = (0.3, 0.75)  # of the bandwidth bound, where measured engines lie, one sequence at a time
MFU = (0.15, 0.45)  # of the products a second, in training
ADAMW = 16  # bytes of a trained parameter: float32 master, gradient and two moments
GIGA, TERA = 1e9, 1e12
WITHIN = 32  # states of a token, each as wide as the model, that a block's backward needs
KINSHIP = 0.6  # of neighbours' experts: measured at 4 tokens


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is planned. Raises ValueError for what cannot be."""

    context: int = 131072
    batch: int = 1
    rank: int = 0  # of latent KV, 0: none
    index_dim: int = 0  # of sparse attention, 0: none
    index_heads: int = 0  # as many as a retrofit would take
    top_k: int = 2048
    kv_bits: float = 16.0
    draft_parameters: float = 0.0  # 0: no draft
    draft_bits: float = 16.0
    columns: int = 8  # verified in a round
    tau: float = 0.0  # tokens per round; 0: unknown, and no speed with the draft is reported
    tokens: float = 0.0  # to train on; 0: nothing is trained
    row_tokens: int = 4096
    cached_layers: int = 5  # of the target, in a teacher cache
    cache_bits: float = 16.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("context", "batch", "columns", "row_tokens") else 0
            if not value >= least or value == float("inf"):
                raise ValueError(f"plan: {field.name} {value}: it must be at least {least}")
        if self.tau and not self.draft_parameters:
            raise ValueError("plan: tau without a draft: give draft_parameters too")


def plan(sizes: Sizes, device: Device, devices: int, choices: Choices) -> dict[str, Any]:
    """Bytes, seconds and dollars; `after` is with latents and index, `before` without."""
    if choices.index_dim and not choices.index_heads:
        choices = replace(choices, index_heads=usual_heads(sizes.config.num_heads))
    keep = TopKConfig(top_k=choices.top_k, min_context=choices.top_k) if choices.index_dim else None
    made = retrofitted(sizes, choices.rank, choices.index_dim, choices.index_heads, keep)
    changed = bool(choices.rank or choices.index_dim)
    values = {
        "model": _model(sizes),
        "hardware": asdict(device) | {"devices": devices},
        "choices": asdict(choices),
        "memory": {"before": _memory(sizes, choices), "after": _memory(made, choices) if changed else None},
        "decode": {
            "before": _decode(sizes, device, devices, choices),
            "after": _decode(made, device, devices, choices) if changed else None,
        },
        "fits": _memory(made, choices)["total"] <= device.memory * devices,
        "training": _training(sizes, made, device, devices, choices) if choices.tokens else None,
        "teacher_cache_bytes": choices.tokens * _cached(sizes, choices),
    }
    learnt = {"trainable_parameters": trainable(made.config)}
    return values | learnt | {"assumptions": assumptions(device, choices)}


def _model(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    return {
        "name": sizes.name,
        "layers": config.num_layers,
        "full_attention_layers": len(sizes.full_layers),
        "parameters": sizes.parameters,
        "active_parameters": round(sizes.active),
        "weight_bytes": sizes.nbytes,
        "kv_bytes_per_token": sizes.kv_growing(),
        "step_bytes": sizes.weights_read(),
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


def _decode(sizes: Sizes, device: Device, devices: int, choices: Choices) -> dict[str, Any]:
    """Of one sequence; weights are shared by a batch, memories are not."""
    number, rate = choices.kv_bits / 8, device.bandwidth * devices
    kv = choices.batch * sizes.kv_read(choices.context, number)
    one = sizes.weights_read(choices.batch, KINSHIP) + kv
    values: dict[str, Any] = {
        "bytes_per_step": one,
        "bound_tokens_per_s": choices.batch * rate / one,
        "expected_tokens_per_s": [choices.batch * share * rate / one for share in OF_BOUND],
    }
    if choices.draft_parameters:
        drafted = choices.draft_parameters * choices.draft_bits / 8
        verify = sizes.weights_read(choices.batch * choices.columns, KINSHIP) + kv
        values |= {"verify_over_step": verify / one, "draft_over_step": drafted / one}
        if choices.tau:
            values["speedup"] = choices.tau * one / (verify + drafted)
    return values


def _cached(sizes: Sizes, choices: Choices) -> float:
    """Bytes of a token in a teacher cache: its id, the states of some layers and the last one."""
    return 4 + (choices.cached_layers + 1) * sizes.config.hidden_size * choices.cache_bits / 8


def _training(sizes: Sizes, made: Sizes, device: Device, devices: int, choices: Choices) -> dict[str, Any]:
    """The backbone is frozen: a teacher's forward, a student's, and a backward that asks for states alone."""
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
        "activations": 2.0 * T * config.hidden_size * (config.num_layers + WITHIN),
        "device_hours": [h * devices for h in hours],
        "hours": hours,
    }
    if device.price is not None:
        values["cost"] = [h * devices * price for h, price in zip(hours, device.price, strict=True)]
    return values


def assumptions(device: Device, choices: Choices) -> list[str]:
    """In words, to be printed with the numbers."""
    rate, headroom, flops = device.bandwidth / GIGA, device.memory / GIGA, device.flops / TERA
    items = [
        f"a device: {rate:,.0f} GB/s, {headroom:,.0f} GB, {flops:,.1f} TFLOP/s",
        f"expected speed: {OF_BOUND[0]:.0%} to {OF_BOUND[1]:.0%} of the bandwidth bound",
        f"experts of n tokens: K + {KINSHIP} (E (1 - (1 - K/E)^n) - K)",
    ]
    if choices.rank:
        items.append("the products that make keys and values of latents are not counted, only bytes")
    if choices.tokens:
        price = "no price is known" if device.price is None else "${} to ${} an hour".format(*device.price)
        items.append(f"training at {MFU[0]:.0%} to {MFU[1]:.0%} of the products a second; {price}")
        items.append(f"AdamW: {ADAMW} bytes a trained parameter; rows of {choices.row_tokens}, one at a time")
    if choices.draft_parameters and not choices.tau:
        items.append("no tau was given, so no speed with the draft is reported")
    return items
