"""DFlash and DFlash 2 in z-lab's format: what z-lab's code, SGLang and vLLM load, and what we train.

Parts that no engine reads there (Markov and confidence heads, a reduced vocabulary, a selector without
convolutions) are under "outpace", and the architecture is then our own: an engine refuses it, and none
drafts with half of it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from outpace.checkpoint.open import LoadError, open_checkpoint
from outpace.checkpoint.save import save_checkpoint
from outpace.drafts.dflash import parts_of, temperatures_in, temperatures_out
from outpace.drafts.dflash_config import DFlashConfig
from outpace.formats.keys import (
    BODY,
    body_fields,
    body_to_hf,
    check_types,
    inner_object,
    once,
    read_layer_types,
    read_rope,
    refuse_meaning,
    unknown_keys,
    whole,
    whole_numbers,
    words,
)
from outpace.formats.spec import (
    DFlashDraft,
    FormatWarning,
    TargetFiles,
    canonical,
    check_shapes,
    dflash_shapes,
    main_dtype,
    shared_copies,
    stored,
    vocabulary_map,
)
from outpace.models.config import FULL, WINDOW, need

ARCHITECTURE, SECOND, OWN = "DFlashDraftModel", "DFlash2DraftModel", "OutpaceDFlashDraftModel"
ARCHITECTURES = (ARCHITECTURE, SECOND, OWN)
DEFAULT_MASK = "<|MASK|>"
KEYS = BODY | words(
    "block_size dflash_config num_target_layers is_causal target_layer_ids mask_token mask_token_id "
    "eagle_aux_hidden_state_layer_ids draft_vocab_size target_hidden_size"
)
INNER_KEYS = words(
    "target_layer_ids block_size mask_token mask_token_id causal use_swa swa_window_size num_target_layers "
    "conv_kernel_size conv_group_size selector_rank selector_top_k"
)
PARTS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")  # of dflash_config
OWN_PARTS: dict[str, type] = {  # of "outpace"
    "markov_rank": int,
    "markov_gated": bool,
    "confidence": bool,
    "draft_vocab_size": int,
}
TokenId = Callable[[str], int | None]


def read(
    folder: Path | str, target: TargetFiles | None = None, token_id: TokenId | None = None
) -> tuple[DFlashDraft, list[str]]:
    """`token_id` finds the MASK where the config names it by its text.

    Raises LoadError where tensors are missing, left over or misshapen, and where the config specifies
    something twice and differently, or asks for what we do not do.
    """
    checkpoint = open_checkpoint(folder)
    held = {name.removeprefix("model."): name for name in checkpoint.names()}
    if len(held) < len(checkpoint.names()):
        raise LoadError(f"{folder} holds some tensors with the prefix `model.` and again without it")
    config, notes = parse(checkpoint.config, str(folder), "mask_embedding" in held, token_id)
    notes += shared_copies(str(folder), checkpoint, held, target)
    check_shapes(folder, dflash_shapes(config), {n: checkpoint.shape(theirs) for n, theirs in held.items()})
    tensors = {name: stored(checkpoint, held[name]) for name in dflash_shapes(config)}
    notes += vocabulary_map(folder, config.rows, config.vocab_size, tensors)
    return DFlashDraft(config=config, tensors=tensors), notes


def parse(
    hf: dict[str, Any], where: str, learned_mask: bool = False, token_id: TokenId | None = None
) -> tuple[DFlashConfig, list[str]]:
    """A z-lab config.json, as z-lab's code, SGLang and vLLM read it. Raises LoadError or ValueError."""
    check_types(where, hf)
    if (hf.get("architectures") or [""])[0] not in ARCHITECTURES:
        raise LoadError(f"{where}: architectures {hf.get('architectures')} is not [{ARCHITECTURE}]")
    inner = inner_object(where, hf, "dflash_config")
    refuse_meaning(where, hf)
    refuse_meaning(where, {k: v for k, v in inner.items() if k not in PARTS}, "dflash_config.")
    rope, notes = read_rope(where, hf, default_theta=None)
    layers = need(hf, "num_hidden_layers")
    types, window = _windows(where, hf, inner, layers)
    block_places = {
        "dflash_config.block_size (SGLang, z-lab)": inner.get("block_size"),
        "block_size (older readers)": hf.get("block_size"),
    }
    target_places = {
        "dflash_config.num_target_layers": inner.get("num_target_layers"),
        "num_target_layers": hf.get("num_target_layers"),
    }
    body = body_fields(hf, head_dim=128)
    _same_sizes(where, hf, body)
    causal, causal_full = _causal(where, hf, inner, types)
    config = DFlashConfig(
        **body,
        **_parts(where, hf, inner),
        num_layers=layers,
        rope=rope,
        block_size=whole(where, "block_size", once(where, "block_size", block_places), 2, 4096),
        target_layer_ids=tuple(_layer_ids(where, hf, inner)),
        num_target_layers=whole(
            where, "num_target_layers", once(where, "num_target_layers", target_places), 1
        ),
        mask_token_id=None if learned_mask else _mask_token_id(where, hf, inner, token_id),
        attention_bias=hf.get("attention_bias") or False,
        layer_types=types,
        sliding_window=window,
        causal=causal,
        causal_full=causal_full,
    )
    notes += unknown_keys(hf, KEYS) + unknown_keys(inner, INNER_KEYS, "dflash_config.")
    return canonical(config), notes


