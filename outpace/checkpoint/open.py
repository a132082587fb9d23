"""open_checkpoint(path) -> config, names, shapes, get(name), whichever format the path holds."""

from pathlib import Path

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from outpace.checkpoint.base import Checkpoint, LoadError
from outpace.checkpoint.foreign import foreign_file, foreign_folder, openai_layout, openai_names
from outpace.checkpoint.gguf import open_gguf
from outpace.checkpoint.hf import open_folder
from outpace.checkpoint.safetensors import DTYPES
from outpace.checkpoint.shipped import NOT_THERE
from outpace.ops.quant import Quant, dense

__all__ = ["Checkpoint", "LoadError", "dtype_bytes", "open_checkpoint", "to_compute", "to_tensor"]


def open_checkpoint(path: Path | str) -> Checkpoint:
    """A folder of HF safetensors, or a GGUF file. Raises LoadError, naming the file and the fix, for
    what is missing, damaged or of another format."""
    path = Path(path)
    if not path.exists():
        raise LoadError(NOT_THERE.format(path), "no_config")
    if is_gguf(path):
        return open_gguf(path)
    if path.is_file():
        raise foreign_file(path)
    try:
        folder = open_folder(path)
    except LoadError as error:
        if error.kind in ("no_config", "no_weights"):
            raise foreign_folder(path) or error from None
        raise
    if openai_names(folder.names()):
        raise openai_layout(path)
    return folder


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix == ".gguf"


def dtype_bytes(name: str) -> float:
    """Bytes per element of a dtype as safetensors or GGUF names it."""
    if name in DTYPES:
        return DTYPES[name].itemsize
    values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return nbytes / values


def to_compute(tensor: Tensor | Quant) -> Tensor | Quant:
    """Weights stay as stored where arithmetic has a path for them: float64 becomes float32, float16 too where
    it is no matrix."""
    if isinstance(tensor, Quant):
        return tensor
    narrow = tensor.dtype == torch.float16 and tensor.dim() < 2
    return tensor.float() if narrow or tensor.dtype == torch.float64 else tensor


def to_tensor(weight: Tensor | Quant) -> Tensor:
    """`to_compute` for those who need one plain tensor: blocks are unpacked to float32."""
    plain = to_compute(weight)
    return plain if isinstance(plain, Tensor) else dense(plain)
