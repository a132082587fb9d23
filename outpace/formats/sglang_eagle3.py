"""EAGLE-3 in SGLang's format, which vLLM reads too; the one in which we keep an EAGLE-3."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from outpace.checkpoint.open import LoadError
from outpace.drafts.eagle3 import Eagle3Config
from outpace.formats.base import FolderFormat
from outpace.formats.engines import (
    IDS,
    REFUSES,
    View,
    converter_view,
    default_states,
    eagle3_norms,
    eagle3_view,
    one_pass,
    source,
)
from outpace.formats.fields import (
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
from outpace.formats.spec import EAGLE3, HEAD, Eagle3Draft, FormatWarning, TargetFiles, warn
from outpace.models.config import FULL, WINDOW

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")  # SGLang's, vLLM's
NESTED_IDS = f"eagle_config.{IDS}"
LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def norms(*before_fc: Place) -> Fields:
    """The four flags on top of the file, or `norm_before_fc` in other places.

    `norm_output` is left out where it is false, the default of SGLang, vLLM and speculators: SpecForge's
    class has another key of that name, the norm before the head, which is true by default."""
    flags: dict[str, tuple[Place, ...]] = {
        "norm_before_residual": (),
        "norm_before_fc": before_fc,
        "fc_norm": (),
        "norm_output": (),
    }
    return tuple(
        Field(name=name, places=places, kind=bool, default=False, sparse=name == "norm_output")
        for name, places in flags.items()
    )


# missing sizes are the layer's own
SIZES = (
    Field(name="target_hidden_size", default=lambda values: values["hidden_size"], least=1),
    Field(name="draft_vocab_size", default=lambda values: values["vocab_size"], least=1),
)
FIELDS = (
    *body(num_hidden_layers=1),
    *SIZES,
    Field(
        name="layer_ids",
        kind=list,
        places=(
            Place(NESTED_IDS, "SGLang adds 1", offset=1),
            Place(IDS, "vLLM and llama.cpp take it as it is"),
        ),
        default=None,
        row="layer ids",
        engines={"SGLang": (NESTED_IDS,), "SpecForge": (NESTED_IDS,), "vLLM": (IDS,), "llama.cpp": (IDS,)},
    ),
    *norms(
        Place("eagle_config.norm_before_fc", "vLLM"), Place("norm_before_fc", "vLLM, llama.cpp's converter")
    ),
    # vLLM's keys for P-EAGLE
    Field(name="parallel", places=(Place("parallel_drafting"),), kind=bool, default=False, sparse=True),
    Field(name="mask_token_id", places=(Place("ptd_token_id"),), default=None),
)
OLD_FC_NORM = "use_aux_norm"  # SGLang's older name
SPECFORGE_FEEDBACK = "feeds back the state before the norm: steps 2 and 3 differ"


def our_name(name: str) -> str:
    name = name.removeprefix("model.").replace("layers.0.", "midlayer.")
    for legacy, new in LEGACY.items():
        name = name.replace(legacy, new)
    return name


def parse(file: ConfigFile) -> Eagle3Config:
    """Raises LoadError. Without a list of layers the target must be named."""
    file.check_keys(FIELDS, OLD_FC_NORM)
    if (file.values.get("architectures") or [""])[0] not in ARCHITECTURES:
        raise file.error(f"architectures {file.values.get('architectures')} is none of {list(ARCHITECTURES)}")
    fields = file.read(FIELDS)
    fields["fc_norm"] = fields["fc_norm"] or bool(file.get(OLD_FC_NORM))
    if fields["layer_ids"] and (file.get(IDS) is None or file.get(NESTED_IDS) is None):
        where = "nested only; vLLM and llama.cpp's converter do not look there and read their defaults"
        if file.get(NESTED_IDS) is None:
            where = "on top only; SGLang does not look there and reads its defaults"
        file.notes.append(f"{IDS} is {where}. Written again, it is in both places")
    return eagle3_config(file, file.values, fields)


def eagle3_config(file: ConfigFile, layer: Mapping[str, Any], fields: dict[str, Any]) -> Eagle3Config:
    """`layer` is the Llama config, `fields` what the table of the format read. Raises LoadError."""
    if fields.pop("attention_bias"):
        raise file.error("attention_bias is true, and EAGLE-3's q, k and v have none")
    fields["layer_ids"] = fields["layer_ids"] or _default_ids(file)
    if not fields["parallel"]:
        fields["mask_token_id"] = None
    types: tuple[str, ...] = (FULL,)
    window = 0
    if WINDOW in (layer.get("layer_types") or ()):  # LlamaConfig has no use_sliding_window
        types, window = read_layer_types(
            file.where, {**layer, "use_sliding_window": True}, fields["num_layers"]
        )
    if len(set(types)) > 1:
        raise file.error(f"layer_types {list(types)}: only EAGLE-3 with layers of one kind is supported")
    rope = read_rope(file, layer, default_theta=10000.0)
    return Eagle3Config(**fields, rope=rope, sliding_window=window)


def _default_ids(file: ConfigFile) -> tuple[int, ...]:
    """Every engine chooses by the target's depth where a file has no list."""
    states = default_states(file.target)
    if states is None:
        raise LoadError(
            f"{file.where} lists no {IDS}: engines choose by the target's depth. Name it (--target)"
        )
    file.notes.append(f"no {IDS}: every engine reads hidden_states {states}")
    return tuple(k - 1 for k in states)


