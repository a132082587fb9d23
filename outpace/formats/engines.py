"""What each engine would take from a draft's files, in words: equal words mean an equal reading."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from outpace.drafts.dflash import parts_of, second_parts
from outpace.formats.keys import read_layer_types, without_nulls
from outpace.formats.spec import (
    EMBEDDING,
    HEAD,
    DFlashDraft,
    Eagle3Draft,
    canonical_rope,
    rope_in_words,
)
from outpace.models.config import FULL, WINDOW, ModelConfig, parse_rope
from outpace.ops.rope import RopeConfig

View = dict[str, str]  # a row of `outpace preflight` -> what an engine takes there
Held = Collection[str]  # the files' tensors, prefixes removed, without copies of the target's
REFUSES = "refuses: "
IDS = "eagle_aux_hidden_state_layer_ids"


# ---- words -------------------------------------------------------------------------------------------


def states(ids: Any) -> str:
    """`ids` counts hidden_states: 0 is the embedding."""
    named = isinstance(ids, list) and ids
    return f"hs {', '.join(map(str, ids))}" if named else REFUSES + "no layers are named"


def plus_one(ids: Any) -> Any:
    return [k + 1 for k in ids] if isinstance(ids, list) and all(type(k) is int for k in ids) else None


def default_states(target: ModelConfig | None) -> Any:
    return None if target is None else [2, target.num_layers // 2, target.num_layers - 3]


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
    whose = ("its own" if embedding else "the target's", "its own" if head else "the target's")
    return whose[0] if whose[0] == whose[1] else f"{whose[0]}, {whose[1]}"


# ---- ours, and what all readers of a config.json share -------------------------------------------------


def of_description(draft: DFlashDraft | Eagle3Draft) -> View:
    c = draft.config
    values = {"rope": rope_in_words(c.rope), "positions": f"{c.max_position_embeddings:,}"}
    if isinstance(draft, DFlashDraft):
        d = draft.config
        causal = [d.hides(i) for i in range(d.num_layers)]
        return values | {
            "layer ids": states([k + 1 for k in d.target_layer_ids]),
            "norms": norm_words(d.rms_norm_eps),
            "window": windows(d.layer_types, d.sliding_window),
            "block sees": sees(d.layer_types, causal),
            "parts": parts_of(d),
            "mask token": "learned, no token" if d.mask_token_id is None else str(d.mask_token_id),
            "block size": str(d.block_size),
            "vocabulary": f"{d.vocab_size:,}",
            "attention bias": bias_words(d.attention_bias),
            "embedding, head": source(False, False),
        }
    e = draft.config
    types = (WINDOW if e.sliding_window else FULL,) * e.num_layers
    norms = (e.norm_before_residual, e.norm_before_fc, e.fc_norm, e.norm_output)
    return values | {
        "layer ids": states([k + 1 for k in e.layer_ids]),
        "layers": str(e.num_layers),
        "one pass": one_pass(e.parallel, e.mask_token_id),
        "norms": eagle3_norms(e.rms_norm_eps, *norms),
        "window": windows(types, e.sliding_window),
        "vocabulary": f"{e.draft_vocab_size:,} of {e.vocab_size:,}",
        "attention bias": bias_words(False),
        "embedding, head": source(draft.own_embedding, draft.own_head),
    }


def rope(hf: Mapping[str, Any], engine: str, default_theta: float) -> str:
    """Current SGLang and vLLM read transformers 5's view of the config, in which rope_scaling goes first;
    older SGLang, and z-lab's code under transformers 4, never look into rope_parameters."""
    new, old = hf.get("rope_parameters") or {}, hf.get("rope_scaling")
    if engine == "SGLang":
        values = (old or {}) if "rope_scaling" in hf else new
    elif engine == "llama.cpp":
        values = new or old or {}
    else:
        values = old or new
    thetas = (values.get("rope_theta"), hf.get("rope_theta"), new.get("rope_theta"), default_theta)
    theta = next(t for t in thetas if t is not None)
    base = {"rope_theta": theta, "max_position_embeddings": hf.get("max_position_embeddings") or 0}
    try:
        result = canonical_rope(parse_rope({**base, "rope_scaling": without_nulls(values)}))
    except (ValueError, TypeError, KeyError) as error:
        return REFUSES + str(error)
    return rope_in_words(ggml_rope(result) if engine == "llama.cpp" else result)


