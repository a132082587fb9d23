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
import json
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor

from outpace.checkpoint.save import write_atomically, write_json

FORMAT_VERSION = 1
DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
FP8_LARGEST = 448.0
OPEN_SHARDS = 64  # memory maps held at once
REBUILD = "delete it and run the same `teacher build` again, which makes the missing shard again"


class StoreError(ValueError):
    """A teacher cache that is damaged, unfinished or another target's; the message names the fix."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    file: str
    sha256: str
    nbytes: int
    samples: int
    tokens: int
    relative_error: float  # of storing: rms of (stored - computed) over rms of computed; of aux or final


@dataclass(frozen=True, kw_only=True)
class TeacherMeta:
    """meta.json. `recipe` is what the build was asked for; `planned_samples` its size when done."""

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
        """Whether the final states are held. Caches built before there were any do not say."""
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
    """Raises StoreError when there is none, when it is not one, or when a newer Outpace wrote it."""
    path = Path(folder) / "meta.json"
    if not path.is_file():
        raise StoreError(f"{folder} holds no meta.json: name the folder of a teacher cache, or build one")
    try:
        data = json.loads(path.read_text())
        version = data["format_version"]
        if version > FORMAT_VERSION:
            raise StoreError(
                f"{path} has format version {version}; this Outpace reads up to {FORMAT_VERSION}: "
                "upgrade it, or build the cache again in another folder"
            )
        data["target_layer_ids"] = tuple(data["target_layer_ids"])
        data["shards"] = tuple(Shard(**shard) for shard in data["shards"])
        return TeacherMeta(**data)
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is not a teacher cache's meta.json ({error!r}): build it again") from error


class TeacherCache:
    """A cache opened for reading. Shards are memory-mapped when first touched."""

    def __init__(self, folder: Path, meta: TeacherMeta) -> None:
        self.folder, self.meta = folder, meta
        self._ends = list(accumulate(s.samples for s in meta.shards))
        self._open: dict[int, _OpenShard] = {}

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        target_fingerprint: str | None = None,
        layer_ids: tuple[int, ...] | None = None,
        tokenizer: str | None = None,
        final: bool = False,
        unfinished: bool = False,
    ) -> "TeacherCache":
        """`target_fingerprint`, `layer_ids` and `tokenizer` (its `tokenizer_sha256`) are compared where
        they are given; `final`: the final states are wanted. Raises StoreError when one differs or is not
        held, when a shard is missing or cut off, and when the build was not finished (unless
        `unfinished`)."""
        folder = Path(folder)
        meta = read_meta(folder)
        if target_fingerprint not in (None, meta.target_fingerprint):
            raise StoreError(
                f"{folder} belongs to another target: its fingerprint is {meta.target_fingerprint[:16]}.., "
                f"this target's {str(target_fingerprint)[:16]}..; name that target, or build a cache of this"
            )
        if tokenizer not in (None, meta.tokenizer_sha256):
            raise StoreError(
                f"{folder} was made with another tokenizer: sha256 {meta.tokenizer_sha256[:16]}.., "
                f"not {str(tokenizer)[:16]}..; use the one it was made with, or build it again"
            )
        if layer_ids is not None and tuple(layer_ids) != meta.target_layer_ids:
            raise StoreError(
                f"{folder} holds the layers {list(meta.target_layer_ids)} in this order, not "
                f"{list(layer_ids)}: give the draft those, or build a cache with target_layer_ids "
                f"{list(layer_ids)}"
            )
        if final and not meta.final:
            raise StoreError(
                f"{folder} holds no final states, from which soft labels are made: build a cache with "
                "`teacher build --final`, or train on hard labels"
            )
        if not meta.complete and not unfinished:
            raise StoreError(
                f"{folder} is unfinished: {meta.samples} of {meta.planned_samples} samples. Run the same "
                "`teacher build` again to finish it, or open it with unfinished=True"
            )
        for shard in meta.shards:
            _check_size(folder, shard)
        return cls(folder, meta)

    def __len__(self) -> int:
        return self.meta.samples

    def describe(self) -> dict[str, Any]:
        """What a reader wants to know, ready for JSON."""
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
        """Reads the rows of that sample alone. Raises IndexError past the end."""
        at, s = self._find(i)
        return self._shard(at).sample(s)

    def text(self, i: int) -> tuple[Tensor, int]:
        """The tokens [T] int64 and prompt_length of `sample`, its states left unread."""
        at, s = self._find(i)
        return self._shard(at).text(s)

    def verify(self) -> int:
        """Compares every shard with its sha256; -> bytes checked. Raises StoreError at the first that
        differs, is cut off or missing."""
        for shard in self.meta.shards:
            _check_size(self.folder, shard)
            path = self.folder / shard.file
            with path.open("rb") as file:
                result = hashlib.file_digest(file, "sha256").hexdigest()
            if result != shard.sha256:
                raise StoreError(
                    f"{path} was altered: its sha256 is {result[:16]}.., meta.json says "
                    f"{shard.sha256[:16]}..; {REBUILD}"
                )
        return self.meta.nbytes

    def _find(self, i: int) -> tuple[int, int]:
        """Its shard, and its number there."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a teacher cache of {len(self)}")
        at = bisect_right(self._ends, i)
        return at, i - (self._ends[at - 1] if at else 0)

    def _shard(self, at: int) -> "_OpenShard":
        if at not in self._open:
            if len(self._open) >= OPEN_SHARDS:
                del self._open[next(iter(self._open))]
            self._open[at] = _OpenShard(self.folder / self.meta.shards[at].file, self.meta.final)
        return self._open[at]


def _check_size(folder: Path, shard: Shard) -> None:
    path = folder / shard.file
    if not path.is_file():
        raise StoreError(f"{path} is missing: run the same `teacher build` again, which makes it again")
    size = path.stat().st_size
    if size != shard.nbytes:
        raise StoreError(f"{path} holds {size:,} bytes, meta.json says {shard.nbytes:,}: {REBUILD}")


class _OpenShard:
    """One memory-mapped shard, its small tensors read. `final`: whether it should hold final states."""

    def __init__(self, path: Path, final: bool) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
            self.begins: list[int] = file.get_tensor("begins").tolist()
            self.prompt_lengths: list[int] = file.get_tensor("prompt_lengths").tolist()
            self.offsets: list[int] = file.get_tensor("offsets").tolist()
            self.temperatures: list[float] = file.get_tensor("temperatures").tolist()
            self.tokens, self.aux = file.get_slice("tokens"), file.get_slice("aux")
            scaled = "aux_scale" in file.keys()  # noqa: SIM118 - not a dict
            self.scale = file.get_slice("aux_scale") if scaled else None
            self.final = file.get_slice("final") if final else None
            self.final_scale = file.get_slice("final_scale") if final and scaled else None
        except (SafetensorError, OSError) as error:
            raise StoreError(f"{path} cannot be read as a shard ({error}): {REBUILD}") from error

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