def _layer_ids(where: str, hf: dict[str, Any], inner: dict[str, Any]) -> list[int]:
    """In z-lab's places, id k is hidden_states[k+1], our layer k; vLLM's own key counts hidden_states."""
    nested = whole_numbers(where, "dflash_config.target_layer_ids", inner.get("target_layer_ids"))
    top = whole_numbers(where, "target_layer_ids", hf.get("target_layer_ids"))
    key = "eagle_aux_hidden_state_layer_ids"
    vllm = whole_numbers(where, key, hf.get(key))
    states = {
        "dflash_config.target_layer_ids (SGLang, z-lab, llama.cpp)": nested and [k + 1 for k in nested],
        "target_layer_ids": top and [k + 1 for k in top],
        f"{key} (vLLM, which takes it as it is)": vllm,
    }
    result = once(where, "the hidden_states to read", states)
    if not result or (nested is None and top is None):
        raise LoadError(
            f"{where}: dflash_config.target_layer_ids is missing; SGLang would predict layers"
            + (f". vLLM reads {key} {vllm}: write those less one" if vllm else "")
        )
    return [k - 1 for k in result]


def _windows(
    where: str, hf: dict[str, Any], inner: dict[str, Any], layers: int
) -> tuple[tuple[str, ...], int]:
    """z-lab and SGLang read layer_types and sliding_window; vLLM and llama.cpp's converter use_swa too."""
    types, window = read_layer_types(where, hf, layers)
    swa = whole(where, "swa_window_size", inner.get("swa_window_size") or 0)
    wide = bool(inner.get("use_swa")) and WINDOW not in types
    if wide or (swa and WINDOW in types and swa != window):
        raise LoadError(
            f"{where}: vLLM reads dflash_config's use_swa {inner.get('use_swa')} and swa_window_size "
            f"{swa or None}, SGLang and z-lab layer_types {list(types)} and sliding_window {window or None}. "
            "Make them agree"
        )
    return types, window


