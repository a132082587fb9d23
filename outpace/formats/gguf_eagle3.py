"""EAGLE-3 in GGUF: architecture "eagle3" of llama.cpp (src/models/eagle3.cpp)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.checkpoint.base import LoadError
from outpace.drafts.eagle3 import Eagle3Config
from outpace.formats.gguf import (
    ROPE_FACTORS,
    Metadata,
    by_factors,
    check_record,
    common_fields,
    common_keys,
    gguf_name,
    narrowed,
    open_metadata,
    read_record,
    read_rope,
    rope_factors,
    tensor_of,
    write_file,
)
from outpace.formats.spec import (
    EMBEDDING,
    HEAD,
    Eagle3Draft,
    FormatWarning,
    TargetFiles,
    canonical_rope,
    check_shapes,
    eagle3_shapes,
    vocabulary_map,
)

ARCHITECTURE = "eagle3"


def read(path: Path | str, target: TargetFiles | None = None) -> tuple[Eagle3Draft, list[str]]:
    """Raises LoadError."""
    metadata = open_metadata(path, ARCHITECTURE)
    record = read_record(metadata)
    if record is None:
        config, notes = _parse(metadata, target)
    else:
        config, notes = _recorded(metadata, record[0]), []
    widened = record[1] if record else {}
    header = metadata.header
    has = {name: gguf_name(name) in header.tensors for name in (EMBEDDING, HEAD, "d2t")}
    head = has[HEAD] or config.draft_vocab_size != config.vocab_size
    wanted = eagle3_shapes(config, embedding=has[EMBEDDING], head=head, mapped=has["d2t"])
    wanted.pop("t2d", None)
    ours = {_name(name): name for name in wanted}
    held = {ours.get(name, name): name for name in header.tensors if name != ROPE_FACTORS}
    check_shapes(path, wanted, {n: header.tensors[theirs].shape for n, theirs in held.items()})
    tensors = {n: narrowed(tensor_of(header, held[n]), widened.get(held[n])) for n in wanted}
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
    for name in _rotated(config):
        tensors[name] = halves(tensors[name], _rotated(config)[name])
    vocabulary_map(path, config.draft_vocab_size, config.vocab_size, tensors)
    return Eagle3Draft(config=config, tensors=tensors), notes


def _name(name: str) -> str:
    return "enc.output_norm.weight" if name == "input_norm.weight" else gguf_name(name)


def _rotated(config: Eagle3Config) -> dict[str, int]:
    """llama.cpp turns pairs (2i, 2i + 1) here, all other engines i with i + D/2: rows are in its order."""
    at = "midlayer.self_attn."
    return {f"{at}q_proj.weight": config.num_heads, f"{at}k_proj.weight": config.num_kv_heads}


def pairs(rows: Tensor, heads: int) -> Tensor:
    """Each head's rows i and i + D/2 -> 2i and 2i + 1."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def halves(rows: Tensor, heads: int) -> Tensor:
    """`pairs` undone."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _recorded(metadata: Metadata, fields: dict[str, Any]) -> Eagle3Config:
    try:
        config = Eagle3Config(**{**fields, "rope": canonical_rope(fields["rope"])})
        wanted = keys(config)
    except (TypeError, AttributeError, KeyError) as error:
        raise LoadError(f"{metadata.header.path}: its record is damaged ({error!r})") from error
    check_record(metadata, wanted)
    return config


def _parse(metadata: Metadata, target: TargetFiles | None) -> tuple[Eagle3Config, list[str]]:
    fields = common_fields(metadata)
    rope, notes = read_rope(metadata, fields["head_dim"], target)
    tensors = metadata.header.tensors
    rows = tensors.get("d2t") or tensors.get("output.weight")
    if metadata.get("block_count", int) != 1:
        raise LoadError(f"{metadata.header.path}: only EAGLE-3 of one layer is supported")
    config = Eagle3Config(
        **fields,
        target_hidden_size=metadata.get("target_hidden_size", int),
        draft_vocab_size=rows.shape[0] if rows else fields["vocab_size"],
        rope=canonical_rope(rope),
        layer_ids=tuple(k - 1 for k in metadata.numbers("target_layers", int)),
        norm_before_residual=metadata.get("norm_before_residual", bool, False),
        norm_before_fc=metadata.get("norm_before_fc", bool, False),
    )
    return config, notes


def keys(config: Eagle3Config) -> dict[str, Any]:
    """What llama.cpp reads, without the architecture's name; `target_layers` counts hidden_states."""
    return common_keys(config, 1) | {
        "target_layers": [k + 1 for k in config.layer_ids],
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
    }


def remarks(draft: Eagle3Draft) -> list[FormatWarning]:
    c = draft.config
    faults = (
        ("layer ids", f"joins three states, not {len(c.layer_ids)}", len(c.layer_ids) != 3),
        ("norms", "has no norm per state (fc_norm)", c.fc_norm),
        ("norms", "feeds back the state before the norm", c.norm_output),
        ("window", "has no window here", c.sliding_window > 0),
        ("layers", "has one layer", c.num_layers > 1),
        ("one pass", "draft tokens step by step", c.parallel),
    )
    return [
        FormatWarning(check=check, engine="llama.cpp", message=value, fatal=True)
        for check, value, has in faults
        if has
    ]


def write(draft: Eagle3Draft, path: Path, target: TargetFiles | None = None, packed: bool = False) -> None:
    """d2t holds target ids there, and t2d follows from it. Raises ValueError without a target, whose
    vocabulary the file needs. `packed`: matrices in Q8_0."""
    if target is None:
        raise ValueError("a GGUF draft carries its target's vocabulary: give --target")
    config = draft.config
    tensors = {_name(name): tensor for name, tensor in draft.tensors.items() if name != "t2d"}
    for name, heads in _rotated(config).items():
        tensors[_name(name)] = pairs(draft.tensors[name], heads)
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    if by_factors(config.rope):
        tensors[ROPE_FACTORS] = rope_factors(config.rope, config.head_dim)
    write_file(path, ARCHITECTURE, keys(config), target.vocabulary(), tensors, config, packed)
