"""What the machine allows: bytes that one token reads, over the rate at which memory gives them."""

import time

import torch

from outpace.models.blocks import ExpertMatrix
from outpace.models.decoder import Decoder
from outpace.models.load import named_tensors


def bytes_per_token(target: Decoder) -> int:
    """Weights that one token's forward reads as they are stored: of the experts its share, of an embedding
    that is not also the head one row. The cache is left out: this is the floor of a short context."""
    config = target.config
    share = config.experts_per_token / config.num_experts if config.num_experts else 0.0
    expert = {
        f"{path}.{name}"
        for path, module in target.named_modules()
        if isinstance(module, ExpertMatrix)
        for name, _ in named_tensors(module)
    }
    total = 0.0
    for name, tensor in named_tensors(target):
        if name.startswith("embed_tokens") and target.lm_head is not None:
            total += tensor.nbytes / config.vocab_size
        else:
            total += tensor.nbytes * (share if name in expert else 1.0)
    return round(total)


def read_bandwidth(gib: float = 1.0, repeats: int = 5) -> float:
    """Bytes a second that all threads together read from memory: the best of a few sums of a large tensor."""
    numbers = torch.ones(int(gib * 2**28))
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - began))
    return best
