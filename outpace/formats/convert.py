"""A target in one format -> the same in another: GGUF that llama.cpp reads, or HF safetensors."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from tokenizers import Tokenizer
from torch import Tensor

from outpace.checkpoint.gguf import INTERLEAVED, ROPE_FACTORS, gguf_name, paired_heads, pairs, rope_factors
from outpace.checkpoint.gguf_config import ARCHITECTURES
from outpace.checkpoint.gguf_writer import Item, OnBytes, write_items
from outpace.checkpoint.open import open_checkpoint
from outpace.checkpoint.publish import published
from outpace.checkpoint.save import write_atomically
from outpace.checkpoint.shipped import target_path
from outpace.checkpoint.tokenizer import open_template, open_tokenizer
from outpace.models.blocks import ExpertMatrix, Experts
from outpace.models.config import ModelConfig
from outpace.models.decoder import Decoder
from outpace.models.load import build, entries, load_target, weight_of
from outpace.models.save import fused, is_mxfp4, save_target
from outpace.ops import mxfp4
from outpace.ops.quant import Quant
from outpace.text.gguf_tokenizer import gguf_vocabulary
from outpace.text.template import ChatTemplate

TYPES: dict[str, GGMLQuantizationType] = {
    "f32": GGMLQuantizationType.F32,
    "f16": GGMLQuantizationType.F16,
    "bf16": GGMLQuantizationType.BF16,
    "q8_0": GGMLQuantizationType.Q8_0,
}
ARCHITECTURE_OF = {theirs: ours for ours, (theirs, _) in ARCHITECTURES.items()}
NO_VOCABULARY = {"tokenizer.ggml.model": "none"}


def write_gguf(
    model: Decoder,
    path: Path,
    vocabulary: dict[str, Any] | None = None,
    type: str = "bf16",
    on_bytes: OnBytes = lambda done, total: None,
) -> None:
    """`type` is that of the matrices; MXFP4 experts stay as they are, norms, biases and routers are F32.
    `vocabulary`: the tokenizer's metadata (`gguf_vocabulary`), or none. One tensor is in memory at a time,
    and the file gets its name when it is whole. Raises ValueError where GGUF cannot say it."""
    _check(model.config)
    if model.config.mla_ranks:
        raise ValueError(
            "GGUF has no place for latent KV: convert the target that the retrofit was made from"
        )
    if model.config.dsa_layers:
        raise ValueError(
            "GGUF has no place for an index of sparse attention: convert the target that it was made for"
        )
    if type not in TYPES:
        raise ValueError(f"type {type!r} is none of: {', '.join(TYPES)}")
    architecture = ARCHITECTURE_OF[model.config.architecture]
    metadata = _metadata(model.config, architecture) | (vocabulary or NO_VOCABULARY)
    write_items(path, architecture, metadata, plan(model, type), on_bytes)


def convert_target(
    source: str,
    out: Path,
    type: str,
    *,
    overwrite: bool = False,
    on_bytes: OnBytes = lambda done, total: None,
) -> None:
    """`source`: a folder, a GGUF file or "default"; `out`: a .gguf name, or a folder. Raises ValueError where
    something is there already, and where the format cannot hold the model."""
    if out.exists() and not overwrite and (out.is_file() or any(out.iterdir())):
        raise ValueError(f"{out} is there already: name another place, or give --overwrite")
    checkpoint = open_checkpoint(target_path(source))
    model, tokenizer = load_target(checkpoint), open_tokenizer(checkpoint)
    template = open_template(checkpoint)
    if out.suffix == ".gguf":
        write_gguf(
            model,
            out,
            vocabulary_of(model, tokenizer, None if template is None else template.source),
            type,
            on_bytes,
        )
        return
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    if type not in dtypes:
        raise ValueError(f"type {type!r} of safetensors is none of: {', '.join(dtypes)}")
    write_folder(model, out, tokenizer, template, dtypes[type])


def write_folder(
    model: Decoder,
    out: Path,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    dtype: torch.dtype | None = None,
) -> None:
    """HF safetensors, the tokenizer and the chat template. `dtype`: of what is not packed; None: as it is."""
    with published(out) as new:
        save_target(model, new, dtype=dtype)
        write_atomically(new / "tokenizer.json", tokenizer.to_str().encode())
        if template is not None:
            write_atomically(new / "chat_template.jinja", template.source.encode())


def vocabulary_of(model: Decoder, tokenizer: Tokenizer, template: str | None) -> dict[str, Any]:
    """The tokenizer, the ids that begin and end a text, and the chat template, as GGUF metadata."""
    config = model.config
    value = gguf_vocabulary(tokenizer, config.vocab_size)
    eos = config.eos_token_ids[0] if config.eos_token_ids else None
    for kind, token in {"eos": eos, "bos": config.bos_token_id, "padding": config.pad_token_id}.items():
        if token is not None:
            value[f"tokenizer.ggml.{kind}_token_id"] = token
    if template is not None:
        value["tokenizer.chat_template"] = template
    return value


def plan(model: Decoder, type: str) -> list[Item]:
    """Every tensor of the file, in its order."""
    config = model.config
    architecture = ARCHITECTURE_OF[config.architecture]
    items = []
    if config.rope.kind in ("llama3", "factors"):
        factors = partial(rope_factors, config.rope, config.head_dim)
        items.append(Item(ROPE_FACTORS, (config.head_dim // 2,), TYPES["f32"], factors))
    with torch.device("meta"):
        empty = build(config, "split")
    for entry in entries(config, "split"):
        meta = weight_of(empty, entry.param)
        assert isinstance(meta, Tensor)
        for i, (name, part) in enumerate(zip(entry.names, entry.split(meta), strict=True)):
            make: Callable[[], Tensor | Quant] = partial(
                _part, model, entry.param, partial(_pick, entry.split, i)
            )
            heads = paired_heads(name, config.num_heads, config.num_kv_heads)
            if heads and architecture == INTERLEAVED:
                make = partial(_reordered, make, pairs(part.shape[0], heads))
            kind = _kind(model, entry.param, name, tuple(part.shape), TYPES[type])
            items.append(Item(gguf_name(name, architecture), tuple(part.shape), kind, make))
    return items


def _kind(
    model: Decoder, param: str, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType
) -> GGMLQuantizationType:
    if len(shape) < 2 or name.endswith("bias") or ".router." in param:
        return TYPES["f32"]
    experts = _experts(model, param)
    if experts is not None and is_mxfp4(_matrix(experts, param)):
        return GGMLQuantizationType.MXFP4
    values, _ = GGML_QUANT_SIZES[kind]
    return kind if shape[-1] % values == 0 else TYPES["f16"]


def _experts(model: Decoder, param: str) -> Experts | None:
    """Those that the weight or bias belongs to."""
    path, _, name = param.rpartition(".")[0].rpartition(".")
    module = model.get_submodule(path)
    return module if isinstance(module, Experts) and name != "router" else None


def _matrix(experts: Experts, param: str) -> ExpertMatrix:
    """The one that holds gate, up or down; gate and up may be one, which is called up."""
    name = param.split(".")[-2]
    return {"gate": experts.gate or experts.up, "up": experts.up, "down": experts.down}[name]


def _pick(split: Callable[[Tensor], list[Tensor]], i: int, whole: Tensor) -> Tensor:
    return split(whole)[i]


def _part(model: Decoder, param: str, pick: Callable[[Tensor], Tensor]) -> Tensor | Quant:
    experts = _experts(model, param)
    if experts is None:
        return pick(fused(model, param))
    matrix, size = _matrix(experts, param), model.config.expert_size
    *_, name, leaf = param.split(".")
    if experts.gate is not None or name == "down":
        rows = slice(None)
    elif experts.limit is not None:  # in turn
        rows = slice(name == "up", None, 2)
    else:
        rows = slice(size, None) if name == "up" else slice(0, size)
    if leaf == "bias":
        assert matrix.bias is not None
        return matrix.bias[:, rows]
    weight = matrix.weight
    if weight is None:
        return Quant(mxfp4.to_ggml(matrix.blocks[:, rows], matrix.scales[:, rows]), "MXFP4")
    return Quant(weight.data[:, rows], weight.format) if isinstance(weight, Quant) else weight[:, rows]


def _reordered(make: Callable[[], Tensor | Quant], rows: Tensor) -> Tensor | Quant:
    return make()[rows]


def _check(config: ModelConfig) -> None:
    if config.architecture == "Qwen3MoeForCausalLM" and not (
        all(config.moe_layers) and config.norm_topk_prob
    ):
        raise ValueError("GGUF's qwen3moe has experts in every layer and renormalises; this model does not")
    if config.architecture != "GptOssForCausalLM" and any(map(config.window, range(config.num_layers))):
        raise ValueError("GGUF cannot say that layers of this architecture have a sliding window")
    if config.qk_norm and config.attention_bias:
        raise ValueError("GGUF's qwen3 has no attention biases; this model does")
    alternating = [bool(config.window(i)) == (i % 2 == 0) for i in range(config.num_layers)]
    if config.architecture == "GptOssForCausalLM" and not all(alternating):
        raise ValueError("GGUF's gpt-oss has windows on even layers and none on odd ones; this model differs")


def _metadata(config: ModelConfig, architecture: str) -> dict[str, Any]:
    rope = config.rope
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if config.num_experts:
        values["expert_count"] = config.num_experts
        values["expert_used_count"] = config.experts_per_token
        values["expert_feed_forward_length"] = config.expert_size
    if config.sliding_window:
        values["attention.sliding_window"] = config.sliding_window
    if rope.kind in ("linear", "yarn"):
        values["rope.scaling.type"] = rope.kind
        values["rope.scaling.factor"] = float(rope.factor)
    if rope.kind == "yarn":
        values["rope.scaling.original_context_length"] = rope.original_max_position
        values["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        values["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
        values["rope.scaling.truncate"] = rope.truncate
    return {f"{architecture}.{key}": value for key, value in values.items()}
