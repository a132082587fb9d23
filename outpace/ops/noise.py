"""Gumbel noise that is a function of a key and a token: what is drawn from it can be drawn again elsewhere.

The Gumbel-max trick: argmax over v of log p(v) + g(v), with independent Gumbel noise g, is a draw from p.
"""

import torch
from torch import Tensor

from outpace.kernels import cpu_noise
from outpace.ops.fast import kernel

LOW = 2**32 - 1


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


_A, _B, _C = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed(x: Tensor) -> Tensor:
    """int64 -> int64, a bijection that scatters neighbours (the finaliser of SplitMix64; products wrap)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _B
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _C
    return x ^ ((x >> 31) & (2**33 - 1))


def keys(key: int, streams: Tensor, places: Tensor) -> Tensor:
    """One key of 64 bits for every place of every stream: streams and places int64, broadcast -> int64."""
    stream = _mixed(key + (streams + 1) * _A)
    return _mixed(stream + (places + 1) * _A)


def _scattered(x: Tensor) -> Tensor:
    """32 bits in int64 -> 32 bits, a bijection (the finaliser of MurmurHash3)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW
    return x ^ (x >> 16)


def gumbel(keys: Tensor, V: int) -> Tensor:
    """keys [...] int64 -> noise [..., V] float32, independent for every key and token.

    g = -log(-log(1 - w)) with w of 32 bits: w is finest near 0, where g is large and decides draws.
    """
    token = torch.arange(V, device=keys.device)
    low, high = keys[..., None] & LOW, (keys[..., None] >> 32) & LOW
    bits = _scattered(_scattered((token * 0x9E3779B9 & LOW) ^ low) ^ high)
    w = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return w.neg_().log1p_().neg_().log_().neg_()


def perturbed(scores: Tensor, keys: Tensor) -> Tensor:
    """scores [..., V] float32 (log p, up to a constant per row; -inf is never drawn), keys [...] -> their sum
    with the noise; its argmax is a draw from p."""
    if kernel(scores):
        V = scores.shape[-1]
        rows = cpu_noise.perturb(scores.contiguous().view(-1, V), keys.contiguous().view(-1))
        return rows.view(scores.shape)
    return scores + gumbel(keys, scores.shape[-1])
