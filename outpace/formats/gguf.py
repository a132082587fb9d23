"""What both kinds of draft share in llama.cpp's format: names, numbers, rope, and a record of the rest."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from outpace.checkpoint.base import LoadError
from outpace.checkpoint.gguf import add_metadata
from outpace.checkpoint.gguf_header import Header, read_header
from outpace.checkpoint.publish import written
from outpace.drafts.quantize import pack, packs
from outpace.formats.spec import EMBEDDING, HEAD, TargetFiles, canonical_rope
from outpace.ops.quant import Quant, dense
from outpace.ops.rope import RopeConfig, inverse_frequencies

T = TypeVar("T")

# of our own: the whole config and the precision of what had to be widened. llama.cpp does not read it
RECORD = "outpace.draft"
ROPE_FACTORS = "rope_freqs.weight"
WHOLE = {"fc.weight": "fc.weight", "norm.weight": "output_norm.weight"}
WHOLE |= {EMBEDDING: "token_embd.weight", HEAD: "output.weight"}
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "hidden_norm": "attn_norm_2",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}
PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.int16, "I64": np.int64}
KINDS = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
    torch.int64: GGMLQuantizationType.I64,
}


@dataclass(frozen=True)
class Metadata:
    """A GGUF file's fields under one architecture, with errors that name the key."""

    header: Header
    architecture: str

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        name = f"{self.architecture}.{key}"
        value = self.header.metadata.get(name, default)
        if value is None:
            raise LoadError(f"{self.header.path}: the metadata lacks {name}")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (kind is int and not 0 <= value < 2**31):  # type: ignore[operator]
            raise LoadError(
                f"{self.header.path}: metadata {name} is {str(value)[:60]!r}, not {kind.__name__}"
            )
        return value  # type: ignore[return-value]

    def numbers(self, key: str, kind: type[T]) -> list[T]:
        items: list[Any] = self.get(key, list)
        if not all(type(value) is kind for value in items):
            raise LoadError(f"{self.header.path}: metadata {self.architecture}.{key} is {str(items)[:60]!r}")
        return items

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.header.metadata


def open_metadata(path: Path | str, architecture: str) -> Metadata:
    header = read_header(Path(path))
    value = header.metadata.get("general.architecture")
    if value != architecture:
        raise LoadError(f"{path}: general.architecture is {str(value)[:60]!r}, not {architecture!r}")
    return Metadata(header, architecture)


def tensor_of(header: Header, name: str) -> Tensor:
    """A view of the mapped file; blocks of numbers are unpacked to float32."""
    info = header.tensors[name]
    flat = np.frombuffer(header.data, np.uint8, info.nbytes, info.start)
    if info.format in PLAIN:
        plain = torch.from_numpy(flat.view(PLAIN[info.format])).reshape(info.shape)
        return plain.view(torch.bfloat16) if info.format == "BF16" else plain
    return dense(Quant(torch.from_numpy(flat).reshape(*info.shape[:-1], -1), info.format))


def gguf_name(name: str) -> str:
    """z-lab's or SGLang's name -> llama.cpp's; one without a place there comes back as it is."""
    if name in WHOLE:
        return WHOLE[name]
    parts = name.replace("midlayer.", "layers.0.").split(".", 2)
    if parts[0] != "layers" or len(parts) < 3:
        return name
    stem, _, kind = parts[2].rpartition(".")
    return f"blk.{parts[1]}.{OF_LAYER[stem]}.{kind}" if stem in OF_LAYER else name


def common_keys(config: Any, layers: int) -> dict[str, Any]:
    """`config` a DFlashConfig or an Eagle3Config; keys without the architecture's name."""
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        **rope_keys(config.rope),
    }


