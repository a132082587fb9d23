"""What a model did on a text, layer by layer: ours by calling its modules one after the other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.models.blocks import Experts
from outpace.models.decoder import Decoder, DecoderBlock

MOSTLY = 0.95  # of the tokens must go to the same experts


@dataclass(frozen=True, kw_only=True)
class LayerSteps:
    """One layer on one text of T tokens; [T, C] float32, on the CPU."""

    x: Tensor  # what came in
    attention: Tensor  # what attention added
    middle: Tensor  # x + attention, as the second norm got it
    mlp: Tensor  # what the MLP added
    out: Tensor
    chosen: Tensor | None = None  # [T, k] experts, in any order


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A whole model, or its first layers, on one text."""

    embedded: Tensor  # [T, C]
    layers: list[LayerSteps]
    logits: Tensor  # [T, V]


@torch.inference_mode()
def walk(model: Decoder, tokens: list[int]) -> Walk:
    """Ours, whole: the embedding, every layer, the final norm and the head."""
    ids = torch.tensor([tokens], device=model.device)
    x = embedded = model.embed(ids)
    steps = []
    for i in range(len(model.layers)):
        block = layer_of(model, i)
        attention = engine_attention(model, block, x[0])
        middle = x + attention
        mlp, chosen = engine_mlp(block, middle[0])
        out = middle + mlp
        parts = {"x": x, "attention": attention, "middle": middle, "mlp": mlp, "out": out}
        plain = {name: part.view(x.shape)[0].float().cpu() for name, part in parts.items()}
        steps.append(LayerSteps(**plain, chosen=chosen))
        x = out
    logits = model.logits(model.norm(x))[0].float().cpu()
    return Walk(embedded=embedded[0].float().cpu(), layers=steps, logits=logits)


def same_experts(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    """[T, k] experts of two sides, in any order -> [T] bool; None where one side routes nothing."""
    if ours is None or theirs is None:
        return None
    return (ours.sort(-1).values == theirs.cpu().sort(-1).values).all(-1)


def telling(alike: Tensor | None, rows: int) -> Tensor:
    """[T] bool: the rows on which two MLPs can be compared. A router's near tie falls either way by rounding,
    and then the MLP computes something else altogether: a few such tokens are left out, many are a
    difference."""
    if alike is not None and float(alike.float().mean()) >= MOSTLY:
        return alike
    return torch.ones(rows, dtype=torch.bool)


def layer_of(model: Decoder, layer: int) -> DecoderBlock:
    block = model.layers[layer]
    assert isinstance(block, DecoderBlock)
    return block


@torch.inference_mode()
def engine_attention(model: Decoder, block: DecoderBlock, x: Tensor) -> Tensor:
    """x [T, C] -> [T, C], what the engine's attention adds; positions 0 .. T-1, no cache."""
    x = x.to(model.device, model.dtype)[None]
    cos, sin = model.rope(torch.arange(x.shape[1], device=x.device)[None])
    result: Tensor = block.self_attn(block.input_layernorm(x), cos, sin, None, None)
    return result[0]


@torch.inference_mode()
def engine_mlp(block: DecoderBlock, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x [T, C] -> what the engine's MLP adds [T, C]; the experts it chose [T, k]."""
    x = x.to(block.post_attention_layernorm.weight.device)[None]
    normed = block.post_attention_layernorm(x)
    if not isinstance(block.mlp, Experts):
        return block.mlp(normed)[0], None
    logits: list[Tensor] = []
    out = block.mlp(normed, logits)
    return out[0], logits[0].topk(block.mlp.per_token, dim=-1).indices.cpu()
