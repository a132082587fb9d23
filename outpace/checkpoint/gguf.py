"""A GGUF file -> named tensors and config, under HF's names; blocks stay packed, and in the mapped file."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from outpace.checkpoint.base import LoadError
from outpace.checkpoint.gguf_config import architecture_of, config_from
from outpace.checkpoint.gguf_header import Header, TensorInfo, read_header
from outpace.ops.quant import PACKED, Quant
from outpace.ops.rope import RopeConfig, inverse_frequencies

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
ROUTER = {"gpt-oss": "mlp.router", "qwen3moe": "mlp.gate"}
ROPE_FACTORS = "rope_freqs.weight"  # a part of the config, not of the weights
PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.int16, "I64": np.int64}
INTERLEAVED = "llama"  # the architecture where the q and k rows are stored for pairs (2i, 2i + 1)


@dataclass(frozen=True)
class GGUFCheckpoint:
    """See base.Checkpoint. `metadata` is the first file's; `held`: HF's name -> file, place."""

    folder: Path
    config: dict[str, Any]
    metadata: dict[str, Any]
    held: dict[str, tuple[Header, TensorInfo]]

    def names(self) -> list[str]:
        return sorted(self.held)

    def get(self, name: str) -> Tensor | Quant:
        tensor = stored_tensor(*self._place(name), name)
        heads = 0
        if self.metadata["general.architecture"] == INTERLEAVED:
            heads = paired_heads(name, self.config["num_attention_heads"], self.config["num_key_value_heads"])
        return tensor[halves(tensor.shape[0], heads)] if heads else tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place(name)[1].shape

    def specs(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        for name, (_, info) in sorted(self.held.items()):
            yield name, info.shape, info.format

    def nbytes(self) -> int:
        return sum(info.nbytes for _, info in self.held.values())

    def _place(self, name: str) -> tuple[Header, TensorInfo]:
        if name not in self.held:
            raise LoadError(f"{self.folder} holds no tensor {name}")
        return self.held[name]


def open_gguf(path: Path) -> GGUFCheckpoint:
    """One file, or the first of `-00001-of-0000N` ones: the others are opened next to it. Raises
    LoadError."""
    first = read_header(path)
    headers = [first, *(read_header(part) for part in _other_parts(first))]
    architecture = architecture_of(path, first.metadata)
    held: dict[str, tuple[Header, TensorInfo]] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name == ROPE_FACTORS:
                continue
            theirs = hf_name(name, architecture)
            if theirs in held:
                raise LoadError(f"{header.path}: {name} is in two of the files")
            held[theirs] = header, info
    factors = first.tensors.get(ROPE_FACTORS)
    embedding = held.get("model.embed_tokens.weight")
    if embedding is None or len(embedding[1].shape) != 2:
        raise LoadError(f"{path} holds no token_embd.weight [vocabulary, width]: it is no language model")
    config = config_from(
        path,
        first.metadata,
        vocab_size=embedding[1].shape[0],
        tied="lm_head.weight" not in held,
        biased="model.layers.0.self_attn.q_proj.bias" in held,
        mlp_biased="model.layers.0.mlp.gate_proj.bias" in held,
        rope_factors=None if factors is None else _floats(first, factors),
    )
    return GGUFCheckpoint(path, config, first.metadata, held)


def _floats(header: Header, info: TensorInfo) -> list[float]:
    if info.format != "F32":
        raise LoadError(f"{header.path}: {ROPE_FACTORS} is {info.format}, not F32")
    items: list[float] = np.frombuffer(header.data, np.float32, info.shape[0], info.start).tolist()
    return items


def gguf_name(name: str, architecture: str) -> str:
    """HF's name -> GGUF's; one without a place there comes back as it is."""
    stem, _, kind = name.rpartition(".")
    if kind == "sinks":
        stem, kind = name, "weight"
    for ours, theirs in WHOLE.items():
        if stem == theirs:
            return f"{ours}.{kind}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    norm = "post_attention_norm" if architecture == "gpt-oss" else "ffn_norm"
    table = {theirs: ours for ours, theirs in OF_LAYER.items()}
    table |= {"post_attention_layernorm": norm, ROUTER.get(architecture, ""): "ffn_gate_inp"}
    table |= {"hidden_norm": "attn_norm_2"}  # of an EAGLE-3
    return f"blk.{layer[1]}.{table[layer[2]]}.{kind}" if layer and layer[2] in table else name


def hf_name(name: str, architecture: str) -> str:
    """GGUF's name of a tensor -> HF's; one that is not known stays, and is then left over."""
    stem, _, kind = name.rpartition(".")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer is None:
        return name
    table = {**OF_LAYER, "ffn_gate_inp": ROUTER.get(architecture, "mlp.gate")}
    theirs = table.get(layer[2])
    if theirs is None:
        return name
    whole = f"model.layers.{layer[1]}.{theirs}"
    return whole if theirs.endswith("sinks") else f"{whole}.{kind}"


def _other_parts(first: Header) -> list[Path]:
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 1 <= count <= 1000:
        raise LoadError(f"{first.path}: split.count is {count!r}, not a number of files")
    if count == 1:
        return []
    number = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", first.path.name)
    if number is None or int(number[3]) != count:
        raise LoadError(f"{first.path} is one of {count} parts: they are named NAME-00001-of-{count:05}.gguf")
    if int(number[2]) != 1:
        raise LoadError(f"{first.path} is part {int(number[2])} of {count}: name the first one")
    parts = [first.path.with_name(f"{number[1]}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)]
    absent = [part.name for part in parts if not part.is_file()]
    if absent:
        raise LoadError(f"{first.path} is one of {count} parts; missing next to it: {', '.join(absent[:5])}")
    return parts


def stored_tensor(header: Header, info: TensorInfo, name: str) -> Tensor | Quant:
    """A view of the mapped file; formats that no product exists for are unpacked to float32."""
    flat = np.frombuffer(header.data, np.uint8, info.nbytes, info.start)
    if info.format in PLAIN:
        plain = torch.from_numpy(flat.view(PLAIN[info.format])).reshape(info.shape)
        return plain.view(torch.bfloat16) if info.format == "BF16" else plain
    if info.format in PACKED and len(info.shape) > 1:
        return Quant(torch.from_numpy(flat).reshape(*info.shape[:-1], -1), info.format)
    return _unpacked(f"{header.path}: {name}", flat, info)


def _unpacked(where: str, flat: "np.ndarray[Any, Any]", info: TensorInfo) -> Tensor:
    try:
        values = gguf.quants.dequantize(flat.reshape(-1, info.nbytes), GGMLQuantizationType[info.format])
    except NotImplementedError:
        raise LoadError(
            f"{where} is stored as {info.format}, which is not read; llama-quantize can make Q8_0 of it"
        ) from None
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(info.shape)


def paired_heads(name: str, heads: int, kv_heads: int) -> int:
    """Of q and k, where llama.cpp may turn pairs (2i, 2i + 1) and all others i with i + D/2; else 0."""
    return heads if ".q_proj." in name else kv_heads if ".k_proj." in name else 0


def halves(rows: int, heads: int) -> Tensor:
    """Index of rows: each head's pairs (2i, 2i + 1) -> i and i + D/2."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def pairs(rows: int, heads: int) -> Tensor:
    """`halves` undone."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


def rope_factors(rope: RopeConfig, head_dim: int) -> Tensor:
    """[D/2] float32: what each of theta's frequencies is divided by."""
    plain = RopeConfig(theta=rope.theta)
    return (inverse_frequencies(plain, head_dim) / inverse_frequencies(rope, head_dim)).float()
