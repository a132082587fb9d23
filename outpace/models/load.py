"""A checkpoint -> a target with its weights; a name left over on either side is an error."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from outpace.checkpoint.open import Checkpoint, LoadError, open_checkpoint, to_compute
from outpace.models import gpt_oss, llama, qwen3_moe
from outpace.models.blocks import Layout
from outpace.models.config import ModelConfig, check_values, parse_dsa, parse_mla
from outpace.models.decoder import Decoder
from outpace.models.tensor_parallel import own_parts, part_config, share
from outpace.models.weights import Entry
from outpace.ops.quant import Quant, Weight, dense
from outpace.ops.ranks import Group

RETROFIT = ("mla_", "dsa_", "use_mla", "use_dsa")  # fields of a config
ARCHITECTURES: dict[str, tuple[ModuleType, type[Decoder]]] = {
    "GptOssForCausalLM": (gpt_oss, gpt_oss.GptOss),
    "LlamaForCausalLM": (llama, llama.Llama),
    "Qwen3ForCausalLM": (llama, llama.Llama),
    "Qwen3MoeForCausalLM": (qwen3_moe, qwen3_moe.Qwen3Moe),
}
# dtypes that no weight by itself is stored in: an 8-bit float means something only with its scales
NO_WEIGHTS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F8_E4M3", "F8_E5M2", "F8_E8M0")


@dataclass(frozen=True)
class Comparison:
    """What a config would build against the contents of a checkpoint, by checkpoint name."""

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
    hf = {key: value for key, value in hf.items() if value is not None}  # null means: the default
    names = hf.get("architectures") or ["(none)"]
    if names[0] not in ARCHITECTURES:
        raise LoadError(f"config.json names the architecture {names[0]}; known: {', '.join(ARCHITECTURES)}")
    config: ModelConfig = ARCHITECTURES[names[0]][0].parse(hf)
    layers = config.num_layers
    return replace(config, **parse_mla(hf, layers), **parse_dsa(hf, layers))


def build(config: ModelConfig, layout: Layout = "dense") -> Decoder:
    """An empty model on the current default device (`with torch.device("meta")` allocates nothing)."""
    return ARCHITECTURES[config.architecture][1](config, layout)  # type: ignore[arg-type,call-arg]


def entries(config: ModelConfig, layout: Layout) -> list[Entry]:
    items: list[Entry] = ARCHITECTURES[config.architecture][0].entries(config, layout)
    return items


def layout_of(names: list[str], config: ModelConfig) -> Layout:
    """How a checkpoint holds its experts. Only gpt-oss's can be MXFP4; elsewhere such names are left over."""
    if config.architecture == "GptOssForCausalLM" and any(name.endswith("_blocks") for name in names):
        return "mxfp4"
    return "split" if any(".experts.gate_proj." in name for name in names) else "dense"


def wanted_tensors(config: ModelConfig, layout: Layout) -> dict[str, Tensor]:
    """Checkpoint name -> an empty tensor on the meta device, of the shape it must have; uint8 for MXFP4."""
    with torch.device("meta"):
        model = build(config, layout)
    parts = dict(named_tensors(model))
    values: dict[str, Tensor] = {}
    for entry in entries(config, layout):
        values |= zip(entry.names, entry.split(parts[entry.param]), strict=True)
    return values


def compare(checkpoint: Checkpoint, config: ModelConfig) -> Comparison:
    """Names, shapes and dtypes, from headers alone."""
    wanted = wanted_tensors(config, layout_of(checkpoint.names(), config))
    held = {name: (shape, dtype) for name, shape, dtype in checkpoint.specs()}
    shapes, dtypes = [], []
    for name in wanted.keys() & held:
        (shape, dtype), right = held[name], tuple(wanted[name].shape)
        if shape != right:
            shapes.append((name, right, shape))
        bytes_wanted = wanted[name].dtype == torch.uint8
        if dtype != "U8" if bytes_wanted else dtype in NO_WEIGHTS:
            dtypes.append((name, "U8" if bytes_wanted else "a floating-point dtype", dtype))
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing, left_over = sorted(wanted.keys() - held), sorted(held.keys() - wanted - tied)
    return Comparison(missing, left_over, sorted(shapes), sorted(dtypes))


