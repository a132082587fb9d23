"""Keys of cached tokens from their latents: the kernel where it runs, and its reference."""

import torch
from torch import Tensor

from outpace.kernels import bindings
from outpace.ops.rope import reference_rotate


def keys_(
    out: Tensor, rows: Tensor, w: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None
) -> None:
    """`reference_keys` by the kernel, written to out, a part of [B, K, n, D]; for float32 on a CPU, D a
    multiple of 8. A token's key does not depend on how many there are."""
    bindings.latent_keys_(out, rows, w, bias, cos.contiguous(), sin.contiguous(), gain)


def reference_keys(
    rows: Tensor, w: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None, heads: int
) -> Tensor:
    """rows [B, n, W], the first R of each @ W [R, K*D], as `panels` has it, + bias; times gain [D] and the
    number behind the R that is the head's, where gain is given; rotated by cos and sin [B or 1, n, D/2] ->
    [B, K, n, D]."""
    R = w.shape[1]
    k = (rows[..., :R] @ w.transpose(0, 1).flatten(1) + bias).unflatten(-1, (heads, -1))
    if gain is not None:
        k = k * rows[..., R : R + heads, None] * gain
    turned: Tensor = reference_rotate(k, cos, sin)
    return turned.transpose(1, 2)


def panels(weight: Tensor, head_dim: int) -> Tensor:
    """[K*D, R] as a Linear holds it -> [K*D/P, R, P] float32, as both take it."""
    P = bindings.PANEL if head_dim % bindings.PANEL == 0 else 8
    return weight.detach().to(torch.float32).unflatten(0, (-1, P)).transpose(1, 2).contiguous()