def ggml_rope(rope_config: RopeConfig) -> RopeConfig:
    """llama.cpp's loaders of drafts know neither the betas nor the untruncated range of YaRN."""
    if rope_config.kind != "yarn":
        return rope_config
    return replace(rope_config, beta_fast=32.0, beta_slow=1.0, truncate=True, attention_factor=None)


def layer_types(hf: Mapping[str, Any]) -> tuple[tuple[str, ...], Any]:
    """(types, window) as Qwen3Config reads them; without use_sliding_window there is no window."""
    layers = hf.get("num_hidden_layers") or 1
    try:
        return read_layer_types("", hf, layers)
    except ValueError:
        return tuple(hf.get("layer_types") or (FULL,) * layers), None


def causal_layers(hf: Mapping[str, Any], types: Iterable[str], otherwise: Any = None) -> list[bool]:
    """An explicit is_causal counts for every layer; else `otherwise`; else windows are causal."""
    value = hf.get("is_causal") if hf.get("is_causal") is not None else otherwise
    return [t == WINDOW if value is None else bool(value) for t in types]


# ---- DFlash ------------------------------------------------------------------------------------------


def parts(hf: Mapping[str, Any], engine: str) -> str:
    """Of a file in z-lab's format: the architecture chooses vLLM's class, the keys choose in SGLang's."""
    inner, name = hf.get("dflash_config") or {}, (hf.get("architectures") or [""])[0]
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    words = ", ".join(second_parts(*map(inner.get, keys))) or "none"
    if name.startswith("Outpace"):
        return f"{REFUSES}it knows no {name}"
    if engine == "llama.cpp" and words != "none":
        return f"{REFUSES}its converter knows no {words}"
    return "none" if engine == "vLLM" and name == "DFlashDraftModel" else words


def zlab(hf: Mapping[str, Any], held: Held, target: ModelConfig | None) -> dict[str, View]:
    inner = hf.get("dflash_config") or {}
    types, window = layer_types(hf)
    block = inner.get("block_size") or hf.get("block_size") or 16
    nested = inner.get("target_layer_ids", hf.get("target_layer_ids"))
    mask = inner.get("mask_token_id", hf.get("mask_token_id"))
    named = inner.get("mask_token") or hf.get("mask_token") or "<|MASK|>"
    base = {
        "norms": norm_words(hf.get("rms_norm_eps")),
        "positions": f"{hf.get('max_position_embeddings') or 32768:,}",
        "vocabulary": f"{hf.get('vocab_size') or 0:,}",
        "attention bias": bias_words(hf.get("attention_bias")),
        "embedding, head": source(False, False),
    }
    sglang = base | {
        "layer ids": states(plus_one(nested)),
        "rope": rope(hf, "SGLang", 1e6),
        "window": windows(types, window),
        "block sees": sees(types, causal_layers(hf, types)),
        "parts": parts(hf, "SGLang"),
        "mask token": f"the token {named!r}" if mask is None else str(mask),
        "block size": str(block),
    }
    use_swa = bool(inner.get("use_swa")) and WINDOW not in types
    wide = (WINDOW,) * len(types) if use_swa else types
    vllm = base | {
        "layer ids": states(hf.get(IDS) or plus_one(inner.get("target_layer_ids")) or plus_one(nested)),
        "rope": rope(hf, "vLLM", 1e6),
        "window": windows(wide, inner.get("swa_window_size") or window),
        "block sees": sees(wide, causal_layers(hf, types, inner.get("causal"))),
        "parts": parts(hf, "vLLM"),
        "mask token": REFUSES + "mask_token_id is missing" if mask is None else str(mask),
        "embedding, head": source(EMBEDDING in held, HEAD in held),
    }
    value = hf.get("is_causal", inner.get("causal"))
    ggml_window = inner.get("swa_window_size") or hf.get("sliding_window")
    slides = bool(hf.get("use_sliding_window") or inner.get("use_swa")) and ggml_window
    ggml_types = (wide if inner.get("use_swa") else types) if slides else (FULL,) * len(types)
    inner_mask = inner.get("mask_token_id")
    llama_cpp = base | {
        "layer ids": states(plus_one(nested)),
        "rope": rope(hf, "llama.cpp", 10000.0),
        "window": windows(ggml_types, ggml_window),
        "block sees": sees(types, [bool(value)] * len(types)),
        "parts": parts(hf, "llama.cpp"),
        "mask token": "none" if inner_mask is None else str(inner_mask),
        "block size": str(block),
        "embedding, head": source(EMBEDDING in held, HEAD in held),
    }
    if hf.get("attention_bias"):
        llama_cpp["attention bias"] = REFUSES + "it has no biases"
    return {"SGLang": sglang, "vLLM": vllm, "llama.cpp": llama_cpp}


