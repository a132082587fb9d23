"""Lossless speculative decoding for GPT-OSS, Qwen3 and Llama: `load`, `load_draft`, `generate`, `stream`."""

import os
from typing import TYPE_CHECKING, Any

# read when torch is loaded: its OpenMP threads would spin for milliseconds on cores that the kernels need
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

if TYPE_CHECKING:
    from outpace.api import (
        GenerationOutput,
        Model,
        SamplingParams,
        StreamPiece,
        generate,
        load,
        load_draft,
        stream,
    )

__version__ = "0.2.0"
__all__ = [
    "GenerationOutput",
    "Model",
    "SamplingParams",
    "StreamPiece",
    "__version__",
    "generate",
    "load",
    "load_draft",
    "stream",
]


def __getattr__(name: str) -> Any:
    """The API on first use: `outpace --help` and `import outpace` do not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    from outpace import api

    return getattr(api, name)
