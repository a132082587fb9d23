"""DFlash and DFlash 2 in z-lab's format: what z-lab's code, SGLang and vLLM load, and what we train.

Parts that no engine reads there (Markov and confidence heads, a reduced vocabulary, a selector without
convolutions) are under "outpace", and the architecture is then our own: an engine refuses it, and none
drafts with half of it.
"""

from functools import partial
from typing import Any

from outpace.checkpoint.open import LoadError
from outpace.drafts.dflash import parts_of, second_parts
from outpace.drafts.dflash_config import DFlashConfig
from outpace.formats.base import FolderFormat
from outpace.formats.engines import (
    IDS,
    REFUSES,
    View,
    bias_words,
    causal_layers,
    dflash_view,
    layer_types,
    source,
)
from outpace.formats.fields import (
    OWN_TEMPERATURES,
    ConfigFile,
    Field,
    Place,
    body,
    layer_keys,
    nested,
    read_layer_types,
    read_rope,
    write_fields,
)
from outpace.formats.spec import DFLASH, DFlashDraft, FormatWarning, TargetFiles, warn
from outpace.models.config import FULL, WINDOW

ARCHITECTURE, SECOND, OWN = "DFlashDraftModel", "DFlash2DraftModel", "OutpaceDFlashDraftModel"
ARCHITECTURES = (ARCHITECTURE, SECOND, OWN)
DEFAULT_MASK = "<|MASK|>"
NESTED_IDS = "dflash_config.target_layer_ids"
MASK = "dflash_config.mask_token_id"
PARTS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")  # DFlash 2
OWN_PARTS: dict[str, type] = {
    "markov_rank": int,
    "markov_gated": bool,
    "confidence": bool,
    "draft_vocab_size": int,
}
FIELDS = (
    *body(head_dim=128),
    Field(
        name="target_layer_ids",
        kind=list,
        places=(
            Place(NESTED_IDS, "SGLang, z-lab, llama.cpp", offset=1),
            Place("target_layer_ids", offset=1, written=False),
            Place(IDS, "vLLM, which takes it as it is"),
        ),
        row="layer ids",
        engines={
            "SGLang": (NESTED_IDS, "target_layer_ids"),
            "vLLM": (IDS, NESTED_IDS, "target_layer_ids"),
            "llama.cpp": (NESTED_IDS, "target_layer_ids"),
        },
    ),
    Field(
        name="block_size",
        places=(Place("dflash_config.block_size", "SGLang, z-lab"), Place("block_size", "older readers")),
        default=16,
        least=2,
        most=4096,
        row="block size",
        engines={"vLLM": ()},
    ),
    Field(
        name="num_target_layers",
        places=(Place("num_target_layers"), Place("dflash_config.num_target_layers", written=False)),
        least=1,
    ),
    Field(
        name="mask_token_id",
        places=(Place(MASK), Place("mask_token_id", "z-lab and SGLang alone read it there", written=False)),
        default=None,
        row="mask token",
        engines={"llama.cpp": (MASK,)},
    ),
    *(Field(name=key, places=(Place(f"dflash_config.{key}"),), default=0, sparse=True) for key in PARTS),
    *(
        Field(name=key, places=(Place(f"outpace.{key}"),), kind=kind, default=kind(), sparse=True)
        for key, kind in OWN_PARTS.items()
    ),
    OWN_TEMPERATURES,
)
MORE = (
    "is_causal mask_token draft_vocab_size target_hidden_size "
    "dflash_config.mask_token dflash_config.causal dflash_config.use_swa dflash_config.swa_window_size"
)


