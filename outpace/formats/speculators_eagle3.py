"""EAGLE-3, and P-EAGLE, in speculators' format: what vLLM and speculators' own code load."""

from pathlib import Path
from typing import Any

from outpace.checkpoint.open import LoadError, open_checkpoint
from outpace.checkpoint.save import save_checkpoint
from outpace.drafts.eagle3 import Eagle3Config
from outpace.formats.keys import whole_numbers, words
from outpace.formats.sglang_eagle3 import (
    IDS,
    MASK,
    NORMS,
    PARALLEL,
    assemble,
    default_ids,
    eagle3_config,
    layer_to_hf,
    our_name,
)
from outpace.formats.spec import EMBEDDING, HEAD, Eagle3Draft, FormatWarning, TargetFiles, main_dtype
from outpace.formats.speculators import (
    COPIED,
    ENVELOPE,
    copied_names,
    copies,
    open_envelope,
    seal_envelope,
)

TYPE, PARALLEL_TYPE = "eagle3", "peagle"
# speculators_model_type -> what config.json calls the classes of the model and of its config
CLASSES = {
    TYPE: ("Eagle3DraftModel", "Eagle3SpeculatorConfig"),
    PARALLEL_TYPE: ("PEagleSpeculator", "PEagleSpeculatorConfig"),
}
KEYS = ENVELOPE | words(f"{IDS} embed_requires_grad enable_sp_ulysses mask_token_id {' '.join(NORMS)}")
# transformer_layer_config is written as the difference from these
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
STEPS = 3  # proposed tokens per round, unless the config says otherwise


def read(folder: Path | str, target: TargetFiles | None = None) -> tuple[Eagle3Draft, list[str]]:
    """Raises LoadError, for the reasons that SGLang's format has."""
    checkpoint = open_checkpoint(folder)
    config, notes = parse(checkpoint.config, str(folder), target)
    held = {our_name(name): name for name in checkpoint.names()}
    if len(held) < len(checkpoint.names()):
        raise LoadError(f"{folder} holds a tensor twice, with and without a prefix")
    copied = copied_names(str(folder), checkpoint.config)
    return assemble(str(folder), config, checkpoint, held, notes, target, copied)


def parse(hf: dict[str, Any], where: str, target: TargetFiles | None) -> tuple[Eagle3Config, list[str]]:
    parallel = hf.get("speculators_model_type") == PARALLEL_TYPE
    layer, notes = open_envelope(where, hf, PARALLEL_TYPE if parallel else TYPE, "llama", LLAMA, KEYS)
    if parallel and hf.get("mask_token_id") is None:
        raise LoadError(f"{where}: mask_token_id is missing; without it nothing means the later draft tokens")
    if hf.get("norm_before_residual") is None:
        raise LoadError(
            f"{where}: norm_before_residual is missing; vLLM takes true, speculators' code and llama.cpp's "
            "converter false. Write which"
        )
    states = whole_numbers(where, IDS, hf.get(IDS))
    if states:
        layer_ids = [k - 1 for k in states]
    else:
        layer_ids, noted = default_ids(where, target)
        notes += noted
    values = {**hf, PARALLEL: parallel, MASK: hf.get("mask_token_id")}
    config, more = eagle3_config(where, values, layer, layer_ids, {key: hf.get(key) for key in NORMS})
    return config, notes + more


def to_hf(draft: Eagle3Draft, target: TargetFiles | None) -> dict[str, Any]:
    c = draft.config
    layer = {"model_type": "llama", **layer_to_hf(c)}
    kind = PARALLEL_TYPE if c.parallel else TYPE
    model_class, config_class = CLASSES[kind]
    return {
        "architectures": [model_class],
        **seal_envelope(kind, config_class, layer, STEPS, target),
        **({"mask_token_id": c.mask_token_id} if c.parallel else {}),
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": None if c.target_hidden_size == c.hidden_size else c.target_hidden_size,
        IDS: [k + 1 for k in c.layer_ids],
        **{key: getattr(c, key) for key in NORMS},
        "embed_requires_grad": draft.own_embedding,
        "outpace": {COPIED: [name for name in (EMBEDDING, HEAD) if name not in draft.tensors]},
    }


def remarks(draft: Eagle3Draft) -> list[FormatWarning]:
    c = draft.config
    faults = (
        ("hidden sizes", "wants a draft as wide as its target", c.hidden_size != c.target_hidden_size),
        ("layer ids", "joins three states", len(c.layer_ids) != 3),
    )
    items = [
        FormatWarning(check=check, engine="speculators", message=value) for check, value, has in faults if has
    ]
    if c.parallel and c.mask_token_id is None:
        text = "knows no learned mask_embedding"
        items += [
            FormatWarning(check="one pass", engine=e, message=text, fatal=True)
            for e in ("speculators", "vLLM")
        ]
    return items


def write(draft: Eagle3Draft, folder: Path, target: TargetFiles | None = None) -> None:
    config = to_hf(draft, target)
    assert target is not None
    tensors = {**draft.tensors, **copies(draft.tensors, target)}
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"][None]  # [1, 1, states], as theirs
    named = ((name.replace("midlayer.", "layers.0."), t) for name, t in tensors.items())
    save_checkpoint(folder, config | {"dtype": main_dtype(draft.tensors)}, named)
