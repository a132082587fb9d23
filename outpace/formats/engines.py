"""What each engine reads from a draft's files, in words: equal words mean an equal reading."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from outpace.drafts.dflash import parts_of
from outpace.formats.fields import NEEDED, ConfigFile, Fields, read_layer_types, without_nulls
from outpace.formats.spec import EMBEDDING, HEAD, DFlashDraft, Eagle3Draft, TargetFiles, canonical_rope
from outpace.models.config import FULL, WINDOW, parse_rope
from outpace.ops.rope import RopeConfig

View = dict[str, str]  # a row of `outpace preflight` -> the reading of one engine
REFUSES = "refuses: "
IDS = "eagle_aux_hidden_state_layer_ids"


# ---- words -------------------------------------------------------------------------------------------


def states(ids: Any) -> str:
    """`ids` counts hidden_states: 0 is the embedding."""
    named = isinstance(ids, list) and ids
    return f"hs {', '.join(map(str, ids))}" if named else REFUSES + "no layers are named"


def windows(types: Iterable[str], window: Any) -> str:
    slides = [str(i) for i, t in enumerate(types) if t == WINDOW]
    if not slides:
        return "none"
    return f"{window} in layers {', '.join(slides)}" if window else REFUSES + "no window"


def sees(types: Iterable[str], causal: Iterable[bool]) -> str:
    pairs = list(zip(types, causal, strict=False))
    back = [t for t, c in pairs if c]
    if not back:
        return "both ways"
    where = " and ".join(sorted(set(back)))
    return "back only" if len(back) == len(pairs) else f"back only in {where} layers"


def norm_words(eps: Any, *more: str) -> str:
    return ", ".join([f"eps {float(eps or 1e-6):g}", *(m for m in more if m)])


def eagle3_norms(eps: Any, residual: Any, before_fc: Any, per_state: Any, output: Any) -> str:
    return norm_words(
        eps,
        "normed residual" if residual else "raw residual",
        "one before fc" if before_fc else "",
        "one per state" if per_state else "",
        "fed back normed" if output else "",
    )


def bias_words(has: Any) -> str:
    return "q, k, v, o" if has else "none"


def one_pass(parallel: Any, mask: Any) -> str:
    if not parallel:
        return "no, step by step"
    return "yes, learned mask" if mask is None else f"yes, mask {mask}"


def source(embedding: bool, head: bool) -> str:
    """Of the embedding and the head: the draft's own, or the target's."""
    names = ["its own" if own else "the target's" for own in (embedding, head)]
    return ", ".join(dict.fromkeys(names))


def rope_words(rope: RopeConfig) -> str:
    """Equal words for equal ropes."""
    message = f"theta {rope.theta:g}"
    match rope.kind:
        case "linear":
            message += f", linear /{rope.factor:g}"
        case "llama3":
            ends = f"{rope.low_freq_factor:g}..{rope.high_freq_factor:g}"
            message += f", llama3 x{rope.factor:g} of {rope.original_max_position}, {ends}"
        case "yarn":
            message += f", yarn x{rope.factor:g} of {rope.original_max_position}"
            message += f", betas {rope.beta_fast:g}/{rope.beta_slow:g}"
            message += ", rounded range" if rope.truncate else ", exact range"
            message += "" if rope.attention_factor is None else f", cos x{rope.attention_factor:g}"
        case "factors":
            message += f", by {len(rope.factors)} factors ({sum(rope.factors):g})"
    return message


WORDS: dict[str, Callable[[Any], str]] = {  # row of a field table -> words of its value
    "layer ids": states,
    "norms": norm_words,
    "positions": "{:,}".format,
    "vocabulary": "{:,}".format,
    "mask token": str,
    "block size": str,
    "attention bias": bias_words,
}


def description_view(draft: DFlashDraft | Eagle3Draft) -> View:
    """The draft as it is meant."""
    c = draft.config
    values = {"rope": rope_words(c.rope), "positions": f"{c.max_position_embeddings:,}"}
    if isinstance(draft, DFlashDraft):
        d = draft.config
        return values | {
            "layer ids": states([k + 1 for k in d.target_layer_ids]),
            "norms": norm_words(d.rms_norm_eps),
            "window": windows(d.layer_types, d.sliding_window),
            "block sees": sees(d.layer_types, [d.hides(i) for i in range(d.num_layers)]),
            "parts": parts_of(d),
            "mask token": "learned, no token" if d.mask_token_id is None else str(d.mask_token_id),
            "block size": str(d.block_size),
            "vocabulary": f"{d.vocab_size:,}",
            "attention bias": bias_words(d.attention_bias),
            "embedding, head": source(False, False),
        }
    e = draft.config
    norms = (e.norm_before_residual, e.norm_before_fc, e.fc_norm, e.norm_output)
    return values | {
        "layer ids": states([k + 1 for k in e.layer_ids]),
        "layers": str(e.num_layers),
        "one pass": one_pass(e.parallel, e.mask_token_id),
        "norms": eagle3_norms(e.rms_norm_eps, *norms),
        "window": windows((WINDOW if e.sliding_window else FULL,) * e.num_layers, e.sliding_window),
        "vocabulary": f"{e.draft_vocab_size:,} of {e.vocab_size:,}",
        "attention bias": bias_words(False),
        "embedding, head": source(draft.own_embedding, draft.own_head),
    }


# ---- rules of engines --------------------------------------------------------------------------------


def field_view(
    file: ConfigFile, fields: Fields, engine: str, missing: Mapping[str, str] | None = None
) -> View:
    """The rows of a field table as an engine reads them: its first place with a value, or the default.
    `missing`: row -> words where there is neither."""
    view = {}
    for row in fields:
        paths = row.engines.get(engine, tuple(place.path for place in row.places))
        if not row.row or not paths:
            continue
        offsets = {place.path: place.offset for place in row.places}
        path = next((path for path in paths if file.get(path) is not None), None)
        value = row.default if path is None else file.get(path)
        if path is not None and row.kind is list:
            value = [k + offsets[path] for k in value]
        if value is None or value is NEEDED:
            words = (missing or {}).get(row.row, f"{REFUSES}{row.places[0].path} is missing")
        else:
            words = WORDS[row.row](value)
        view[row.row] = words
    return view


def default_states(target: TargetFiles | None) -> list[int] | None:
    """The hidden_states that an EAGLE-3 without a list reads."""
    if target is None:
        return None
    layers = target.config.num_layers
    return [2, layers // 2, layers - 3]


def engine_rope(layer: Mapping[str, Any], engine: str, default_theta: float) -> str:
    """Current SGLang and vLLM read transformers 5's view of the config, in which rope_scaling goes first;
    older SGLang, and z-lab's code under transformers 4, never look into rope_parameters."""
    new, old = layer.get("rope_parameters") or {}, layer.get("rope_scaling")
    if engine == "SGLang":
        values = (old or {}) if "rope_scaling" in layer else new
    elif engine == "llama.cpp":
        values = new or old or {}
    else:
        values = old or new
    thetas = (values.get("rope_theta"), layer.get("rope_theta"), new.get("rope_theta"), default_theta)
    theta = next(t for t in thetas if t is not None)
    base = {"rope_theta": theta, "max_position_embeddings": layer.get("max_position_embeddings") or 0}
    try:
        rope = canonical_rope(parse_rope({**base, "rope_scaling": without_nulls(values)}))
    except (ValueError, TypeError, KeyError) as error:
        return REFUSES + str(error)
    if (
        engine == "llama.cpp" and rope.kind == "yarn"
    ):  # its loaders of drafts know neither betas nor exact range
        rope = replace(rope, beta_fast=32.0, beta_slow=1.0, truncate=True, attention_factor=None)
    return rope_words(rope)


