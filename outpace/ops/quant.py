"""Weights as GGUF files hold them: blocks, kept packed; and rows that lie in several matrices."""

import gguf
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor, nn

from outpace.kernels import bindings
from outpace.kernels.bindings import use_kernel

PACKED = tuple(bindings.BLOCKS_KIND)  # formats a product exists for; gguf unpacks all others at loading
# the bytes of a block that hold its scales, float16 but for MXFP4's exponent
SCALES = {
    "MXFP4": slice(1),
    "Q8_0": slice(2),
    "Q4_0": slice(2),
    "Q4_K": slice(4),
    "Q5_K": slice(4),
    "Q6_K": slice(208, 210),
}


class Quant(nn.Module):
    """A weight [..., N, K] in blocks of GGML's `format`: `data` uint8 [..., N, bytes of a row].

    A module only so that it travels with the model it belongs to; it is a value, and has no forward.
    """

    data: Tensor

    def __init__(self, data: Tensor, format: str) -> None:
        super().__init__()
        self.format = format
        self.register_buffer("data", data)

    @property
    def shape(self) -> torch.Size:
        values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.format]]
        return torch.Size((*self.data.shape[:-1], self.data.shape[-1] // nbytes * values))

    def scales(self) -> Tensor:
        """[..., N, blocks, 1 or 2]: float16, or for MXFP4 the exponents, uint8."""
        _, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.format]]
        part = self.data.unflatten(-1, (-1, nbytes))[..., SCALES[self.format]].contiguous()
        return part if self.format == "MXFP4" else part.view(torch.float16)

    def dense(self) -> Tensor:
        """float32 [..., N, K], exactly the values that the blocks mean."""
        if use_kernel(self.data):
            return bindings.expand(self)
        return reference_dense(self.data, self.format)

    def __getitem__(self, index: int | slice | Tensor) -> "Quant":
        """Some of the leading axis, as blocks."""
        return Quant(self.data[index], self.format)

    def extra_repr(self) -> str:
        return f"{self.format}, {tuple(self.shape)}"


class Joined(nn.Module):
    """A weight [N, K] whose rows lie in several matrices, one under the other: the contents of a file as
    q, k and v is used in place, in whatever formats it has."""

    def __init__(self, parts: list[Tensor | Quant]) -> None:
        super().__init__()
        for i, part in enumerate(parts):
            if isinstance(part, Quant):
                self.add_module(f"part{i}", part)
            else:
                self.register_buffer(f"part{i}", part)
        self.rows = [part.shape[0] for part in parts]

    @property
    def parts(self) -> list[Tensor | Quant]:
        return [getattr(self, f"part{i}") for i in range(len(self.rows))]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(self.rows), *self.parts[0].shape[1:]))


Weight = Tensor | Quant | Joined


def coarse(weight: object) -> bool:
    """Whether a weight is in bfloat16 or MXFP4 (a pair of blocks and scales, or GGUF's): as few digits as
    activations of bfloat16 have."""
    if isinstance(weight, Tensor):
        return weight.dtype == torch.bfloat16
    return isinstance(weight, tuple) or (isinstance(weight, Quant) and weight.format == "MXFP4")


def round_activations(x: Tensor, *weights: object) -> Tensor:
    """x to bfloat16 and back, where all weights that it meets are `coarse`; else x."""
    return x.bfloat16().to(x.dtype) if all(map(coarse, weights)) else x


def dense(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The whole weight as one tensor of `dtype`."""
    if isinstance(weight, Joined):
        return torch.cat([dense(part, dtype) for part in weight.parts])
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dense().to(dtype)


def rows(weight: Weight, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of a weight [N, K]: index [...] -> [..., K]. Only they are unpacked."""
    assert not isinstance(weight, Joined), "an embedding is one matrix"
    if isinstance(weight, Tensor):
        return nn.functional.embedding(index, weight).to(dtype)
    return weight[index].dense().to(dtype)


def reference_dense(data: Tensor, format: str) -> Tensor:
    """uint8 [..., bytes of a row] -> float32 [..., K], by the gguf package."""
    array = data.cpu().contiguous().numpy()
    return torch.from_numpy(gguf.quants.dequantize(array, GGMLQuantizationType[format])).to(data.device)
