"""EAGLE-3 in SGLang's format, which vLLM reads too; the one we keep an EAGLE-3 in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.checkpoint.open import Checkpoint, LoadError, open_checkpoint
from outpace.checkpoint.save import save_checkpoint
from outpace.drafts.eagle3 import Eagle3Config
from outpace.formats.keys import (
    BODY,
    body_fields,
    body_to_hf,
    check_types,
    inner_object,
    once,
    read_layer_types,
    read_rope,
    refuse_meaning,
    unknown_keys,
    whole,
    whole_numbers,
    words,
)
from outpace.formats.spec import (
    EMBEDDING,
    HEAD,
    Eagle3Draft,
    FormatWarning,
    TargetFiles,
    canonical_rope,
    check_shapes,
    eagle3_shapes,
    is_targets,
    main_dtype,
    stored,
    vocabulary_map,
)
from outpace.models.config import FULL, WINDOW

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")  # SGLang's, vLLM's
IDS = "eagle_aux_hidden_state_layer_ids"
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
PARALLEL, MASK = "parallel_drafting", "ptd_token_id"  # vLLM's keys for P-EAGLE
KEYS = BODY | words(
    f"{IDS} eagle_config draft_vocab_size target_hidden_size use_aux_norm {PARALLEL} {MASK} {' '.join(NORMS)}"
)
INNER_KEYS = words(f"{IDS} norm_before_fc")
LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def read(folder: Path | str, target: TargetFiles | None = None) -> tuple[Eagle3Draft, list[str]]:
    """Raises LoadError where tensors are missing, left over or misshapen, where d2t and t2d disagree, and
    where the config contradicts itself. Without a list of layers the target must be named."""
    checkpoint = open_checkpoint(folder)
    config, notes = parse(checkpoint.config, str(folder), target)
    held = {our_name(name): name for name in checkpoint.names()}
    if len(held) < len(checkpoint.names()):
        raise LoadError(f"{folder} holds a tensor twice, with and without a prefix")
    return assemble(str(folder), config, checkpoint, held, notes, target)


def our_name(name: str) -> str:
    name = name.removeprefix("model.").replace("layers.0.", "midlayer.")
    for legacy, new in LEGACY.items():
        name = name.replace(legacy, new)
    return name


def assemble(
    where: str,
    config: Eagle3Config,
    checkpoint: Checkpoint,
    held: dict[str, str],
    notes: list[str],
    target: TargetFiles | None,
    copied: tuple[str, ...] = (),
) -> tuple[Eagle3Draft, list[str]]:
    """Check and take the tensors. `held`: our name -> the file's; `copied`: known to be the target's."""
    biases = sorted(name for name in held if name.endswith(".bias"))
    if biases:
        raise LoadError(
            f"{where} holds {', '.join(biases[:3])}: EAGLE-3 has no biases; SGLang would drop those of q, k "
            "and v in silence"
        )
    notes = notes + _targets_own(where, checkpoint, held, target, copied)
    head = HEAD in held or config.draft_vocab_size != config.vocab_size
    wanted = eagle3_shapes(config, embedding=EMBEDDING in held, head=head, mapped="d2t" in held)
    if "d2t" in held and "t2d" not in held:
        del wanted["t2d"]
    shapes = {name: checkpoint.shape(theirs) for name, theirs in held.items()}
    mask = "mask_hidden"
    if shapes.get(mask, ())[:2] == (1, 1):  # as speculators' code has it
        shapes[mask] = shapes[mask][1:]
    check_shapes(where, wanted, shapes)
    tensors = {name: stored(checkpoint, held[name]).reshape(wanted[name]) for name in wanted}
    notes += vocabulary_map(where, config.draft_vocab_size, config.vocab_size, tensors)
    return Eagle3Draft(config=config, tensors=tensors), notes


def _targets_own(
    where: str,
    checkpoint: Checkpoint,
    held: dict[str, str],
    target: TargetFiles | None,
    copied: tuple[str, ...],
) -> list[str]:
    """Take embedding and head out of `held` where they are the target's."""
    notes = []
    for name in (EMBEDDING, HEAD):
        if name not in held or (name == HEAD and "d2t" in held):
            continue
        same = None
        if target is not None and not target.packed:
            same = is_targets(name, stored(checkpoint, held[name]), target)
        if target is not None and name in copied and same is False:
            raise LoadError(
                f"{where}: {name} should be a copy of the target's, and is not that of {target.path}"
            )
        if name in copied or same:
            del held[name]
            notes += [] if name in copied else [f"{name} left out: it is the target's"]
        elif name == EMBEDDING and same is None:
            notes.append(f"{name} is taken as the draft's own; name the target to have the two compared")
    return notes


