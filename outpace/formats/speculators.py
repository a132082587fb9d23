"""DFlash in speculators' format: what vLLM and speculators' own code load."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from outpace.checkpoint.open import LoadError, open_checkpoint
from outpace.checkpoint.save import save_checkpoint
from outpace.drafts.dflash import temperatures_in, temperatures_out
from outpace.drafts.dflash_config import DFlashConfig
from outpace.formats.keys import (
    BODY,
    body_fields,
    body_to_hf,
    check_types,
    inner_object,
    read_layer_types,
    read_rope,
    refuse_meaning,
    unknown_keys,
    whole,
    whole_numbers,
    words,
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
    main_dtype,
    shared_copies,
    stored,
    target_layers,
    without_parts,
)
from outpace.formats.zlab import narrow_window
from outpace.models.config import FULL, WINDOW, check_values, need

TYPE = "dflash"
COPIED = "copied_from_target"
ENVELOPE = words(
    "speculators_model_type speculators_version speculators_config transformer_layer_config draft_vocab_size "
    "target_hidden_size has_no_defaults_at_init"
)
KEYS = ENVELOPE | words(
    "block_size aux_hidden_state_layer_ids mask_token_id sliding_window_non_causal max_anchors emb_dim auf "
    "pure_draft_prefix_len gru_hidden_dim lambda_base_start lambda_base_decay_ratio"
)
# transformer_layer_config is written as the difference from these
QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


def read(folder: Path | str, target: TargetFiles | None = None) -> tuple[DFlashDraft, list[str]]:
    """Raises LoadError. Files of others say nothing of the target's size: name the target."""
    checkpoint = open_checkpoint(folder)
    config, notes = parse(checkpoint.config, str(folder), target)
    held = {name: name for name in checkpoint.names()}
    copied = copied_names(str(folder), checkpoint.config)
    notes += shared_copies(str(folder), checkpoint, held, target, copied)
    check_shapes(folder, dflash_shapes(config), {n: checkpoint.shape(theirs) for n, theirs in held.items()})
    tensors = {name: stored(checkpoint, name) for name in dflash_shapes(config)}
    return DFlashDraft(config=config, tensors=tensors), notes


def copied_names(where: str, hf: dict[str, Any]) -> tuple[str, ...]:
    """Which tensors we wrote as copies of the target's; of files of others, none."""
    value = inner_object(where, hf, "outpace").get(COPIED)
    return tuple(name for name in (EMBEDDING, HEAD) if isinstance(value, list) and name in value)


def parse(hf: dict[str, Any], where: str, target: TargetFiles | None) -> tuple[DFlashConfig, list[str]]:
    layer, notes = open_envelope(where, hf, TYPE, "qwen3", QWEN3, KEYS)
    rope, rope_noted = read_rope(where, layer, default_theta=10000.0)
    layers = need(layer, "num_hidden_layers")
    types, window = read_layer_types(where, layer, layers)
    states = whole_numbers(where, "aux_hidden_state_layer_ids", hf.get("aux_hidden_state_layer_ids"))
    if not states:
        raise LoadError(f"{where}: aux_hidden_state_layer_ids is missing; vLLM needs it")
    fields = body_fields(layer)
    if hf.get("draft_vocab_size") not in (None, fields["vocab_size"]):
        raise LoadError(
            f"{where}: a DFlash over {hf['draft_vocab_size']} of {fields['vocab_size']} tokens is not "
            "supported"
        )
    if hf.get("target_hidden_size") not in (None, fields["hidden_size"]):
        raise LoadError(
            f"{where}: target_hidden_size {hf['target_hidden_size']} is not the draft's own width"
        )
    causal, causal_noted = _causal(where, hf, types)
    config = DFlashConfig(
        **fields,
        num_layers=layers,
        rope=rope,
        block_size=whole(where, "block_size", hf.get("block_size", 8), 2, 4096),
        target_layer_ids=tuple(k - 1 for k in states),
        num_target_layers=target_layers(where, inner_object(where, hf, "outpace"), target),
        temperatures=temperatures_in(where, inner_object(where, hf, "outpace")),
        mask_token_id=whole(where, "mask_token_id", need(hf, "mask_token_id")),
        attention_bias=layer.get("attention_bias") or False,
        layer_types=types,
        sliding_window=window,
        causal=causal,
    )
    return canonical(config), notes + rope_noted + causal_noted + window_notes(config.layer_types)


