"""Targets and drafts as a report names them."""

from math import prod
from typing import Any

from torch import nn

from outpace.drafts.dflash import DFlash
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint, named_tensors
from outpace.ops.quant import Quant


def parameters(module: nn.Module) -> int:
    """Weights that are packed count as well."""
    packed = (prod(part.shape) for part in module.modules() if isinstance(part, Quant))
    return sum(p.numel() for p in module.parameters()) + sum(packed)


def describe_target(target: Decoder) -> dict[str, Any]:
    c = target.config
    return {
        "architecture": c.architecture,
        "layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "experts": c.num_experts,
        "experts_per_token": c.experts_per_token,
        "vocab_size": c.vocab_size,
        "window": c.sliding_window,
        "bytes": sum(t.nbytes for _, t in named_tensors(target)),
        "compute_dtype": str(target.dtype).removeprefix("torch."),
        "fingerprint": fingerprint(target),
    }


def describe_draft(draft: DFlash) -> dict[str, Any]:
    return {
        "kind": "dflash",
        "layers": draft.config.num_layers,
        "block_size": draft.block_size,
        "target_layer_ids": list(draft.target_layer_ids),
        "parameters": parameters(draft),
        "bytes": sum(t.nbytes for _, t in named_tensors(draft)),
        "fingerprint": fingerprint(draft),  # type: ignore[arg-type]
    }