def parse(hf: dict[str, Any], where: str, target: TargetFiles | None) -> tuple[Eagle3Config, list[str]]:
    check_types(where, hf)
    if (hf.get("architectures") or [""])[0] not in ARCHITECTURES:
        raise LoadError(f"{where}: architectures {hf.get('architectures')} is none of {list(ARCHITECTURES)}")
    inner = inner_object(where, hf, "eagle_config")
    refuse_meaning(where, hf)
    refuse_meaning(where, inner, "eagle_config.")
    layer_ids, notes = _layer_ids(where, hf, inner, target)
    before_fc = {
        "eagle_config.norm_before_fc (vLLM)": inner.get("norm_before_fc"),
        "norm_before_fc (vLLM, llama.cpp's converter)": hf.get("norm_before_fc"),
    }
    norms = {key: hf.get(key) for key in NORMS}
    norms["norm_before_fc"] = once(where, "norm_before_fc", before_fc)
    norms["fc_norm"] = norms["fc_norm"] or hf.get("use_aux_norm")  # SGLang's older name
    config, more = eagle3_config(where, hf, hf, layer_ids, norms)
    notes += more + unknown_keys(hf, KEYS) + unknown_keys(inner, INNER_KEYS, "eagle_config.")
    return config, notes


def eagle3_config(
    where: str, hf: Mapping[str, Any], layer: dict[str, Any], layer_ids: list[int], norms: Mapping[str, Any]
) -> tuple[Eagle3Config, list[str]]:
    """`layer` is the Llama config of the one layer, `hf` the object that has the draft's own keys."""
    layers = whole(where, "num_hidden_layers", layer.get("num_hidden_layers", 1), 1)
    if layer.get("attention_bias"):
        raise LoadError(f"{where}: attention_bias is true, and EAGLE-3's q, k and v have none")
    rope, notes = read_rope(where, layer, default_theta=10000.0)
    types, window = _window(where, layer, layers)
    if len(set(types)) > 1:
        raise LoadError(
            f"{where}: layer_types {list(types)}: only EAGLE-3 with layers of one kind is supported"
        )
    parallel = hf.get(PARALLEL) or False
    fields = body_fields(layer)
    defaults = {"target_hidden_size": fields["hidden_size"], "draft_vocab_size": fields["vocab_size"]}
    sizes = {key: whole(where, key, hf.get(key) or default, 1) for key, default in defaults.items()}
    config = Eagle3Config(
        **fields,
        target_hidden_size=sizes["target_hidden_size"],
        draft_vocab_size=sizes["draft_vocab_size"],
        rope=canonical_rope(rope),
        layer_ids=tuple(layer_ids),
        sliding_window=window,
        num_layers=layers,
        parallel=parallel,
        mask_token_id=hf.get(MASK) if parallel else None,
        **{key: bool(norms.get(key)) for key in NORMS},
    )
    return config, notes


def _window(where: str, layer: Mapping[str, Any], layers: int) -> tuple[tuple[str, ...], int]:
    """LlamaConfig has no use_sliding_window: where layer_types has one, the window is there."""
    if WINDOW not in (layer.get("layer_types") or ()):
        return (FULL,) * layers, 0
    return read_layer_types(where, {**layer, "use_sliding_window": True}, layers)


