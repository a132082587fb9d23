"""A DFlash on disk -> a draft that runs, and back into z-lab's format."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from outpace.drafts import format_zlab
from outpace.drafts.dflash import DFlash, DFlashConfig
from outpace.drafts.files import read_draft
from outpace.drafts.formats import DFlashDraft, canonical, converted
from outpace.models.load import assign, named_tensors
from outpace.models.names import Entry
from outpace.weights.checkpoint import LoadError, to_tensor


def entries(config: DFlashConfig) -> list[Entry]:
    """z-lab's names (no prefix); gate/up and q/k/v are one matrix each on our side."""
    found = [Entry(name, (name,)) for name in ("fc.weight", "hidden_norm.weight", "norm.weight")]
    if config.mask_token_id is None:
        found.append(Entry("mask_embedding", ("mask_embedding",)))
    D = config.head_dim
    qkv = (config.num_heads * D, config.num_kv_heads * D, config.num_kv_heads * D)
    gate_up = (config.intermediate_size,) * 2
    for i in range(config.num_layers):
        at = f"layers.{i}."
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            found.append(Entry(at + name, (at + name,)))
        for name in ("q_norm", "k_norm"):
            found.append(Entry(f"{at}{name}.weight", (f"{at}self_attn.{name}.weight",)))
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            names = tuple(f"{at}self_attn.{x}_proj.{kind}" for x in "qkv")
            found.append(Entry(f"{at}qkv_proj.{kind}", names, qkv))
            found.append(Entry(f"{at}o_proj.{kind}", (f"{at}self_attn.o_proj.{kind}",)))
        names = (f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight")
        found.append(Entry(f"{at}mlp.gate_up_proj.weight", names, gate_up))
        found.append(Entry(f"{at}mlp.down_proj.weight", (f"{at}mlp.down_proj.weight",)))
    return found


def load_dflash(path: Path | str, tokenizer: Tokenizer | None = None) -> DFlash:
    """A DFlash in any format. Raises LoadError where tensors are missing, left over or misshapen (`fc` is
    checked against the number of layers it reads), where the config contradicts itself, and where the MASK
    token cannot be resolved."""
    found = read_draft(Path(path), token_id=None if tokenizer is None else tokenizer.token_to_id)[1]
    if not isinstance(found, DFlashDraft):
        raise LoadError(f"{path} is an EAGLE-3, which is read and written here, and not yet run")
    return build_dflash(found)


def build_dflash(found: DFlashDraft) -> DFlash:
    """What a file of any format describes -> the module."""
    with torch.device("meta"):
        draft = DFlash(found.config)
    for entry in entries(found.config):
        tensor = entry.join([to_tensor(found.tensors[name]) for name in entry.names])
        assign(draft, entry.param, tensor)
    return draft.eval()


def describe_dflash(draft: DFlash, dtype: torch.dtype | None = None) -> DFlashDraft:
    """The module -> what any format can be written from; `dtype` None keeps each tensor's precision."""
    ours = dict(named_tensors(draft))
    tensors = {
        name: part.contiguous()
        for entry in entries(draft.config)
        for name, part in zip(entry.names, entry.split(ours[entry.param].detach()), strict=True)
    }
    return DFlashDraft(config=canonical(draft.config), tensors=converted(tensors, dtype))


def save_dflash(draft: DFlash, folder: Path | str, dtype: torch.dtype = torch.bfloat16) -> None:
    """z-lab's format: what SGLang and vLLM read. No embedding and no head: they are the target's."""
    format_zlab.write(describe_dflash(draft, dtype), Path(folder))