def _parts(where: str, hf: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    """The optional parts: DFlash 2's in dflash_config, others under "outpace" with our architecture."""
    architecture = hf["architectures"][0]
    fields: dict[str, Any] = {key: whole(where, f"dflash_config.{key}", inner.get(key) or 0) for key in PARTS}
    if architecture == SECOND and not all(fields.values()):
        missing = [key for key, value in fields.items() if not value]
        raise LoadError(f"{where}: a {SECOND} needs dflash_config.{', dflash_config.'.join(missing)}")
    own = inner_object(where, hf, "outpace")
    for key, kind in OWN_PARTS.items():
        if type(own.get(key, kind())) is not kind:
            raise LoadError(f"{where}: outpace.{key} is {str(own[key])[:60]!r}, not a {kind.__name__}")
        fields[key] = own.get(key, kind())
    if architecture != OWN and any(fields[key] for key in OWN_PARTS):
        raise LoadError(f"{where}: parts under outpace belong to a {OWN}, this is a {architecture}")
    return fields | {"temperatures": temperatures_in(where, own)}


def _causal(
    where: str, hf: dict[str, Any], inner: dict[str, Any], types: tuple[str, ...]
) -> tuple[bool, bool]:
    """Whether windowed and whether full layers hide the slots behind. An explicit `is_causal` counts for
    every layer; without one, windows are causal and full layers are not."""
    value, nested = hf.get("is_causal"), inner.get("causal")
    windows, full = WINDOW in types, FULL in types
    if nested is not None and value is None and nested and full:
        raise LoadError(
            f"{where}: dflash_config.causal true is read by vLLM, which makes full_attention layers causal "
            "too; SGLang and z-lab read is_causal. Write is_causal: true, or neither where only windows are"
        )
    if value is None and nested is False and windows:
        raise LoadError(
            f"{where}: dflash_config.causal false is read by vLLM and llama.cpp's converter; SGLang and "
            "z-lab read is_causal, and without it take windows as causal. Write is_causal: false"
        )
    return (windows, False) if value is None else (bool(value) and windows, bool(value) and full)


def _mask_token_id(
    where: str, hf: dict[str, Any], inner: dict[str, Any], token_id: TokenId | None
) -> int | None:
    places = {
        "dflash_config.mask_token_id": inner.get("mask_token_id"),
        "mask_token_id (z-lab and SGLang alone read it there)": hf.get("mask_token_id"),
    }
    value = once(where, "mask_token_id", places)
    if value is not None:
        return whole(where, "mask_token_id", value)
    token = inner.get("mask_token") or hf.get("mask_token") or DEFAULT_MASK
    result = token_id(str(token)) if token_id is not None else None
    if result is None:
        raise LoadError(
            f"{where}: dflash_config has no mask_token_id, and the tokenizer knows no {token!r}: "
            "write the id of a token that text never uses"
        )
    return result


def _same_sizes(where: str, hf: dict[str, Any], body: dict[str, Any]) -> None:
    for key, ours in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if hf.get(key) not in (None, body[ours]):
            raise LoadError(
                f"{where}: {key} {hf[key]} is not {ours} {body[ours]}; such a DFlash is not supported"
            )


def to_hf(config: DFlashConfig) -> dict[str, Any]:
    """config.json, every fact in all the places where an engine looks for it."""
    config = canonical(config)
    inner: dict[str, Any] = {
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
    }
    if config.mask_token_id is not None:
        inner["mask_token_id"] = config.mask_token_id
    inner |= {key: getattr(config, key) for key in PARTS if getattr(config, key)}
    own: dict[str, Any] = {key: getattr(config, key) for key in OWN_PARTS if getattr(config, key)}
    own |= temperatures_out(config)
    body = body_to_hf(
        config, layers=config.num_layers, layer_types=config.layer_types, window=config.sliding_window
    )
    # where only windows are causal, the key is left out; true would reach the full layers too
    windows_alone = config.causal and FULL in config.layer_types and not config.causal_full
    causal = {} if windows_alone else {"is_causal": config.causal or config.causal_full}
    name = architecture(config)
    return {
        "architectures": [name],
        "auto_map": {"AutoModel": f"dflash.{name}"},
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": inner,
        "eagle_aux_hidden_state_layer_ids": [k + 1 for k in config.target_layer_ids],
        **body,
        "attention_bias": config.attention_bias,
        **causal,
        **({"outpace": own} if own else {}),
    }


def architecture(config: DFlashConfig) -> str:
    """z-lab's name, or ours for what no other engine would draft with."""
    second = [bool(getattr(config, key)) for key in PARTS]
    if any(getattr(config, key) for key in OWN_PARTS) or any(second) != all(second):
        return OWN
    return SECOND if all(second) else ARCHITECTURE


def remarks(draft: DFlashDraft) -> list[FormatWarning]:
    """What the engines that load this format would not take as it is meant."""
    config, items = draft.config, []
    for engine in ("SGLang", "vLLM"):
        if config.mask_token_id is None:
            text = "knows no learned mask_embedding"
            items.append(FormatWarning(check="mask token", engine=engine, message=text, fatal=True))
        items += narrow_window(config, engine)
        if architecture(config) == OWN:
            items.append(
                FormatWarning(check="parts", engine=engine, message=f"knows no {OWN}: {parts_of(config)}")
            )
    return items


def narrow_window(config: DFlashConfig, engine: str) -> list[FormatWarning]:
    """Engines where the windows look both ways measure them to both sides; ours, and llama.cpp's, to the
    left."""
    if WINDOW not in config.layer_types or config.causal or config.sliding_window >= config.block_size:
        return []
    text = f"a window of {config.sliding_window} also hides the far end of a block of {config.block_size}"
    return [FormatWarning(check="window", engine=engine, message=text, fatal=True)]


def write(draft: DFlashDraft, folder: Path, target: TargetFiles | None = None) -> None:
    config = to_hf(draft.config) | {"dtype": main_dtype(draft.tensors)}
    save_checkpoint(folder, config, draft.tensors.items())
