"""Field tables of draft formats: one row per fact, to read it, write it and compare engines."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outpace.checkpoint.open import LoadError
from outpace.formats.spec import EMBEDDING, HEAD, TargetFiles
from outpace.models.config import FAR, FULL, WINDOW, check_values, parse_rope, rope_to_hf
from outpace.ops.rope import RopeConfig

NEEDED: Any = object()  # the default of a field that has none
TokenId = Callable[[str], int | None]


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


OBJECTS = ("dflash_config", "eagle_config", "transformer_layer_config", "outpace")
# keys of a Qwen3 or Llama config that are read by `read_layer_types` and `read_rope`
LAYER_KEYS = words(
    "layer_types use_sliding_window sliding_window max_window_layers rope_theta rope_scaling rope_parameters"
)
# keys without influence on what a draft computes; any other key that no format reads is reported
HARMLESS = words(
    "_attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout "
    "auto_map bos_token_id dtype eos_token_id initializer_range max_window_layers model_type "
    "num_aux_hidden_states pad_token_id pretraining_tp return_dict tie_word_embeddings torch_dtype "
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
KINDS: dict[
    type, frozenset[str]
] = {  # the types of keys that some engine reads, in any object of config.json
    int: words(
        "block_size draft_vocab_size mask_token_id num_target_layers ptd_token_id swa_window_size "
        "target_hidden_size"
    ),
    list: words("target_layer_ids aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids"),
    bool: words(
        "causal fc_norm is_causal norm_before_fc norm_before_residual norm_output parallel_drafting "
        "sliding_window_non_causal use_aux_norm use_swa"
    ),
}
KIND_NAMES = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    list: "a list of layers",
    str: "a string",
    tuple: "a list of decimals",
}


@dataclass(frozen=True)
class Place:
    """A key where files have a field. `readers`: the engines that look there, for messages. `offset`: of
    lists of layers, k there is hidden_states[k + offset]. `written`: False for keys that are only read."""

    path: str  # "block_size", or "dflash_config.block_size" inside an object
    readers: str = ""
    offset: int = 0
    written: bool = True


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a DFlashConfig or Eagle3Config, as a format has it.

    `places`: by default the key of that name; all that a file fills must agree. `default`: the value of a
    missing key, or a function of the fields read so far. `sparse`: false, zero and empty values are not
    written. `row`: the row of `outpace preflight` that shows it; `engines`: the places that an engine reads,
    first one first, where that is not all of them.
    """

    name: str
    places: tuple[Place, ...] = ()
    kind: type = int
    default: Any = NEEDED
    least: int = 0
    most: int = FAR
    sparse: bool = False
    row: str = ""
    engines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.places:
            object.__setattr__(self, "places", (Place(self.name),))


Fields = tuple[Field, ...]


def body(prefix: str = "", **defaults: Any) -> Fields:
    """The Qwen3 or Llama config that drafts of both kinds have, under `prefix`. `defaults`: HF's key -> what
    the format's config class takes for a missing one."""
    usual = {
        "num_key_value_heads": lambda values: values["num_heads"],
        "head_dim": lambda values: values["hidden_size"] // values["num_heads"],
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "attention_bias": False,
    }
    rows: tuple[tuple[str, str, type, int, str], ...] = (
        ("hidden_size", "hidden_size", int, FAR, ""),
        ("num_layers", "num_hidden_layers", int, 1024, ""),
        ("num_heads", "num_attention_heads", int, FAR, ""),
        ("num_kv_heads", "num_key_value_heads", int, FAR, ""),
        ("head_dim", "head_dim", int, FAR, ""),
        ("intermediate_size", "intermediate_size", int, FAR, ""),
        ("vocab_size", "vocab_size", int, FAR, "vocabulary"),
        ("rms_norm_eps", "rms_norm_eps", float, FAR, "norms"),
        ("max_position_embeddings", "max_position_embeddings", int, 2**40, "positions"),
        ("attention_bias", "attention_bias", bool, FAR, "attention bias"),
    )
    values = usual | defaults
    return tuple(
        Field(
            name=name,
            places=(Place(prefix + key),),
            kind=kind,
            default=values.get(key, NEEDED),
            least=1,
            most=most,
            row=row,
        )
        for name, key, kind, most, row in rows
    )


