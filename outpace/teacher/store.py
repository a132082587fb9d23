"""The teacher cache on disk: a folder of safetensors shards under one meta.json; write, open, read, verify.

meta.json                what the cache belongs to, how it was made, and each shard's size and sha256
shard-00000.safetensors  S samples where the texts hold R tokens in all:
    tokens         [R] int32           the texts (prompt, then response) one after another
    aux            [R, n, C]           bfloat16, or float8_e4m3fn alongside ..
    aux_scale      [R, n] float32      .. its scale: one per token and layer
    final          [R, C]              as aux, where asked for: the state after the final norm, ..
    final_scale    [R] float32         .. and its scale; row t is what the head reads to predict token t + 1
    begins         [S+1] int64         sample s owns rows begins[s] .. begins[s+1]
    prompt_lengths [S] int64
    offsets        [S] int64           rotary position of the first token
    temperatures   [S] float32
"""

import hashlib
import math
import re
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor

from outpace.checkpoint.save import write_atomically, write_json
from outpace.checkpoint.strict_json import read_object
from outpace.config import typed

FORMAT_VERSION = 1
DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
FP8_LARGEST = 448.0
OPEN_SHARDS = 64  # memory maps open at once
MAX_OFFSET = 2**31  # of rotary positions
REBUILD = "delete this shard and run the same `teacher build` again, which makes it again"


