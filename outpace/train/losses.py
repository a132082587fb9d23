"""Cross-entropy over a large vocabulary in chunks, and how the positions of a block are weighed."""

import torch
from torch import Tensor

CHUNK_LOGITS = 2**20  # a chunk of float32 logits of this many entries stays in cache
LEAST_ROWS = 128  # of a chunk: fewer, and reading the head costs more than the product


def chunked_nll(hidden: Tensor, head: Tensor, labels: Tensor, chunk: int | None = None) -> Tensor:
    """hidden [n, C], head [V, C], labels [n] -> negative log-likelihood per row [n], float32.

    Logits exist for `chunk` rows at a time. Gradients reach `hidden`, and `head` where it wants one.
    """
    return chunked_nll_and_hits(hidden, head, labels, chunk)[0]


def chunked_nll_and_hits(
    hidden: Tensor, head: Tensor, labels: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """chunked_nll, and whether no logit of the row exceeds the label's [n] bool."""
    chunk = chunk or max(LEAST_ROWS, CHUNK_LOGITS // len(head))
    nll, hits = _ChunkedNLL.apply(hidden, head, labels, chunk)  # type: ignore[no-untyped-call]
    return nll, hits


def reference_nll(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    logits = (hidden @ head.to(hidden.dtype).T).float()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def reference_hits(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    logits = (hidden @ head.to(hidden.dtype).T).float()
    return logits.gather(1, labels[:, None])[:, 0] == logits.amax(-1)


class _ChunkedNLL(torch.autograd.Function):
    """The row gradient (softmax - onehot) @ head is linear in the row's weight, so with a frozen head
    it is formed in the forward and only scaled in the backward; a head that learns costs one more
    product of logits there, because its gradient mixes the rows."""

    @staticmethod
    def forward(ctx, hidden, head, labels, chunk):  # type: ignore[no-untyped-def]
        head = head.to(hidden.dtype)
        nll = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        hits = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        frozen = not ctx.needs_input_grad[1]
        rows = torch.empty_like(hidden) if frozen and ctx.needs_input_grad[0] else None
        for i in range(0, len(hidden), chunk):
            part = slice(i, i + chunk)
            logits = (hidden[part] @ head.T).float()
            top, said = logits.amax(-1), logits.gather(1, labels[part, None]).squeeze(1)
            p = logits.softmax(-1)  # one fused pass, where logsumexp and exp would be five
            nll[part] = top - p.amax(-1).log() - said
            hits[part] = said == top
            if rows is not None:
                torch.mm(_less_one(p, labels[part]).to(head.dtype), head, out=rows[part])
        ctx.save_for_backward(hidden, head, labels, rows)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(hits)
        return nll, hits

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        hidden, head, labels, rows = ctx.saved_tensors
        if rows is not None:
            return rows * grad[:, None].to(rows.dtype), None, None, None
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros_like(head, dtype=torch.float32)
        for i in range(0, len(hidden), ctx.chunk):
            part = slice(i, i + ctx.chunk)
            p = (hidden[part] @ head.T).float().softmax(-1)
            d = _less_one(p, labels[part]).mul_(grad[part, None]).to(hidden.dtype)
            d_hidden[part] = d @ head
            d_head += d.T @ hidden[part]
        return d_hidden, d_head, None, None


def _less_one(p: Tensor, labels: Tensor) -> Tensor:
    """softmax - onehot, in place."""
    p[torch.arange(len(p), device=p.device), labels] -= 1
    return p


def default_gamma(block_size: int) -> float:
    """7, 5 and 4 for blocks of 16, 10 and 8 (DFlash, section 4.3); straight lines between and beyond."""
    if block_size >= 10:
        return 5 + (block_size - 10) / 3
    return max(1.0, 4 + (block_size - 8) / 2)


def decay_weights(valid: Tensor, gamma: float) -> Tensor:
    """valid [A, n] bool -> exp(-(k-1)/gamma) for k = 1..n, 0 where not valid, float32."""
    k = torch.arange(valid.shape[1], device=valid.device)
    return torch.exp(-k / gamma) * valid


def dpace_weights(nll: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): nll and valid [A, n] -> w_j = sum_{m >= j} P_m, P_m = prod_{i <= m} a~_i,
    a~ = (1 - alpha) exp(-nll) + alpha. What is not valid counts as 1 in the product and is left out of
    the sum. No gradient flows through a weight."""
    smoothed = (1 - alpha) * (-nll.detach()).exp() + alpha
    prefix = smoothed.masked_fill(~valid, 1.0).cumprod(1) * valid
    return prefix.flip(1).cumsum(1).flip(1) * valid