# fields of ours alone, under "outpace" in config.json
OWN_DEPTH = Field(name="num_target_layers", places=(Place("outpace.num_target_layers"),), default=0)
OWN_TEMPERATURES = Field(
    name="temperatures", places=(Place("outpace.temperatures"),), kind=tuple, default=(), sparse=True
)


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A draft's config.json, or the metadata of its GGUF file, while it is read.

    `values`: nested objects, or GGUF's flat names. `names`: the tensors of the checkpoint, by our names.
    `token_id` finds a MASK that is named by its text. `notes` collects what a user should know of the file.
    """

    where: str
    values: Mapping[str, Any]
    target: TargetFiles | None = None
    names: Collection[str] = ()
    token_id: TokenId | None = None
    notes: list[str] = field(default_factory=list)

    def get(self, path: str) -> Any:
        """The value at a key path; None where the key is missing or null."""
        if path in self.values:  # GGUF's names have dots
            return self.values[path]
        value: Any = self.values
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def first(self, *paths: str) -> Any:
        """The first value that is there, None without one."""
        return next((value for path in paths if (value := self.get(path)) is not None), None)

    def section(self, key: str) -> dict[str, Any]:
        """The object under `key`, empty where there is none. Raises LoadError for anything else."""
        value = self.get(key)
        return {} if value is None else dict(self.checked(key, value, dict))

    def error(self, message: str) -> LoadError:
        return LoadError(f"{self.where}: {message}")

    def checked(self, path: str, value: Any, kind: type, least: int = 0, most: int = FAR) -> Any:
        """`value`, if it has the kind and lies in the range; LoadError, naming the key, otherwise."""
        if kind is float and type(value) is int:
            value = float(value)
        if kind in (list, tuple):
            item: type[int] | type[float] = int if kind is list else float
            fits = isinstance(value, list) and all(type(v) is item and abs(v) < FAR for v in value)
        else:
            fits = type(value) is kind
            if kind is int:
                fits = type(value) is int and least <= value <= most
        if not fits:
            wanted = KIND_NAMES.get(kind, f"a whole number from {least} to {most:,}")
            raise self.error(f"{path} is {str(value)[:60]!r}, not {wanted}")
        return value

    def once(self, what: str, places: Mapping[str, Any]) -> Any:
        """The value at all `places` (key, and who reads it -> value) that have one; None where none has.
        Raises LoadError where two differ: engines would disagree without a message."""
        given = {place: value for place, value in places.items() if value is not None}
        values = list(given.values())
        if any(value != values[0] for value in values):
            message = "; ".join(f"{place} is {value}" for place, value in given.items())
            raise LoadError(f"{self.where} gives {what} twice, and differently: {message}. Make them agree")
        return values[0] if values else None

    def at(self, row: Field, place: Place) -> Any:
        """The value of a field at one place; layers as indices of hidden_states. Raises LoadError."""
        value = self.get(place.path)
        if value is None:
            return None
        value = self.checked(place.path, value, row.kind, row.least, row.most)
        return [k + place.offset for k in value] if row.kind is list else value

    def read(self, fields: Fields) -> dict[str, Any]:
        """Name -> value. Raises LoadError where places disagree, for a missing key without a default, and for
        another type or range."""
        values: dict[str, Any] = {}
        for row in fields:
            label = "the hidden_states to read" if row.kind is list else row.name
            places = {f"{p.path} ({p.readers})" if p.readers else p.path: self.at(row, p) for p in row.places}
            value = self.once(label, places)
            if value is None:
                value = row.default(values) if callable(row.default) else row.default
            if value is NEEDED:
                raise self.error(f"{row.places[0].path} is missing")
            if isinstance(value, list):
                value = tuple(k - 1 for k in value) if row.kind is list else tuple(value)
            values[row.name] = value
        return values

    def check_types(self) -> None:
        """Raises LoadError or ValueError where a key that engines read has a type that none of them reads."""
        for part in (self.values, *map(self.section, OBJECTS)):
            check_values(dict(part))
            for kind, keys in KINDS.items():
                for key in keys & part.keys():
                    if part[key] is not None:
                        self.checked(key, part[key], kind)

    def check_keys(self, fields: Fields, more: str, prefix: str = "") -> None:
        """Check types; refuse keys that ask for something that not every engine, or not ours, does; note the
        keys that are read by nobody. `more`: keys next to the table's, `prefix`: of the layer's config."""
        self.check_types()
        known = {p.path for row in fields for p in row.places} | words(more)
        known |= {prefix + key for key in LAYER_KEYS}
        sections = {f"{name}.": self.section(name) for name in OBJECTS if name != "outpace"}
        for inside, part in ({"": self.values} | sections).items():
            unknown = []
            for key, value in part.items():
                if inside + key in known or key in HARMLESS or (not inside and key in OBJECTS):
                    continue
                if key not in NEUTRAL:
                    unknown.append(inside + key)
                elif value not in NEUTRAL[key]:
                    raise self.error(
                        f"{inside}{key} = {str(value)[:60]} is not supported: without it the draft would "
                        "compute something else"
                    )
            if unknown:
                self.notes.append(f"keys that no engine reads, left out: {', '.join(sorted(unknown))}")

    def depth(self, values: dict[str, Any]) -> dict[str, Any]:
        """The fields with the target's number of layers, from the target where the file has none. Raises
        LoadError without either."""
        if not values["num_target_layers"] and self.target is None:
            raise LoadError(
                f"{self.where} does not say how many layers its target has: name the target (--target)"
            )
        layers = values["num_target_layers"] or (self.target and self.target.config.num_layers)
        return values | {"num_target_layers": layers}


def write_fields(fields: Fields, config: Any) -> dict[str, Any]:
    """Key path -> value, in every place that is written."""
    values = {}
    for row in fields:
        value = getattr(config, row.name, row.default)
        if value is None or (row.sparse and not value):
            continue
        for place in row.places:
            if place.written:
                layers = [k + 1 - place.offset for k in value] if row.kind is list else value
                values[place.path] = list(value) if row.kind is tuple else layers
    return values


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}."""
    result: dict[str, Any] = {}
    for path, value in flat.items():
        *objects, key = path.split(".")
        part = result
        for name in objects:
            part = part.setdefault(name, {})
        part[key] = value
    return result