def open_envelope(
    where: str,
    hf: dict[str, Any],
    kind: str,
    model_type: str,
    defaults: Mapping[str, Any],
    keys: Iterable[str],
) -> tuple[dict[str, Any], list[str]]:
    """speculators' config.json -> its transformer_layer_config, whole, and notes. Raises LoadError."""
    check_types(where, hf)
    if hf.get("speculators_model_type") != kind:
        raise LoadError(
            f"{where}: speculators_model_type {hf.get('speculators_model_type')!r} is not {kind!r}"
        )
    value = inner_object(where, hf, "transformer_layer_config")
    if value.get("model_type", model_type) != model_type:
        raise LoadError(
            f"{where}: transformer_layer_config.model_type {value['model_type']!r} is not supported, "
            f"only {model_type!r}"
        )
    layer = {**defaults, **{k: v for k, v in value.items() if v is not None or k not in defaults}}
    check_values(layer)
    refuse_meaning(where, hf)
    refuse_meaning(where, layer, "transformer_layer_config.")
    notes = unknown_keys(hf, keys) + unknown_keys(layer, BODY, "transformer_layer_config.")
    return layer, notes


def _causal(where: str, hf: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, list[str]]:
    """Of windowed layers; speculators' code always lets full ones see both ways."""
    value = hf.get("sliding_window_non_causal")
    if value is None and WINDOW in types:
        raise LoadError(
            f"{where}: without sliding_window_non_causal, speculators' code takes windows as causal and vLLM "
            "takes them as not. Write which"
        )
    older = "sliding_window_non_causal false: older vLLM makes full_attention layers causal too"
    return value is False, [older] if value is False and FULL in types else []


OWN_WINDOW = "anchors it at the block's start and does not count the token itself"


def window_notes(types: tuple[str, ...]) -> list[str]:
    read = "it is read here as vLLM reads it, by slot and with the token itself"
    return [f"window: speculators' own code {OWN_WINDOW}; {read}"] if WINDOW in types else []


def seal_envelope(
    kind: str, config_class: str, layer: dict[str, Any], tokens: int, target: TargetFiles | None
) -> dict[str, Any]:
    """The part of config.json that all of speculators' kinds share. Raises ValueError without a target."""
    if target is None:
        raise ValueError("speculators' files name their target and hold its embedding: give --target")
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "auto_map": {"": f"config.{config_class}"},
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target.path, "architectures": [target.config.architecture]},
        },
        "transformer_layer_config": layer,
    }


def copies(tensors: Mapping[str, Tensor], target: TargetFiles) -> dict[str, Tensor]:
    """The target's embedding and head, in the draft's precision, where the draft has none of its own."""
    dtype = tensors["fc.weight"].dtype
    theirs = {EMBEDDING: target.embedding, HEAD: target.head}
    return {name: get().to(dtype) for name, get in theirs.items() if name not in tensors}


def to_hf(config: DFlashConfig, target: TargetFiles | None) -> dict[str, Any]:
    body = body_to_hf(
        config, layers=config.num_layers, layer_types=config.layer_types, window=config.sliding_window
    )
    layer = {"model_type": "qwen3", **body, "attention_bias": config.attention_bias}
    return {
        "architectures": ["DFlashDraftModel"],
        **seal_envelope(TYPE, "DFlashSpeculatorConfig", layer, config.block_size - 1, target),
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": None,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [k + 1 for k in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        # true even where no layer has a window: older vLLM reads false as "every layer is causal"
        "sliding_window_non_causal": not config.causal,
        "sample_from_anchor": False,
        "outpace": {
            "num_target_layers": config.num_target_layers,
            COPIED: [EMBEDDING, HEAD],
            **temperatures_out(config),
        },
    }


def remarks(draft: DFlashDraft) -> list[FormatWarning]:
    config, items = draft.config, []
    if config.mask_token_id is None:
        text = "has no learned mask_embedding"
        items.append(FormatWarning(check="mask token", engine="vLLM", message=text, fatal=True))
    if WINDOW in config.layer_types:
        items.append(FormatWarning(check="window", engine="speculators", message=OWN_WINDOW))
    if config.causal and FULL in config.layer_types:
        text = "older builds make full_attention layers causal too"
        items.append(FormatWarning(check="block sees", engine="vLLM", message=text))
    if config.causal_full:
        text = "has no word for causal full_attention layers"
        items += [
            FormatWarning(check="block sees", engine=e, message=text, fatal=True)
            for e in ("vLLM", "speculators")
        ]
    return items + narrow_window(config, "vLLM") + without_parts(config, "vLLM")


def write(draft: DFlashDraft, folder: Path, target: TargetFiles | None = None) -> None:
    config = to_hf(draft.config, target)
    assert target is not None
    tensors = {**draft.tensors, **copies(draft.tensors, target)}
    save_checkpoint(folder, config | {"dtype": main_dtype(draft.tensors)}, tensors.items())