def parse(file: ConfigFile) -> DFlashConfig:
    """As z-lab's code, SGLang and vLLM read it. Raises LoadError or ValueError."""
    file.check_keys(FIELDS, MORE)
    name = (file.values.get("architectures") or [""])[0]
    if name not in ARCHITECTURES:
        raise file.error(f"architectures {file.values.get('architectures')} is not [{ARCHITECTURE}]")
    _check_layer_ids(file)
    fields = file.read(FIELDS)
    for key, ours in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if file.get(key) not in (None, fields[ours]):
            raise file.error(
                f"{key} {file.get(key)} is not {ours} {fields[ours]}; such a DFlash is not supported"
            )
    _check_parts(file, name, fields)
    rope = read_rope(file, file.values, default_theta=None)
    types, window = _windows(file, fields["num_layers"])
    causal, causal_full = _causal(file, types)
    if "mask_embedding" not in file.names and fields["mask_token_id"] is None:
        fields["mask_token_id"] = _mask_by_text(file)
    return DFlashConfig(
        **fields, rope=rope, layer_types=types, sliding_window=window, causal=causal, causal_full=causal_full
    )


def _check_layer_ids(file: ConfigFile) -> None:
    if not file.first(NESTED_IDS, "target_layer_ids"):
        ids = file.get(IDS)
        raise file.error(
            f"{NESTED_IDS} is missing; SGLang would predict layers"
            + (f". vLLM reads {IDS} {ids}: write those less one" if ids else "")
        )


def _check_parts(file: ConfigFile, architecture: str, fields: dict[str, Any]) -> None:
    missing = [f"dflash_config.{key}" for key in PARTS if not fields[key]]
    if architecture == SECOND and missing:
        raise file.error(f"a {SECOND} needs {', '.join(missing)}")
    if architecture != OWN and any(fields[key] for key in OWN_PARTS):
        raise file.error(f"parts under outpace belong to a {OWN}, this is a {architecture}")


def _windows(file: ConfigFile, layers: int) -> tuple[tuple[str, ...], int]:
    """z-lab and SGLang read layer_types and sliding_window; vLLM and llama.cpp's converter use_swa too."""
    types, window = read_layer_types(file.where, file.values, layers)
    use_swa, swa = file.get("dflash_config.use_swa"), file.get("dflash_config.swa_window_size")
    if (use_swa and WINDOW not in types) or (swa and WINDOW in types and swa != window):
        raise file.error(
            f"vLLM reads dflash_config's use_swa {use_swa} and swa_window_size {swa or None}, SGLang and "
            f"z-lab layer_types {list(types)} and sliding_window {window or None}. Make them agree"
        )
    return types, window


def _causal(file: ConfigFile, types: tuple[str, ...]) -> tuple[bool, bool]:
    """Whether windowed and whether full layers hide the later slots of a block. An explicit `is_causal` is
    for every layer; without one, windows are causal and full layers are not."""
    value, inner = file.get("is_causal"), file.get("dflash_config.causal")
    windowed, full = WINDOW in types, FULL in types
    if inner and value is None and full:
        raise file.error(
            "dflash_config.causal true is read by vLLM, which makes full_attention layers causal "
            "too; SGLang and z-lab read is_causal. Write is_causal: true, or neither where only windows are"
        )
    if value is None and inner is False and windowed:
        raise file.error(
            "dflash_config.causal false is read by vLLM and llama.cpp's converter; SGLang and "
            "z-lab read is_causal, and without it take windows as causal. Write is_causal: false"
        )
    return (windowed, False) if value is None else (value and windowed, value and full)


def _mask_by_text(file: ConfigFile) -> int:
    token = str(file.first("dflash_config.mask_token", "mask_token") or DEFAULT_MASK)
    result = None if file.token_id is None else file.token_id(token)
    if result is None:
        raise LoadError(
            f"{file.where}: dflash_config has no mask_token_id, and the tokenizer knows no {token!r}: "
            "write the id of a token that text never uses"
        )
    return result


def to_hf(draft: DFlashDraft, target: TargetFiles | None = None) -> dict[str, Any]:
    """config.json, every fact in all the places where an engine looks for it."""
    config, name = draft.config, architecture(draft.config)
    # where only windows are causal, the key is left out; true would reach the full layers too
    windows_alone = config.causal and FULL in config.layer_types and not config.causal_full
    causal = {} if windows_alone else {"is_causal": config.causal or config.causal_full}
    return {
        "architectures": [name],
        "auto_map": {"AutoModel": f"dflash.{name}"},
        "model_type": "qwen3",
        **nested(write_fields(FIELDS, config)),
        **layer_keys(config, config.layer_types, config.sliding_window),
        **causal,
    }


