"""Reading a draft's config.json with suspicion: given twice, meaning something else, unknown."""

from collections.abc import Iterable, Mapping
from typing import Any

from outpace.checkpoint.open import LoadError
from outpace.models.config import FAR, FULL, WINDOW, check_values, need, parse_rope, rope_to_hf
from outpace.ops.rope import RopeConfig


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BODY = words(
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
    "rms_norm_eps vocab_size max_position_embeddings attention_bias layer_types use_sliding_window "
    "sliding_window rope_theta rope_scaling rope_parameters"
)
# what a draft may say without changing what it computes; anything else that nobody here reads is reported
HARMLESS = words(
    "_attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout "
    "auto_map bos_token_id dtype eos_token_id initializer_range max_window_layers model_type "
    "num_aux_hidden_states outpace pad_token_id pretraining_tp return_dict tie_word_embeddings torch_dtype "
    "transformers_version use_cache"
)
ROPE_KEYS = words(
    "rope_type type rope_theta factor original_max_position_embeddings beta_fast beta_slow truncate "
    "attention_factor low_freq_factor high_freq_factor"
)
NO = (None, False)
# key -> the values that change nothing. Some engine reads each of these, another does not
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_swa_attention_sink_bias": NO,
    "attention_sink_bias": NO,
    "attention_value_scale": (None, 1),
    "bias": NO,
    "conv_group_size": (None, 0),
    "conv_kernel_size": (None, 0),
    "final_logit_softcapping": (None, 0),
    "hidden_act": (None, "silu"),
    "input_embedding_scale": (None, 1),
    "is_neox_style": (None, True),
    "layer_ids": (None,),
    "logit_scale": (None, 1),
    "mlp_bias": NO,
    "output_multiplier": (None, 1),
    "partial_rotary_factor": (None, 1),
    "projector_type": (None, "dflash"),
    "quantization_config": (None,),
    "rope_is_neox_style": (None, True),
    "sample_from_anchor": NO,
    "selector_rank": (None, 0),
    "selector_top_k": (None, 0),
    "shift_label": NO,
    "use_aux_hidden_state": (None, True),
}


OBJECTS = ("dflash_config", "eagle_config", "transformer_layer_config", "outpace")
COUNTS = (
    *("block_size", "draft_vocab_size", "mask_token_id", "num_target_layers", "ptd_token_id"),
    *("swa_window_size", "target_hidden_size"),
)
LISTS = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
FLAGS = (
    *("causal", "fc_norm", "is_causal", "norm_before_fc", "norm_before_residual", "norm_output"),
    *("parallel_drafting", "sliding_window_non_causal", "use_aux_norm", "use_swa"),
)


def check_types(where: str, hf: dict[str, Any]) -> None:
    """Raises LoadError or ValueError where a value has a type that no engine reads. Nothing is stated about
    keys that are missing or unknown."""
    for item in (hf, *(inner_object(where, hf, key) for key in OBJECTS)):
        check_values(item)
        for key in COUNTS:
            if item.get(key) is not None:
                whole(where, key, item[key])
        for key in LISTS:
            whole_numbers(where, key, item.get(key))
        for key in FLAGS:
            if not isinstance(item.get(key), bool | None):
                raise LoadError(f"{where}: {key} is {str(item[key])[:60]!r}, not true or false")


