"""A draft on disk -> one that runs, and back: a DFlash into z-lab's format, an EAGLE-3 into SGLang's."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from outpace.checkpoint.gguf_header import read_header
from outpace.checkpoint.hf import read_config
from outpace.checkpoint.open import LoadError, is_gguf, to_tensor
from outpace.drafts.dflash import DFlash
from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.eagle3 import Eagle3, Eagle3Config
from outpace.drafts.lookup import ARCHITECTURE
from outpace.drafts.quantize import check_format, quantised
from outpace.formats import gguf_dflash as format_gguf_dflash
from outpace.formats import gguf_eagle3 as format_gguf_eagle3
from outpace.formats import sglang_eagle3 as format_sglang_eagle3
from outpace.formats import speculators as format_speculators
from outpace.formats import speculators_eagle3 as format_speculators_eagle3
from outpace.formats import transformers as format_transformers
from outpace.formats import zlab as format_zlab
from outpace.formats.spec import (
    Description,
    DFlashDraft,
    Eagle3Draft,
    FormatWarning,
    Read,
    TargetFiles,
    canonical,
    canonical_rope,
    converted,
    dflash_shapes,
    marks,
)
from outpace.formats.zlab import TokenId
from outpace.models.load import assign, check_finite, named_tensors
from outpace.models.weights import Entry

DFLASH, EAGLE3 = "DFlash", "EAGLE-3"


@dataclass(frozen=True, kw_only=True)
class Format:
    """`write(draft, path, target)`: a folder, or a file for GGUF. `remarks(draft)`: the parts it cannot hold.
    `engines` load it as it is."""

    kind: str
    read: Callable[..., Read]
    write: Callable[..., None]
    remarks: Callable[..., list[FormatWarning]]
    engines: tuple[str, ...]


def _format(kind: str, module: Any, *engines: str) -> Format:
    return Format(kind=kind, read=module.read, write=module.write, remarks=module.remarks, engines=engines)


FORMATS = {
    "zlab": _format(DFLASH, format_zlab, "SGLang", "vLLM"),
    "speculators": _format(DFLASH, format_speculators, "vLLM", "speculators"),
    "gguf": _format(DFLASH, format_gguf_dflash, "llama.cpp"),
    "transformers": _format(DFLASH, format_transformers, "transformers"),
    "sglang-eagle3": _format(EAGLE3, format_sglang_eagle3, "SGLang", "vLLM"),
    "speculators-eagle3": _format(EAGLE3, format_speculators_eagle3, "vLLM", "speculators"),
    "gguf-eagle3": _format(EAGLE3, format_gguf_eagle3, "llama.cpp"),
}
CANONICAL = {DFLASH: "zlab", EAGLE3: "sglang-eagle3"}
OF_SPECULATORS = {"dflash": "speculators", "eagle3": "speculators-eagle3", "peagle": "speculators-eagle3"}
OF_GGUF = {"dflash": "gguf", "eagle3": "gguf-eagle3"}
# drafts of other kinds, which look much like these
OTHERS = {
    ARCHITECTURE: "answers that are looked up: it has no weights",
    "DSparkDraftModel": "a DSpark: it has a Markov head",
    "Qwen3DSparkModel": "a DSpark: it has a Markov head",
    "Eagle3Qwen3ForCausalLM": "an EAGLE-3 with q/k norms",
    "EagleLlamaForCausalLM": "an EAGLE-1",
    "LlamaForCausalLMEagle": "an EAGLE-1",
}


def kind_of(draft: Description) -> str:
    return DFLASH if isinstance(draft, DFlashDraft) else EAGLE3


def detect(path: Path) -> str:
    """The name of the format of a draft's files. Raises LoadError for what is none of them."""
    if is_gguf(path):
        architecture = str(read_header(path).metadata.get("general.architecture"))[:60]
        if architecture not in OF_GGUF:
            raise LoadError(f"{path} is a GGUF of {architecture!r}; drafts are 'dflash' or 'eagle3'")
        return OF_GGUF[architecture]
    if path.is_file():
        raise LoadError(f"{path} is a file: name the folder that holds config.json, or a GGUF file")
    hf = read_config(path)
    kind = hf.get("speculators_model_type")
    if kind is not None:
        if not isinstance(kind, str) or kind not in OF_SPECULATORS:
            raise LoadError(f"{path}: speculators' {str(kind)[:60]!r} is neither a DFlash nor an EAGLE-3")
        return OF_SPECULATORS[kind]
    if hf.get("model_type") == format_transformers.MODEL_TYPE:
        return "transformers"
    architectures = hf.get("architectures") or [""]
    architecture = str(architectures[0])[:60] if isinstance(architectures, list) else ""
    if architecture in format_zlab.ARCHITECTURES:
        return "zlab"
    if architecture in format_sglang_eagle3.ARCHITECTURES:
        return "sglang-eagle3"
    other = f" ({OTHERS[architecture]})" if architecture in OTHERS else ""
    raise LoadError(
        f"{path}: architectures [{architecture}]{other} is no draft that is known here; known are DFlash and "
        f"EAGLE-3, in the formats {', '.join(FORMATS)}"
    )


