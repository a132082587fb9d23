"""transformers as the reference: opening a model in float32 where it fits, and its layers on a text."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.checkpoint.open import open_checkpoint
from outpace.doctor.engine import LayerSteps, Walk
from outpace.ops.dispatch import available_memory

GIB = 2**30


def open_transformers(folder: Path, layers: int) -> Any:
    """The model in float32, its first `layers` layers, MXFP4 experts unpacked by transformers itself.

    Raises ValueError where transformers is not installed, or where float32 would not fit in memory.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("--reference hf needs transformers: pip install 'outpace[baselines]'")
    if not (folder / "config.json").is_file():
        raise ValueError(f"--reference hf: {folder} holds no config.json; name an HF folder after PATH")
    theirs: Any = importlib.import_module("transformers")
    config = theirs.AutoConfig.from_pretrained(folder)
    needed, free = _float32_bytes(folder, layers), available_memory()
    if needed > free:
        raise ValueError(
            f"transformers would need about {needed / GIB:.0f} GiB for {folder} in float32, "
            f"{free / GIB:.0f} are free: compare fewer layers (--layers 4), or without transformers "
            "(--reference OTHER-CHECKPOINT)"
        )
    if layers < config.num_hidden_layers:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    options: dict[str, Any] = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
    if getattr(config, "quantization_config", None):
        options["quantization_config"] = theirs.Mxfp4Config(dequantize=True)
    theirs.logging.set_verbosity_error()
    theirs.logging.disable_progress_bar()
    try:
        return theirs.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    except ImportError as error:  # it unpacks MXFP4 with accelerate
        raise ValueError(f"--reference hf: {error}") from error


@torch.inference_mode()
def walk_transformers(model: Any, tokens: list[int]) -> Walk:
    """`model`: a transformers causal model of the Llama shape (`model.layers`, `self_attn`, `mlp`, ..)."""
    seen: dict[tuple[int, str], Tensor] = {}
    embedded: list[Tensor] = []
    hooks = [model.model.embed_tokens.register_forward_hook(lambda m, a, out: embedded.append(out[0]))]

    def entering(layer: int, name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            seen[layer, name] = (args[0] if args else kwargs["hidden_states"])[0].float()

        return hook

    def leaving(layer: int, name: str, part: int = 0) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            value = out[part] if isinstance(out, tuple) else out
            seen[layer, name] = value if name == "chosen" else value.view(-1, value.shape[-1]).float()

        return hook

    for i, layer in enumerate(model.model.layers):
        hooks += [
            layer.register_forward_pre_hook(entering(i, "x"), with_kwargs=True),
            layer.self_attn.register_forward_hook(leaving(i, "attention")),
            layer.post_attention_layernorm.register_forward_pre_hook(entering(i, "middle"), with_kwargs=True),
            layer.mlp.register_forward_hook(leaving(i, "mlp")),
            layer.register_forward_hook(leaving(i, "out")),
        ]
        router = getattr(layer.mlp, "router", None) or getattr(layer.mlp, "gate", None)
        if router is not None:
            hooks.append(router.register_forward_hook(leaving(i, "chosen", 2)))
    try:
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    finally:
        for hook in hooks:
            hook.remove()
    count = len(model.model.layers)
    names = ("x", "attention", "middle", "mlp", "out", "chosen")
    steps = [LayerSteps(**{n: seen[i, n] for n in names if (i, n) in seen}) for i in range(count)]
    return Walk(embedded=embedded[0].float(), layers=steps, logits=logits)


def _float32_bytes(folder: Path, layers: int) -> int:
    """Memory of the weights of the first `layers` layers in float32."""
    total = 0
    for name, shape, _ in open_checkpoint(folder).specs():
        number = name.split("layers.")[-1].split(".")[0]
        if "layers." in name and number.isdigit() and int(number) >= layers:
            continue
        values = int(torch.Size(shape).numel())
        total += 4 * values * (2 if name.endswith("_blocks") else 0 if name.endswith("_scales") else 1)
    return total
