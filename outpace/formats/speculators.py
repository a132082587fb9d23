"""DFlash, EAGLE-3 and P-EAGLE in speculators' format: what vLLM and speculators' own code load."""

from typing import Any

from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.eagle3 import Eagle3Config
from outpace.formats.base import FolderFormat
from outpace.formats.engines import (
    IDS,
    View,
    converter_view,
    dflash_view,
    eagle3_norms,
    eagle3_view,
    layer_types,
    one_pass,
)
from outpace.formats.fields import (
    OWN_DEPTH,
    OWN_TEMPERATURES,
    ConfigFile,
    Field,
    Fields,
    Place,
    body,
    layer_keys,
    nested,
    read_layer_types,
    read_rope,
    write_fields,
)
from outpace.formats.sglang_eagle3 import SIZES, eagle3_config, eagle3_layer, norms, our_name
from outpace.formats.spec import (
    DFLASH,
    EAGLE3,
    EMBEDDING,
    HEAD,
    DFlashDraft,
    Eagle3Draft,
    FormatWarning,
    TargetFiles,
    parts_warning,
    warn,
)
from outpace.formats.zlab import narrow_window
from outpace.models.config import FULL, WINDOW, check_values

LAYER = "transformer_layer_config."
# a file has what differs from these, the defaults of transformers' LlamaConfig and Qwen3Config
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
QWEN3 = LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}
MASK = Field(name="mask_token_id", default=None, row="mask token")
DFLASH_FIELDS = (
    *body(LAYER, **QWEN3),
    Field(
        name="target_layer_ids",
        kind=list,
        places=(Place("aux_hidden_state_layer_ids"),),
        default=None,
        row="layer ids",
    ),
    Field(name="block_size", default=8, least=2, most=4096, row="block size", engines={"vLLM": ()}),
    MASK,
    OWN_DEPTH,
    OWN_TEMPERATURES,
)
EAGLE3_FIELDS = (
    *body(LAYER, **LLAMA),
    *SIZES,
    Field(name="layer_ids", kind=list, places=(Place(IDS),), default=None, row="layer ids"),
    *norms(),
    MASK,
)
DFLASH_MORE = (
    "sliding_window_non_causal max_anchors emb_dim auf pure_draft_prefix_len gru_hidden_dim "
    "lambda_base_start lambda_base_decay_ratio draft_vocab_size target_hidden_size"
)
EAGLE3_MORE = "embed_requires_grad enable_sp_ulysses"
ENVELOPE = "speculators_model_type speculators_version speculators_config has_no_defaults_at_init "
# speculators_model_type of an EAGLE-3 -> what config.json calls the classes of the model and of its config
CLASSES = {
    "eagle3": ("Eagle3DraftModel", "Eagle3SpeculatorConfig"),
    "peagle": ("PEagleSpeculator", "PEagleSpeculatorConfig"),
}
STEPS = 3  # proposed tokens per round, unless the config says otherwise
OWN_WINDOW = "anchors it at the block's start and does not count the token itself"


def _open(
    file: ConfigFile, kinds: tuple[str, ...], fields: Fields, more: str, model_type: str, window: int | None
) -> dict[str, Any]:
    """Check a file of one of the `kinds` -> its transformer_layer_config. Raises LoadError."""
    file.check_keys(fields, ENVELOPE + more, prefix=LAYER)
    kind = file.get("speculators_model_type")
    if kind not in kinds:
        raise file.error(f"speculators_model_type {kind!r} is not {kinds[0]!r}")
    layer = file.section("transformer_layer_config")
    if layer.get("model_type", model_type) != model_type:
        raise file.error(
            f"transformer_layer_config.model_type {layer['model_type']!r} is not supported, only "
            f"{model_type!r}"
        )
    if window and layer.get("sliding_window") is None:
        layer["sliding_window"] = window
    check_values(layer)
    return layer


