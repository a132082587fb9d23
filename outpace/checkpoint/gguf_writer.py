"""A GGUF file, written one tensor at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from outpace.checkpoint.publish import written
from outpace.ops.quant import Quant

OnBytes = Callable[[int, int], None]  # bytes just written, bytes in all


@dataclass(frozen=True)
class Item:
    """One tensor of the file; `make` gives it when its turn comes."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    make: Callable[[], Tensor | Quant]

    @property
    def nbytes(self) -> int:
        values, size = GGML_QUANT_SIZES[self.kind]
        return prod(self.shape) // values * size


def write_items(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    items: Sequence[Item],
    on_bytes: OnBytes = lambda done, total: None,
) -> None:
    """One tensor is in memory at a time, and the file gets its name when it is whole."""
    total = sum(item.nbytes for item in items)
    with written(path, total) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        _add_metadata(writer, metadata)
        for item in items:
            row = item.nbytes // prod(item.shape[:-1])
            shape = (*item.shape[:-1], row)
            writer.add_tensor_info(item.name, shape, np.dtype(np.uint8), item.nbytes, raw_dtype=item.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for item in items:
            writer.write_tensor_data(_bytes(item.make(), item.kind))
            on_bytes(item.nbytes, total)
        writer.close()


def _add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """bool, int (uint32), float (float32), str, or a list of one of them."""
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)


def _bytes(tensor: Tensor | Quant, kind: GGMLQuantizationType) -> "np.ndarray[Any, Any]":
    if isinstance(tensor, Quant):
        if tensor.format == kind.name:
            return tensor.data.contiguous().numpy()
        tensor = tensor.dense()
    tensor = tensor.detach().cpu().contiguous()
    match kind.name:
        case "F32":
            return tensor.float().numpy()
        case "F16":
            return tensor.half().numpy()
        case "BF16":
            return tensor.bfloat16().view(torch.int16).numpy()
        case "I64":
            return tensor.numpy()
        case _:
            return gguf.quants.quantize(tensor.float().numpy(), kind)
