"""Metadata into a GGUF file that is being written, each value by its Python type."""

from collections.abc import Mapping
from typing import Any

import gguf


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
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