def load_target(
    source: Checkpoint | Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layers: int | None = None,
    finite: bool = True,
    group: Group | None = None,
) -> Decoder:
    """Weights stay in the precision they are stored in (MXFP4 and GGUF's blocks packed, bfloat16, float16,
    float32), large ones in the mapped file, or on another device as `for_device` says; activations are
    `dtype`. `layers`: only the first so many. `finite` False: weights may be NaN or Inf, for the doctor. With
    a `group`, this process's part of the target; of the file nothing else is read.

    Raises LoadError when a tensor is missing, left over or of another shape, or holds NaN or Inf (see
    `check_finite`); ValueError for a target that the group cannot divide.
    """
    checkpoint = open_checkpoint(source) if isinstance(source, Path | str) else source
    config = parse_config(checkpoint.config)
    difference = compare(checkpoint, config)
    if not difference.clean:
        raise LoadError(
            f"{checkpoint.folder} is not what its config describes:\n{explain(difference)}\n"
            f"`outpace inspect {checkpoint.folder}` says what to do"
        )
    if layers is not None:
        config = first_layers(config, layers)
    layout = layout_of(checkpoint.names(), config)
    with torch.device("meta"):
        model = build(config if group is None else part_config(config, group.size), layout)
        if group is not None:
            share(model, config, group)
            model.checkpoint = checkpoint
    for name, weight in _weights(checkpoint, model, layout):
        placed = weight if torch.device(device).type == "cpu" else for_device(name, weight, dtype)
        assign(model, name, placed.to(device))
    if finite:
        check_finite(f"{checkpoint.folder}", stored_values(model))
    model.dtype = dtype
    return model.to(device).eval()


def _weights(checkpoint: Checkpoint, model: Decoder, layout: Layout) -> Iterator[tuple[str, Weight]]:
    """The parameters of `model`, an empty one, from the checkpoint, one after the other, sorted by name."""
    shapes = {name: t.shape for name, t in named_tensors(model)}
    for entry in sorted(entries(model.config, layout), key=lambda entry: entry.param):
        if entry.param in shapes:  # of a part, the bias of a sum is the first process's
            parts = [to_compute(part) for part in own_parts(entry, checkpoint, model.group)]
            weight = entry.gather(parts)
            yield entry.param, weight.reshape(shapes[entry.param]) if isinstance(weight, Tensor) else weight


def for_device(param: str, weight: Weight, dtype: torch.dtype) -> Tensor:
    """A weight as a GPU has it, where no step should convert it: matrices in `dtype`, GGUF's blocks unpacked.
    MXFP4 stays packed; vectors, the router and what a retrofit added stay in their precision."""
    kept = any(part in param for part in ("router", ".latent.", ".indexer."))
    if not isinstance(weight, Tensor):
        return dense(weight, torch.float32 if kept else dtype)
    matrix = weight.is_floating_point() and weight.dim() > 1
    return weight.to(dtype) if matrix and not kept else weight


def empty_target(config: ModelConfig, layout: Layout, dtype: torch.dtype) -> Decoder:
    """On the meta device, its weights in the dtypes that they have on a GPU."""
    with torch.device("meta"):
        model = build(config, layout)
    for name, tensor in list(named_tensors(model)):
        assign(model, name, for_device(name, tensor.detach(), dtype))
    model.dtype = dtype
    return model.to("meta").eval()


NAN_SCALE = 255  # of E8M0
SMALL, ALL = 2**20, 2**28  # bytes of a tensor that is always read, and of a model that is read whole