def _envelope(kind: str, config_class: str, model_type: str, tokens: int, target: Any) -> dict[str, Any]:
    """Key path -> value of what all kinds have. Raises ValueError without a target."""
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
        f"{LAYER}model_type": model_type,
    }


# ---- DFlash ------------------------------------------------------------------------------------------


def parse_dflash(file: ConfigFile) -> DFlashConfig:
    """Raises LoadError. Without the depth of the target, which others do not write, it must be named."""
    layer = _open(file, ("dflash",), DFLASH_FIELDS, DFLASH_MORE, "qwen3", 4096)
    fields = file.read(DFLASH_FIELDS)
    if not fields["target_layer_ids"]:
        raise file.error("aux_hidden_state_layer_ids is missing; vLLM needs it")
    if fields["mask_token_id"] is None:
        raise file.error("mask_token_id is missing")
    if file.get("draft_vocab_size") not in (None, fields["vocab_size"]):
        raise file.error(
            f"a DFlash over {file.get('draft_vocab_size')} of {fields['vocab_size']} tokens is not supported"
        )
    if file.get("target_hidden_size") not in (None, fields["hidden_size"]):
        raise file.error(f"target_hidden_size {file.get('target_hidden_size')} is not the draft's own width")
    types, window = read_layer_types(file.where, layer, fields["num_layers"])
    if WINDOW in types:
        read = "it is read here as vLLM reads it, by slot and with the token itself"
        file.notes.append(f"window: speculators' own code {OWN_WINDOW}; {read}")
    return DFlashConfig(
        **file.depth(fields),
        rope=read_rope(file, layer, default_theta=10000.0),
        layer_types=types,
        sliding_window=window,
        causal=_causal(file, types),
    )


def _causal(file: ConfigFile, types: tuple[str, ...]) -> bool:
    """Of windowed layers; speculators' code always lets full ones see both ways."""
    value = file.get("sliding_window_non_causal")
    if value is None and WINDOW in types:
        raise file.error(
            "without sliding_window_non_causal, speculators' code takes windows as causal and vLLM "
            "takes them as not. Write which"
        )
    if value is False and FULL in types:
        file.notes.append(
            "sliding_window_non_causal false: older vLLM makes full_attention layers causal too"
        )
    return value is False


def dflash_to_hf(draft: DFlashDraft, target: TargetFiles | None) -> dict[str, Any]:
    c = draft.config
    flat = {
        "architectures": ["DFlashDraftModel"],
        **_envelope("dflash", "DFlashSpeculatorConfig", "qwen3", c.block_size - 1, target),
        **write_fields(DFLASH_FIELDS, c),
        **layer_keys(c, c.layer_types, c.sliding_window, LAYER),
        "draft_vocab_size": c.vocab_size,
        "target_hidden_size": None,
        # true even where no layer has a window: older vLLM reads false as "every layer is causal"
        "sliding_window_non_causal": not c.causal,
        "sample_from_anchor": False,
        "outpace.copied_from_target": [EMBEDDING, HEAD],
    }
    return nested(flat)


def dflash_warnings(draft: DFlashDraft) -> list[FormatWarning]:
    c = draft.config
    older = "older builds make full_attention layers causal too"
    result = warn(
        "vLLM", (c.mask_token_id is None, "mask token", "has no learned mask_embedding"), fatal=True
    )
    result += warn("speculators", (WINDOW in c.layer_types, "window", OWN_WINDOW), lossy=True)
    result += warn("vLLM", (c.causal and FULL in c.layer_types, "block sees", older))
    for engine in ("vLLM", "speculators"):
        message = "has no word for causal full_attention layers"
        result += warn(engine, (c.causal_full, "block sees", message), fatal=True)
    return result + narrow_window(c, "vLLM") + parts_warning(c, "vLLM")


