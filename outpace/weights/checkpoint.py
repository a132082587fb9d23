"""open_checkpoint(folder) -> config, names, shapes, get(name): HF safetensors, sharded or not, lazily."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class LoadError(ValueError):
    """A checkpoint that is not what it should be; the message names the file, the tensor and the mend."""


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    config: dict[str, Any]
    shard_of: dict[str, Path]  # tensor name -> the file that holds it

    def names(self) -> list[str]:
        return sorted(self.shard_of)

    def get(self, name: str) -> Tensor:
        """One tensor, in the precision it is stored in. A copy: the file may be replaced afterwards."""
        with self._file(name) as file:
            return file.get_tensor(name).clone()

    def shape(self, name: str) -> tuple[int, ...]:
        with self._file(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def specs(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """(name, shape, safetensors dtype) of every tensor, from the headers alone."""
        for shard in sorted(set(self.shard_of.values())):
            with _open(shard) as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    part = file.get_slice(name)
                    yield name, tuple(part.get_shape()), part.get_dtype()

    def _file(self, name: str) -> Any:
        if name not in self.shard_of:
            raise LoadError(f"{self.folder} holds no tensor {name}")
        return _open(self.shard_of[name])


def read_config(folder: Path) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise LoadError(f"{folder} holds no config.json: name the folder of an HF checkpoint")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise LoadError(f"{path} holds a {type(config).__name__}, not an object")
    return config


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Raises LoadError for a missing config, a missing or cut-off shard, a tensor the index promises
    and no shard holds."""
    folder = Path(folder)
    config = read_config(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return Checkpoint(folder, config, _sharded(folder, index))
    single = folder / "model.safetensors"
    if not single.is_file():
        raise LoadError(
            f"{folder} holds neither model.safetensors nor model.safetensors.index.json; "
            "other formats (.bin, .gguf) are not read"
        )
    with _open(single) as file:
        return Checkpoint(folder, config, dict.fromkeys(file.keys(), single))


def _sharded(folder: Path, index: Path) -> dict[str, Path]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise LoadError(f"{index} is not a safetensors index: {error!r}") from error
    missing = sorted({s for s in weight_map.values() if not (folder / s).is_file()})
    if missing:
        raise LoadError(f"{index} names shards that are not there: {', '.join(missing)}; fetch them again")
    held: dict[str, Path] = {}
    for shard in sorted(set(weight_map.values())):
        with _open(folder / shard) as file:
            held |= dict.fromkeys(file.keys(), folder / shard)
    absent = sorted(set(weight_map) - set(held))
    if absent:
        raise LoadError(f"{index} promises {absent[0]} (and {len(absent) - 1} more) that no shard holds")
    return held


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise LoadError(
            f"{path} cannot be read as safetensors ({error}): it is cut off or damaged; fetch it again"
        ) from error


def dtype_bytes(name: str) -> float:
    """Bytes per element of a safetensors dtype name."""
    sizes = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BOOL": 1, "U8": 1, "I8": 1}
    return sizes.get(name, 1 if name.startswith("F8") else 2)


def to_compute(tensor: Tensor) -> Tensor:
    """Weights stay as stored where arithmetic has a path for them; float16 and float64 become float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.float64) else tensor
