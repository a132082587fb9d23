"""open_checkpoint(path) -> config, names, shapes, get(name), whichever format the path holds."""

from pathlib import Path

import torch
from torch import Tensor

from outpace.weights.contract import Checkpoint, LoadError
from outpace.weights.foreign import foreign_file, foreign_folder, openai_layout, openai_names
from outpace.weights.hf import open_folder

__all__ = ["Checkpoint", "LoadError", "dtype_bytes", "open_checkpoint", "to_compute"]


def open_checkpoint(path: Path | str) -> Checkpoint:
    """A folder of HF safetensors. Raises LoadError, naming the file and the mend, for what is missing,
    damaged or of another format."""
    path = Path(path)
    if is_gguf(path):
        raise LoadError(f"{path} is a GGUF file, which is not read yet")
    if path.is_file():
        raise foreign_file(path)
    try:
        found = open_folder(path)
    except LoadError as error:
        if error.kind in ("no_config", "no_weights"):
            raise foreign_folder(path) or error from None
        raise
    if openai_names(found.names()):
        raise openai_layout(path)
    return found


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix == ".gguf"


def dtype_bytes(name: str) -> float:
    """Bytes per element of a safetensors dtype name."""
    sizes = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BOOL": 1, "U8": 1, "I8": 1}
    return sizes.get(name, 1 if name.startswith("F8") else 2)


def to_compute(tensor: Tensor) -> Tensor:
    """Weights stay as stored where arithmetic has a path for them; float16 and float64 become float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.float64) else tensor
