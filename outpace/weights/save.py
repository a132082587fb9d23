"""Write shards, index and config so that HF readers can load them; nothing is half-written."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 5 * 2**30


def write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def save_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """config.json and model.safetensors, or numbered shards with an index past `shard_bytes`.

    Tensors are taken from the iterable one shard at a time. Files get their names only when whole;
    the config comes last, so a folder that has one is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[tuple[Path, list[str], int]] = []
    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > shard_bytes:
            shards.append(_write_shard(folder, len(shards), held))
            held, size = {}, 0
        held[name] = tensor.contiguous()
        size += tensor.nbytes
    shards.append(_write_shard(folder, len(shards), held))
    for old in folder.glob("model*.safetensors"):
        old.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    if len(shards) == 1:
        os.replace(shards[0][0], folder / "model.safetensors")
    else:
        weight_map: dict[str, str] = {}
        for i, (temporary, names, _) in enumerate(shards):
            final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            os.replace(temporary, folder / final)
            weight_map |= dict.fromkeys(names, final)
        total = sum(size for _, _, size in shards)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)
    write_json(folder / "config.json", config)


def _write_shard(folder: Path, n: int, held: dict[str, Tensor]) -> tuple[Path, list[str], int]:
    temporary = folder / f"shard-{n}.safetensors.tmp"
    save_file(held, temporary, metadata={"format": "pt"})
    return temporary, list(held), sum(t.nbytes for t in held.values())
