"""Write shards, index and config so that HF readers can load them; nothing is half-written."""

import json
import os
import struct
from collections.abc import Container, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from outpace.checkpoint.hf import INDEX, SINGLE
from outpace.checkpoint.publish import disk, published, replaced
from outpace.checkpoint.safetensors import DTYPES

SHARD_BYTES = 5 * 2**30


def write_atomically(path: Path, data: bytes) -> None:
    with replaced(path, len(data)) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def save_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """config.json and model.safetensors, or numbered shards with an index past `shard_bytes`.

    Tensors are taken from the iterable one shard at a time, and may be views of the files they replace. The
    folder is published whole (see `published`): a kill at any moment leaves the old one or the new one.
    """
    shards: list[tuple[Path, list[str], int]] = []
    held: dict[str, Tensor] = {}
    size = 0
    with published(folder) as new:
        for name, tensor in tensors:
            if held and size + tensor.nbytes > shard_bytes:
                shards.append(_write_shard(new, len(shards), held))
                held, size = {}, 0
            held[name] = tensor.contiguous()
            size += tensor.nbytes
        shards.append(_write_shard(new, len(shards), held))
        finals = shard_names(len(shards))
        for (temporary, _, _), final in zip(shards, finals, strict=True):
            os.replace(temporary, new / final)
        if len(shards) > 1:
            names = {final: names for final, (_, names, _) in zip(finals, shards, strict=True)}
            write_index(new, names, sum(size for _, _, size in shards))
        write_json(new / "config.json", config)


def remove_weights(folder: Path, kept: Container[str] = ()) -> None:
    """Unlink a checkpoint's files but the `kept`. Who has them mapped keeps what he has: nothing is cut short
    in place."""
    for old in folder.glob("model*.safetensors"):
        if old.name not in kept:
            old.unlink()
    (folder / INDEX).unlink(missing_ok=True)


def shard_names(count: int) -> list[str]:
    """HF's names: numbered ones, or the one of a single file."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_index(folder: Path, names_of: dict[str, list[str]], total_bytes: int) -> None:
    weight_map = {name: shard for shard, names in names_of.items() for name in names}
    write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _write_shard(folder: Path, n: int, held: dict[str, Tensor]) -> tuple[Path, list[str], int]:
    temporary, size = folder / f"shard-{n}.safetensors.tmp", sum(t.nbytes for t in held.values())
    with disk(folder, size):
        save_file(held, temporary, metadata={"format": "pt"})
    temporary.chmod(0o666 & ~_umask())  # safetensors makes files that the owner alone may read
    return temporary, list(held), size


def _umask() -> int:
    mask = os.umask(0)  # there is no other way to ask
    os.umask(mask)
    return mask


def stream_file(
    path: Path, specs: Sequence[tuple[str, str, tuple[int, ...]]], chunks: Iterable[bytes | memoryview]
) -> None:
    """One safetensors file from pieces that are never in memory together.

    `specs` are (name, safetensors dtype, shape), in the order in which `chunks` brings their bytes; dtypes
    with larger elements first, or what follows is not aligned. The file gets its name when it is whole.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in specs:
        begin, end = end, end + prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    size = 8 + len(text) + end
    with replaced(path, size) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for chunk in chunks:
            file.write(chunk)
        assert file.tell() == size, "the chunks are not what the specs promise"
