"""Top-k candidates of each row of logits, and the walk that picks among them (DFlash 2)."""

import torch
from torch import Tensor

from outpace.kernels import bindings, draft_bindings
from outpace.kernels.bindings import use_kernel


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [..., N] -> the min(k, N) largest of each row, falling, the first among equals first: ids int64
    and values float32 [..., k]; and the rows' log-sum-exp [...] float32."""
    k = min(k, logits.shape[-1])
    if use_kernel(logits) and logits.is_contiguous() and k <= bindings.MOST_CANDIDATES:
        ids, values, lse = bindings.top(logits.view(-1, logits.shape[-1]), k)
        shape = logits.shape[:-1]
        return ids.view(*shape, k), values.view(*shape, k), lse.view(shape)
    return reference_top_k(logits, k)


def reference_top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float()
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return ids[..., :k], values[..., :k], logits.logsumexp(-1)


def walkable(k: int, *books: Tensor) -> bool:
    """Whether the kernels take k candidates of each position, and these codebooks."""
    return k <= bindings.MOST_CANDIDATES and len({book.dtype for book in books}) <= 1


def by_kernel(h: Tensor, ids: Tensor, before: Tensor, after: Tensor) -> bool:
    return use_kernel(h) and walkable(ids.shape[-1], before, after)


def coupled_walk(
    last: Tensor,
    ids: Tensor,
    values: Tensor,
    lse: Tensor,
    h: Tensor,
    books: tuple[Tensor, Tensor],
    keys: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """As `walk`, where `by_kernel`: of each position's candidates the one with the largest
    score / temperature + noise, which is of the position's key, keys [B, n] int64, and the token."""
    inputs = tuple(t.contiguous() for t in (last, ids, values, lse, h, *books))
    return draft_bindings.walk(inputs, (keys.contiguous(), torch.full((len(last),), temperature)))


def walk(
    last: Tensor, ids: Tensor, values: Tensor, lse: Tensor, h: Tensor, before: Tensor, after: Tensor
) -> tuple[Tensor, Tensor]:
    """From `last` [B] int64 on, of each position's candidates (ids and their logits `values` [B, n, k], h
    [B, n, r], codebooks [V, r]) the one with the largest score after the one chosen before it:

        S_t(a, b) = values_t(b) + <before[a] * h_t, after[b]>

    -> the chosen ids [B, n] int64, and how likely each was, [B, n] float32: its share of the row, whose
    log-sum-exp `lse` [B, n] is over all logits; what is no candidate keeps its own.
    """
    if by_kernel(h, ids, before, after):
        inputs = last, ids, values, lse, h, before, after
        return draft_bindings.walk(tuple(t.contiguous() for t in inputs))
    return reference_walk(last, ids, values, lse, h, before, after)


def reference_walk(
    last: Tensor, ids: Tensor, values: Tensor, lse: Tensor, h: Tensor, before: Tensor, after: Tensor
) -> tuple[Tensor, Tensor]:
    chosen, sure = [], []
    for t in range(ids.shape[1]):
        scores = pair_scores(last, ids[:, t], values[:, t], h[:, t], before, after)
        best, place = scores.max(-1)
        last = ids[:, t].gather(1, place[:, None])[:, 0]
        chosen.append(last)
        sure.append(share(best, scores, values[:, t], lse[:, t]))
    return torch.stack(chosen, dim=1), torch.stack(sure, dim=1)


def share(best: Tensor, scores: Tensor, values: Tensor, lse: Tensor) -> Tensor:
    """How likely a candidate of score `best` [...] is in its whole row, where the candidates of logits
    `values` [..., k] have `scores` [..., k] instead, and `lse` [...] is over all the row's logits."""
    outside = (1 - (values - lse[..., None]).exp().sum(-1)).clamp(min=0).log() + lse
    return (best - torch.logaddexp(scores.logsumexp(-1), outside)).exp()


def pair_scores(
    previous: Tensor, ids: Tensor, values: Tensor, h: Tensor, before: Tensor, after: Tensor
) -> Tensor:
    """previous [...], ids and values [..., k], h [..., r] -> S [..., k] float32."""
    pairs = (before[previous].float() * h.float())[..., None, :] * after[ids].float()
    return values.float() + pairs.sum(-1)


def all_pairs(
    previous: Tensor, ids: Tensor, values: Tensor, h: Tensor, before: Tensor, after: Tensor
) -> Tensor:
    """previous [..., m], ids and values [..., k], h [..., r] -> S of every candidate after every
    predecessor [..., m, k] float32."""
    left = before[previous].float() * h.float()[..., None, :]
    return values.float()[..., None, :] + left @ after[ids].float().mT
