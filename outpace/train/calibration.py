"""How far a draft's own certainty can be believed: a temperature per place (DSpark, arXiv 2607.05147)."""

import torch
from torch import Tensor

BINS = 15
GRID = tuple(2 ** (i / 8) for i in range(-16, 17))  # 1/4 .. 4


def expected_error(value: Tensor, was: Tensor) -> float:
    """The expected calibration error of predicted probabilities [S] against outcomes [S] bool: over bins of
    equal width, how far the mean chance lies from the share that came true, weighed by how many fall
    there."""
    at = (value * BINS).long().clamp(0, BINS - 1)
    gap = torch.zeros(BINS).index_add_(0, at, value.float() - was.float())
    return (gap.abs().sum() / max(1, len(value))).item()


def fit_temperatures(sure: Tensor, hits: Tensor, valid: Tensor) -> tuple[float, ...]:
    """sure [S, n], the chance of each place by itself; hits [S, n], whether it was right; valid [S, n] ->
    what to divide the log-odds of each place by, so that the product up to it is the chance that all of them
    are right. Left to right: each temperature is the one of GRID with the least expected error of that
    product, those before it being fixed; among equals the nearest to 1."""
    odds = torch.logit(sure.float(), eps=1e-6)
    all_right = hits.long().cumprod(1).bool()
    chance, items = torch.ones(len(sure)), []
    for k in range(sure.shape[1]):
        counted = valid[:, k]
        errors = []
        for t in GRID:
            value = chance * torch.sigmoid(odds[:, k] / t)
            errors.append((expected_error(value[counted], all_right[counted, k]), abs(t - 1), t))
        items.append(min(errors)[2])
        chance = chance * torch.sigmoid(odds[:, k] / items[-1])
    return tuple(items)
