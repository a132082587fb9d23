"""What the machine allows: bytes that a forward reads, over the rate at which memory gives them."""

import time

import torch

from outpace.models.blocks import ExpertMatrix
from outpace.models.decoder import Decoder
from outpace.models.load import named_tensors


def weight_bytes(target: Decoder, experts: float | None = None) -> int:
    """Weights that a forward through the layers reads, as they are stored; neither embedding nor head.
    `experts`: how many of a layer's are touched; None: those of one token."""
    config = target.config
    touched = config.experts_per_token if experts is None else experts
    share = touched / config.num_experts if config.num_experts else 0.0
    packed = tuple(path for path, module in target.named_modules() if isinstance(module, ExpertMatrix))
    idle = {".latent.": not config.use_mla_kv, ".indexer.": not config.use_dsa}
    named = ((n, t) for n, t in named_tensors(target) if not any(off and x in n for x, off in idle.items()))
    layers = ((n, t.nbytes) for n, t in named if n.startswith("layers."))
    return round(sum(size * (share if n.rpartition(".")[0] in packed else 1.0) for n, size in layers))


def read_bandwidth(gib: float = 1.0, repeats: int = 5) -> float:
    """Bytes per second that all threads together read from memory: the best of a few sums of a large
    tensor."""
    numbers = torch.ones(int(gib * 2**28))
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - began))
    return best


def multiply_rate(size: int = 2048, repeats: int = 5) -> float:
    """Products and sums a second of a square float32 product with all threads: the best of a few."""
    a, b = torch.ones(size, size), torch.ones(size, size)
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        _ = a @ b
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best
