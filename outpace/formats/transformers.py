"""DFlash as transformers itself loads it (5.23 and later): MuseGlimmerAssistantModel."""

from typing import Any

from outpace.drafts.dflash_config import DFlashConfig
from outpace.formats.base import FolderFormat
from outpace.formats.engines import View, bias_words, dflash_view, source
from outpace.formats.fields import (
    OWN_DEPTH,
    OWN_TEMPERATURES,
    ConfigFile,
    Field,
    Place,
    body,
    layer_keys,
    nested,
    read_rope,
    write_fields,
)
from outpace.formats.spec import DFLASH, DFlashDraft, FormatWarning, TargetFiles, parts_warning, warn
from outpace.formats.zlab import narrow_window
from outpace.models.config import WINDOW

ARCHITECTURE, MODEL_TYPE = "MuseGlimmerAssistantModel", "muse_glimmer_assistant"
# our names -> theirs; all others are the same
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
OURS = {theirs: name for name, theirs in RENAMED.items()}
# defaults are those of MuseGlimmerAssistantConfig
FIELDS = (
    *body(head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=131072, vocab_size=0),
    Field(name="target_layer_ids", kind=list, places=(Place("target_layer_ids", offset=1),), row="layer ids"),
    Field(name="block_size", default=16, least=2, most=4096, row="block size"),
    Field(name="mask_token_id", row="mask token"),
    OWN_DEPTH,
    OWN_TEMPERATURES,
)
LEFT_OUT = ("use_sliding_window", "max_window_layers", "rope_theta", "rope_scaling")


def parse(file: ConfigFile) -> DFlashConfig:
    """Raises LoadError. Without the depth of the target, which others do not write, it must be named."""
    file.check_keys(FIELDS, "")
    if file.get("model_type") != MODEL_TYPE:
        raise file.error(f"model_type {file.get('model_type')!r} is not {MODEL_TYPE!r}")
    fields = file.depth(file.read(FIELDS))
    fields["vocab_size"] = fields["vocab_size"] or (file.target and file.target.config.vocab_size)
    if not fields["vocab_size"]:
        raise file.error("config.json has no vocab_size; name the target that has the vocabulary")
    return DFlashConfig(
        **fields,
        rope=read_rope(file, file.values, default_theta=500000.0),
        layer_types=_types(file),
        # their window counts how many positions back a query sees; here the query itself is counted too
        sliding_window=file.checked("sliding_window", _window(file), int) + 1,
    )


def _types(file: ConfigFile) -> tuple[str, ...]:
    return tuple(file.get("layer_types") or (WINDOW,) * (file.get("num_hidden_layers") or 5))


def _window(file: ConfigFile) -> Any:
    return file.values.get("sliding_window", 2048)


def to_hf(draft: DFlashDraft, target: TargetFiles | None = None) -> dict[str, Any]:
    config, window = draft.config, draft.config.sliding_window
    keys = layer_keys(config, config.layer_types, window)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **nested(write_fields(FIELDS, config)),
        **{key: value for key, value in keys.items() if key not in LEFT_OUT},
        "sliding_window": window - 1 if window else config.max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def warnings(draft: DFlashDraft) -> list[FormatWarning]:
    c, engine = draft.config, "transformers"
    result = warn(
        engine,
        (c.attention_bias, "attention bias", "has no attention biases"),
        (c.mask_token_id is None, "mask token", "knows no learned mask_embedding"),
        (c.causal or c.causal_full, "block sees", "has no causal blocks"),
        fatal=True,
    )
    return result + narrow_window(c, engine) + parts_warning(c, engine)


def views(file: ConfigFile) -> dict[str, View]:
    window = _window(file)
    window = window + 1 if type(window) is int else 2049
    view = dflash_view(file, FIELDS, "transformers", file.values, 500000.0, _types(file), window, causal=())
    view |= {"attention bias": bias_words(False), "embedding, head": source(False, False)}
    view.pop("vocabulary")  # it is not read
    return {"transformers": view}


FORMAT = FolderFormat(
    kind=DFLASH,
    engines=("transformers",),
    warnings=warnings,
    views=views,
    parse=parse,
    to_hf=to_hf,
    our_name=lambda name: OURS.get(name, name),
    their_name=lambda name: RENAMED.get(name, name),
)
