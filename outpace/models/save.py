"""A target -> a folder of HF safetensors, however its weights are held."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.checkpoint.save import save_checkpoint
from outpace.models.blocks import ExpertMatrix, Experts
from outpace.models.config import dsa_to_hf, mla_to_hf
from outpace.models.decoder import Decoder
from outpace.models.load import ARCHITECTURES, entries, weight_of
from outpace.ops import mxfp4
from outpace.ops.quant import Joined, Quant, Weight

KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def save_target(
    model: Decoder,
    folder: Path | str,
    *,
    pack: bool = False,
    unpack: bool = False,
    dtype: torch.dtype | None = None,
    **config: Any,
) -> None:
    """`pack` writes dense gpt-oss experts as MXFP4, `unpack` packed ones densely; `dtype` converts everything
    that is not packed; what GGUF packs in other formats is written in float32 without it. `config` adds or
    replaces keys of config.json. One tensor is unpacked at a time."""
    packed = (pack or holds_mxfp4(model)) and not unpack
    module = ARCHITECTURES[model.config.architecture][0]
    embedding = model.embed_tokens.weight
    stored = dtype or (embedding.dtype if isinstance(embedding, Tensor) else torch.float32)
    values = {
        **module.to_hf(model.config),
        **mla_to_hf(model.config),
        **dsa_to_hf(model.config),
        "eos_token_id": list(model.config.eos_token_ids) or None,
        "bos_token_id": model.config.bos_token_id,
        "pad_token_id": model.config.pad_token_id,
        "dtype": str(stored).removeprefix("torch."),
    }
    if packed:
        values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}

    def parts() -> Iterator[tuple[str, Tensor]]:
        for entry in entries(model.config, "mxfp4" if packed else "dense"):
            tensor = fused(model, entry.param)
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            yield from zip(entry.names, (part.contiguous() for part in entry.split(tensor)), strict=True)

    save_checkpoint(Path(folder), values | config, parts())


def holds_mxfp4(model: Decoder) -> bool:
    """True where the experts are MXFP4, of safetensors or of GGUF."""
    return any(is_mxfp4(m) for m in model.modules() if isinstance(m, ExpertMatrix))


def dense_tensors(model: Decoder) -> dict[str, Tensor]:
    """Every weight by our names, packed experts as float32 [E, N, K]: what `build(config)` would hold."""
    return {entry.param: fused(model, entry.param) for entry in entries(model.config, "dense")}


def fused(model: Decoder, param: str) -> Tensor:
    """One tensor under the name it has where gates and ups are one matrix: `weight` is dense, `blocks` and
    `scales` are MXFP4 as safetensors hold it (dense experts are packed, packed ones unpacked)."""
    path, _, leaf = param.rpartition(".")
    module = model.get_submodule(path)
    if not isinstance(module, ExpertMatrix):
        return _plain(weight_of(model, param)).detach()
    experts = model.get_submodule(path.rpartition(".")[0])
    assert isinstance(experts, Experts)
    halves = [experts.gate, module] if experts.gate is not None and module is experts.up else [module]
    if leaf in ("blocks", "scales"):
        items = [_blocks(half)[leaf == "scales"] for half in halves]
    elif leaf == "weight":
        items = [_dense(half) for half in halves]
    else:
        items = [half.bias.detach() for half in halves if half.bias is not None]
    return items[0] if len(items) == 1 else _one(items, in_turn=experts.limit is not None)


def _one(halves: list[Tensor], in_turn: bool) -> Tensor:
    """Gates and ups [E, F, ..] -> [E, 2F, ..], their rows in turn or the gates first."""
    return torch.stack(halves, dim=2).flatten(1, 2) if in_turn else torch.cat(halves, dim=1)


def is_mxfp4(matrix: ExpertMatrix) -> bool:
    """True for either file format's blocks."""
    weight = matrix.weight
    return weight is None or (isinstance(weight, Quant) and weight.format == "MXFP4")


def _blocks(matrix: ExpertMatrix) -> tuple[Tensor, Tensor]:
    if matrix.weight is None:
        return matrix.blocks, matrix.scales
    if isinstance(matrix.weight, Quant) and is_mxfp4(matrix):
        return mxfp4.from_ggml(matrix.weight.data)
    return mxfp4.pack(_dense(matrix))


def _dense(matrix: ExpertMatrix) -> Tensor:
    if matrix.weight is None:
        return mxfp4.unpack(matrix.blocks, matrix.scales)
    return _plain(matrix.weight).detach()


def _plain(weight: Weight) -> Tensor:
    """As stored where that is a tensor, else float32."""
    if isinstance(weight, Joined):
        return torch.cat([_plain(part) for part in weight.parts])
    return weight if isinstance(weight, Tensor) else weight.dense()
