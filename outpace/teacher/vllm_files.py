"""A teacher cache from the files of vLLM's `extract_hidden_states`: read, checked and stored as our own.

A file is one request: hidden_states [T, n, C] and token_ids [T]. Its layers are the run's
`eagle_aux_hidden_state_layer_ids`, where k counts layers: the output of our layer k - 1. The last of all
comes before the final norm.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.progress import track
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from outpace.checkpoint.publish import disk, one_writer
from outpace.config import check_ranges
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.ops.sampling import seeded
from outpace.teacher.build import CHECKED, MOST_SAMPLES, States, begin, finished
from outpace.teacher.check import check_states
from outpace.teacher.source import OwnEngine
from outpace.teacher.store import (
    DTYPES,
    FORMAT_VERSION,
    StoreError,
    TeacherCache,
    TeacherMeta,
    require,
    tokenizer_sha256,
    write_meta,
    write_shard,
)

REQUEST = "run that request again, or remove the file"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, kw_only=True)
class ImportRecipe:
    """How to import files. `final`: the states of the last layer become final states, which the target's norm
    makes of them. Raises ValueError for settings that no import can use."""

    vllm_layer_ids: tuple[int, ...] = ()  # eagle_aux_hidden_state_layer_ids of the run, in its order
    final: bool = False
    dtype: str = "bfloat16"  # or "fp8"
    shard_samples: int = 64
    tolerance: float = 0.05  # of a sampled text's states against those of our own engine: teacher/check.py
    seed: int = 1

    def __post_init__(self) -> None:
        check_ranges(self, {"shard_samples": (1, MOST_SAMPLES), "tolerance": (0, 1)})
        ids = self.vllm_layer_ids
        if not ids or min(ids) < 1 or list(ids) != sorted(set(ids)):
            raise ValueError(
                f"vllm_layer_ids {list(ids)} (--layer-ids): give the run's eagle_aux_hidden_state_layer_ids, "
                "ascending and each once; 0, the embeddings, is no layer's output"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: a teacher cache holds {' or '.join(DTYPES)}")

    def layer_ids(self, layers: int) -> tuple[int, ...]:
        """Ours, without the final states' one. Raises ValueError for ids that a target of so many layers
        lacks."""
        ids = self.vllm_layer_ids
        if ids[-1] > layers or (self.final and (ids[-1] < layers or len(ids) < 2)):
            raise ValueError(
                f"vllm_layer_ids {list(ids)}: this target's end at {layers}"
                + (", and final states need that one and another" if self.final else "")
            )
        return tuple(k - 1 for k in (ids[:-1] if self.final else ids))


def import_files(
    target: Decoder,
    tokenizer: Tokenizer,
    files: Path,
    folder: Path,
    recipe: ImportRecipe,
    prompt_lengths: Mapping[str, int] | None = None,
) -> TeacherCache:
    """Import, or go on importing, every *.safetensors of `files` into the cache `folder`; those of a finished
    shard are not read again. Of every shard one text is run by `target`. `prompt_lengths`: tokens of the
    prompt by file name without its ending; without them all tokens but the first are the answer.

    Raises StoreError, naming file and fix, for one that is no such request of this target; ValueError for
    settings that do not fit it.
    """
    with one_writer(folder), disk(folder):
        paths = sorted(files.glob("*.safetensors"))
        require(bool(paths), f"{files} holds no *.safetensors: name the run's shared_storage_path")
        prompts = {path.stem: _prompt_length(path.stem, prompt_lengths) for path in paths}
        layer_ids = recipe.layer_ids(target.config.num_layers)
        meta = TeacherMeta(
            format_version=FORMAT_VERSION,
            target_fingerprint=fingerprint(target),
            tokenizer_sha256=tokenizer_sha256(tokenizer),
            corpus_sha256=hashlib.sha256(repr(prompts).encode()).hexdigest(),
            template="vLLM's extract_hidden_states",
            target_layer_ids=layer_ids,
            hidden_size=target.config.hidden_size,
            dtype=recipe.dtype,
            planned_samples=len(paths),
            recipe=asdict(recipe) | {"source": "vllm"},
            shards=(),
        )
        shards, size = begin(folder, meta), recipe.shard_samples
        for k in track(range(math.ceil(len(paths) / size)), "importing"):
            if finished(folder, shards, k):
                continue
            some = paths[k * size : (k + 1) * size]
            tensors, error = _shard(target, some, prompts, recipe, layer_ids, k)
            shards[k : k + 1] = [write_shard(folder, k, tensors, error)]
            write_meta(folder, replace(meta, shards=tuple(shards)))
        return TeacherCache.open(folder)


def read_request(path: Path, layers: int, hidden_size: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """-> token_ids [T] int64 and hidden_states [T, layers, hidden_size]. Raises StoreError for a file that
    does not hold exactly that."""
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            missing = {"hidden_states", "token_ids"} - names
            require(not missing, f"{path} lacks {' and '.join(sorted(missing))}: it holds {sorted(names)}")
            states, tokens = file.get_tensor("hidden_states"), file.get_tensor("token_ids")
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} is no whole safetensors file ({error}): {REQUEST}") from error
    for name, tensor, known in (("hidden_states", states, FLOATS), ("token_ids", tokens, INTEGERS)):
        dtypes = ", ".join(map(str, known))
        require(tensor.dtype in known, f"{path}: {name} is {tensor.dtype}; it must be one of {dtypes}")
    wanted = (len(tokens) if tokens.dim() == 1 else -1, layers, hidden_size)
    require(
        tuple(states.shape) == wanted and len(tokens) >= 2,
        f"{path}: hidden_states {list(states.shape)} and token_ids {list(tokens.shape)} are not "
        f"[T, {layers}, {hidden_size}] and [T] with T of 2 or more: give the run's layer ids and its model",
    )
    require(bool(states.isfinite().all()), f"{path}: hidden_states holds NaN or Inf: {REQUEST}")
    low, high = int(tokens.min()), int(tokens.max())
    require(
        0 <= low and high < vocab_size,
        f"{path}: token_ids reach from {low} to {high}, this target's vocabulary from 0 to {vocab_size - 1}: "
        "name the model that the run used",
    )
    return tokens.long(), states


def _prompt_length(stem: str, lengths: Mapping[str, int] | None) -> int:
    if lengths is None:
        return 1
    length = lengths.get(stem)
    require(
        isinstance(length, int) and length >= 1, f"the prompt lengths have no whole number above 0 for {stem}"
    )
    return int(lengths[stem])


@torch.inference_mode()
def _shard(
    target: Decoder,
    paths: list[Path],
    prompts: Mapping[str, int],
    recipe: ImportRecipe,
    layer_ids: tuple[int, ...],
    k: int,
) -> tuple[dict[str, Tensor], float]:
    """-> the shard's tensors, and the relative error of storing them."""
    config, n = target.config, len(recipe.vllm_layer_ids)
    read = {path: read_request(path, n, config.hidden_size, config.vocab_size) for path in paths}
    begins = torch.tensor([0, *(len(tokens) for tokens, _ in read.values())]).cumsum(0)
    rows = int(begins[-1])
    aux = States("aux", (rows, len(layer_ids), config.hidden_size), recipe.dtype)
    final = States("final", (rows, config.hidden_size), recipe.dtype) if recipe.final else None
    checked = paths[int(seeded(recipe.seed, CHECKED, k).initial_seed()) % len(paths)]
    for (path, (tokens, states)), first in zip(read.items(), begins.tolist(), strict=False):
        require(
            prompts[path.stem] <= len(tokens), f"{path}: its prompt is longer than its {len(tokens)} tokens"
        )
        features = states[:, : len(layer_ids)]
        if path == checked:
            given = OwnEngine(target), tokens, layer_ids, features.transpose(0, 1), recipe.tolerance
            check_states(str(path), *given)
        aux.write(first, features)
        if final is not None:
            final.write(first, target.norm(states[:, -1].to(target.device, target.dtype)))
    tensors = {
        "tokens": torch.cat([tokens for tokens, _ in read.values()]).int(),
        "begins": begins,
        "prompt_lengths": torch.tensor([prompts[path.stem] for path in paths]),
        "offsets": torch.zeros(len(paths), dtype=torch.int64),
        "temperatures": torch.zeros(len(paths)),
    }
    if final is None:
        return tensors | aux.tensors, aux.relative_error()
    return tensors | aux.tensors | final.tensors, max(aux.relative_error(), final.relative_error())