def speculators(hf: Mapping[str, Any], held: Held, target: ModelConfig | None) -> dict[str, View]:
    layer = hf.get("transformer_layer_config") or {}
    types, window = layer_types(layer)
    ids, value = hf.get("aux_hidden_state_layer_ids"), hf.get("sliding_window_non_causal")
    base = {
        "layer ids": states(ids),
        "norms": norm_words(layer.get("rms_norm_eps")),
        "rope": rope(layer, "vLLM", 10000.0),
        "positions": f"{layer.get('max_position_embeddings') or 32768:,}",
        "window": windows(types, window),
        "mask token": str(hf.get("mask_token_id")),
        "vocabulary": f"{layer.get('vocab_size') or 151936:,}",
        "attention bias": bias_words(layer.get("attention_bias")),
        "embedding, head": source(EMBEDDING in held, HEAD in held),
    }
    older = [not (True if value is None else value)] * len(types)  # vLLM, before it resolved this per layer
    own = [not value and t == WINDOW for t in types]
    return {
        "vLLM": base | {"block sees": sees(types, older)},
        "speculators": base | {"block sees": sees(types, own), "block size": str(hf.get("block_size") or 8)},
    }


def transformers(hf: Mapping[str, Any], held: Held, target: ModelConfig | None) -> dict[str, View]:
    layers = hf.get("num_hidden_layers") or 5
    types = tuple(hf.get("layer_types") or (WINDOW,) * layers)
    view = {
        "layer ids": states(plus_one(hf.get("target_layer_ids"))),
        "norms": norm_words(hf.get("rms_norm_eps") or 1e-5),
        "rope": rope(hf, "transformers", 500000.0),
        "positions": f"{hf.get('max_position_embeddings') or 131072:,}",
        "window": windows(types, int(hf.get("sliding_window") or 2048) + 1),
        "block sees": "both ways",
        "mask token": str(hf.get("mask_token_id")),
        "block size": str(hf.get("block_size") or 16),
        "attention bias": bias_words(False),
        "embedding, head": source(False, False),
    }
    return {"transformers": view}


# ---- EAGLE-3 -----------------------------------------------------------------------------------------


