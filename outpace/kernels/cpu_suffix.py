"""The ctypes wrapper of cpu_suffix.c."""

import struct

import torch
from torch import Tensor

from outpace.kernels.cpu import _c, _empty

GROW = struct.Struct("4q8q3d4q").pack  # the struct of cpu_suffix.c in its order
MOST_CONTEXTS, MOST_SAMPLES, MOST_RECENT, MOST_BRANCH = 8, 64, 16, 16


def grow(
    text: Tensor,
    order: Tensor,
    history: Tensor,
    nodes: int,
    *,
    contexts: tuple[int, ...],
    samples: int,
    recent: int,
    branch: int,
    deepest: int,
    doubt: float,
    own_doubt: float,
    enough: float,
) -> tuple[list[int], list[int], list[float]]:
    """text, order [n] int32, order of places in text; history [m] int32; contexts descending -> tokens,
    parents and reach."""
    assert text.dtype == order.dtype == history.dtype == torch.int32 and len(text) == len(order)
    assert text.is_contiguous() and order.is_contiguous() and history.is_contiguous()
    assert 2 * len(contexts) <= MOST_CONTEXTS and list(contexts) == sorted(contexts, reverse=True)
    assert samples <= MOST_SAMPLES and recent <= MOST_RECENT and branch <= MOST_BRANCH
    lengths = torch.tensor(contexts, dtype=torch.int64)
    result, reach = _empty(2, nodes, dtype=torch.int64), _empty(nodes, dtype=torch.float64)
    count = _empty(1, dtype=torch.int64)
    given = (t.data_ptr() for t in (text, order, history, lengths))
    sizes = len(text), len(history), len(contexts), nodes, samples, recent, branch, deepest
    made = (t.data_ptr() for t in (result[0], result[1], reach, count))
    _c.grow(GROW(*given, *sizes, doubt, own_doubt, enough, *made))
    n = int(count)
    tokens, parents = result[:, :n].tolist()
    return tokens, parents, reach[:n].tolist()
