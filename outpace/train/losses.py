"""Cross-entropy over a large vocabulary in chunks: the [rows, V] logits never exist at once."""

import torch
from torch import Tensor


CHUNK_LOGITS = 2**20  # a chunk of float32 logits of this many entries stays in cache


def chunked_nll(
    hidden: Tensor, head: Tensor, labels: Tensor, chunk: int | None = None
) -> Tensor:
    """hidden [n, C], head [V, C], labels [n] -> negative log-likelihood per row [n], float32.

    Logits exist for `chunk` rows at a time. Gradients reach `hidden`, and `head` where it wants one.
    """
    chunk = chunk or max(16, CHUNK_LOGITS // len(head))
    return _ChunkedNLL.apply(hidden, head, labels, chunk)


def reference_nll(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    logits = (hidden @ head.to(hidden.dtype).T).float()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


class _ChunkedNLL(torch.autograd.Function):
    """The row gradient (softmax - onehot) @ head is linear in the row's weight, so with a frozen head
    it is formed in the forward and only scaled in the backward; a head that learns costs one more
    product of logits there, because its gradient mixes the rows."""

    @staticmethod
    def forward(ctx, hidden, head, labels, chunk):  # type: ignore[override]
        head = head.to(hidden.dtype)
        nll = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        frozen = not ctx.needs_input_grad[1]
        rows = torch.empty_like(hidden) if frozen and ctx.needs_input_grad[0] else None
        for i in range(0, len(hidden), chunk):
            part = slice(i, i + chunk)
            logits = (hidden[part] @ head.T).float()
            lse = logits.logsumexp(-1)
            nll[part] = lse - logits.gather(1, labels[part, None]).squeeze(1)
            if rows is not None:
                rows[part] = _row_gradient(logits, lse, labels[part], None).to(head.dtype) @ head
        ctx.save_for_backward(hidden, head, labels, rows)
        ctx.chunk = chunk
        return nll

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        hidden, head, labels, rows = ctx.saved_tensors
        if rows is not None:
            return rows * grad[:, None].to(rows.dtype), None, None, None
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros_like(head, dtype=torch.float32)
        for i in range(0, len(hidden), ctx.chunk):
            part = slice(i, i + ctx.chunk)
            logits = (hidden[part] @ head.T).float()
            d = _row_gradient(logits, logits.logsumexp(-1), labels[part], grad[part])
            d = d.to(hidden.dtype)
            d_hidden[part] = d @ head
            d_head += d.T @ hidden[part]
        return d_hidden, d_head, None, None


def _row_gradient(logits: Tensor, lse: Tensor, labels: Tensor, scale: Tensor | None) -> Tensor:
    """(softmax - onehot) * scale, in place over the logits."""
    p = logits.sub_(lse[:, None]).exp_()
    p[torch.arange(len(p), device=p.device), labels] -= 1
    return p if scale is None else p.mul_(scale[:, None])