def to_hf(draft: Eagle3Draft, target: TargetFiles | None = None) -> dict[str, Any]:
    """config.json, every fact in all the places where an engine looks for it."""
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        **nested({"eagle_config.use_aux_hidden_state": True, **write_fields(FIELDS, draft.config)}),
        **eagle3_layer(draft.config),
        # null has SGLang take the target's head
        "draft_vocab_size": draft.config.draft_vocab_size if draft.own_head else None,
    }


def eagle3_layer(c: Eagle3Config, prefix: str = "") -> dict[str, Any]:
    types = (WINDOW if c.sliding_window else FULL,) * c.num_layers
    more = {"mlp_bias": False, "num_aux_hidden_states": len(c.layer_ids)}
    return layer_keys(c, types, c.sliding_window, prefix) | {prefix + key: v for key, v in more.items()}


def warnings(draft: Eagle3Draft) -> list[FormatWarning]:
    c, flag = draft.config, "serve with --speculative-draft-window-size"
    learned = c.parallel and c.mask_token_id is None
    result = warn(
        "SGLang",
        (c.norm_before_residual, "norms", "adds the raw feature, not the normed one"),
        (c.norm_before_fc, "norms", "has no norm before fc"),
        (c.sliding_window, "window", f"reads none from the files: {flag} {c.sliding_window - 1}"),
        (draft.own_embedding, "embedding, head", "uses the target's embedding"),
        (c.num_layers > 1, "layers", "runs the first alone"),
        (c.parallel, "one pass", "draft tokens step by step"),
    )
    result += warn(
        "SpecForge",
        (c.norm_before_residual, "norms", "adds the raw feature, not the normed one"),
        (c.norm_before_fc, "norms", "has no norm before fc"),
        (len(c.layer_ids) != 3, "layer ids", "joins three states"),
        (draft.own_embedding, "embedding, head", "uses the target's embedding"),
        (c.norm_output, "norms", SPECFORGE_FEEDBACK),
        (c.sliding_window, "window", "has none"),
        (c.num_layers > 1, "layers", "runs the first alone"),
        (c.parallel, "one pass", "trains step by step"),
    )
    return result + warn("vLLM", (learned, "one pass", "knows no learned mask_embedding"))


def views(file: ConfigFile) -> dict[str, View]:
    hf = file.values
    eps, output = file.get("rms_norm_eps"), file.get("norm_output")
    before_fc = file.first("eagle_config.norm_before_fc", "norm_before_fc")
    base = partial(eagle3_view, file, FIELDS, hf)
    whole = hf.get("draft_vocab_size") is None
    sglang = base("SGLang") | {
        "norms": eagle3_norms(eps, False, False, file.first("fc_norm", OLD_FC_NORM), output),
        "window": "none",
        "layers": "1",
        "one pass": one_pass(False, None),
        "embedding, head": source(False, HEAD in file.names and not whole),
    }
    vllm = base("vLLM") | {
        "norms": eagle3_norms(eps, hf.get("norm_before_residual"), before_fc, hf.get("fc_norm"), output)
    }
    # its norm_output is the norm before the head; the state it feeds back is always the one before
    specforge_norms = eagle3_norms(eps, False, False, file.first("fc_norm", OLD_FC_NORM), False)
    specforge = base("SpecForge") | {
        "norms": specforge_norms + (", none before the head" if output is False else ""),
        "window": "none",
        "layers": "1",
        "one pass": one_pass(False, None),
        "embedding, head": source(False, True) if HEAD in file.names else REFUSES + "it needs a head",
    }
    if len(file.get(NESTED_IDS) or (1, 2, 3)) != 3:
        specforge["layer ids"] = REFUSES + "it joins three states"
    llama_cpp = converter_view(file, hf, base("llama.cpp"))
    if hf.get("parallel_drafting") and "mask_embedding" in file.names:
        vllm["one pass"] = REFUSES + "it knows no learned mask_embedding"
    return {"SGLang": sglang, "vLLM": vllm, "SpecForge": specforge, "llama.cpp": llama_cpp}


FORMAT = FolderFormat(
    kind=EAGLE3,
    engines=("SGLang", "vLLM", "SpecForge"),
    warnings=warnings,
    views=views,
    parse=parse,
    to_hf=to_hf,
    our_name=our_name,
)
