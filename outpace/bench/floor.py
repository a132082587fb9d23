"""What the machine allows: the rate at which memory gives its bytes."""

import time

import torch


def read_bandwidth(gib: float = 1.0, repeats: int = 5) -> float:
    """Bytes a second that all threads together read from memory: the best of a few sums of a large tensor."""
    numbers = torch.ones(int(gib * 2**28))
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - began))
    return best
