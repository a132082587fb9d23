"""Random weights in the shape and the format of a published model: a checkpoint to load, time and break."""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import floor, log2, prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.checkpoint.base import LoadError
from outpace.checkpoint.safetensors import DTYPES, open_file
from outpace.checkpoint.save import (
    SHARD_BYTES,
    remove_weights,
    shard_names,
    stream_file,
    write_index,
    write_json,
)
from outpace.checkpoint.shipped import EMBEDDED
from outpace.checkpoint.strict_json import read_object
from outpace.models.load import parse_config, wanted_tensors
from outpace.models.published import GENERATION, PUBLISHED, first_layers
from outpace.ops.mxfp4 import E2M1, SCALE_BIAS

RECIPE = "synth.json"
STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
CHUNK = 2**22  # values in memory at once
MARGIN = 2**26  # bytes of disk that stay free
LOGITS = 3.0  # their standard deviation: wide enough that few are equal in low precision
PRINTABLE = 1280  # ids of the embedded tokenizer; the rows of the head beyond are scaled down ..
HUSHED = 0.125  # .. by this, so that what the model generates can be printed

Spec = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be written: `shards` by file name, in the order of their bytes."""

    config: dict[str, Any]
    recipe: dict[str, Any]
    shards: dict[str, list[Spec]]

    @property
    def parameters(self) -> int:
        """Published counts leave out scales and count two values in a byte of blocks."""
        counts = {"_blocks": 2, "_scales": 0}
        specs = [spec for specs in self.shards.values() for spec in specs]
        return sum(counts.get(name[-7:], 1) * prod(shape) for name, _, shape in specs)

    @property
    def nbytes(self) -> int:
        return sum(map(size, self.shards.values()))


@dataclass(frozen=True, kw_only=True)
class Written:
    folder: str
    parameters: int
    nbytes: int
    shards: int
    kept_shards: int  # of an earlier run that was stopped
    seconds: float


def size(specs: list[Spec]) -> int:
    return sum(prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in specs)


def plan(
    like: str,
    *,
    layers: int | None = None,
    seed: int = 0,
    dtype: str = "bfloat16",
    shard_bytes: int = SHARD_BYTES,
) -> Plan:
    """`like` is a name in models.published. Raises ValueError for another, for layers that the model does
    not have, for an unknown dtype and a negative seed."""
    if like not in PUBLISHED:
        raise ValueError(f"--like {like}: known models are {', '.join(PUBLISHED)}")
    if dtype not in STORED:
        raise ValueError(f"--dtype {dtype}: choose {', '.join(STORED)}")
    if seed < 0:
        raise ValueError(f"--seed {seed} is below 0")
    config = PUBLISHED[like] if layers is None else first_layers(PUBLISHED[like], layers)
    recipe = {"made_by": "outpace synth", "like": like, "layers": config["num_hidden_layers"]}
    recipe |= {"seed": seed, "dtype": dtype, "shard_bytes": shard_bytes}
    return Plan(
        config=config | {"dtype": dtype}, recipe=recipe, shards=_shards(config, STORED[dtype], shard_bytes)
    )


def _shards(config: dict[str, Any], dtype: str, shard_bytes: int) -> dict[str, list[Spec]]:
    parsed = parse_config(config)
    tensors = wanted_tensors(parsed, "mxfp4" if "quantization_config" in config else "dense")
    specs = [(n, "U8" if t.dtype == torch.uint8 else dtype, tuple(t.shape)) for n, t in tensors.items()]
    shards: list[list[Spec]] = [[]]
    for _, layer in groupby(sorted(specs, key=_place), key=_place):
        held = list(layer)
        if shards[-1] and size(shards[-1]) + size(held) > shard_bytes:
            shards.append([])
        shards[-1] += held
    for held in shards:  # larger elements first: all that follows stays aligned
        held.sort(key=lambda spec: -DTYPES[spec[1]].itemsize)
    return dict(zip(shard_names(len(shards)), shards, strict=True))


def _place(spec: Spec) -> int:
    """Layers in their order, the embedding before and the rest after them."""
    parts = spec[0].split(".")
    if "layers" in parts:
        return int(parts[parts.index("layers") + 1])
    return -1 if "embed_tokens" in parts else 2**20


def synthesise(
    folder: Path, plan: Plan, *, overwrite: bool = False, on_bytes: Callable[[int], None] = lambda n: None
) -> Written:
    """Writes the checkpoint, a tokenizer.json (the embedded one: enough to run text through,
    not the model's own), generation_config.json and synth.json, which records how it was made.

    It adds less than 200 MB to memory, whatever the size. Each tensor depends on the seed and its name
    alone. A run that was stopped goes on with the shards it lacks; config.json comes last. `on_bytes` hears
    of every chunk. Raises ValueError for a folder that holds anything else (unless `overwrite`, which
    removes the weights in it) and for a disk with too little room.
    """
    started = time.perf_counter()
    kept = _kept(folder, plan, overwrite)
    replaced = [path for path in folder.glob("model*.safetensors") if path.name not in kept]
    missing = sum(size(specs) for shard, specs in plan.shards.items() if shard not in kept)
    free = shutil.disk_usage(folder).free + sum(path.stat().st_size for path in replaced)
    if missing + MARGIN > free:
        raise ValueError(
            f"{folder} needs {missing / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB free: "
            "give fewer --layers or another disk"
        )
    if not kept:
        (folder / "config.json").unlink(missing_ok=True)
    remove_weights(folder, kept)
    write_json(folder / RECIPE, plan.recipe)
    for shard, specs in plan.shards.items():
        if shard in kept:
            on_bytes(size(specs))
        else:
            stream_file(folder / shard, specs, _chunks(specs, plan, on_bytes))
    if len(plan.shards) > 1:
        write_index(folder, {k: [name for name, _, _ in v] for k, v in plan.shards.items()}, plan.nbytes)
    shutil.copyfile(EMBEDDED / "target" / "tokenizer.json", folder / "tokenizer.json")
    write_json(folder / "generation_config.json", GENERATION[plan.config["model_type"]])
    write_json(folder / "config.json", plan.config)
    return Written(
        folder=str(folder),
        parameters=plan.parameters,
        nbytes=plan.nbytes,
        shards=len(plan.shards),
        kept_shards=len(kept),
        seconds=time.perf_counter() - started,
    )


def _kept(folder: Path, plan: Plan, overwrite: bool) -> set[str]:
    """The shards that an earlier run of the same plan finished. ValueError where something else is."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / RECIPE
    if recipe.is_file() and read_object(recipe) == plan.recipe:
        return {shard for shard, specs in plan.shards.items() if _whole(folder / shard, specs)}
    if any(folder.iterdir()) and not overwrite:
        raise ValueError(
            f"{folder} is not empty: name a new folder, or give --overwrite to replace its weights"
        )
    return set()


def _whole(path: Path, specs: list[Spec]) -> bool:
    try:
        held = open_file(path).slots
    except LoadError:
        return False
    return {n: (s.dtype, s.shape) for n, s in held.items()} == {n: (d, s) for n, d, s in specs}


def _chunks(specs: list[Spec], plan: Plan, on_bytes: Callable[[int], None]) -> Iterator[memoryview]:
    for spec in specs:
        for chunk in _tensor(spec, plan):
            data = chunk.view(torch.uint8).numpy().data
            yield data
            on_bytes(data.nbytes)


def _tensor(spec: Spec, plan: Plan) -> Iterator[Tensor]:
    """The tensor's values in order, flat, a few million at a time."""
    name, dtype, shape = spec
    source = np.random.SFC64(np.random.SeedSequence([plan.recipe["seed"], *name.encode()]))
    count, columns = prod(shape), shape[-1]
    step = CHUNK // columns * columns or columns  # whole rows
    for begin in range(0, count, step):
        values = min(step, count - begin)
        if name.endswith("_blocks"):
            yield _bits(source, values, torch.uint8)
        elif name.endswith("_scales"):
            yield _scales(source, values, columns)
        else:
            centre, spread = _distribution(name, shape, plan.config)
            noise = _bits(source, values, torch.int16).float().mul_(sqrt(3) * spread / 2**15)
            if _is_head(name, plan.config) and begin + values > PRINTABLE * columns:
                noise[max(PRINTABLE * columns - begin, 0) :] *= HUSHED
            yield noise.add_(centre).to(DTYPES[dtype])


def _bits(source: np.random.SFC64, values: int, dtype: torch.dtype) -> Tensor:
    """Uniform over all codes of an integer dtype."""
    raw = source.random_raw(-(-values * dtype.itemsize // 8))
    return torch.from_numpy(raw.view(np.uint8)).view(dtype)[:values]


def _scales(source: np.random.SFC64, values: int, groups: int) -> Tensor:
    """E8M0 bytes of two neighbouring powers of two, in the proportion that makes the squares of 32 * groups
    uniform codes sum to 1 on average."""
    mean_square = sum(v * v for v in E2M1) / len(E2M1)
    wanted = 1 / sqrt(32 * groups * mean_square)
    exponent = floor(log2(wanted))
    upper = ((wanted / 2**exponent) ** 2 - 1) / 3  # (1 - upper) * 1 + upper * 4 is the square wanted
    return (_bits(source, values, torch.uint8) < 256 * upper).to(torch.uint8).add_(SCALE_BIAS + exponent)


def _is_head(name: str, config: dict[str, Any]) -> bool:
    return name == ("model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight")


def _distribution(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> tuple[float, float]:
    """Mean and standard deviation: every product of a unit vector is one, whatever its width, so activations
    grow as the root of the number of layers and no more."""
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if _is_head(name, config):
        return 0.0, LOGITS / sqrt(shape[-1])
    if "embed_tokens" in name or name.endswith("sinks"):
        return 0.0, 1.0
    if name.endswith("bias"):
        return 0.0, 0.02
    gain = 2.0 if ".mlp.router." in name or name.endswith(".mlp.gate.weight") else 1.0
    return 0.0, gain / sqrt(shape[-1])
