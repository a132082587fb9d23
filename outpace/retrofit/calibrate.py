"""What a retrofit must know of every layer, from real text: second moments of keys, values and queries."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.models.attention import Attention
from outpace.models.decoder import Decoder
from outpace.ops.norm import rms_norm
from outpace.retrofit.states import read_by, states_of

OFFSETS = 512  # distances over which a rotation is averaged


@dataclass(frozen=True)
class Moments:
    """Of one layer, float64. y = [k; v] [2KD], before rotary positions and before any norm.

    mean [2KD] and cov [2KD, 2KD] of y; q [K, D, D]: E[q q^T], summed over the query heads of a kv head and
    averaged over relative rotations, the norm's weight and E[1/rms^2] applied where keys are normed;
    o [K, D, D]: sum over the same heads of W_o^T W_o; stream: E|x|^2 of the residual stream behind the layer.
    """

    mean: Tensor
    cov: Tensor
    q: Tensor
    o: Tensor
    stream: float
    tokens: int


@torch.inference_mode()
def calibrate(target: Decoder, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, Moments]:
    """rows of token ids, each a text from its beginning. Raises ValueError where there is no token."""
    if not rows or not all(rows):
        raise ValueError("calibration needs text: give rows of at least one token")
    sums: dict[int, list[Tensor]] = {}
    total = sum(map(len, rows))
    for row in rows:
        states = states_of(target, torch.tensor([list(row)], device=target.device))
        for layer in layers:
            result = _sums(target.attentions[layer], read_by(target, layer, states)[0])
            result.append(states[layer + 1].double().square().sum())
            sums[layer] = (
                [a + b for a, b in zip(sums[layer], result, strict=True)] if layer in sums else result
            )
    return {
        layer: _moments(target, target.attentions[layer], [part / total for part in result], total)
        for layer, result in sums.items()
    }


def _sums(attention: Attention, x: Tensor) -> list[Tensor]:
    """x [T, C] -> sums over tokens of y, y y^T, q q^T [K, D, D] and 1/rms^2 [K]."""
    K, D = attention.kv_heads, attention.head_dim
    q, y = attention.qkv_proj(x).split((attention.heads * D, 2 * K * D), dim=-1)
    q = q.unflatten(-1, (-1, D))
    inverse = torch.full((K,), float(len(x)), dtype=torch.float64, device=x.device)
    if attention.q_norm is not None and attention.k_norm is not None:
        q = rms_norm(q, attention.q_norm.weight, attention.q_norm.eps)
        k = y[:, : K * D].double().unflatten(-1, (K, D))
        inverse = (k.square().mean(-1) + attention.k_norm.eps).reciprocal().sum(0)
    q, y = q.double().unflatten(1, (K, -1)), y.double()
    return [y.sum(0), y.T @ y, torch.einsum("tkgd,tkge->kde", q, q), inverse]


def _moments(target: Decoder, attention: Attention, means: list[Tensor], tokens: int) -> Moments:
    mean, outer, q, inverse, stream = means
    K, D = attention.kv_heads, attention.head_dim
    if attention.k_norm is not None:
        weight = attention.k_norm.weight.double()
        q = q * inverse[:, None, None]
        q = averaged(q, target) * weight[:, None] * weight
    else:
        q = averaged(q, target)
    out = attention.o_proj.weight
    assert isinstance(out, Tensor)
    heads = out.double().unflatten(1, (K, -1, D))  # [C, K, G, D]
    o = torch.einsum("ckgd,ckge->kde", heads, heads)
    return Moments(mean, outer - mean[:, None] * mean, q * attention.scale**2, o, float(stream), tokens)


def averaged(q: Tensor, target: Decoder) -> Tensor:
    """q [K, D, D] -> the mean of R^T q R over rotations R by distances 0 .. OFFSETS - 1: a score is
    q^T R_(s-t) k, so this is what an error of k costs at all distances together."""
    half, (cos, sin) = q.shape[-1] // 2, target.rope(torch.arange(OFFSETS, device=q.device))
    R = torch.diag_embed(torch.cat((cos, cos), -1).double())
    at = torch.arange(half, device=q.device)
    R[:, at, at + half], R[:, at + half, at] = -sin.double(), sin.double()
    turned = torch.einsum("nde,kdf,nfg->keg", R, q, R) / OFFSETS
    return turned * target.config.rope.concentration**2  # queries and keys are both multiplied by it
