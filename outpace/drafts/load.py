"""A z-lab DFlash checkpoint folder -> a draft, and back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from outpace.drafts import dflash
from outpace.drafts.dflash import DFlash, DFlashConfig
from outpace.models.load import Comparison, assign, explain, named_tensors
from outpace.models.names import Entry
from outpace.weights.checkpoint import LoadError, open_checkpoint, to_tensor
from outpace.weights.save import save_checkpoint

DEFAULT_MASK = "<|MASK|>"


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


def load_dflash(folder: Path | str, tokenizer: Tokenizer | None = None) -> DFlash:
    """Raises LoadError where tensors are missing, left over or misshapen (`fc` is checked against the
    number of target_layer_ids), or where the MASK token cannot be resolved."""
    checkpoint = open_checkpoint(folder)
    hf = checkpoint.config
    if (hf.get("architectures") or [""])[0] != "DFlashDraftModel":
        raise LoadError(f"{folder}: architectures {hf.get('architectures')} is not [DFlashDraftModel]")
    held = {name.removeprefix("model."): name for name in checkpoint.names()}
    config = dflash.parse(hf, _mask_token_id(hf, held, tokenizer, folder))
    with torch.device("meta"):
        draft = DFlash(config)
    shapes = {name: t.shape for name, t in named_tensors(draft)}
    wanted, wrong = set(), []
    for entry in entries(config):
        empty = torch.empty(shapes[entry.param], device="meta")
        for name, part in zip(entry.names, entry.split(empty), strict=True):
            wanted.add(name)
            if name in held and checkpoint.shape(held[name]) != tuple(part.shape):
                wrong.append((name, tuple(part.shape), checkpoint.shape(held[name])))
    difference = Comparison(sorted(wanted - set(held)), sorted(set(held) - wanted), wrong)
    if not difference.clean:
        hint = ""
        if any(name == "fc.weight" for name, _, _ in wrong):
            n = len(config.target_layer_ids)
            hint = f"\n  fc.in_features must be {n} (target_layer_ids) x {config.hidden_size}"
        raise LoadError(f"{folder} is not what its config.json describes:\n{explain(difference)}{hint}")
    for entry in entries(config):
        tensor = entry.join([to_tensor(checkpoint.get(held[name])) for name in entry.names])
        assign(draft, entry.param, tensor)
    return draft.eval()


def _mask_token_id(
    hf: dict[str, Any], held: dict[str, str], tokenizer: Tokenizer | None, folder: Path | str
) -> int | None:
    if "mask_embedding" in held:
        return None
    inner = hf.get("dflash_config") or {}
    if inner.get("mask_token_id") is not None:
        return int(inner["mask_token_id"])
    token = inner.get("mask_token") or DEFAULT_MASK
    found = tokenizer.token_to_id(token) if tokenizer is not None else None
    if found is None:
        raise LoadError(
            f"{folder}: dflash_config has no mask_token_id, and the tokenizer knows no {token!r}: "
            "write the id of a token that text never uses"
        )
    return int(found)


def save_dflash(draft: DFlash, folder: Path | str, dtype: torch.dtype = torch.bfloat16) -> None:
    """z-lab's format: what SGLang and vLLM read. No embedding and no head: they are the target's."""
    tensors = dict(named_tensors(draft))

    def parts() -> Iterator[tuple[str, torch.Tensor]]:
        for entry in entries(draft.config):
            whole = tensors[entry.param].detach().to(dtype)
            yield from zip(entry.names, (t.contiguous() for t in entry.split(whole)), strict=True)

    config = dflash.to_hf(draft.config) | {"dtype": str(dtype).removeprefix("torch.")}
    save_checkpoint(Path(folder), config, parts())
