"""Reading a draft's config.json with suspicion: what is said twice, what changes the meaning, what is unknown."""

from collections.abc import Iterable, Mapping
from typing import Any

from outpace.models.config import FULL, WINDOW, parse_rope
from outpace.ops.rope import RopeConfig
from outpace.weights.checkpoint import LoadError

# what a draft may say without changing what it computes; anything else that nobody here reads is reported
HARMLESS = frozenset(
    "_attn_implementation_autoset _name_or_path architectures attention_dropout auto_map bos_token_id dtype "
    "eos_token_id initializer_range max_window_layers model_type num_aux_hidden_states outpace pad_token_id "
    "pretraining_tp return_dict tie_word_embeddings torch_dtype transformers_version use_cache".split()
)
ROPE_KEYS = frozenset(
    "rope_type type rope_theta factor original_max_position_embeddings beta_fast beta_slow truncate "
    "attention_factor low_freq_factor high_freq_factor".split()
)
ROPE_PLACES = frozenset(("rope_theta", "rope_scaling", "rope_parameters"))
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


def once(where: str, what: str, places: Mapping[str, Any]) -> Any:
    """The value that all `places` (who reads it -> value) give; None where none does. Raises LoadError
    where two differ: then engines would disagree and none would say so."""
    said = {place: value for place, value in places.items() if value is not None}
    values = list(said.values())
    if any(value != values[0] for value in values):
        told = "; ".join(f"{place}: {value}" for place, value in said.items())
        raise LoadError(f"{where} says {what} twice, and differently. {told}. Make them agree")
    return values[0] if values else None


def refuse_meaning(where: str, found: Mapping[str, Any], inside: str = "") -> None:
    """Raises LoadError where a key asks for something that not every engine, or not ours, does."""
    for key, allowed in NEUTRAL.items():
        if key in found and found[key] not in allowed:
            raise LoadError(
                f"{where}: {inside}{key} = {found[key]!r} is not supported: this draft would compute something else"
            )


def unknown_keys(found: Mapping[str, Any], known: Iterable[str], inside: str = "") -> list[str]:
    left = sorted(found.keys() - set(known) - HARMLESS - NEUTRAL.keys())
    if not left:
        return []
    return [f"left out, no reader known here uses them: {', '.join(inside + key for key in left)}"]


def read_rope(where: str, hf: Mapping[str, Any], default_theta: float | None) -> tuple[RopeConfig, list[str]]:
    """The rope of a config.json, which may say it in `rope_parameters`, in `rope_theta` and `rope_scaling`,
    or both. Raises LoadError where they differ (transformers 5 prefers `rope_scaling`, others
    `rope_parameters`), for keys that mean something else, and without a theta where engines have no common
    default (`default_theta` None)."""
    new, old = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    for said in (new, old):
        strange = sorted(k for k in said.keys() - ROPE_KEYS if said[k] is not None)
        if [k for k in strange if k != "partial_rotary_factor" or said[k] != 1]:
            raise LoadError(f"{where}: rope_scaling with {', '.join(strange)} is not supported")
    theta = once(
        where,
        "rope_theta",
        {
            "rope_theta": hf.get("rope_theta"),
            "rope_parameters.rope_theta": new.get("rope_theta"),
            "rope_scaling.rope_theta": old.get("rope_theta"),
        },
    )
    notes = []
    if theta is None:
        if default_theta is None:
            raise LoadError(
                f"{where} gives no rope_theta: transformers and z-lab's code would take 10,000, vLLM and older "
                "SGLang 1,000,000. Write the one it was trained with (the target's, usually)"
            )
        theta = default_theta
        notes.append(f"no rope_theta in config.json: every engine takes {theta:g}; was it trained so?")
    base = {"rope_theta": theta, "max_position_embeddings": hf.get("max_position_embeddings", 0)}
    ropes = [parse_rope({**base, "rope_scaling": dict(said)}) for said in (new, old) if len(said.keys()) > 0]
    explicit_none = "rope_scaling" in hf and hf["rope_scaling"] is None
    if explicit_none and ropes and ropes[0].kind != "default":
        raise LoadError(
            f"{where}: rope_scaling is null and rope_parameters says {ropes[0].kind}: transformers 4 reads the "
            "first, transformers 5 the second. Write both alike"
        )
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        raise LoadError(
            f"{where}: rope_parameters and rope_scaling differ; transformers 5 reads rope_scaling, other "
            "engines rope_parameters. Make them agree"
        )
    return (ropes[0] if ropes else parse_rope(base)), notes


def read_layer_types(where: str, hf: Mapping[str, Any], layers: int) -> tuple[tuple[str, ...], int]:
    """(layer types, window) as Qwen3Config reads them: without `use_sliding_window` there is no window,
    and without `layer_types` it begins at layer `max_window_layers`. Raises LoadError where a layer slides
    over a window that nobody gives."""
    uses = hf.get("use_sliding_window", False)
    window = hf.get("sliding_window") if uses else None
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        types = [WINDOW if window is not None and i >= first else FULL for i in range(layers)]
    if WINDOW in types and window is None:
        raise LoadError(
            f"{where}: layer_types has {WINDOW}, but engines read no window: use_sliding_window is {uses!r}, "
            f"sliding_window {hf.get('sliding_window')!r}. Set use_sliding_window to true"
        )
    return tuple(types), int(window or 0)
