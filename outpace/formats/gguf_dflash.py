"""DFlash in GGUF: architecture "dflash" of llama.cpp (src/models/dflash.cpp)."""

from pathlib import Path
from typing import Any

from torch import Tensor

from outpace.checkpoint.base import LoadError
from outpace.drafts.dflash_config import DFlashConfig
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
    DFlashDraft,
    FormatWarning,
    TargetFiles,
    canonical,
    check_shapes,
    dflash_shapes,
    is_targets,
    target_layers,
    without_parts,
)
from outpace.models.config import FULL, WINDOW

ARCHITECTURE = "dflash"
MASK = "tokenizer.ggml.mask_token_id"
UNSUPPORTED = {  # keys of its successors -> the value that changes nothing
    "attention.scale": 0.0,
    "attention.value_scale": 0.0,
    "conv_kernel_size": 0,
    "embedding_scale": 0.0,
    "final_logit_softcapping": 0.0,
    "hyper_connection_count": 0,
    "logit_scale": 0.0,
    "sample_from_anchor": False,
    "selector_rank": 0,
}


def read(path: Path | str, target: TargetFiles | None = None) -> tuple[DFlashDraft, list[str]]:
    """Raises LoadError. Files of others say nothing of the target's size: name the target."""
    value = open_metadata(path, ARCHITECTURE)
    for key, neutral in UNSUPPORTED.items():
        if value.header.metadata.get(f"{ARCHITECTURE}.{key}", neutral) != neutral:
            raise LoadError(f"{path}: {ARCHITECTURE}.{key} is not supported")
    record = read_record(value)
    if record is None:
        config, notes = _parse(value, target)
    else:
        config, notes = _recorded(value, record[0]), []
    widened = record[1] if record else {}
    header = value.header
    named = {_name(name): name for name in dflash_shapes(config)}
    held = {named.get(n, n): n for n in header.tensors if n != ROPE_FACTORS}
    for name in (EMBEDDING, HEAD):
        theirs = held.pop(_name(name), None)
        if theirs is None:
            continue
        notes.append(f"{theirs} left out: a DFlash uses the target's")
        if target is not None and not is_targets(name, tensor_of(header, theirs), target):
            raise LoadError(f"{path}: {theirs} is not the target's ({target.path}); not supported")
    check_shapes(path, dflash_shapes(config), {n: header.tensors[theirs].shape for n, theirs in held.items()})
    tensors = {n: narrowed(tensor_of(header, held[n]), widened.get(held[n])) for n in dflash_shapes(config)}
    return DFlashDraft(config=config, tensors=tensors), notes


def _name(name: str) -> str:
    return "enc.output_norm.weight" if name == "hidden_norm.weight" else gguf_name(name)


def _recorded(value: Metadata, fields: dict[str, Any]) -> DFlashConfig:
    try:
        config = canonical(DFlashConfig(**fields))
        wanted = keys(config)
    except (TypeError, AttributeError, KeyError) as error:
        raise LoadError(f"{value.header.path}: its record is damaged ({error!r})") from error
    check_record(value, wanted)
    if value.header.metadata.get(MASK) != config.mask_token_id:
        raise LoadError(
            f"{value.header.path}: {MASK} was changed after the file was written; export it again"
        )
    return config


def _parse(value: Metadata, target: TargetFiles | None) -> tuple[DFlashConfig, list[str]]:
    path = str(value.header.path)
    fields = common_fields(value)
    rope, notes = read_rope(value, fields["head_dim"], target)
    layers = value.get("block_count", int)
    window = value.get("attention.sliding_window", int, 0)
    key = "attention.sliding_window_pattern"
    slides = value.numbers(key, bool) if window and value.has(key) else [False] * layers
    if len(slides) != layers:
        raise LoadError(f"{path}: {ARCHITECTURE}.{key} names {len(slides)} layers of {layers}")
    causal = value.get("attention.causal", bool, False)
    mask = value.header.metadata.get(MASK)
    if type(mask) is not int:
        raise LoadError(f"{path} lacks {MASK}")
    config = DFlashConfig(
        **fields,
        num_layers=layers,
        rope=rope,
        block_size=value.get("block_size", int, 16),
        target_layer_ids=tuple(k - 1 for k in value.numbers("target_layers", int)),
        num_target_layers=target_layers(path, {}, target),
        mask_token_id=mask,
        layer_types=tuple(WINDOW if slide else FULL for slide in slides),
        sliding_window=window,
        causal=causal and any(slides),
        causal_full=causal and not all(slides),
    )
    return canonical(config), notes


def keys(config: DFlashConfig) -> dict[str, Any]:
    """What llama.cpp reads, without the architecture's name; `target_layers` counts hidden_states."""
    result = common_keys(config, config.num_layers)
    result |= {
        "block_size": config.block_size,
        "target_layers": [k + 1 for k in config.target_layer_ids],
        "attention.causal": config.one_way,
    }
    if WINDOW in config.layer_types:
        result["attention.sliding_window"] = config.sliding_window
        result["attention.sliding_window_pattern"] = [t == WINDOW for t in config.layer_types]
    return result


def remarks(draft: DFlashDraft) -> list[FormatWarning]:
    config = draft.config
    mixed = config.causal and not config.one_way
    faults = {
        "attention bias": "has no attention biases" if config.attention_bias else "",
        "mask token": "knows no learned mask_embedding" if config.mask_token_id is None else "",
        "block sees": "is causal in all layers or in none" if mixed else "",
    }
    entries = [
        FormatWarning(check=check, engine="llama.cpp", message=value, fatal=True)
        for check, value in faults.items()
        if value
    ]
    return entries + without_parts(config, "llama.cpp")


def write(draft: DFlashDraft, path: Path, target: TargetFiles | None = None, packed: bool = False) -> None:
    """Raises ValueError without a target; its vocabulary the file needs; embedding and head are taken
    from the target when llama.cpp runs it. `packed`: matrices in Q8_0."""
    if target is None:
        raise ValueError("a GGUF draft carries its target's vocabulary: give --target")
    config = draft.config
    tensors: dict[str, Tensor] = {_name(name): tensor for name, tensor in draft.tensors.items()}
    if by_factors(config.rope):
        tensors[ROPE_FACTORS] = rope_factors(config.rope, config.head_dim)
    vocabulary = {**target.vocabulary(), MASK: config.mask_token_id}
    write_file(path, ARCHITECTURE, keys(config), vocabulary, tensors, config, packed)