def common_fields(value: Metadata) -> dict[str, Any]:
    heads = value.get("attention.head_count", int)
    width = value.get("embedding_length", int)
    return {
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": value.get("attention.head_count_kv", int, heads),
        "head_dim": value.get("attention.key_length", int, width // max(heads, 1)),
        "intermediate_size": value.get("feed_forward_length", int),
        "rms_norm_eps": shortest(value.get("attention.layer_norm_rms_epsilon", float)),
        "max_position_embeddings": value.get("context_length", int),
        "vocab_size": value.get(
            "vocab_size", int, len(value.header.metadata.get("tokenizer.ggml.tokens") or ()) or None
        ),
    }


def shortest(value: float) -> float:
    """What was meant by a number that went through float32: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def by_factors(rope: RopeConfig) -> bool:
    """llama.cpp's loaders of drafts read YaRN without its betas, and round its range; what they cannot read
    is written as one factor per frequency, which they can."""
    usual = rope.truncate and (rope.beta_fast, rope.beta_slow) == (32.0, 1.0)
    return rope.kind in ("llama3", "factors") or (rope.kind == "yarn" and not usual)


def _own_concentration(rope: RopeConfig) -> float:
    """What llama.cpp multiplies cos and sin by, by itself."""
    known = rope.kind == "yarn" and not by_factors(rope) and rope.factor > 1
    return 0.1 * math.log(rope.factor) + 1.0 if known else 1.0


def rope_keys(rope: RopeConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope.freq_base": float(rope.theta)}
    scaling = "none" if by_factors(rope) or rope.kind == "default" else rope.kind
    values["rope.scaling.type"] = scaling
    if scaling != "none":
        values["rope.scaling.factor"] = float(rope.factor)
    if scaling == "yarn":
        values["rope.scaling.original_context_length"] = rope.original_max_position
    more = rope.concentration / _own_concentration(rope)
    if more != 1.0:
        values["rope.scaling.attn_factor"] = more
    return values


def rope_factors(rope: RopeConfig, head_dim: int) -> Tensor:
    """[D/2] float32: what each of theta's frequencies is divided by."""
    plain = RopeConfig(theta=rope.theta)
    return (inverse_frequencies(plain, head_dim) / inverse_frequencies(rope, head_dim)).float()


def read_rope(metadata: Metadata, head_dim: int, target: TargetFiles | None) -> tuple[RopeConfig, list[str]]:
    """Of a file without our record. Factors are the target's rope where that has the same frequencies."""
    theta = shortest(metadata.get("rope.freq_base", float, 10000.0))
    kind = metadata.get("rope.scaling.type", str, "linear")
    factor = shortest(metadata.get("rope.scaling.factor", float, 0.0)) or 1.0
    more = metadata.get("rope.scaling.attn_factor", float, 1.0)
    if ROPE_FACTORS in metadata.header.tensors:
        return _from_factors(metadata, theta, head_dim, more, target)
    if kind == "yarn":
        original = metadata.get("context_length", int)
        original = metadata.get("rope.scaling.original_context_length", int, original)
        rope = RopeConfig(theta=theta, kind="yarn", factor=factor, original_max_position=original)
        if more == 1.0:
            return rope, []
        return RopeConfig(**{**asdict(rope), "attention_factor": shortest(more * rope.concentration)}), []
    if more != 1.0 or kind not in ("none", "linear"):
        raise LoadError(
            f"{metadata.header.path}: a rope of type {kind!r} with attn_factor {more} is not supported"
        )
    scaled = kind == "linear" and factor != 1.0
    return RopeConfig(theta=theta, kind="linear", factor=factor) if scaled else RopeConfig(theta=theta), []


def _from_factors(
    metadata: Metadata, theta: float, head_dim: int, more: float, target: TargetFiles | None
) -> tuple[RopeConfig, list[str]]:
    factors = tensor_of(metadata.header, ROPE_FACTORS)
    if target is not None and factors.shape == (head_dim // 2,):
        rope = canonical_rope(target.config.rope)
        same = rope.theta == theta and torch.allclose(rope_factors(rope, head_dim), factors, rtol=1e-5)
        if same and math.isclose(rope.concentration, more, rel_tol=1e-5):
            return rope, ["the rope's frequencies are those of the target; its rope is taken"]
    if more != 1.0:
        raise LoadError(
            f"{metadata.header.path}: {ROPE_FACTORS} with attn_factor {more:g} is YaRN, and the file does "
            "not hold its parameters: name the target, its rope is tried"
        )
    rope = RopeConfig(theta=theta, kind="factors", factors=tuple(factors.tolist()))
    return rope, ["the rope is one factor per frequency, which only GGUF can say; --target may name its kind"]


def write_file(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    vocabulary: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    config: Any,
    packed: bool = False,
) -> None:
    """`keys` without the architecture's name, `tensors` by llama.cpp's names. Vectors are widened to float32,
    which llama.cpp wants of norms. `packed`: matrices become blocks of Q8_0, but for those that blocks do not
    divide and the embedding, which is read a row at a time. The file gets its name when it is whole."""
    widened = {n: str(t.dtype).removeprefix("torch.") for n, t in tensors.items() if _vector(t)}
    record = json.dumps({"config": asdict(config), "widened": widened}, sort_keys=True)
    if packed and not any(_multiplies(name, tensor) for name, tensor in tensors.items()):
        raise ValueError("q8_0: blocks of 32 divide the rows of none of its matrices; leave it as stored")
    with written(path, sum(t.nbytes for t in tensors.values())) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        writer.add_type("model")
        add_metadata(writer, {f"{architecture}.{key}": value for key, value in keys.items()})
        add_metadata(writer, {**vocabulary, RECORD: record})
        for name, tensor in tensors.items():
            if packed and _multiplies(name, tensor):
                blocks = pack(tensor).data.contiguous().numpy()
                writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType.Q8_0)
                continue
            plain = tensor.float() if _vector(tensor) else tensor
            if plain.dtype not in KINDS:
                raise ValueError(f"{name} is {plain.dtype}: GGUF has no such type; choose --dtype")
            data = plain.detach().contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, data, raw_dtype=KINDS[plain.dtype])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _multiplies(name: str, tensor: Tensor) -> bool:
    """Whether it is the matrix of a product, in rows that blocks divide."""
    is_matrix = tensor.dim() == 2 and tensor.is_floating_point()
    return is_matrix and name != WHOLE[EMBEDDING] and packs(tensor)


