"""The ctypes wrapper of cpu_suffix.c."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.kernels.cpu import _c, _empty

GROW = struct.Struct("4q7q2d4q").pack  # the struct of cpu_suffix.c in its order
MOST_CONTEXTS, MOST_SAMPLES, MOST_BRANCH = 8, 64, 16


def grow(
    text: Tensor,
    order: Tensor,
    tail: Sequence[int],
    nodes: int,
    *,
    contexts: tuple[int, ...],
    samples: int,
    branch: int,
    deepest: int,
    doubt: float,
    enough: float,
) -> tuple[list[int], list[int], list[float]]:
    """text, order [n] int32, order of places in text -> tokens, parents and reach."""
    assert text.dtype == order.dtype == torch.int32 and len(text) == len(order)
    assert text.is_contiguous() and order.is_contiguous()
    assert len(contexts) <= MOST_CONTEXTS and samples <= MOST_SAMPLES and branch <= MOST_BRANCH
    last, lengths = (torch.tensor(x, dtype=torch.int64) for x in (tail, contexts))
    found, reach = _empty(2, nodes, dtype=torch.int64), _empty(nodes, dtype=torch.float64)
    count = _empty(1, dtype=torch.int64)
    given = (t.data_ptr() for t in (text, order, last, lengths))
    sizes = len(text), len(tail), len(contexts), nodes, samples, branch, deepest
    made = (t.data_ptr() for t in (found[0], found[1], reach, count))
    _c.grow(GROW(*given, *sizes, doubt, enough, *made))
    n = int(count)
    tokens, parents = found[:, :n].tolist()
    return tokens, parents, reach[:n].tolist()
