"""What is in a checkpoint: architecture, shapes, parameters, bytes, what is missing or left over."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from outpace.models.config import ModelConfig
from outpace.models.load import Comparison, compare, parse_config
from outpace.weights.checkpoint import Checkpoint, dtype_bytes, open_checkpoint

VALUES_PER_BYTE = {"_blocks": 2, "_scales": 0}  # MXFP4: scales are overhead, not parameters


@dataclass(frozen=True, kw_only=True)
class Inspection:
    folder: str
    config: ModelConfig
    parameters: int
    active_parameters: int  # that one token's forward reads; of the embedding, one row
    nbytes: int
    dtypes: dict[str, int]  # safetensors dtype -> bytes
    parts: dict[str, tuple[int, int]]  # part -> (parameters, bytes)
    kv_bytes_per_token: int  # float32, growing layers only
    comparison: Comparison

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "architecture": self.config.architecture,
            "layers": self.config.num_layers,
            "hidden_size": self.config.hidden_size,
            "heads": [self.config.num_heads, self.config.num_kv_heads, self.config.head_dim],
            "experts": [self.config.num_experts, self.config.experts_per_token],
            "vocab_size": self.config.vocab_size,
            "sliding_window": self.config.sliding_window,
            "max_position_embeddings": self.config.max_position_embeddings,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "bytes": self.nbytes,
            "bytes_by_dtype": self.dtypes,
            "parts": {k: {"parameters": p, "bytes": b} for k, (p, b) in self.parts.items()},
            "kv_bytes_per_token_float32": self.kv_bytes_per_token,
            "missing": self.comparison.missing,
            "left_over": self.comparison.left_over,
            "wrong_shape": [list(map(str, row)) for row in self.comparison.wrong_shape],
        }


def inspect_target(folder: Path | str) -> Inspection:
    """Reads headers only. Raises LoadError where there is no checkpoint to read."""
    checkpoint = open_checkpoint(folder)
    config = parse_config(checkpoint.config)
    parts, dtypes = _count(checkpoint)
    total = sum(p for p, _ in parts.values())
    experts = parts.get("experts", (0, 0))[0]
    idle = experts * (1 - config.experts_per_token / config.num_experts) if experts else 0
    embedding = config.vocab_size * config.hidden_size
    unread = 0 if config.tie_word_embeddings else embedding - config.hidden_size
    growing = sum(not config.window(i) for i in range(config.num_layers))
    return Inspection(
        folder=str(folder),
        config=config,
        parameters=total,
        active_parameters=round(total - idle - unread),
        nbytes=sum(b for _, b in parts.values()),
        dtypes=dtypes,
        parts=parts,
        kv_bytes_per_token=growing * 2 * config.num_kv_heads * config.head_dim * 4,
        comparison=compare(checkpoint, config),
    )


def _count(checkpoint: Checkpoint) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    parts: dict[str, tuple[int, int]] = {}
    dtypes: dict[str, int] = {}
    for name, shape, dtype in checkpoint.specs():
        size = round(prod(shape) * dtype_bytes(dtype))
        packing = next((n for suffix, n in VALUES_PER_BYTE.items() if name.endswith(suffix)), 1)
        part = _part(name)
        parameters, held = parts.get(part, (0, 0))
        parts[part] = (parameters + prod(shape) * packing, held + size)
        dtypes[dtype] = dtypes.get(dtype, 0) + size
    return parts, dtypes


def _part(name: str) -> str:
    if ".experts." in name:
        return "experts"
    if ".self_attn." in name:
        return "attention"
    if ".mlp." in name:
        return "router" if ".router." in name or name.endswith("mlp.gate.weight") else "mlp"
    if "embed_tokens" in name:
        return "embedding"
    return "head" if "lm_head" in name else "norms"