def _layer_ids(
    where: str, hf: dict[str, Any], inner: dict[str, Any], target: TargetFiles | None
) -> tuple[list[int], list[str]]:
    """Nested, id k is hidden_states[k+1] (SGLang); on top, vLLM and llama.cpp take hidden_states[k]."""
    nested = whole_numbers(where, f"eagle_config.{IDS}", inner.get(IDS))
    top = whole_numbers(where, IDS, hf.get(IDS))
    states = {
        f"eagle_config.{IDS} (SGLang adds 1)": nested and [k + 1 for k in nested],
        f"{IDS} (vLLM and llama.cpp take it as it is)": top,
    }
    result = once(where, "the hidden_states to read", states)
    if result:
        missed = ""
        if top is None:
            missed = "nested only; vLLM and llama.cpp's converter do not look there and read their defaults"
        if nested is None:
            missed = "on top only; SGLang does not look there and reads its defaults"
        notes = [f"{IDS} is {missed}. Written again, it is in both places"] if missed else []
        return [k - 1 for k in result], notes
    return default_ids(where, target)


def default_ids(where: str, target: TargetFiles | None) -> tuple[list[int], list[str]]:
    """What EAGLE itself and every engine read where no list is given: a rule of the target's depth."""
    if target is None:
        raise LoadError(f"{where} lists no {IDS}: engines choose by the target's depth. Name it (--target)")
    layers = target.config.num_layers
    states = [2, layers // 2, layers - 3]
    return [k - 1 for k in states], [f"no {IDS}: every engine reads hidden_states {states}"]


def to_hf(draft: Eagle3Draft) -> dict[str, Any]:
    """config.json, every fact in all the places where an engine looks for it."""
    c = draft.config
    nested: dict[str, Any] = {"use_aux_hidden_state": True, IDS: list(c.layer_ids)}
    if c.norm_before_fc:
        nested["norm_before_fc"] = True
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        "eagle_config": nested,
        IDS: [k + 1 for k in c.layer_ids],
        **layer_to_hf(c),
        # null has SGLang take the target's head
        "draft_vocab_size": c.draft_vocab_size if draft.own_head else None,
        "target_hidden_size": c.target_hidden_size,
        **{key: getattr(c, key) for key in NORMS},
        **({PARALLEL: True, MASK: c.mask_token_id} if c.parallel else {}),
    }


def layer_to_hf(c: Eagle3Config) -> dict[str, Any]:
    types = (WINDOW if c.sliding_window else FULL,) * c.num_layers
    body = body_to_hf(c, layers=c.num_layers, layer_types=types, window=c.sliding_window)
    return {
        **body,
        "attention_bias": False,
        "mlp_bias": False,
        "num_aux_hidden_states": len(c.layer_ids),
    }


def remarks(draft: Eagle3Draft) -> list[FormatWarning]:
    c, own = draft.config, "serve with --speculative-draft-window-size"
    faults = (
        ("norms", "adds the raw feature, not the normed one", c.norm_before_residual),
        ("norms", "has no norm before fc", c.norm_before_fc),
        ("window", f"reads none from the files: {own} {c.sliding_window - 1}", c.sliding_window > 0),
        ("embedding, head", "uses the target's embedding", draft.own_embedding),
        ("layers", "runs the first alone", c.num_layers > 1),
        ("one pass", "draft tokens step by step", c.parallel),
    )
    items = [
        FormatWarning(check=check, engine="SGLang", message=value) for check, value, has in faults if has
    ]
    if c.parallel and c.mask_token_id is None:
        text = "knows no learned mask_embedding"
        items.append(FormatWarning(check="one pass", engine="vLLM", message=text))
    return items


def write(draft: Eagle3Draft, folder: Path, target: TargetFiles | None = None) -> None:
    config = to_hf(draft) | {"dtype": main_dtype(draft.tensors)}
    save_checkpoint(folder, config, draft.tensors.items())
