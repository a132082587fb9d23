"""What the layers of a target see of a text."""

import torch
from torch import Tensor

from outpace.models.decoder import Decoder, DecoderBlock


@torch.no_grad()
def states_of(target: Decoder, rows: Tensor) -> list[Tensor]:
    """rows [B, T] int64, texts from their beginnings -> the residual stream [B, T, C] before the first
    layer and behind every one; the target as it is switched."""
    aux = target(rows, aux=range(target.config.num_layers)).aux
    assert aux is not None
    return [target.embed(rows), *aux]


@torch.no_grad()
def read_by(target: Decoder, layer: int, states: list[Tensor]) -> Tensor:
    """[B, T, C]: what the layer's attention reads of `states_of`."""
    block = target.layers[layer]
    assert isinstance(block, DecoderBlock)
    normed: Tensor = block.input_layernorm(states[layer])
    return normed