def dflash_views(file: ConfigFile) -> dict[str, View]:
    layer = file.section("transformer_layer_config")
    types, window = layer_types(layer)
    non_causal = file.get("sliding_window_non_causal")
    # vLLM, before it resolved this per layer
    older = [not (True if non_causal is None else non_causal)] * len(types)
    own = [not non_causal and t == WINDOW for t in types]
    return {
        engine: dflash_view(file, DFLASH_FIELDS, engine, layer, 10000.0, types, window, causal)
        for engine, causal in (("vLLM", older), ("speculators", own))
    }


# ---- EAGLE-3 -----------------------------------------------------------------------------------------


def parse_eagle3(file: ConfigFile) -> Eagle3Config:
    """Raises LoadError, for the reasons that SGLang's format has."""
    layer = _open(file, tuple(CLASSES), EAGLE3_FIELDS, EAGLE3_MORE, "llama", None)
    parallel = file.get("speculators_model_type") == "peagle"
    if parallel and file.get("mask_token_id") is None:
        raise file.error("mask_token_id is missing; without it nothing means the later draft tokens")
    if file.get("norm_before_residual") is None:
        raise file.error(
            "norm_before_residual is missing; vLLM takes true, speculators' code and llama.cpp's "
            "converter false. Write which"
        )
    return eagle3_config(file, layer, file.read(EAGLE3_FIELDS) | {"parallel": parallel})


def eagle3_to_hf(draft: Eagle3Draft, target: TargetFiles | None) -> dict[str, Any]:
    c = draft.config
    kind = "peagle" if c.parallel else "eagle3"
    model_class, config_class = CLASSES[kind]
    flat = {
        "architectures": [model_class],
        **_envelope(kind, config_class, "llama", STEPS, target),
        **write_fields(EAGLE3_FIELDS, c),
        **eagle3_layer(c, LAYER),
        "target_hidden_size": None if c.target_hidden_size == c.hidden_size else c.target_hidden_size,
        "embed_requires_grad": draft.own_embedding,
        "outpace.copied_from_target": [name for name in (EMBEDDING, HEAD) if name not in draft.tensors],
    }
    return nested(flat)


def eagle3_warnings(draft: Eagle3Draft) -> list[FormatWarning]:
    c = draft.config
    result = warn(
        "speculators",
        (c.hidden_size != c.target_hidden_size, "hidden sizes", "wants a draft as wide as its target"),
        (len(c.layer_ids) != 3, "layer ids", "joins three states"),
    )
    learned = c.parallel and c.mask_token_id is None
    for engine in ("speculators", "vLLM"):
        result += warn(engine, (learned, "one pass", "knows no learned mask_embedding"), fatal=True)
    return result


def eagle3_views(file: ConfigFile) -> dict[str, View]:
    layer = file.section("transformer_layer_config")
    eps, residual = layer.get("rms_norm_eps"), file.get("norm_before_residual")
    more = (file.get("norm_before_fc"), file.get("fc_norm"), file.get("norm_output"))
    parallel = file.get("speculators_model_type") == "peagle"
    base = eagle3_view(file, EAGLE3_FIELDS, layer, "vLLM") | {
        "one pass": one_pass(parallel, file.get("mask_token_id"))
    }
    vllm = base | {"norms": eagle3_norms(eps, residual in (None, True), *more)}
    own = base | {"norms": eagle3_norms(eps, residual, *more)}
    return {"vLLM": vllm, "speculators": own, "llama.cpp": converter_view(file, layer, base)}


DFLASH_FORMAT = FolderFormat(
    kind=DFLASH,
    engines=("vLLM", "speculators"),
    warnings=dflash_warnings,
    views=dflash_views,
    parse=parse_dflash,
    to_hf=dflash_to_hf,
    our_name=lambda name: name,
    copies=True,
)
EAGLE3_FORMAT = FolderFormat(
    kind=EAGLE3,
    engines=("vLLM", "speculators"),
    warnings=eagle3_warnings,
    views=eagle3_views,
    parse=parse_eagle3,
    to_hf=eagle3_to_hf,
    our_name=our_name,
    their_name=lambda name: name.replace("midlayer.", "layers.0."),
    copies=True,
)
