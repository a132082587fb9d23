"""A draft in fewer bytes: its matrices in 8-bit blocks, as GGUF files hold them, multiplied as they are."""

import copy
from typing import TypeGuard, TypeVar

import gguf
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor, nn

from outpace.models.blocks import Linear
from outpace.ops.quant import Quant, Weight

Draft = TypeVar("Draft", bound=nn.Module)
FORMATS = ("q8_0",)
BLOCK = 32  # values of a row that share a scale


def quantised(draft: Draft, format: str = "q8_0") -> Draft:
    """A copy of a draft where the matrices are in blocks of Q8_0: one byte a value and two a block of 32, a
    rounding of at most 1/254 of the block's largest value. Rows that no block divides, norms, tables that
    are read a row at a time, and what is not a product's weight stay as they are.

    It proposes nearly the same tokens; the text is the target's with either. Raises ValueError for a
    format that is not known, and where it would pack nothing.
    """
    check_format(format)
    if not any(isinstance(m, Linear) and packs(m.weight) for m in draft.modules()):
        raise ValueError(
            f"draft weights {format!r}: blocks of {BLOCK} divide the rows of none of its matrices"
        )
    packed = copy.deepcopy(draft)
    for module in packed.modules():
        if isinstance(module, Linear) and packs(module.weight):
            weight = module.weight
            del module.weight  # a parameter's name takes no module
            module.weight = pack(weight)
    return packed


def check_format(format: str | None) -> None:
    """Raises ValueError where it is one that is not known."""
    if format is not None and format not in FORMATS:
        raise ValueError(f"draft weights {format!r}: known are {', '.join(FORMATS)}")


def packs(weight: Weight) -> TypeGuard[Tensor]:
    """Whether `pack` can take it: it is no block yet, and blocks divide its rows."""
    return isinstance(weight, Tensor) and weight.shape[1] % BLOCK == 0


def pack(weight: Tensor) -> Quant:
    """[N, K] with K a multiple of 32 -> its blocks."""
    blocks = gguf.quants.quantize(weight.detach().float().cpu().numpy(), GGMLQuantizationType.Q8_0)
    return Quant(torch.from_numpy(blocks).to(weight.device), "Q8_0")