class StoreError(ValueError):
    """A teacher cache that is damaged, unfinished or another target's; the message names the fix."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise StoreError(message)


@dataclass(frozen=True, kw_only=True)
class Shard:
    file: str
    sha256: str
    nbytes: int
    samples: int
    tokens: int
    relative_error: float  # rms of (stored - computed) over rms of computed; the larger of aux and final


@dataclass(frozen=True, kw_only=True)
class TeacherMeta:
    """meta.json. `recipe`: of the build; `planned_samples`: its size when done."""

    format_version: int
    target_fingerprint: str
    tokenizer_sha256: str
    corpus_sha256: str
    template: str
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    planned_samples: int
    recipe: dict[str, Any]
    shards: tuple[Shard, ...]

    @property
    def final(self) -> bool:
        """Whether it holds final states; missing in the recipe of an older cache."""
        return bool(self.recipe.get("final", False))

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.shards)

    @property
    def samples(self) -> int:
        return sum(s.samples for s in self.shards)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.shards)

    @property
    def complete(self) -> bool:
        return self.samples == self.planned_samples


@dataclass(frozen=True)
class TeacherSample:
    """One text at one offset. `aux` is strided as it is stored, [T, n, C]; the loss belongs to
    positions >= prompt_length. `target.logits(final[t])` is the target's output of token t + 1."""

    tokens: Tensor  # [T] int64
    prompt_length: int
    aux: Tensor  # [n, T, C] bfloat16, or float32 where the cache is fp8
    offset: int
    temperature: float
    final: Tensor | None = None  # [T, C], in the dtype of aux; None where the cache holds none


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def encode_aux(aux: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """[..., C] float -> what is stored, and for fp8 its scales [...] float32."""
    if dtype != "fp8":
        return aux.to(DTYPES[dtype]), None
    scale = aux.float().abs().amax(-1).clamp(min=2.0**-100) / FP8_LARGEST
    return (aux.float() / scale[..., None]).clamp(-FP8_LARGEST, FP8_LARGEST).to(DTYPES[dtype]), scale


def decode_aux(stored: Tensor, scale: Tensor | None) -> Tensor:
    return stored.float() if scale is None else stored.float() * scale[..., None]


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def write_shard(folder: Path, index: int, tensors: dict[str, Tensor], relative_error: float) -> Shard:
    """Raises LoadError where the disk is full; then nothing of the shard is left behind."""
    data = save(tensors)
    path = folder / shard_name(index)
    write_atomically(path, data)
    return Shard(
        file=path.name,
        sha256=hashlib.sha256(data).hexdigest(),
        nbytes=len(data),
        samples=len(tensors["prompt_lengths"]),
        tokens=len(tensors["tokens"]),
        relative_error=relative_error,
    )


def write_meta(folder: Path, meta: TeacherMeta) -> None:
    write_json(folder / "meta.json", asdict(meta))


def read_meta(folder: Path | str) -> TeacherMeta:
    """Raises StoreError, naming the key, for a meta.json that is missing, malformed or of a newer Outpace."""
    path = Path(folder) / "meta.json"
    require(path.is_file(), f"{folder} holds no meta.json: name the folder of a teacher cache, or build one")
    try:
        data = read_object(path)
        version, shards = data.get("format_version"), data.get("shards")
        if type(version) is int and version > FORMAT_VERSION:
            raise ValueError(
                f"{path} has format version {version}; this Outpace reads up to {FORMAT_VERSION}: upgrade "
                "it, or build the cache again in another folder"
            )
        if not isinstance(shards, list) or not all(isinstance(shard, dict) for shard in shards):
            raise ValueError(f"{path}: `shards` must be a list of objects")
        data["shards"] = ()
        meta = typed(TeacherMeta, data, str(path))
        listed = tuple(typed(Shard, shard, f"{path}: shards[{k}]") for k, shard in enumerate(shards))
        meta = replace(meta, shards=listed)
    except ValueError as error:
        raise StoreError(
            f"{error}; this is no whole teacher cache: build it again in a new folder"
        ) from error
    _check_meta(meta, path)
    return meta


def _check_meta(meta: TeacherMeta, path: Path) -> None:
    layers, hashes = meta.target_layer_ids, (meta.target_fingerprint, meta.tokenizer_sha256)
    wrong = {
        "format_version": meta.format_version < 1,
        "target_fingerprint and tokenizer_sha256": not all(map(_is_sha256, hashes)),
        "target_layer_ids": not layers or min(layers) < 0 or len(set(layers)) < len(layers),
        "hidden_size": not 1 <= meta.hidden_size <= 2**24,
        "dtype": meta.dtype not in DTYPES,
        "planned_samples": not meta.samples <= meta.planned_samples,
        "recipe.final": not isinstance(meta.recipe.get("final", False), bool),
    }
    for k, shard in enumerate(meta.shards):
        at = f"shards[{k}]."
        wrong |= {
            # no other name: a path must not lead out of the folder
            f"{at}file": shard.file != shard_name(k),
            f"{at}sha256": not _is_sha256(shard.sha256),
            f"{at}nbytes, samples and tokens": min(shard.nbytes, shard.samples, shard.tokens) < 1,
            f"{at}relative_error": not 0 <= shard.relative_error < math.inf,
        }
    for name, is_wrong in wrong.items():
        require(not is_wrong, f"{path}: `{name}` has no valid value: build the cache again in a new folder")


def _is_sha256(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


class TeacherCache:
    """A cache opened for reading. A shard is checked and memory-mapped at its first use."""

    def __init__(self, folder: Path, meta: TeacherMeta, vocab_size: int | None = None) -> None:
        self.folder, self.meta, self.vocab_size = folder, meta, vocab_size
        self._ends = list(accumulate(s.samples for s in meta.shards))
        self._open: dict[int, _OpenShard] = {}
        self._checked: set[int] = set()

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        target_fingerprint: str | None = None,
        vocab_size: int | None = None,
        layer_ids: tuple[int, ...] | None = None,
        tokenizer: str | None = None,
        final: bool = False,
        unfinished: bool = False,
    ) -> "TeacherCache":
        """`target_fingerprint`, `layer_ids` and `tokenizer` (its `tokenizer_sha256`) are compared if given;
        `vocab_size`: the target's, above every token; `final`: final states are needed. Raises StoreError
        when one differs or is missing, when a shard is missing or cut off, and when the build was not
        finished (unless `unfinished`)."""
        folder = Path(folder)
        meta = read_meta(folder)
        require(
            target_fingerprint in (None, meta.target_fingerprint),
            f"{folder} belongs to another target: its fingerprint is {meta.target_fingerprint[:16]}.., "
            f"this target's {str(target_fingerprint)[:16]}..; name that target, or build a cache of this",
        )
        require(
            tokenizer in (None, meta.tokenizer_sha256),
            f"{folder} was made with another tokenizer: sha256 {meta.tokenizer_sha256[:16]}.., "
            f"not {str(tokenizer)[:16]}..; use the one it was made with, or build it again",
        )
        wanted = meta.target_layer_ids if layer_ids is None else tuple(layer_ids)
        require(
            wanted == meta.target_layer_ids,
            f"{folder} holds the layers {list(meta.target_layer_ids)} in this order, not {list(wanted)}: "
            f"give the draft those, or build a cache with target_layer_ids {list(wanted)}",
        )
        require(
            meta.final or not final,
            f"{folder} holds no final states, from which soft labels are made: build a cache with "
            "`teacher build --final`, or train on hard labels",
        )
        require(
            meta.complete or unfinished,
            f"{folder} is unfinished: {meta.samples} of {meta.planned_samples} samples. Run the same "
            "`teacher build` again to finish it, or open it with unfinished=True",
        )
        for shard in meta.shards:
            _check_size(folder, shard)
        return cls(folder, meta, vocab_size)

    def __len__(self) -> int:
        return self.meta.samples

    def describe(self) -> dict[str, Any]:
        """A summary, ready for JSON."""
        meta = self.meta
        values = {k: v for k, v in asdict(meta).items() if k not in ("shards", "planned_samples", "recipe")}
        return values | {
            "samples": meta.samples,
            "planned_samples": meta.planned_samples,
            "tokens": meta.tokens,
            "shards": len(meta.shards),
            "nbytes": meta.nbytes,
            "final": meta.final,
            "relative_error": max((s.relative_error for s in meta.shards), default=0.0),
            "recipe": meta.recipe,
        }

    def sample(self, i: int) -> TeacherSample:
        """Reads the rows of that sample alone. Raises IndexError past the end, StoreError for a damaged
        shard."""
        shard, s = self._find(i)
        return shard.sample(s)

    def text(self, i: int) -> tuple[Tensor, int]:
        """The tokens [T] int64 and prompt_length of `sample`; its states are not read."""
        shard, s = self._find(i)
        return shard.text(s)

    def verify(self) -> int:
        """Checks every shard, its sha256 included; -> bytes checked. Raises StoreError at the first that is
        damaged or missing."""
        for k in range(len(self.meta.shards)):
            self._checked.discard(k)
            self._shard(k)
        return self.meta.nbytes

    def _find(self, i: int) -> tuple["_OpenShard", int]:
        """Its shard, and its number there."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a teacher cache of {len(self)}")
        k = bisect_right(self._ends, i)
        return self._shard(k), i - (self._ends[k - 1] if k else 0)

    def _shard(self, k: int) -> "_OpenShard":
        if k not in self._checked:
            self._open.pop(k, None)
            _check_sha256(self.folder, self.meta.shards[k])
        if k not in self._open:
            if len(self._open) >= OPEN_SHARDS:
                del self._open[next(iter(self._open))]
            self._open[k] = _OpenShard(self.folder, self.meta, k)
        if k not in self._checked:
            self._open[k].check(self.vocab_size)
            self._checked.add(k)
        return self._open[k]


def _check_size(folder: Path, shard: Shard) -> None:
    path = folder / shard.file
    require(path.is_file(), f"{path} is missing: run the same `teacher build` again, which makes it again")
    size = path.stat().st_size
    require(
        size == shard.nbytes, f"{path} holds {size:,} bytes, meta.json records {shard.nbytes:,}: {REBUILD}"
    )


def _check_sha256(folder: Path, shard: Shard) -> None:
    _check_size(folder, shard)
    path = folder / shard.file
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    require(
        digest == shard.sha256,
        f"{path} was altered: its sha256 is {digest[:16]}.., meta.json records {shard.sha256[:16]}..; "
        f"{REBUILD}",
    )


class _OpenShard:
    """One memory-mapped shard, its small tensors read."""

    def __init__(self, folder: Path, meta: TeacherMeta, k: int) -> None:
        self.path, self.shard = folder / meta.shards[k].file, meta.shards[k]
        S, R, C, n = self.shard.samples, self.shard.tokens, meta.hidden_size, len(meta.target_layer_ids)
        stored = "BF16" if meta.dtype == "bfloat16" else "F8_E4M3"
        wanted: dict[str, tuple[str, list[int]]] = {
            "tokens": ("I32", [R]),
            "aux": (stored, [R, n, C]),
            "begins": ("I64", [S + 1]),
            "prompt_lengths": ("I64", [S]),
            "offsets": ("I64", [S]),
            "temperatures": ("F32", [S]),
        }
        if meta.final:
            wanted["final"] = stored, [R, C]
        if meta.dtype == "fp8":
            scaled = [name for name in ("aux", "final") if name in wanted]
            wanted |= {f"{name}_scale": ("F32", wanted[name][1][:-1]) for name in scaled}
        try:
            file: Any = safe_open(self.path, framework="pt")
            parts = {name: file.get_slice(name) for name in wanted}
            for name, part in parts.items():
                actual = part.get_dtype(), part.get_shape()
                if actual != wanted[name]:
                    raise ValueError(f"{name} is {actual}, not {wanted[name]}")
            names = ("begins", "prompt_lengths", "offsets", "temperatures")
            self.begins, self.prompt_lengths, self.offsets, self.temperatures = (
                file.get_tensor(name).tolist() for name in names
            )
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise StoreError(f"{self.path} is not a shard of this cache ({error}): {REBUILD}") from error
        self.tokens, self.aux = parts["tokens"], parts["aux"]
        self.final, self.scale = parts.get("final"), parts.get("aux_scale")
        self.final_scale = parts.get("final_scale")

    def check(self, vocab_size: int | None) -> None:
        """Raises StoreError for values that no build writes."""
        begins, tokens = self.begins, self.tokens[:]
        lengths = [b - a for a, b in pairwise(begins)]
        most = int(tokens.max()) if len(tokens) else 0
        fits = zip(self.prompt_lengths, lengths, strict=True)
        wrong = {
            "begins": begins[0] != 0 or begins[-1] != len(tokens) or min(lengths) < 1,
            "prompt_lengths": not all(1 <= prompt <= length for prompt, length in fits),
            "offsets": not all(0 <= offset <= MAX_OFFSET for offset in self.offsets),
            "temperatures": not all(0 <= t < math.inf for t in self.temperatures),
            "tokens": int(tokens.min()) < 0 or (vocab_size is not None and most >= vocab_size),
        }
        for name, is_wrong in wrong.items():
            require(
                not is_wrong,
                f"{self.path}: {name} out of range"
                + (f" (token {most}, vocabulary of {vocab_size})" if name == "tokens" else "")
                + f": {REBUILD}",
            )

    def text(self, s: int) -> tuple[Tensor, int]:
        return self.tokens[self.begins[s] : self.begins[s + 1]].long(), self.prompt_lengths[s]

    def sample(self, s: int) -> TeacherSample:
        rows = slice(self.begins[s], self.begins[s + 1])
        return TeacherSample(
            *self.text(s),
            _read(self.aux, self.scale, rows).transpose(0, 1),
            self.offsets[s],
            self.temperatures[s],
            None if self.final is None else _read(self.final, self.final_scale, rows),
        )


def _read(stored: Any, scale: Any, rows: slice) -> Tensor:
    """bfloat16 as it is, fp8 as float32."""
    return stored[rows] if scale is None else decode_aux(stored[rows], scale[rows])