def architecture(config: DFlashConfig) -> str:
    """z-lab's name, or ours for a draft that no other engine runs."""
    second = [bool(getattr(config, key)) for key in PARTS]
    if any(getattr(config, key) for key in OWN_PARTS) or any(second) != all(second):
        return OWN
    return SECOND if all(second) else ARCHITECTURE


def warnings(draft: DFlashDraft) -> list[FormatWarning]:
    config, result = draft.config, []
    for engine in ("SGLang", "vLLM"):
        learned = config.mask_token_id is None
        result += warn(engine, (learned, "mask token", "knows no learned mask_embedding"), fatal=True)
        result += narrow_window(config, engine)
        own = architecture(config) == OWN
        result += warn(engine, (own, "parts", f"knows no {OWN}: {parts_of(config)}"))
    return result


def narrow_window(config: DFlashConfig, engine: str) -> list[FormatWarning]:
    """Engines where the windows look both ways measure them to both sides; ours, and llama.cpp's, to the
    left."""
    size, block = config.sliding_window, config.block_size
    narrow = WINDOW in config.layer_types and not config.causal and size < block
    message = f"a window of {size} also hides the far end of a block of {block}"
    return warn(engine, (narrow, "window", message), fatal=True)


def views(file: ConfigFile) -> dict[str, View]:
    inner, layer = file.section("dflash_config"), file.values
    types, window = layer_types(layer)
    swa = inner.get("swa_window_size")
    use_swa = bool(inner.get("use_swa")) and WINDOW not in types
    wide = (WINDOW,) * len(types) if use_swa else types
    mask = f"the token {file.first('dflash_config.mask_token', 'mask_token') or DEFAULT_MASK!r}"
    view = partial(dflash_view, file, FIELDS)
    sglang = view("SGLang", layer, 1e6, types, window, causal_layers(layer, types), {"mask token": mask})
    sglang["embedding, head"] = source(False, False)
    vllm = view("vLLM", layer, 1e6, wide, swa or window, causal_layers(layer, types, inner.get("causal")))
    ggml_window = swa or layer.get("sliding_window")
    slides = (layer.get("use_sliding_window") or inner.get("use_swa")) and ggml_window
    ggml_types = (wide if inner.get("use_swa") else types) if slides else (FULL,) * len(types)
    causal = [bool(layer.get("is_causal", inner.get("causal")))] * len(types)
    no_mask = {"mask token": "none"}
    llama_cpp = view("llama.cpp", layer, 10000.0, ggml_types, ggml_window, causal, no_mask)
    if llama_cpp["attention bias"] == bias_words(True):
        llama_cpp["attention bias"] = REFUSES + "it has no biases"
    views = {"SGLang": sglang, "vLLM": vllm, "llama.cpp": llama_cpp}
    return {engine: view | {"parts": _parts(file, engine)} for engine, view in views.items()}


def _parts(file: ConfigFile, engine: str) -> str:
    """The architecture chooses vLLM's class, the keys choose in SGLang's."""
    name = (file.values.get("architectures") or [""])[0]
    parts = ", ".join(second_parts(*(file.get(f"dflash_config.{key}") for key in PARTS))) or "none"
    if name == OWN:
        return f"{REFUSES}it knows no {name}"
    if engine == "llama.cpp" and parts != "none":
        return f"{REFUSES}its converter knows no {parts}"
    return "none" if engine == "vLLM" and name == ARCHITECTURE else parts


FORMAT = FolderFormat(
    kind=DFLASH, engines=("SGLang", "vLLM"), warnings=warnings, views=views, parse=parse, to_hf=to_hf
)
