"""The check on every source of features: a sampled text has the same states alone as in its batch.

An engine that mixes up the rows of a batch, or lets a row see its padding, makes a cache that looks whole
and from which drafts learn little.
"""

import torch
from torch import Tensor

from outpace.models.decoder import Decoder
from outpace.teacher.store import require

# of |difference| / |state|, the mean over a text's tokens: an outlier's size or an expert that flips hardly
# moves it. Products round by their number of rows, in float32 by 4e-6 as measured
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
NOT_FINITE = "the target's hidden states are not finite: its weights are damaged"


@torch.inference_mode()
def states_alone(
    target: Decoder, tokens: Tensor, layer_ids: tuple[int, ...], offset: int = 0
) -> tuple[Tensor, Tensor]:
    """tokens [T] of one text -> its aux [n, T, C], and its states after the final norm [T, C]. Raises
    ValueError where they are not finite."""
    out = target(tokens[None].to(target.device), aux=layer_ids, offset=offset)
    assert out.aux is not None
    if not bool(out.hidden.isfinite().all() & out.aux.isfinite().all()):
        raise ValueError(NOT_FINITE)
    return out.aux[:, 0], out.hidden[0]


def check_states(
    name: str, layer_ids: tuple[int, ...], alone: Tensor, given: Tensor, tolerance: float
) -> float:
    """alone and given [n, T, C] of one text, by itself and of the source -> the largest of the layers'
    differences. Raises StoreError for one above the tolerance, naming the text, the layer and the token."""
    alone, given = alone.float().cpu(), given.float().cpu()
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