def _vector(tensor: Tensor) -> bool:
    return tensor.dim() < 2 and tensor.is_floating_point()


def read_record(given: Metadata) -> tuple[dict[str, Any], dict[str, torch.dtype]] | None:
    """(config's fields, GGUF's name -> the precision a vector had) of a file we wrote, None of others'."""
    text = given.header.metadata.get(RECORD)
    if text is None:
        return None
    try:
        data = json.loads(text)
        fields = dict(data["config"])
        for key, value in fields.items():
            fields[key] = tuple(value) if isinstance(value, list) else value
        rope: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields["rope"].items()}
        fields["rope"] = RopeConfig(**rope)
        widened = {str(name): getattr(torch, str(dtype)) for name, dtype in data["widened"].items()}
        if not all(isinstance(dtype, torch.dtype) for dtype in widened.values()):
            raise TypeError("no dtype")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LoadError(f"{given.header.path}: the metadata {RECORD} is damaged ({error!r})") from error
    return fields, widened


def check_record(metadata: Metadata, keys: Mapping[str, Any]) -> None:
    """The record speaks for the keys that llama.cpp reads only while they say the same. Raises LoadError."""
    for key, value in keys.items():
        given = metadata.header.metadata.get(f"{metadata.architecture}.{key}")
        same = given == value
        if isinstance(value, float) and isinstance(given, float):
            same = np.float32(given) == np.float32(value)
        if not same:
            raise LoadError(
                f"{metadata.header.path}: {metadata.architecture}.{key} is {str(given)[:60]}, and {RECORD} "
                f"was made for {str(value)[:60]}: the file was changed after it was written; export it again"
            )


def narrowed(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A widened vector as it was; exact, since it was widened from there."""
    return tensor if dtype is None or dtype == tensor.dtype else tensor.to(dtype)
