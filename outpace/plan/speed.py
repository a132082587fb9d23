"""Seconds of a forward: the bytes it reads, its products, the calls of its layers, the sums over ranks."""

from outpace.plan.choices import EFFICIENCY, MFU, Choices
from outpace.plan.devices import Device
from outpace.plan.sizes import Sizes

Shares = tuple[float, float]  # of the bandwidth, and of the products a second
LOW, HIGH = zip(EFFICIENCY, MFU, strict=True)
SUMMED = 2  # bytes of a number that is added up over the ranks: bfloat16


def step_bytes(sizes: Sizes, choices: Choices, positions: int = 1) -> float:
    """Bytes that a forward over `positions` per sequence reads; a batch shares the weights, not the KV."""
    weights = sizes.weights_read(choices.batch * positions, choices.expert_overlap)
    return weights + choices.batch * sizes.kv_read(choices.context, choices.kv_bits / 8)


def step_seconds(sizes: Sizes, device: Device, choices: Choices, shares: Shares, positions: int = 1) -> float:
    """Of a forward over `positions` per sequence: reading or products, what takes longer, then the rest."""
    rows = choices.batch * positions
    reading = step_bytes(sizes, choices, positions) / (shares[0] * device.bandwidth)
    products = 2 * sizes.active * rows / (shares[1] * device.flops)
    return max(reading, products) + overhead(sizes, device, choices, rows)


def overhead(sizes: Sizes, device: Device, choices: Choices, rows: int) -> float:
    """Of the calls of all layers, and of their sums: two a layer, an all-gather of [rows, C] each."""
    config = sizes.config
    calls = choices.layer_overhead * config.num_layers
    if sizes.ranks == 1:
        return calls
    received = (sizes.ranks - 1) * rows * config.hidden_size * SUMMED
    sent = received / device.link if device.link else 0.0
    return calls + 2 * config.num_layers * (choices.sum_seconds + sent)


def row_flops(sizes: Sizes, tokens: int) -> float:
    """Products and sums of a token's forward, as a mean over a row: each attends to half of the row, twice
    (scores, values)."""
    config = sizes.config
    attended = 2 * config.num_heads * config.head_dim * tokens * len(sizes.full_layers)
    return 2 * sizes.active + attended / sizes.ranks