def layer_types(layer: Mapping[str, Any]) -> tuple[tuple[str, ...], Any]:
    """(types, window) as Qwen3Config reads them; without use_sliding_window there is no window."""
    layers = layer.get("num_hidden_layers") or 1
    try:
        return read_layer_types("", layer, layers)
    except ValueError:
        return tuple(layer.get("layer_types") or (FULL,) * layers), None


def causal_layers(hf: Mapping[str, Any], types: Iterable[str], otherwise: Any = None) -> list[bool]:
    """An explicit is_causal counts for every layer; else `otherwise`; else windows are causal."""
    value = hf.get("is_causal") if hf.get("is_causal") is not None else otherwise
    return [t == WINDOW if value is None else bool(value) for t in types]


def own_source(file: ConfigFile) -> str:
    """Of an engine that takes what the files hold."""
    return source(EMBEDDING in file.names, HEAD in file.names)


def dflash_view(
    file: ConfigFile,
    fields: Fields,
    engine: str,
    layer: Mapping[str, Any],
    default_theta: float,
    types: Collection[str],
    window: Any,
    causal: Iterable[bool],
    missing: Mapping[str, str] | None = None,
) -> View:
    """`layer`: the Qwen3 config; `types`, `window` and `causal`: as the engine reads them."""
    return field_view(file, fields, engine, missing) | {
        "rope": engine_rope(layer, engine, default_theta),
        "window": windows(types, window),
        "block sees": sees(types, causal),
        "embedding, head": own_source(file),
    }


def eagle3_view(file: ConfigFile, fields: Fields, layer: Mapping[str, Any], engine: str) -> View:
    """`layer`: the Llama config. Norms are the caller's."""
    vocab = layer.get("vocab_size") or 0
    types = tuple(layer.get("layer_types") or (FULL,))
    ids = states(default_states(file.target))
    return field_view(file, fields, engine, missing={"layer ids": ids}) | {
        "rope": engine_rope(layer, engine, 10000.0),
        "window": windows(types, layer.get("sliding_window")),
        "layers": str(layer.get("num_hidden_layers") or 1),
        "one pass": one_pass(file.get("parallel_drafting"), file.get("ptd_token_id")),
        "vocabulary": f"{file.get('draft_vocab_size') or vocab:,} of {vocab:,}",
        "embedding, head": own_source(file),
    }


def converter_view(file: ConfigFile, layer: Mapping[str, Any], base: View) -> View:
    """EAGLE-3 by llama.cpp's own convert_hf_to_gguf: top-level keys alone, no window, no EAGLE-3.1."""
    ids = file.get(IDS)
    norms = (file.get("norm_before_residual"), file.get("norm_before_fc"), False, False)
    view = base | {
        "norms": eagle3_norms(layer.get("rms_norm_eps"), *norms),
        "rope": engine_rope(layer, "llama.cpp", 10000.0),
        "window": "none",
    }
    if ids and len(ids) != 3:
        view["layer ids"] = REFUSES + "it joins three states"
    if (layer.get("num_hidden_layers") or 1) != 1:
        view["layers"] = REFUSES + "it has one layer"
    if base["one pass"] != one_pass(False, None):
        view["one pass"] = REFUSES + "it proposes step by step"
    if file.get("fc_norm"):
        view["norms"] = REFUSES + "it has no norm per state"
    return view
