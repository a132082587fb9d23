"""DFlash as transformers itself loads it (5.23 and later): MuseGlimmerAssistantModel."""

from pathlib import Path
from typing import Any

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
    stored,
    target_layers,
    without_parts,
)
from outpace.formats.zlab import narrow_window
from outpace.models.config import WINDOW, need

ARCHITECTURE, MODEL_TYPE = "MuseGlimmerAssistantModel", "muse_glimmer_assistant"
KEYS = BODY | words("block_size mask_token_id target_layer_ids")
# z-lab's names -> theirs; all others are the same
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def read(folder: Path | str, target: TargetFiles | None = None) -> tuple[DFlashDraft, list[str]]:
    """Raises LoadError. Files of others say nothing of the target's size: name the target."""
    checkpoint = open_checkpoint(folder)
    config, notes = parse(checkpoint.config, str(folder), target)
    ours = {theirs: name for name, theirs in RENAMED.items()}
    held = {ours.get(name, name): name for name in checkpoint.names()}
    check_shapes(folder, dflash_shapes(config), {n: checkpoint.shape(theirs) for n, theirs in held.items()})
    tensors = {name: stored(checkpoint, held[name]) for name in dflash_shapes(config)}
    return DFlashDraft(config=config, tensors=tensors), notes


def parse(hf: dict[str, Any], where: str, target: TargetFiles | None) -> tuple[DFlashConfig, list[str]]:
    """A missing key means what MuseGlimmerAssistantConfig takes for it: windows of 2,048 in all layers."""
    check_types(where, hf)
    if hf.get("model_type") != MODEL_TYPE:
        raise LoadError(f"{where}: model_type {hf.get('model_type')!r} is not {MODEL_TYPE!r}")
    refuse_meaning(where, hf)
    rope, notes = read_rope(where, hf, default_theta=500000.0)
    layers = need(hf, "num_hidden_layers")
    types = tuple(hf.get("layer_types") or (WINDOW,) * layers)
    value = inner_object(where, hf, "outpace")
    vocab_size = hf.get("vocab_size") or value.get("vocab_size") or (target and target.config.vocab_size)
    if not vocab_size:
        raise LoadError(f"{where}: config.json has no vocab_size; name the target that has the vocabulary")
    config = DFlashConfig(
        **body_fields({**hf, "vocab_size": vocab_size}, head_dim=128),
        num_layers=layers,
        rope=rope,
        block_size=whole(where, "block_size", hf.get("block_size", 16), 2, 4096),
        target_layer_ids=tuple(whole_numbers(where, "target_layer_ids", need(hf, "target_layer_ids")) or ()),
        num_target_layers=target_layers(where, value, target),
        temperatures=temperatures_in(where, value),
        mask_token_id=whole(where, "mask_token_id", need(hf, "mask_token_id")),
        layer_types=types,
        # they count how far back a query sees; here the query itself is counted too
        sliding_window=whole(where, "sliding_window", hf.get("sliding_window", 2048)) + 1,
    )
    return canonical(config), notes + unknown_keys(hf, KEYS)


def to_hf(config: DFlashConfig) -> dict[str, Any]:
    window = config.sliding_window
    body = body_to_hf(config, layers=config.num_layers, layer_types=config.layer_types, window=window)
    for key in ("use_sliding_window", "max_window_layers", "rope_theta", "rope_scaling"):
        del body[key]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **body,
        "sliding_window": window - 1 if window else config.max_position_embeddings,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "outpace": {"num_target_layers": config.num_target_layers, **temperatures_out(config)},
    }


def remarks(draft: DFlashDraft) -> list[FormatWarning]:
    config = draft.config
    faults = {
        "attention bias": "has no attention biases" if config.attention_bias else "",
        "mask token": "knows no learned mask_embedding" if config.mask_token_id is None else "",
        "block sees": "has no causal blocks" if config.causal or config.causal_full else "",
    }
    entries = [
        FormatWarning(check=check, engine="transformers", message=value, fatal=True)
        for check, value in faults.items()
        if value
    ]
    return entries + narrow_window(config, "transformers") + without_parts(config, "transformers")


def write(draft: DFlashDraft, folder: Path, target: TargetFiles | None = None) -> None:
    config = to_hf(draft.config) | {"dtype": main_dtype(draft.tensors)}
    save_checkpoint(folder, config, ((RENAMED.get(n, n), t) for n, t in draft.tensors.items()))
