"""What every kind of checkpoint offers, and the error that all of them raise."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from outpace.ops.quant import Quant


class LoadError(ValueError):
    """A checkpoint that is not what it should be; the message names the file, the tensor and the fix.

    `kind` is the name under which `outpace inspect` reports it.
    """

    def __init__(self, message: str, kind: str = "unreadable") -> None:
        super().__init__(message)
        self.kind = kind


class Checkpoint(Protocol):
    """Named tensors and the config that goes with them, under HF's names, whatever the files are.

    `checkpoint/hf.py` reads folders of safetensors, `checkpoint/gguf.py` GGUF files; `checkpoint/open.py`
    opens whichever a path holds.
    """

    @property
    def folder(self) -> Path:
        """Where the tokenizer lies, and what messages name: the folder, or the file of a one-file format."""

    @property
    def config(self) -> dict[str, Any]:
        """What HF's config.json would say."""

    def names(self) -> list[str]:
        """Sorted."""

    def get(self, name: str) -> Tensor | Quant:
        """One tensor, or GGUF's blocks, in the precision it is stored in. May be a view of a private
        mapping of the file: written to, it changes in memory alone; replaced by a rename, the file leaves it
        as it is.
        Raises LoadError for a name that is not held."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises LoadError for a name that is not held."""

    def specs(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """(name, shape, dtype) of every tensor, from headers alone; `dtype_bytes` knows the dtypes."""
