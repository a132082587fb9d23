"""Attention of many small blocks over one shared context, in parts merged by their log-sum-exp."""

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = -1e30  # finite: a row that sees nothing of a part gets weight exp(-1e30 - lse) = 0, not nan


@dataclass(frozen=True)
class Part:
    """Queries first..last (of N) against the context keys begin..end.

    `mask`: None where every one of these queries sees every one of these keys, else a float32
    [last - first, end - begin] of 0 and NEVER.
    """

    first: int
    last: int
    begin: int
    end: int
    mask: Tensor | None


def block_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    parts: tuple[Part, ...],
    block: int,
    scale: float,
) -> Tensor:
    """q [N,H,D], k and v [N,K,D] of N/block packed blocks; context_k and context_v [S,K,D] -> [N,H*D].

    A query sees all of its own block, and of the context what `parts` say (a query may stand in several
    parts, a key only once for each query). Work and memory follow the parts: no [N, S + N] grid exists
    on a CPU. Elsewhere the grid is built and handed to the plain reference.
    """
    if q.device.type != "cpu":
        return reference_block_attend(q, k, v, context_k, context_v, parts, block, scale)
    out: Tensor = _BlockFlash.apply(  # type: ignore[no-untyped-call]
        q, k, v, context_k, context_v, parts, block, scale
    )
    return out


def dense_mask(parts: tuple[Part, ...], N: int, S: int, block: int, device: torch.device) -> Tensor:
    """The grid that `parts` and the blocks stand for: [N, S + N] bool."""
    grid = torch.zeros(N, S + N, dtype=torch.bool, device=device)
    for part in parts:
        seen = True if part.mask is None else part.mask == 0
        grid[part.first : part.last, part.begin : part.end] = seen
    owner = torch.arange(N, device=device) // block
    grid[:, S:] = owner[:, None] == owner
    return grid


def reference_block_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    parts: tuple[Part, ...],
    block: int,
    scale: float,
) -> Tensor:
    N, H, D = q.shape
    S, K = context_k.shape[:2]
    allowed = dense_mask(parts, N, S, block, q.device)
    keys, values = (torch.cat(pair).float() for pair in ((context_k, k), (context_v, v)))
    scores = torch.einsum("nkgd,skd->kgns", q.float().reshape(N, K, H // K, D), keys) * scale
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("kgns,skd->nkgd", weights, values).reshape(N, H * D).to(q.dtype)


class _BlockFlash(torch.autograd.Function):
    """The flash kernel's backward rebuilds a part's weights as exp(score - lse) and takes
    rowsum(dout * out) itself, so given the merged out and lse it is right for every part alone.

    Query heads that share a kv head are folded into the rows, [K, N*G, D]: keys and values are read
    in place. Float32 throughout: the kernel is no faster in bfloat16 and its backward slower.
    """

    @staticmethod
    def forward(ctx, q, k, v, context_k, context_v, parts, block, scale):  # type: ignore[no-untyped-def]
        N, H, D = q.shape
        K = k.shape[1]
        G = H // K
        q_rows = _fold(q, K)
        k, v, context_k, context_v = (x.float().transpose(0, 1) for x in (k, v, context_k, context_v))
        own, own_lse = _flash(_blocks(q_rows, block * G), _blocks(k, block), _blocks(v, block), None, scale)
        out = own.transpose(0, 1).reshape(K, N * G, D)
        lse = own_lse.transpose(0, 1).reshape(K, N * G)
        for part in parts:
            rows, keys = slice(part.first * G, part.last * G), slice(part.begin, part.end)
            mask = _row_mask(part.mask, G)
            inputs = q_rows[None, :, rows], context_k[None, :, keys], context_v[None, :, keys]
            _merge(out[:, rows], lse[:, rows], *_flash(*inputs, mask, scale))
        ctx.save_for_backward(q_rows, k, v, context_k, context_v, out, lse)
        ctx.settings = parts, block, scale, q.dtype
        return _unfold(out, N).to(q.dtype).flatten(1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, context_k, context_v, out, lse = ctx.saved_tensors
        parts, block, scale, dtype = ctx.settings
        K, S, D = context_k.shape
        N = k.shape[1]
        G = q.shape[1] // N
        wide = _fold(grad.unflatten(1, (K * G, D)), K), q, out, lse[..., None]
        own = _blocks(k, block), _blocks(v, block)
        dq, dk, dv = _flash_backward([_blocks(x, block * G) for x in wide], *own, None, scale)
        dq = dq.transpose(0, 1).reshape(K, N * G, D)
        dk, dv = (x.transpose(1, 2).reshape(N, K, D).to(dtype) for x in (dk, dv))
        d_context_k, d_context_v = torch.zeros(2, K, S, D)
        for part in parts:
            rows, keys = slice(part.first * G, part.last * G), slice(part.begin, part.end)
            theirs = context_k[None, :, keys], context_v[None, :, keys]
            mask = _row_mask(part.mask, G)
            found = _flash_backward([x[None, :, rows] for x in wide], *theirs, mask, scale)
            dq[:, rows] += found[0][0]
            d_context_k[:, keys] += found[1][0]
            d_context_v[:, keys] += found[2][0]
        d_context = (x.transpose(0, 1).to(dtype) for x in (d_context_k, d_context_v))
        return _unfold(dq, N).to(dtype), dk, dv, *d_context, None, None, None


def _fold(x: Tensor, K: int) -> Tensor:
    """[N, K*G, D] -> [K, N*G, D] float32."""
    N, H, D = x.shape
    return x.view(N, K, H // K, D).transpose(0, 1).float().reshape(K, -1, D)


def _unfold(x: Tensor, N: int) -> Tensor:
    """[K, N*G, D] -> [N, K*G, D]."""
    K, _, D = x.shape
    return x.view(K, N, -1, D).transpose(0, 1).reshape(N, -1, D)


def _blocks(x: Tensor, rows: int) -> Tensor:
    """[K, A*rows, D] -> [A, K, rows, D], a view."""
    K, n, D = x.shape
    return x.view(K, n // rows, rows, D).transpose(0, 1)


def _row_mask(mask: Tensor | None, G: int) -> Tensor | None:
    return None if mask is None else mask.repeat_interleave(G, dim=0)


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """out [K,n,D] and lse [K,n], in place, with one more part [1,K,n,D], [1,K,n]."""
    total = torch.logaddexp(lse, more_lse[0])
    out.mul_((lse - total).exp_()[..., None]).addcmul_(more[0], (more_lse[0] - total).exp_()[..., None])
    lse.copy_(total)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """q [b,K,n,D], k and v [b,K,s,D] -> out [b,K,n,D], lse [b,K,n]."""
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    return found


def _flash_backward(
    wide: list[Tensor], k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """wide: grad, q and out [b,K,n,D], lse [b,K,n,1]; k and v [b,K,s,D] -> dq, dk, dv."""
    grad, q, out, lse = wide
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(grad, q, k, v, out, lse[..., 0], 0.0, False, attn_mask=mask, scale=scale)
    return dq, dk, dv
