"""MLA-lite: keys and values of a layer factored into one latent, three ways; which rank each layer gets.

An error e = y - y^ of y = [k; v] costs e^T M e. With S the covariance of y and M^(1/2) S M^(1/2) = U L U^T,
the best latent of rank R is c = U_R^T M^(1/2) (y - mu), read as y^ = M^(-1/2) U_R c + mu, and its cost
is the sum of the eigenvalues left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from outpace.models.attention import Attention
from outpace.models.blocks import Linear
from outpace.models.decoder import Decoder
from outpace.models.latent import Latent
from outpace.ops.quant import dense
from outpace.retrofit.calibrate import Moments

SVD, PCA, LOSS = METHODS = ("svd", "pca", "loss")
BALANCE = 1.0  # of keys against values
DAMPING = 1e-6  # of the mean diagonal: directions that cost nothing stay invertible


@dataclass(frozen=True)
class Basis:
    """Of one layer, float64. down [n, n]: rows by falling worth, c = (down (y - mean))[:R]; up [n, n]:
    y^ = up[:, :R] c + mean; worth [n]: what each direction saves."""

    down: Tensor
    up: Tensor
    mean: Tensor
    worth: Tensor

    def residual(self, moments: Moments, rank: int) -> Tensor:
        """E[(y - y^)(y - y^)^T] [n, n] at a rank."""
        n = len(self.mean)
        kept = torch.eye(n, dtype=torch.float64) - self.up[:, :rank] @ self.down[:rank]
        shift = moments.mean - self.mean
        return kept @ (moments.cov + shift[:, None] * shift) @ kept.T


def projection(attention: Attention) -> tuple[Tensor, Tensor]:
    """W [2KD, C] and b [2KD] of keys and values, float64."""
    q = attention.heads * attention.head_dim
    weight = attention.qkv_proj.weight
    whole = (weight if isinstance(weight, Tensor) else dense(weight)).double()[q:]
    bias = attention.qkv_proj.bias
    return whole, torch.zeros(len(whole), dtype=torch.float64) if bias is None else bias.double()[q:]


def basis(method: str, attention: Attention, moments: Moments, balance: float = BALANCE) -> Basis:
    """svd: of the weights alone, blind to what x is (a baseline). pca: of the outputs, about their mean.
    loss: of the outputs, in the metric of what attention makes of them. Raises ValueError for another."""
    W, b = projection(attention)
    n = len(W)
    eye = torch.eye(n, dtype=torch.float64)
    if method == SVD:
        U, values, _ = torch.linalg.svd(W, full_matrices=True)
        worth = torch.zeros(n, dtype=torch.float64)
        worth[: len(values)] = values.square()
        return Basis(U.T, U, b, worth)
    if method not in (PCA, LOSS):
        raise ValueError(f"method {method!r}: it must be one of {', '.join(METHODS)}")
    root, inverse = (eye, eye) if method == PCA else roots(metric(attention, moments, balance))
    values, U = torch.linalg.eigh(root @ moments.cov @ root)
    U, values = U.flip(1), values.flip(0).clamp(min=0)
    return Basis(U.T @ root, inverse @ U, moments.mean, values / moments.stream)


def metric(attention: Attention, moments: Moments, balance: float = BALANCE) -> Tensor:
    """M [2KD, 2KD], block by kv head. An error of v costs W_o^T W_o times the squared weights of the tokens;
    an error of k changes scores, and a score's error costs the same weights times E|W_o (v - mean)|^2, were
    the values independent of who looks at them: `balance` makes up for it."""
    K, D, G = attention.kv_heads, attention.head_dim, attention.heads // attention.kv_heads
    blocks = moments.cov[K * D :, K * D :].unflatten(0, (K, D)).unflatten(2, (K, D))
    values = torch.stack([blocks[h, :, h] for h in range(K)])  # [K, D, D]
    spread = torch.einsum("kde,ked->k", moments.o, values) / G
    return torch.block_diag(*(moments.q * (balance * spread)[:, None, None]), *moments.o)


def roots(m: Tensor) -> tuple[Tensor, Tensor]:
    """m^(1/2) and its inverse, damped."""
    values, U = torch.linalg.eigh(m)
    values = values.clamp(min=0) + DAMPING * values.mean()
    return (U * values.sqrt()) @ U.T, (U * values.rsqrt()) @ U.T


def ranks_of(bases: Mapping[int, Basis], mean_rank: int) -> dict[int, int]:
    """Ranks of equal marginal loss: of all directions of all layers the worthiest, mean_rank per layer; each
    layer gets at least one."""
    worth = torch.cat([b.worth for b in bases.values()])
    layer = torch.cat([torch.full((len(b.worth),), i) for i, b in bases.items()])
    best = layer[worth.argsort(descending=True)[: mean_rank * len(bases)]]
    return {i: max(1, int((best == i).sum())) for i in bases}


@torch.no_grad()
def attach(target: Decoder, bases: Mapping[int, Basis], ranks: Mapping[int, int]) -> None:
    """Give these layers of the target their latents, in place, and switch them on. Raises ValueError for a
    layer with a sliding window."""
    config = target.config
    ranks_by_layer = tuple(ranks.get(i, 0) for i in range(config.num_layers))
    target.config = replace(config, mla_ranks=ranks_by_layer, use_mla_kv=True)
    for layer, result in bases.items():
        attention, rank = target.attentions[layer], ranks[layer]
        latent = Latent(target.config, rank)
        W, b = projection(attention)
        half = len(W) // 2
        _fill(latent.down, result.down[:rank] @ W, result.down[:rank] @ (b - result.mean))
        for part, rows in ((latent.k_up, slice(half)), (latent.v_up, slice(half, None))):
            _fill(part, result.up[rows, :rank], result.mean[rows])
        attention.latent, attention.use_latent = latent.requires_grad_(False).to(target.device), True


def detach(target: Decoder) -> None:
    """The target as it was before `attach`."""
    target.config = replace(target.config, mla_ranks=(), use_mla_kv=False)
    for attention in target.attentions:
        attention.latent, attention.use_latent = None, False


def _fill(part: Linear, weight: Tensor, bias: Tensor) -> None:
    part.weight = nn.Parameter(weight.float().contiguous())
    part.bias = nn.Parameter(bias.float())


@dataclass(frozen=True)
class Error:
    """Share of the variance of keys and of values that a rank loses, and of what attention makes of them."""

    layer: int
    rank: int
    k: float
    v: float
    loss: float


def errors(
    target: Decoder, bases: Mapping[int, Basis], moments: Mapping[int, Moments], ranks: Mapping[int, int]
) -> list[Error]:
    entries = []
    for layer, made in bases.items():
        of, left = moments[layer], made.residual(moments[layer], ranks[layer])
        M, half = metric(target.attentions[layer], of), len(left) // 2
        parts = slice(half), slice(half, None)
        k, v = (float(left.diagonal()[rows].sum() / of.cov.diagonal()[rows].sum()) for rows in parts)
        cost = float((M * left).sum() / (M * of.cov).sum())
        entries.append(Error(layer, ranks[layer], k, v, cost))
    return entries
