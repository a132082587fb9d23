"""DFlash in z-lab's format: what z-lab's own code, SGLang and vLLM load. Ours to train, keep and serve from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from outpace.drafts import dflash
from outpace.drafts.dflash import DFlashConfig
from outpace.drafts.format_keys import (
    ROPE_PLACES,
    once,
    read_layer_types,
    read_rope,
    refuse_meaning,
    unknown_keys,
)
from outpace.drafts.formats import (
    EMBEDDING,
    HEAD,
    DFlashDraft,
    Remark,
    TargetFiles,
    canonical,
    check_shapes,
    dflash_shapes,
    main_dtype,
    stored,
)
from outpace.models.config import FULL, WINDOW
from outpace.models.config_values import check_values
from outpace.weights.checkpoint import Checkpoint, LoadError, open_checkpoint
from outpace.weights.save import save_checkpoint

ARCHITECTURE = "DFlashDraftModel"
DEFAULT_MASK = "<|MASK|>"
KEYS = frozenset(
    "block_size dflash_config num_target_layers hidden_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim intermediate_size rms_norm_eps vocab_size max_position_embeddings "
    "attention_bias layer_types use_sliding_window sliding_window is_causal target_layer_ids mask_token "
    "mask_token_id eagle_aux_hidden_state_layer_ids draft_vocab_size target_hidden_size".split()
)
INNER_KEYS = frozenset(
    "target_layer_ids block_size mask_token mask_token_id causal use_swa swa_window_size "
    "num_target_layers".split()
)
TokenId = Callable[[str], int | None]


def read(
    folder: Path | str, token_id: TokenId | None = None, target: TargetFiles | None = None
) -> tuple[DFlashDraft, list[str]]:
    """`token_id` finds the MASK in a vocabulary where the config names it by its text.

    Raises LoadError where tensors are missing, left over or misshapen, where the config says something
    twice and differently, or asks for what we do not do.
    """
    checkpoint = open_checkpoint(folder)
    held = {name.removeprefix("model."): name for name in checkpoint.names()}
    if len(held) < len(checkpoint.names()):
        raise LoadError(f"{folder} holds some tensors with the prefix `model.` and again without it")
    config, notes = parse(checkpoint.config, str(folder), "mask_embedding" in held, token_id)
    copies = shared_copies(str(folder), checkpoint, held, target)
    shapes = {name: checkpoint.shape(theirs) for name, theirs in held.items() if name not in copies}
    check_shapes(folder, dflash_shapes(config), shapes)
    tensors = {name: stored(checkpoint, held[name]) for name in dflash_shapes(config)}
    return DFlashDraft(config=config, tensors=tensors), notes + list(copies.values())


def parse(
    hf: dict[str, Any], where: str, learned_mask: bool, token_id: TokenId | None
) -> tuple[DFlashConfig, list[str]]:
    """A z-lab config.json, read as SGLang, vLLM and z-lab's code read it. Raises LoadError or ValueError."""
    if (hf.get("architectures") or [""])[0] != ARCHITECTURE:
        raise LoadError(f"{where}: architectures {hf.get('architectures')} is not [{ARCHITECTURE}]")
    check_values(hf)
    inner = hf.get("dflash_config") or {}
    if not isinstance(inner, dict):
        raise LoadError(f"{where}: dflash_config is a {type(inner).__name__}, not an object")
    refuse_meaning(where, hf)
    refuse_meaning(where, inner, "dflash_config.")
    rope, notes = read_rope(where, hf, default_theta=None)
    types, window, windows_noted = _windows(where, hf, inner)
    config = dflash.parse(
        {
            **hf,
            **{key: None for key in ROPE_PLACES},
            "rope_theta": rope.theta,
            "layer_types": list(types),
            "sliding_window": window,
            "num_target_layers": once(
                where,
                "num_target_layers",
                {
                    "dflash_config.num_target_layers (SGLang)": inner.get("num_target_layers"),
                    "num_target_layers (outpace)": hf.get("num_target_layers"),
                },
            ),
            "block_size": once(
                where,
                "block_size",
                {
                    "dflash_config.block_size (SGLang, z-lab, llama.cpp's converter)": inner.get(
                        "block_size"
                    ),
                    "block_size (older readers)": hf.get("block_size"),
                },
            ),
            "is_causal": _causal(where, hf, inner, types),
            "dflash_config": {"target_layer_ids": _layer_ids(where, hf, inner)},
        },
        None if learned_mask else _mask_token_id(where, hf, inner, token_id),
    )
    _same_vocabulary(where, hf, config)
    notes += windows_noted + unknown_keys(hf, KEYS | ROPE_PLACES)
    notes += unknown_keys(inner, INNER_KEYS, "dflash_config.")
    return canonical(_with_rope(config, rope)), notes


def _with_rope(config: DFlashConfig, rope: Any) -> DFlashConfig:
    return dflash.replace(config, rope=rope)