def inner_object(where: str, hf: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`, empty where there is none. Raises LoadError for anything else."""
    value = hf.get(key)
    if not isinstance(value, dict | None):
        raise LoadError(f"{where}: {key} is a {type(value).__name__}, not an object")
    return value or {}


def once(where: str, what: str, places: Mapping[str, Any]) -> Any:
    """The value that all `places` (who reads it -> value) give; None where none does. Raises LoadError
    where two differ: then engines would disagree and none would say so."""
    fields = {place: value for place, value in places.items() if value is not None}
    values = list(fields.values())
    if any(value != values[0] for value in values):
        message = "; ".join(f"{place} is {value}" for place, value in fields.items())
        raise LoadError(f"{where} gives {what} twice, and differently: {message}. Make them agree")
    return values[0] if values else None


def whole(where: str, what: str, value: Any, least: int = 0, most: int = FAR) -> int:
    """Raises LoadError for what is no whole number in that range."""
    if type(value) is not int or not least <= value <= most:
        raise LoadError(
            f"{where}: {what} is {str(value)[:60]!r}, not a whole number from {least} to {most:,}"
        )
    return value


def whole_numbers(where: str, what: str, value: Any) -> list[int] | None:
    """None stays None. Raises LoadError for what is no list of whole numbers."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(v) is int and abs(v) < FAR for v in value):
        raise LoadError(f"{where}: {what} is {str(value)[:60]!r}, not a list of layers")
    return value


def refuse_meaning(where: str, values: Mapping[str, Any], inside: str = "") -> None:
    """Raises LoadError where a key asks for something that not every engine, or not ours, does."""
    for key, allowed in NEUTRAL.items():
        if key in values and values[key] not in allowed:
            raise LoadError(
                f"{where}: {inside}{key} = {str(values[key])[:60]} is not supported: "
                "without it the draft would compute something else"
            )


def unknown_keys(values: Mapping[str, Any], known: Iterable[str], inside: str = "") -> list[str]:
    left = sorted(values.keys() - set(known) - HARMLESS - NEUTRAL.keys())
    return (
        [f"keys that nobody known here reads, left out: {', '.join(inside + k for k in left)}"]
        if left
        else []
    )


def body_fields(hf: dict[str, Any], *, head_dim: int | None = None) -> dict[str, Any]:
    """What the configs of both kinds share, from a config.json of the Qwen3 or Llama form. `head_dim`: what
    a missing one means there, None for C / H. Raises ValueError."""
    heads, hidden = need(hf, "num_attention_heads"), need(hf, "hidden_size")
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or head_dim or hidden // heads,
        "intermediate_size": need(hf, "intermediate_size"),
        "vocab_size": need(hf, "vocab_size"),
        "rms_norm_eps": hf.get("rms_norm_eps") or 1e-6,
        "max_position_embeddings": hf.get("max_position_embeddings") or 32768,
    }


def body_to_hf(config: Any, *, layers: int, layer_types: Iterable[str], window: int) -> dict[str, Any]:
    """`config` a DFlashConfig or an Eagle3Config -> what `body_fields` reads, the rope in both forms."""
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": list(layer_types),
        "use_sliding_window": window > 0,
        "sliding_window": window or None,
        "max_window_layers": layers,
        "tie_word_embeddings": False,
        **rope_to_hf(config.rope),
    }


def without_nulls(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """An object without its nulls."""
    return {key: value for key, value in (values or {}).items() if value is not None}


def read_rope(where: str, hf: Mapping[str, Any], default_theta: float | None) -> tuple[RopeConfig, list[str]]:
    """The rope of a config.json, which states it in `rope_parameters`, in `rope_theta` and `rope_scaling`, or
    in both. Raises LoadError where they differ (transformers 5 prefers `rope_scaling`, others
    `rope_parameters`), for keys that mean something else, and without a theta where engines have no common
    default (`default_theta` None)."""
    new, old = without_nulls(hf.get("rope_parameters")), without_nulls(hf.get("rope_scaling"))
    for item in (new, old):
        strange = sorted(k for k in item.keys() - ROPE_KEYS if (k, item[k]) != ("partial_rotary_factor", 1))
        if strange:
            raise LoadError(f"{where}: a rope with {', '.join(strange)} is not supported")
    places = {"rope_theta": hf.get("rope_theta"), "rope_parameters.rope_theta": new.get("rope_theta")}
    theta = once(where, "rope_theta", {**places, "rope_scaling.rope_theta": old.get("rope_theta")})
    notes = []
    if theta is None and default_theta is None:
        raise LoadError(
            f"{where} gives no rope_theta: transformers and z-lab's code would take 10,000, vLLM and older "
            "SGLang 1,000,000. Write the one it was trained with (mostly the target's)"
        )
    if theta is None:
        theta = default_theta
        notes.append(f"no rope_theta: every engine takes {theta:,.0f}; was the draft trained so?")
    base = {"rope_theta": theta, "max_position_embeddings": hf.get("max_position_embeddings") or 0}
    ropes = [parse_rope({**base, "rope_scaling": item}) for item in (new, old) if item]
    null = "rope_scaling" in hf and hf["rope_scaling"] is None and "rope_parameters" in hf
    if (null and ropes and ropes[0].kind != "default") or any(rope != ropes[0] for rope in ropes):
        kinds = f"rope_scaling {old or None}, rope_parameters {new}"
        raise LoadError(
            f"{where} gives the rope twice, and differently ({kinds}): transformers 5 reads rope_scaling "
            "where it is an object, others rope_parameters, older ones rope_scaling alone. Make them agree"
        )
    return (ropes[0] if ropes else parse_rope(base)), notes


def read_layer_types(where: str, hf: Mapping[str, Any], layers: int) -> tuple[tuple[str, ...], int]:
    """(layer types, window) as Qwen3Config reads them: without `use_sliding_window` there is no window,
    and without `layer_types` it begins at layer `max_window_layers`. Raises LoadError where a layer slides
    over a window that nobody gives."""
    uses = hf.get("use_sliding_window") or False
    window = hf.get("sliding_window") if uses else None
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        types = [WINDOW if window is not None and i >= first else FULL for i in range(layers)]
    if WINDOW in types and window is None:
        raise LoadError(
            f"{where}: layer_types has {WINDOW}, but engines read no window: use_sliding_window is {uses}, "
            f"sliding_window {hf.get('sliding_window')}. Set use_sliding_window to true"
        )
    return tuple(types), int(window or 0)
