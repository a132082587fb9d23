"""Jobs on a cluster: memory per rank, tokens/s, hours, dollars of decoding, a teacher cache and training."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from outpace.plan.choices import ADAMW, BLOCK_STATES, LOGITS, USABLE, Choices
from outpace.plan.devices import DEVICES, Device
from outpace.plan.sizes import Sizes, divided, trainable
from outpace.plan.speed import HIGH, LOW, Shares, row_flops, step_seconds
from outpace.teacher.build import CAPTURE_TOKENS


@dataclass(frozen=True)
class Job:
    """`memory`: bytes of each part, in a rank; `rate`: tokens/s of the ranks that hold one target. `divided`:
    by tensor parallel; other jobs hold the target whole in every rank. `smaller`: what lowers its memory."""

    memory: Callable[[Sizes, Choices], dict[str, float]]
    rate: Callable[[Sizes, Device, Choices, Shares], float]
    divided: bool
    smaller: str


def decoding_memory(sizes: Sizes, choices: Choices) -> dict[str, float]:
    return {
        "weights": sizes.nbytes,
        "kv": choices.batch * sizes.kv_bytes(choices.context, choices.kv_bits / 8),
        "draft": choices.draft_parameters * choices.draft_bits / 8,
    }


def decoding_rate(sizes: Sizes, device: Device, choices: Choices, shares: Shares) -> float:
    """With a draft where tau is known: tau tokens of each sequence in a round of drafting and verifying."""
    if not choices.tau:
        return choices.batch / step_seconds(sizes, device, choices, shares)
    draft = choices.draft_parameters * choices.draft_bits / 8 / (shares[0] * device.bandwidth)
    verify = step_seconds(sizes, device, choices, shares, choices.columns)
    return choices.tau * choices.batch / (verify + draft + choices.layer_overhead)


def _cached(choices: Choices) -> Choices:
    """The decoding of a teacher cache: no draft."""
    batch, context = choices.teacher_batch, choices.row_tokens
    return replace(choices, batch=batch, context=context, tau=0.0, draft_parameters=0.0)


def teacher_memory(sizes: Sizes, choices: Choices) -> dict[str, float]:
    states = 2.0 * CAPTURE_TOKENS * sizes.config.hidden_size * (choices.cached_layers + 1 + BLOCK_STATES)
    return decoding_memory(sizes, _cached(choices)) | {"states": states}


def teacher_rate(sizes: Sizes, device: Device, choices: Choices, shares: Shares) -> float:
    """Every token is decoded, and runs once more in the forward that takes the states."""
    capture = row_flops(sizes, choices.row_tokens) / (shares[1] * device.flops)
    return 1 / (1 / decoding_rate(sizes, device, _cached(choices), shares) + capture)


def draft_memory(sizes: Sizes, choices: Choices, sharers: int = 1) -> dict[str, float]:
    """Of one row at a time: `--set micro_batches` of the training. Each of `sharers` processes gathers two
    layers of the draft, and the gradients of one, in float32."""
    T, C = choices.row_tokens, sizes.config.hidden_size
    gathered = 12 * choices.draft_parameters / choices.draft_layers if sharers > 1 else 0.0
    return {
        "weights": sizes.nbytes,
        "optimizer": ADAMW * choices.draft_parameters / sharers + gathered,
        "cached states": 2.0 * T * C * (choices.cached_layers + 1),
        "activations": 2.0 * T * choices.positions_per_token * C * choices.draft_layers * BLOCK_STATES,
        "logits": 3 * 4.0 * LOGITS,
    }


def draft_rate(sizes: Sizes, device: Device, choices: Choices, shares: Shares) -> float:
    """The target does not run: its states are read. A forward and a backward at every position."""
    flops = 6 * choices.draft_parameters * choices.positions_per_token
    return shares[1] * device.flops / flops


def retrofit_memory(sizes: Sizes, choices: Choices) -> dict[str, float]:
    """Every block's input in 16 bits, and what one block forms again for its backward."""
    config = sizes.config
    return {
        "weights": sizes.nbytes,
        "optimizer": ADAMW * trainable(config),
        "activations": 2.0 * choices.row_tokens * config.hidden_size * (config.num_layers + BLOCK_STATES),
    }