def sglang_eagle3(hf: Mapping[str, Any], held: Held, target: ModelConfig | None) -> dict[str, View]:
    nested = hf.get("eagle_config") or {}
    per_state = hf.get("fc_norm") or hf.get("use_aux_norm")
    base = _eagle3_base(hf, hf)
    has_head, whole = HEAD in held, hf.get("draft_vocab_size") is None
    before_fc = nested.get("norm_before_fc", hf.get("norm_before_fc"))
    eps, output = hf.get("rms_norm_eps"), hf.get("norm_output")
    sglang = base | {
        "layer ids": states(plus_one(nested.get(IDS)) or default_states(target)),
        "norms": eagle3_norms(eps, False, False, per_state, output),
        "rope": rope(hf, "SGLang", 10000.0),
        "window": "none",
        "layers": "1",
        "one pass": one_pass(False, None),
        "embedding, head": source(False, has_head and not whole),
    }
    if hf.get("parallel_drafting") and "mask_embedding" in held:
        base["one pass"] = REFUSES + "it knows no learned mask_embedding"
    vllm = base | {
        "layer ids": states(hf.get(IDS) or default_states(target)),
        "norms": eagle3_norms(eps, hf.get("norm_before_residual"), before_fc, hf.get("fc_norm"), output),
        "rope": rope(hf, "vLLM", 10000.0),
        "embedding, head": source(EMBEDDING in held, has_head),
    }
    return {"SGLang": sglang, "vLLM": vllm, "llama.cpp": _converted(hf, hf, base, held, target)}


def speculators_eagle3(hf: Mapping[str, Any], held: Held, target: ModelConfig | None) -> dict[str, View]:
    layer = hf.get("transformer_layer_config") or {}
    base = _eagle3_base(hf, layer)
    eps, residual = layer.get("rms_norm_eps"), hf.get("norm_before_residual")
    more = (hf.get("norm_before_fc"), hf.get("fc_norm"), hf.get("norm_output"))
    base |= {
        "layer ids": states(hf.get(IDS) or default_states(target)),
        "one pass": one_pass(hf.get("speculators_model_type") == "peagle", hf.get("mask_token_id")),
        "rope": rope(layer, "vLLM", 10000.0),
        "embedding, head": source(EMBEDDING in held, HEAD in held),
    }
    vllm = base | {"norms": eagle3_norms(eps, True if residual is None else residual, *more)}
    own = base | {"norms": eagle3_norms(eps, residual, *more)}
    return {"vLLM": vllm, "speculators": own, "llama.cpp": _converted(hf, layer, base, held, target)}


def _eagle3_base(hf: Mapping[str, Any], layer: Mapping[str, Any]) -> View:
    types, window = tuple(layer.get("layer_types") or (FULL,)), layer.get("sliding_window")
    vocab = layer.get("vocab_size") or 0
    return {
        "positions": f"{layer.get('max_position_embeddings') or 2048:,}",
        "window": windows(types, window),
        "layers": str(layer.get("num_hidden_layers") or 1),
        "one pass": one_pass(hf.get("parallel_drafting"), hf.get("ptd_token_id")),
        "vocabulary": f"{hf.get('draft_vocab_size') or vocab:,} of {vocab:,}",
        "attention bias": bias_words(layer.get("attention_bias")),
    }


def _converted(
    hf: Mapping[str, Any], layer: Mapping[str, Any], base: View, held: Held, target: ModelConfig | None
) -> View:
    """By llama.cpp's own convert_hf_to_gguf: top-level keys alone, no window, no EAGLE-3.1."""
    ids = hf.get(IDS) or default_states(target)
    norms = (hf.get("norm_before_residual"), hf.get("norm_before_fc"), False, False)
    values = base | {
        "layer ids": states(ids),
        "norms": eagle3_norms(layer.get("rms_norm_eps"), *norms),
        "rope": rope(layer, "llama.cpp", 10000.0),
        "window": "none",
        "embedding, head": source(EMBEDDING in held, HEAD in held),
    }
    if ids and len(ids) != 3:
        values["layer ids"] = REFUSES + "it joins three states"
    if (layer.get("num_hidden_layers") or 1) != 1:
        values["layers"] = REFUSES + "it has one layer"
    if base["one pass"] != one_pass(False, None):
        values["one pass"] = REFUSES + "it proposes step by step"
    if hf.get("fc_norm"):
        values["norms"] = REFUSES + "it has no norm per state"
    return values
