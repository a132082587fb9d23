"""Our parameters and the tensors that hold them in HF checkpoints: which names, joined how."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from outpace.checkpoint.open import dtype_bytes
from outpace.models.config import ModelConfig
from outpace.ops.quant import Joined, Quant, Weight

Spec = tuple[str, tuple[int, ...], str]  # name, shape, safetensors dtype or GGUF format
VALUES_PER_BYTE = {"_blocks": 2, "_scales": 0}  # MXFP4: scales are overhead, not parameters
COPIED = 16 * 2**20  # bytes: below, q, k and v become one matrix; above, a call costs less than the copy


@dataclass(frozen=True)
class Entry:
    """One parameter of ours. Its tensor is the named ones joined along their rows, in this order, then
    viewed in the parameter's shape; `rows` is how many each has. `swapped` swaps the last two axes
    (gpt-oss stores dense experts as [E, in, out])."""

    param: str
    names: tuple[str, ...]
    rows: tuple[int, ...] = ()
    swapped: bool = False

    def join(self, parts: list[Tensor]) -> Tensor:
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.mT.contiguous() if self.swapped else whole

    def gather(self, parts: list[Tensor | Quant]) -> Weight:
        """`join` for a few small tensors, which saves calls; large and packed ones stay where they lie, as
        the rows of one `Joined`."""
        plain = [part for part in parts if isinstance(part, Tensor)]
        if len(plain) < len(parts):
            return parts[0] if len(parts) == 1 else Joined(parts)
        if 1 < len(parts) < 4 and sum(part.nbytes for part in plain) > COPIED:
            return Joined(parts)
        return self.join(plain)

    def split(self, tensor: Tensor) -> list[Tensor]:
        if self.swapped:
            tensor = tensor.mT
        if len(self.names) == 1:
            return [tensor]
        flat = tensor.flatten(0, -2) if tensor.dim() == 3 else tensor
        return list(flat.split(self.rows))


def backbone_weights(config: ModelConfig) -> list[Entry]:
    """What all architectures share: embedding, norms, attention, head."""
    entries = [
        Entry("embed_tokens.weight", ("model.embed_tokens.weight",)),
        Entry("norm.weight", ("model.norm.weight",)),
    ]
    if not config.tie_word_embeddings:
        entries.append(Entry("lm_head.weight", ("lm_head.weight",)))
    D = config.head_dim
    rows = (config.num_heads * D, config.num_kv_heads * D, config.num_kv_heads * D)
    for i in range(config.num_layers):
        here, there = f"layers.{i}.", f"model.layers.{i}."
        plain = ["input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight"]
        kinds = ["weight"]
        if config.attention_bias:
            plain.append("self_attn.o_proj.bias")
            kinds.append("bias")
        if config.qk_norm:
            plain += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        if config.sinks:
            plain.append("self_attn.sinks")
        entries += [Entry(here + name, (there + name,)) for name in plain]
        for kind in kinds:
            names = tuple(f"{there}self_attn.{x}_proj.{kind}" for x in "qkv")
            entries.append(Entry(f"{here}self_attn.qkv_proj.{kind}", names, rows))
        if config.mla_rank(i):
            entries += _latent(f"{here}self_attn.latent.", f"{there}self_attn.mla_")
        if i in config.dsa_layers:
            entries += _indexer(config, f"{here}self_attn.indexer.", f"{there}self_attn.dsa_")
    return entries


def _latent(here: str, there: str) -> list[Entry]:
    """W_c [C, R], W_k_lat and W_v_lat [R, K*D], as the equations of models/latent.py have them."""
    items = []
    for part, weight, bias in (
        ("down", "W_c", "b_c"),
        ("k_up", "W_k_lat", "b_k"),
        ("v_up", "W_v_lat", "b_v"),
    ):
        items.append(Entry(f"{here}{part}.weight", (there + weight,), swapped=True))
        items.append(Entry(f"{here}{part}.bias", (there + bias,)))
    return items


def _indexer(config: ModelConfig, here: str, there: str) -> list[Entry]:
    H, D = config.dsa_index_heads, config.dsa_index_dim
    rows = (H * D, D, H)
    items = [
        Entry(f"{here}proj.{kind}", tuple(f"{there}{x}.{kind}" for x in "qkw"), rows)
        for kind in ("weight", "bias")
    ]
    return [*items, Entry(f"{here}frequencies", (f"{there}frequencies",))]


def dense_mlp(config: ModelConfig, layer: int) -> list[Entry]:
    here, there = f"layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
    entries = []
    for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
        names = (f"{there}gate_proj.{kind}", f"{there}up_proj.{kind}")
        rows = (config.intermediate_size,) * 2
        entries.append(Entry(f"{here}gate_up_proj.{kind}", names, rows))
        entries.append(Entry(f"{here}down_proj.{kind}", (f"{there}down_proj.{kind}",)))
    return entries


def split_experts(layer: int, bias: bool) -> list[Entry]:
    """Experts where the gates and ups are two tensors [E, F, C]: GGUF."""
    here, there = f"layers.{layer}.mlp.", f"model.layers.{layer}.mlp.experts."
    return [
        Entry(f"{here}{name}.{kind}", (f"{there}{name}_proj.{kind}",))
        for name in ("gate", "up", "down")
        for kind in (("weight", "bias") if bias else ("weight",))
    ]


def count(specs: Iterable[Spec]) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Names, shapes and safetensors dtypes -> (parameters, bytes) of each part of a model; bytes of each
    dtype."""
    parts: dict[str, tuple[int, int]] = {}
    dtypes: dict[str, int] = {}
    for name, shape, dtype in specs:
        size = round(prod(shape) * dtype_bytes(dtype))
        packing = next((n for suffix, n in VALUES_PER_BYTE.items() if name.endswith(suffix)), 1)
        part = _part(name)
        parameters, held = parts.get(part, (0, 0))
        parts[part] = (parameters + prod(shape) * packing, held + size)
        dtypes[dtype] = dtypes.get(dtype, 0) + size
    return parts, dtypes


def _part(name: str) -> str:
    if ".experts." in name:
        return "experts"
    if ".mla_" in name or ".dsa_" in name:
        return "retrofit"
    if ".self_attn." in name:
        return "attention"
    if ".mlp." in name:
        return "router" if ".router." in name or name.endswith("mlp.gate.weight") else "mlp"
    if "embed_tokens" in name:
        return "embedding"
    return "head" if "lm_head" in name else "norms"
