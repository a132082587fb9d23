"""A folder -> a target with its weights, and back; a name left over on either side is an error."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from outpace.models import gpt_oss, llama, qwen3_moe
from outpace.models.config import ModelConfig
from outpace.models.config_values import check_values
from outpace.models.decoder import Decoder
from outpace.models.names import Entry
from outpace.ops import mxfp4
from outpace.weights.checkpoint import Checkpoint, LoadError, open_checkpoint, to_compute
from outpace.weights.save import save_checkpoint

ARCHITECTURES: dict[str, tuple[ModuleType, type[Decoder]]] = {
    "GptOssForCausalLM": (gpt_oss, gpt_oss.GptOss),
    "LlamaForCausalLM": (llama, llama.Llama),
    "Qwen3ForCausalLM": (llama, llama.Llama),
    "Qwen3MoeForCausalLM": (qwen3_moe, qwen3_moe.Qwen3Moe),
}
PACKED_SUFFIX = "_blocks"
# dtypes that no weight by itself is stored in: an 8-bit float means something only with its scales
NO_WEIGHTS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F8_E4M3", "F8_E5M2", "F8_E8M0")


@dataclass(frozen=True)
class Comparison:
    """What a config would build against what a checkpoint holds, by checkpoint name."""

    missing: list[str]
    left_over: list[str]
    wrong_shape: list[tuple[str, tuple[int, ...], tuple[int, ...]]]  # name, wanted, found
    wrong_dtype: list[tuple[str, str, str]] = field(default_factory=list)  # name, wanted, found

    @property
    def clean(self) -> bool:
        return not (self.missing or self.left_over or self.wrong_shape or self.wrong_dtype)


def parse_config(hf: dict[str, Any]) -> ModelConfig:
    """Raises ValueError naming the key and what it should be; LoadError for an unknown architecture."""
    check_values(hf)
    names = hf.get("architectures") or ["(none)"]
    if names[0] not in ARCHITECTURES:
        raise LoadError(f"config.json names the architecture {names[0]}; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[names[0]][0].parse(hf)


def build(config: ModelConfig, packed: bool = False) -> Decoder:
    """An empty model on the current default device (`with torch.device("meta")` allocates nothing)."""
    return ARCHITECTURES[config.architecture][1](config, packed)  # type: ignore[arg-type,call-arg]


def entries(config: ModelConfig, packed: bool) -> list[Entry]:
    found: list[Entry] = ARCHITECTURES[config.architecture][0].entries(config, packed)
    return found


def is_packed(names: list[str], config: ModelConfig) -> bool:
    """True where experts are MXFP4; only gpt-oss can hold them so, elsewhere such names are left over."""
    gpt_oss_alone = config.architecture == "GptOssForCausalLM"
    return gpt_oss_alone and any(name.endswith(PACKED_SUFFIX) for name in names)


def compare(checkpoint: Checkpoint, config: ModelConfig) -> Comparison:
    """Names, shapes and dtypes, from headers alone."""
    packed = is_packed(checkpoint.names(), config)
    with torch.device("meta"):
        model = build(config, packed)
    parts = dict(named_tensors(model))
    held = {name: (shape, dtype) for name, shape, dtype in checkpoint.specs()}
    wanted: dict[str, tuple[int, ...]] = {}
    shapes, dtypes = [], []
    for entry in entries(config, packed):
        for name, part in zip(entry.names, entry.split(parts[entry.param]), strict=True):
            wanted[name] = tuple(part.shape)
            shape, dtype = held.get(name, (wanted[name], ""))
            if shape != wanted[name]:
                shapes.append((name, wanted[name], shape))
            bytes_wanted = part.dtype == torch.uint8
            if dtype and (dtype != "U8" if bytes_wanted else dtype in NO_WEIGHTS):
                dtypes.append((name, "U8" if bytes_wanted else "a floating-point dtype", dtype))
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return Comparison(sorted(wanted.keys() - held), sorted(held.keys() - wanted - tied), shapes, dtypes)


def load_target(
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """Weights stay in the precision they are stored in (MXFP4 packed, bfloat16, float32); activations
    are `dtype`. Raises LoadError when a tensor is missing, left over, or of another shape or dtype."""
    checkpoint = open_checkpoint(folder)
    config = parse_config(checkpoint.config)
    difference = compare(checkpoint, config)
    if not difference.clean:
        raise LoadError(
            f"{folder} is not what its config.json describes:\n{explain(difference)}\n"
            f"`outpace inspect {folder}` says what to do"
        )
    packed = is_packed(checkpoint.names(), config)
    with torch.device("meta"):
        model = build(config, packed)
    shapes = {name: t.shape for name, t in named_tensors(model)}
    for entry in entries(config, packed):
        tensor = entry.join([to_compute(checkpoint.get(name)) for name in entry.names])
        assign(model, entry.param, tensor.reshape(shapes[entry.param]).to(device))
    model.dtype = dtype
    return model.eval()


def explain(difference: Comparison) -> str:
    lines = []
    for what, names in (("missing", difference.missing), ("left over", difference.left_over)):
        if names:
            shown = ", ".join(names[:6]) + (f", .. ({len(names)} in all)" if len(names) > 6 else "")
            lines.append(f"  {what} in the checkpoint: {shown}")
    lines += [
        f"  {name}: shape {found}, the config wants {wanted}"
        for name, wanted, found in difference.wrong_shape[:6]
    ]
    lines += [
        f"  {name}: dtype {found}, where {wanted} belongs"
        for name, wanted, found in difference.wrong_dtype[:6]
    ]
    return "\n".join(lines)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))


def save_target(
    model: Decoder,
    folder: Path | str,
    *,
    pack: bool = False,
    unpack: bool = False,
    dtype: torch.dtype | None = None,
    **config: Any,
) -> None:
    """HF safetensors. `pack` writes dense gpt-oss experts as MXFP4, `unpack` packed ones densely; `dtype`
    converts everything that is not packed. `config` adds or replaces keys of config.json."""
    packed = any(name.endswith(".blocks") for name, _ in named_tensors(model))
    tensors = dict(named_tensors(model))
    if pack and not packed:
        tensors = _pack_experts(tensors)
    if unpack and packed:
        tensors = dense_tensors(model)
    packed = (packed or pack) and not unpack
    module = ARCHITECTURES[model.config.architecture][0]
    stored = dtype or model.embed_tokens.weight.dtype
    said = {
        **module.to_hf(model.config),
        "eos_token_id": list(model.config.eos_token_ids) or None,
        "bos_token_id": model.config.bos_token_id,
        "pad_token_id": model.config.pad_token_id,
        "dtype": str(stored).removeprefix("torch."),
    }
    if packed:
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        said["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}

    def parts() -> Iterator[tuple[str, Tensor]]:
        for entry in entries(model.config, packed):
            tensor = tensors[entry.param].detach()
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            yield from zip(entry.names, (t.contiguous() for t in entry.split(tensor)), strict=True)

    save_checkpoint(Path(folder), said | config, parts())


def _pack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(("mlp.up.weight", "mlp.down.weight")):
            stem = name.removesuffix("weight")
            found[stem + "blocks"], found[stem + "scales"] = mxfp4.pack(tensor.detach())
        else:
            found[name] = tensor
    return found


def dense_tensors(model: Decoder) -> dict[str, Tensor]:
    """Every weight by our names, packed experts as float32 [E, N, K]: what `build(config)` would hold."""
    tensors = dict(named_tensors(model))
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(".blocks"):
            stem = name.removesuffix("blocks")
            found[stem + "weight"] = mxfp4.unpack(tensor, tensors[stem + "scales"])
        elif not name.endswith(".scales"):
            found[name] = tensor
    return found


def _said(config: Any) -> list[tuple[str, Any]]:
    """What differs from a config's defaults, by name: a field that a later version adds changes nothing."""
    values = [(f.name, f.default, getattr(config, f.name)) for f in fields(config)]
    return sorted((name, _said(v) if is_dataclass(v) else v) for name, default, v in values if v != default)


def fingerprint(model: Decoder) -> str:
    """sha256 over config and every weight as stored: what a teacher cache or a draft belongs to."""
    digest = hashlib.sha256(repr(_said(model.config)).encode())
    for name, tensor in sorted(named_tensors(model)):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