def read_draft(
    path: Path, target: TargetFiles | None = None, token_id: TokenId | None = None
) -> tuple[str, Description, list[str]]:
    """(format, draft, what a person should know about these files). `token_id` finds a MASK that is named by
    its text. Raises LoadError or ValueError."""
    name = detect(path)
    if name == "zlab":
        draft, notes = format_zlab.read(path, target, token_id or _tokens_of(target))
        return name, draft, notes
    read = FORMATS[name].read(path, target)
    return name, read[0], read[1]


def _tokens_of(target: TargetFiles | None) -> TokenId | None:
    return None if target is None else lambda token: target.tokenizer().token_to_id(token)


def weight_map(config: DFlashConfig) -> list[Entry]:
    """z-lab's names (no prefix); gate/up and q/k/v are one matrix each on our side."""
    items = [Entry(name, (name,)) for name in ("fc.weight", "hidden_norm.weight", "norm.weight")]
    if config.mask_token_id is None:
        items.append(Entry("mask_embedding", ("mask_embedding",)))
    D = config.head_dim
    qkv = (config.num_heads * D, config.num_kv_heads * D, config.num_kv_heads * D)
    gate_up = (config.intermediate_size,) * 2
    for i in range(config.num_layers):
        at = f"layers.{i}."
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            items.append(Entry(at + name, (at + name,)))
        for name in ("q_norm", "k_norm"):
            items.append(Entry(f"{at}{name}.weight", (f"{at}self_attn.{name}.weight",)))
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            names = tuple(f"{at}self_attn.{x}_proj.{kind}" for x in "qkv")
            items.append(Entry(f"{at}qkv_proj.{kind}", names, qkv))
            items.append(Entry(f"{at}o_proj.{kind}", (f"{at}self_attn.o_proj.{kind}",)))
        names = (f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight")
        items.append(Entry(f"{at}mlp.gate_up_proj.weight", names, gate_up))
        items.append(Entry(f"{at}mlp.down_proj.weight", (f"{at}mlp.down_proj.weight",)))
    done = {name for entry in items for name in entry.names} | {"t2d"}
    left = (name for name in dflash_shapes(config) if name not in done)
    return items + [Entry(name.replace("markov_w1.weight", "markov_w1"), (name,)) for name in left]


def eagle3_weight_map(config: Eagle3Config, names: Iterable[str]) -> list[Entry]:
    """SGLang's names, of those that the draft has; gate/up and q/k/v are one matrix each on our side."""
    D = config.head_dim
    qkv = (config.num_heads * D, config.num_kv_heads * D, config.num_kv_heads * D)
    gate_up = (config.intermediate_size,) * 2
    items = [Entry(name, (name,)) for name in names if not name.startswith(("layers.", "midlayer."))]
    for i in range(config.num_layers):
        here, there = f"layers.{i}.", f"layers.{i}." if i else "midlayer."
        norms = ("input_layernorm", "post_attention_layernorm") + (() if i else ("hidden_norm",))
        items += [Entry(f"{here}{name}.weight", (f"{there}{name}.weight",)) for name in norms]
        joined = tuple(f"{there}self_attn.{x}_proj.weight" for x in "qkv")
        items.append(Entry(f"{here}qkv_proj.weight", joined, qkv))
        items.append(Entry(f"{here}o_proj.weight", (f"{there}self_attn.o_proj.weight",)))
        joined = tuple(f"{there}mlp.{x}_proj.weight" for x in ("gate", "up"))
        items.append(Entry(f"{here}mlp.gate_up_proj.weight", joined, gate_up))
        items.append(Entry(f"{here}mlp.down_proj.weight", (f"{there}mlp.down_proj.weight",)))
    return items


def load_draft(
    path: Path | str,
    tokenizer: Tokenizer | None = None,
    target: TargetFiles | None = None,
    *,
    quantize: str | None = None,
) -> DFlash | Eagle3:
    """A draft in any format. Raises LoadError where tensors are missing, left over or misshapen (`fc` is
    checked against the number of layers it reads), where the config contradicts itself, where a DFlash's MASK
    token cannot be resolved, and where an EAGLE-3 leaves its layers to the depth of a target that is not
    given. An EAGLE-3's embedding or head that is a copy of the target's is not kept. `quantize` "q8_0" packs
    a draft's matrices in 8-bit blocks; ValueError for another, and where blocks divide no row of it."""
    path = Path(path)
    check_format(quantize)
    if FORMATS[detect(path)].kind == DFLASH:
        target = None  # it has neither embedding nor head
    value = read_draft(path, target, None if tokenizer is None else tokenizer.token_to_id)[1]
    check_finite(f"{path}", value.tensors.items())
    draft = build_draft(value)
    return draft if quantize is None else quantised(draft, quantize)


def build_draft(description: Description) -> DFlash | Eagle3:
    """What a file of any format describes -> the module."""
    return build_dflash(description) if isinstance(description, DFlashDraft) else build_eagle3(description)


def load_dflash(
    path: Path | str, tokenizer: Tokenizer | None = None, *, quantize: str | None = None
) -> DFlash:
    """`load_draft` for those who can use nothing but a DFlash; raises LoadError for another kind too."""
    is_dflash = FORMATS[detect(Path(path))].kind == DFLASH
    draft = load_draft(path, tokenizer, quantize=quantize) if is_dflash else None
    if not isinstance(draft, DFlash):
        raise LoadError(f"{path} is an EAGLE-3, where a DFlash is asked for")
    return draft


def build_dflash(dflash_draft: DFlashDraft) -> DFlash:
    """What a file of any format describes -> the module."""
    with torch.device("meta"):
        draft = DFlash(dflash_draft.config)
    for entry in weight_map(dflash_draft.config):
        tensor = entry.join([to_tensor(dflash_draft.tensors[name]) for name in entry.names])
        assign(draft, entry.param, tensor)
    return draft.eval()


def describe_dflash(draft: DFlash, dtype: torch.dtype | None = None) -> DFlashDraft:
    """The module -> what any format can be written from; `dtype` None keeps each tensor's precision."""
    ours = dict(named_tensors(draft))
    tensors = {
        name: part.contiguous()
        for entry in weight_map(draft.config)
        for name, part in zip(entry.names, entry.split(ours[entry.param].detach()), strict=True)
    }
    if draft.d2t is not None:
        ids = draft.d2t + torch.arange(len(draft.d2t))
        tensors["t2d"] = marks(ids, draft.config.vocab_size)
    return DFlashDraft(config=canonical(draft.config), tensors=converted(tensors, dtype))


def save_dflash(draft: DFlash, folder: Path | str, dtype: torch.dtype = torch.bfloat16) -> None:
    """z-lab's format: what SGLang and vLLM read. No embedding and no head: they are the target's."""
    format_zlab.write(describe_dflash(draft, dtype), Path(folder))


def build_eagle3(eagle3_draft: Eagle3Draft) -> Eagle3:
    """What a file of any format describes -> the module."""
    with torch.device("meta"):
        draft = Eagle3(
            eagle3_draft.config,
            own_embedding=eagle3_draft.own_embedding,
            own_head=eagle3_draft.own_head,
            mapped="d2t" in eagle3_draft.tensors,
        )
    for entry in eagle3_weight_map(eagle3_draft.config, eagle3_draft.tensors.keys() - {"t2d"}):
        assign(
            draft, entry.param, entry.join([to_tensor(eagle3_draft.tensors[name]) for name in entry.names])
        )
    return draft.eval()


def describe_eagle3(draft: Eagle3, dtype: torch.dtype | None = None) -> Eagle3Draft:
    """The module -> what any format can be written from; `dtype` None keeps each tensor's precision."""
    config = replace(draft.config, rope=canonical_rope(draft.config.rope))
    ours = dict(named_tensors(draft))
    whole = [name for name in ours if not name.startswith("layers.")]
    tensors = {
        name: part.contiguous()
        for entry in eagle3_weight_map(config, whole)
        for name, part in zip(entry.names, entry.split(ours[entry.param].detach()), strict=True)
    }
    ids = draft.target_ids()
    if ids is not None:
        tensors["t2d"] = marks(ids, config.vocab_size)
    return Eagle3Draft(config=config, tensors=converted(tensors, dtype))


def save_eagle3(draft: Eagle3, folder: Path | str, dtype: torch.dtype = torch.bfloat16) -> None:
    """SGLang's format, which vLLM reads too. Embedding and head where the draft has its own."""
    format_sglang_eagle3.write(describe_eagle3(draft, dtype), Path(folder))