def check_finite(where: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises LoadError, naming the tensor, for weights that are NaN or Inf. Of a model above 256 MiB only the
    tensors up to 1 MiB are read, so that opening stays quick: `outpace inspect --scan` reads all, and
    decoding stops where logits are not finite."""
    stored = [(name, t) for name, t in tensors if not t.is_meta]
    whole = sum(t.nbytes for _, t in stored) <= ALL
    for name, tensor in stored:
        if not whole and tensor.nbytes > SMALL:
            continue
        if tensor.is_floating_point():
            wrong = ~tensor.isfinite()
        elif name.endswith(".scales"):
            wrong = tensor == NAN_SCALE
        else:
            continue
        if wrong.any():
            raise LoadError(
                f"{where}: {name} holds {int(wrong.sum()):,} values that are NaN or Inf: the file is "
                "damaged, or its training diverged; fetch it again, or use an earlier checkpoint"
            )


def stored_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, and of GGUF's blocks the scales."""
    yield from named_tensors(model)
    for name, module in model.named_modules():
        if isinstance(module, Quant):
            yield f"{name}.scales", module.scales()


def first_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The same model cut off after `layers` blocks: for debugging."""
    if not 1 <= layers <= config.num_layers:
        raise ValueError(f"layers {layers}: give 1 to {config.num_layers}, which is what this model has")
    lists = ("layer_types", "moe_layers", "mla_ranks")
    kept = {name: getattr(config, name)[:layers] for name in lists}
    indexed = tuple(i for i in config.dsa_layers if i < layers)
    return replace(config, num_layers=layers, dsa_layers=indexed, **kept)


def explain(difference: Comparison) -> str:
    lines = []
    for what, names in (("missing", difference.missing), ("left over", difference.left_over)):
        if names:
            shown = ", ".join(names[:6]) + (f", .. ({len(names)} in all)" if len(names) > 6 else "")
            lines.append(f"  {what} in the checkpoint: {shown}")
    lines += [
        f"  {name}: shape {result}, the config wants {wanted}"
        for name, wanted, result in difference.wrong_shape[:6]
    ]
    lines += [
        f"  {name}: dtype {result}, where {wanted} belongs"
        for name, wanted, result in difference.wrong_dtype[:6]
    ]
    return "\n".join(lines)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def assign(model: nn.Module, name: str, weight: Weight) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if not isinstance(weight, Tensor):
        delattr(module, leaf)  # a parameter's name takes no module
        setattr(module, leaf, weight)
    elif leaf in module._buffers:
        module._buffers[leaf] = weight
    else:
        setattr(module, leaf, nn.Parameter(weight, requires_grad=False))


def weight_of(model: nn.Module, name: str) -> Weight:
    path, _, leaf = name.rpartition(".")
    weight: Weight = getattr(model.get_submodule(path), leaf)
    return weight


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _summary(config: Any) -> list[tuple[str, Any]]:
    """What differs from a config's defaults, by name: a field that a later version adds changes nothing."""
    values = [(f.name, _default(f), getattr(config, f.name)) for f in fields(config)]
    return sorted(
        (name, _summary(v) if is_dataclass(v) else v) for name, default, v in values if v != default
    )


def fingerprint(model: Decoder, *, retrofits: bool = True) -> str:
    """sha256 over config and every weight as stored: what a teacher cache or a draft belongs to. Without
    `retrofits`, of the target that they were made from."""
    config = model.config
    if not retrofits:
        none = {f.name: _default(f) for f in fields(config) if f.name.startswith(RETROFIT)}
        config = replace(config, **none)
    digest = hashlib.sha256(repr(_summary(config)).encode())
    for name, tensor in _all_tensors(model):
        if not retrofits and (".latent." in name or ".indexer." in name):
            continue
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _all_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Sorted by name; of a part of a target those of the whole, one at a time."""
    checkpoint = getattr(model, "checkpoint", None)  # a draft, which is no part, has none
    if checkpoint is None:
        yield from sorted(named_tensors(model))
        return
    layout = layout_of(checkpoint.names(), model.config)
    with torch.device("meta"):
        whole = build(model.config, layout)
    for name, weight in _weights(checkpoint, whole, layout):
        if isinstance(weight, Tensor):
            yield name, weight
        else:
            yield from sorted((f"{name}.{part}", t) for part, t in weight.named_buffers())