def retrofit_rate(sizes: Sizes, device: Device, choices: Choices, shares: Shares) -> float:
    """The backbone is frozen: a teacher's forward, a student's, and a backward for the states alone. What
    learns has a forward and the two products of its backward."""
    return shares[1] * device.flops / (3 * row_flops(sizes, choices.row_tokens))


DECODING = Job(decoding_memory, decoding_rate, True, "a shorter --context or a smaller --batch")
TEACHER = Job(teacher_memory, teacher_rate, True, "a smaller --set teacher_batch")
DRAFT = Job(draft_memory, draft_rate, False, "a smaller --draft or --set row_tokens")
RETROFIT = Job(retrofit_memory, retrofit_rate, False, "a smaller --rank or --set row_tokens")


def _sharded(devices: int) -> Job:
    return replace(DRAFT, memory=partial(draft_memory, sharers=devices))


def jobs(sizes: Sizes, made: Sizes, device: Device, devices: int, choices: Choices) -> dict[str, Any]:
    """Each job by its name. `made`: the target with its retrofit, which decodes and learns; the original
    teaches. Raises ValueError for a target or devices that tensor parallel cannot divide."""
    todo = {"decoding": (DECODING, made), "teacher cache": (TEACHER, sizes)}
    if choices.draft_parameters:
        todo["draft training"] = _sharded(devices) if choices.shard else DRAFT, sizes
    if trainable(made.config):
        todo["retrofit training"] = RETROFIT, made
    return {name: _job(name, *job, device, devices, choices) for name, job in todo.items()}


def _job(name: str, job: Job, sizes: Sizes, device: Device, devices: int, choices: Choices) -> dict[str, Any]:
    ranks = choices.tensor_parallel_size if job.divided else 1
    part = divided(sizes, ranks)
    memory = job.memory(part, choices)
    total, usable = sum(memory.values()), USABLE * device.memory
    rates = [job.rate(part, device, choices, shares) * (devices // ranks) for shares in (LOW, HIGH)]
    values: dict[str, Any] = {
        "ranks_of_a_target": ranks,
        "targets": devices // ranks,
        "memory": memory,
        "memory_per_rank": total,
        "usable_per_rank": usable,
        "tokens_per_s": rates,
        "fits": total <= usable,
    }
    if total > usable:
        need, have = total / 1e9, f"{device.name} has {usable / 1e9:,.1f} GB usable"
        fix = _fix(job, sizes, device, devices, choices)
        values["fix"] = f"{name} does not fit: {need:,.1f} GB per rank, and {have}; take {fix}"
    if choices.tokens:
        hours = [choices.tokens / rate / 3600 for rate in reversed(rates)]
        values |= {"hours": hours, "device_hours": [h * devices for h in hours]}
        if device.price is not None:
            values["cost"] = [h * devices * p for h, p in zip(hours, device.price, strict=True)]
    return values


def _fix(job: Job, sizes: Sizes, device: Device, devices: int, choices: Choices) -> str:
    """The smallest change that makes it fit: more ranks, a device with more memory, or less of the job."""

    def need(ranks: int) -> float:
        return sum(job.memory(divided(sizes, ranks), choices).values())

    sharded = sum(draft_memory(sizes, choices, devices).values()) if job is DRAFT else math.inf
    if sharded <= USABLE * device.memory:
        return "--set shard=true"
    size = choices.tensor_parallel_size if job.divided else 1
    for ranks in range(size + 1, sizes.config.num_kv_heads + 1) if job.divided else ():
        try:
            fits = need(ranks) <= USABLE * device.memory
        except ValueError:  # it cannot be divided by this number
            continue
        if fits:
            count = -(-devices // ranks) * ranks
            hardware = "" if count == devices else f"--hardware {count}x{device.name} "
            return f"{hardware}--tensor-parallel-size {ranks}"
    no_slower = [d for d in DEVICES.values() if d.tpu == device.tpu and d.bandwidth >= device.bandwidth]
    larger = [d for d in no_slower if need(size) <= USABLE * d.memory]
    fixes = [f"--hardware {devices}x{min(larger, key=lambda d: d.memory).name}"] if larger else []
    if divided(sizes, size).nbytes < USABLE * device.memory:
        fixes.append(job.smaller)
    return ", or ".join(fixes) or "a smaller target: no device of the table has that much"