def layer_keys(config: Any, layer_types: Iterable[str], window: int, prefix: str = "") -> dict[str, Any]:
    """What `body` has no rows for: windows, the rope in both forms, and constants."""
    values = {
        "hidden_act": "silu",
        "layer_types": list(layer_types),
        "use_sliding_window": window > 0,
        "sliding_window": window or None,
        "max_window_layers": config.num_layers,
        "tie_word_embeddings": False,
        **rope_to_hf(config.rope),
    }
    return {prefix + key: value for key, value in values.items()}


def copied_names(file: ConfigFile) -> list[str]:
    """The tensors that an export of ours copied from the target; none in others' files."""
    value = file.section("outpace").get("copied_from_target")
    return [name for name in (EMBEDDING, HEAD) if isinstance(value, list) and name in value]


def fingerprint_in(file: ConfigFile, path: str = "outpace.target_fingerprint") -> str:
    """The fingerprint of the target that a draft was made for; "" where the file has none."""
    value = file.get(path)
    return "" if value is None else str(file.checked(path, value, str))


def without_nulls(values: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (values or {}).items() if value is not None}


def read_rope(file: ConfigFile, layer: Mapping[str, Any], default_theta: float | None) -> RopeConfig:
    """The rope of a Qwen3 or Llama config, in `rope_parameters`, in `rope_theta` and `rope_scaling`, or in
    both. Raises LoadError where they differ (transformers 5 prefers `rope_scaling`, others
    `rope_parameters`), for keys that mean something else, and without a theta where engines have no common
    default (`default_theta` None)."""
    new, old = without_nulls(layer.get("rope_parameters")), without_nulls(layer.get("rope_scaling"))
    for part in (new, old):
        strange = sorted(k for k in part.keys() - ROPE_KEYS if (k, part[k]) != ("partial_rotary_factor", 1))
        if strange:
            raise file.error(f"a rope with {', '.join(strange)} is not supported")
    places = {
        "rope_theta": layer.get("rope_theta"),
        "rope_parameters.rope_theta": new.get("rope_theta"),
        "rope_scaling.rope_theta": old.get("rope_theta"),
    }
    theta = file.once("rope_theta", places)
    if theta is None and default_theta is None:
        raise LoadError(
            f"{file.where} gives no rope_theta: transformers and z-lab's code would take 10,000, vLLM and "
            "older SGLang 1,000,000. Write the one it was trained with (mostly the target's)"
        )
    if theta is None:
        theta = default_theta
        file.notes.append(f"no rope_theta: every engine takes {theta:,.0f}; was the draft trained so?")
    base = {"rope_theta": theta, "max_position_embeddings": layer.get("max_position_embeddings") or 0}
    ropes = [parse_rope({**base, "rope_scaling": part}) for part in (new, old) if part]
    null = "rope_scaling" in layer and layer["rope_scaling"] is None and "rope_parameters" in layer
    if (null and ropes and ropes[0].kind != "default") or any(rope != ropes[0] for rope in ropes):
        raise LoadError(
            f"{file.where} gives the rope twice, and differently (rope_scaling {old or None}, "
            f"rope_parameters {new}): transformers 5 reads rope_scaling where it is an object, others "
            "rope_parameters, older ones rope_scaling alone. Make them agree"
        )
    return ropes[0] if ropes else parse_rope(base)


def read_layer_types(where: str, layer: Mapping[str, Any], layers: int) -> tuple[tuple[str, ...], int]:
    """(layer types, window) as Qwen3Config reads them: without `use_sliding_window` there is no window,
    and without `layer_types` it begins at layer `max_window_layers`. Raises LoadError where a layer has a
    window of unknown size."""
    uses = layer.get("use_sliding_window") or False
    window = layer.get("sliding_window") if uses else None
    types = layer.get("layer_types")
    if types is None:
        first = layer.get("max_window_layers", 28)
        types = [WINDOW if window is not None and i >= first else FULL for i in range(layers)]
    if WINDOW in types and window is None:
        raise LoadError(
            f"{where}: layer_types has {WINDOW}, but engines read no window: use_sliding_window is {uses}, "
            f"sliding_window {layer.get('sliding_window')}. Set use_sliding_window to true"
        )
    return tuple(types), int(window or 0)
