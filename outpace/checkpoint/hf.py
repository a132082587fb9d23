"""A folder as HF writes it: config.json alongside model.safetensors, or alongside shards and their index."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr  # short, however long or deep the value
from typing import Any

from torch import Tensor

from outpace.checkpoint.base import LoadError
from outpace.checkpoint.safetensors import File, open_file
from outpace.checkpoint.strict_json import check_name, read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"(?!\.)[\w.+=@ -]{1,240}\.safetensors")  # one file of this folder, whatever the system


@dataclass(frozen=True, kw_only=True)
class HFCheckpoint:
    """A `base.Checkpoint`. Its files are mapped once, when it is opened: what `get` gives
    is what was there then."""

    folder: Path
    config: dict[str, Any]
    files: tuple[File, ...]
    file_of: dict[str, File]
    total_size: Any = None  # what the index claims, unchecked: writers count it differently

    def names(self) -> list[str]:
        return sorted(self.file_of)

    def get(self, name: str) -> Tensor:
        return self._file(name).get(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).slots[name].shape

    def specs(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        for file in self.files:
            for name, slot in file.slots.items():
                yield name, slot.shape, slot.dtype

    def release(self, name: str) -> None:
        """Give a tensor's pages back to the system, for walks over files larger than memory."""
        self._file(name).release(name)

    def _file(self, name: str) -> File:
        if name not in self.file_of:
            raise LoadError(f"{self.folder} holds no tensor {name}")
        return self.file_of[name]


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError(f"{folder} holds no config.json: name the folder of an HF checkpoint", "no_config")
    return read_object(path)


def open_folder(folder: Path) -> HFCheckpoint:
    """Raises LoadError for a missing config, a missing, damaged or ambiguous shard, an index that names
    files outside the folder, and a tensor that is not in the shard where the index places it."""
    config = read_config(folder)
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        return _sharded(folder, config, index)
    if not single.is_file():
        raise LoadError(f"{folder} holds neither {SINGLE} nor {INDEX}: fetch them", "no_weights")
    file = open_file(single)
    return HFCheckpoint(folder=folder, config=config, files=(file,), file_of=dict.fromkeys(file.slots, file))


def _sharded(folder: Path, config: dict[str, Any], index: Path) -> HFCheckpoint:
    value = read_object(index)
    shard_of = _weight_map(value, index)
    shards = sorted(set(shard_of.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        shown = ", ".join(missing[:6]) + (f", .. ({len(missing)} in all)" if len(missing) > 6 else "")
        raise LoadError(f"{index} names shards that are not there: {shown}; fetch them", "missing_shards")
    if SINGLE not in shards and (folder / SINGLE).is_file():
        raise LoadError(
            f"{folder} holds two sets of weights, {SINGLE} and the shards of {INDEX}: move one away",
            "two_sets",
        )
    files = {shard: open_file(folder / shard) for shard in shards}
    file_of: dict[str, File] = {}
    for file in files.values():
        twice = file.slots.keys() & file_of.keys()
        if twice:
            name = min(twice)
            raise LoadError(f"{name} is in {file_of[name].path} and again in {file.path}", "index")
        file_of |= dict.fromkeys(file.slots, file)
    absent = sorted(shard_of.keys() - file_of.keys())
    if absent:
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        raise LoadError(f"{index} promises {absent[0]}{more}, which no shard holds", "index")
    for name, shard in shard_of.items():
        if file_of[name] is not files[shard]:
            there = file_of[name].path.name
            raise LoadError(f"{index} says that {name} is in {shard}, and {there} holds it", "index")
    metadata = value.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return HFCheckpoint(
        folder=folder, config=config, files=tuple(files.values()), file_of=file_of, total_size=total
    )


def _weight_map(values: dict[str, Any], index: Path) -> dict[str, str]:
    """tensor -> file name. A name is one file of this folder: a path could lead anywhere. (A symbolic
    link may: HF's cache is made of them, and who made the folder made the link.)"""
    value = values.get("weight_map")
    if not isinstance(value, dict) or not value:
        raise LoadError(f"{index} is not a safetensors index: it has no weight_map with tensors", "index")
    for name, shard in value.items():
        check_name(name, str(index))
        if not isinstance(shard, str) or not SHARD.fullmatch(shard):
            raise LoadError(
                f"{index}: weight_map sends {name} to {repr(shard)}; "
                "shards are *.safetensors files in the same folder",
                "index",
            )
    return value
