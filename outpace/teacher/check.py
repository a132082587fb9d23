"""The check on every source of features: a sampled text has the same states alone as in its batch.

An engine that mixes up the rows of a batch, or lets a row see its padding, makes a cache that looks whole
and from which drafts learn little.
"""

import torch
from torch import Tensor

from outpace.teacher.source import Source
from outpace.teacher.store import require

NOT_FINITE = "the target's hidden states are not finite: its weights are damaged"


def tolerance_of(dtype: torch.dtype) -> float:
    """Of |difference| / |state|, the mean over a text's tokens: an outlier's size or an expert that flips
    hardly moves it. Products round by their number of rows, in float32 by 4e-6 as measured."""
    return 1e-3 if dtype == torch.float32 else 0.05


def check_states(
    name: str,
    source: Source,
    tokens: Tensor,
    layer_ids: tuple[int, ...],
    given: Tensor,
    tolerance: float,
    offset: int = 0,
) -> float:
    """given [n, T, C]: states of a text of tokens [T] -> the largest of the layers' differences from what
    `source` computes for it alone. Raises StoreError for one above the tolerance, naming the text, the layer
    and the token; ValueError for states that are not finite."""
    alone = source.states(tokens[None], layer_ids, offset)[0][:, 0].float().cpu()
    given = given.float().cpu()
    if not bool(alone.isfinite().all()):
        raise ValueError(NOT_FINITE)
    rows = (given - alone).norm(dim=-1) / alone.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    means = rows.nan_to_num(nan=torch.inf).mean(-1)
    n = int(means.argmax())
    most, at = float(means[n]), int(rows[n].nan_to_num(nan=torch.inf).argmax())
    require(
        most <= tolerance,
        f"{name}: alone it has other states in layer {layer_ids[n]}. They differ by {most:.2g} of their size "
        f"(at most {tolerance:g}), most at token {at}: the source mixes up rows of a batch, or is another "
        "model, precision or numbering of layers",
    )
    return most
