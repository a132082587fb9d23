"""Attention of an unrolled draft: the first step's keys up to the query, and its own of later steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Unrolled:
    """R rows of text, packed: row r owns the first step's keys keys[r] .. keys[r+1] and the queries
    queries[r] .. queries[r+1]. Query n stands at key at[n], ascending within its row."""

    keys: list[int]  # [R+1]
    queries: list[int]  # [R+1]
    at: Tensor  # [N] int64

    @cached_property
    def rows(self) -> list["Row"]:
        """Those that have a query."""
        found = []
        for r in range(len(self.keys) - 1):
            begin, end = self.queries[r], self.queries[r + 1]
            if begin < end:
                first, last = int(self.at[begin]), int(self.at[end - 1])
                gaps = last - first != end - 1 - begin
                found.append(Row(slice(begin, end), self.keys[r], first, last, self.at[begin:end], gaps))
        return found


@dataclass(frozen=True)
class Row:
    queries: slice
    begin: int  # its first key,
    first: int  # the key its first query stands at,
    last: int  # and its last
    at: Tensor  # [n] int64
    gaps: bool  # some keys between first and last have no query

    def allowed(self, ahead: int, window: int) -> Tensor:
        """[n, last + 1 - begin] bool: key s is seen from index t where s <= t; a window hides what lies that
        far behind the query's position, t + ahead."""
        keys = torch.arange(self.begin, self.last + 1, device=self.at.device)
        at = self.at[:, None]
        return (keys <= at) & (keys > at + ahead - window) if window else keys <= at


def unrolled_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    layout: Unrolled,
    window: int,
    scale: float,
) -> Tensor:
    """q [N,H,D] of one step; k and v [S,K,D] of the first; own: k and v [N,K,D] of every later step up to the
    query's own, each at the queries' indices -> [N, H*D]. The first step itself has none: N = S then.

    Keys of step 0 come through the flash kernel, and meet the few own ones by their log-sum-exp; off the CPU
    through the plain reference. A window must be longer than there are steps.
    """
    assert not window or window > len(own)
    if q.device.type != "cpu":
        return reference_unrolled_attend(q, k, v, own, layout, window, scale)
    tensors = (t for pair in own for t in pair)
    out: Tensor = _Unrolled.apply(q, k, v, layout, window, scale, *tensors)  # type: ignore[no-untyped-call]
    return out


def reference_unrolled_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    layout: Unrolled,
    window: int,
    scale: float,
) -> Tensor:
    """The same with all scores of a row at once, [n, T + own]."""
    group = q.shape[1] // k.shape[1]
    found = []
    for row in layout.rows:
        queries, keys = q[row.queries].float(), slice(row.begin, row.last + 1)
        near_k, near_v = (t[keys].float().repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("nhd,shd->hns", queries, near_k) * scale
        scores = scores.masked_fill(~row.allowed(len(own), window), -torch.inf)
        mine = [[t[row.queries].float().repeat_interleave(group, dim=1) for t in pair] for pair in own]
        theirs = [torch.einsum("nhd,nhd->hn", queries, own_k)[..., None] * scale for own_k, _ in mine]
        weights = torch.cat((scores, *theirs), dim=-1).softmax(-1)
        out = torch.einsum("hns,shd->nhd", weights[..., : near_k.shape[0]], near_v)
        for i, (_, own_v) in enumerate(mine):
            out = out + weights[..., near_k.shape[0] + i].T[..., None] * own_v
        found.append(out)
    return torch.cat(found).to(q.dtype).flatten(1)


class _Unrolled(torch.autograd.Function):
    """Softmax over keys that come in parts: each part gives its out and log-sum-exp, and out = sum_i out_i
    exp(lse_i - lse). The backward of a part needs only the joint out and lse: its weights are exp(score -
    lse), and rowsum(grad * out) is the same for all."""

    @staticmethod
    def forward(ctx, q, k, v, layout, window, scale, *own):  # type: ignore[no-untyped-def]
        group, ahead = q.shape[1] // k.shape[1], len(own) // 2
        out = torch.zeros(q.shape, dtype=torch.float32)
        lse = torch.full(q.shape[:2], -torch.inf)  # [N,H]
        for row in layout.rows:
            for keys, causal, mask in _parts(row, ahead, window, q.dtype):
                given = (_heads(q[row.queries]), *(_heads(t[keys], group) for t in (k, v)))
                part, part_lse = flash(*given, 0.0, causal, attn_mask=mask, scale=scale)
                joined = out[row.queries], lse[row.queries]
                _merge(*joined, part[0].transpose(0, 1).float(), part_lse[0].transpose(0, 1))
        wide = q.float()
        for own_k, own_v in zip(own[::2], own[1::2], strict=True):
            score = (wide * _wide(own_k, group)).sum(-1) * scale
            _merge(out, lse, _wide(own_v, group), score)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *own)
        ctx.layout, ctx.window, ctx.scale = layout, window, scale
        return out.flatten(1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, out, lse, *own = ctx.saved_tensors
        group, ahead, scale = q.shape[1] // k.shape[1], len(own) // 2, ctx.scale
        grad = grad.view(q.shape)
        dq = torch.zeros(q.shape, dtype=torch.float32)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for row in ctx.layout.rows:
            mine = [_heads(t[row.queries]) for t in (grad, q)]
            joint = _heads(out[row.queries]), lse[row.queries].T.contiguous()[None]
            for keys, causal, mask in _parts(row, ahead, ctx.window, q.dtype):
                given = (*mine, *(_heads(t[keys], group) for t in (k, v)), *joint)
                found = flash_backward(*given, 0.0, causal, attn_mask=mask, scale=scale)
                dq[row.queries] += found[0][0].transpose(0, 1)
                for whole, part in ((dk, found[1]), (dv, found[2])):
                    whole[keys] += _grouped(part[0].transpose(0, 1), group)
        wide, by_head = q.float(), grad.float()
        delta = (by_head * out.float()).sum(-1)
        d_own = []
        for own_k, own_v in zip(own[::2], own[1::2], strict=True):
            wide_k, wide_v = _wide(own_k, group), _wide(own_v, group)
            weight = ((wide * wide_k).sum(-1) * scale - lse).exp()
            ds = weight * ((by_head * wide_v).sum(-1) - delta) * scale
            dq += ds[..., None] * wide_k
            d_own.append(_grouped(ds[..., None] * wide, group).to(own_k.dtype))
            d_own.append(_grouped(weight[..., None] * by_head, group).to(own_v.dtype))
        return dq.to(q.dtype), dk, dv, None, None, None, *d_own


def _parts(row: Row, ahead: int, window: int, dtype: torch.dtype) -> list[tuple[slice, bool, Tensor | None]]:
    """The first step's keys that the row's queries see, as (keys, causal, mask) the flash kernel takes: what
    lies before all queries, and a triangle; a mask where there are gaps or a window."""
    if row.gaps or window:
        allowed = row.allowed(ahead, window)
        mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf)
        return [(slice(row.begin, row.last + 1), False, mask[None, None])]
    triangle = (slice(row.first, row.last + 1), True, None)
    return [triangle] if row.first == row.begin else [(slice(row.begin, row.first), False, None), triangle]


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """out [n,H,D] and lse [n,H] float32 become those of both key sets."""
    joint = torch.logaddexp(lse, more_lse)
    out.mul_((lse - joint).exp()[..., None]).addcmul_(more, (more_lse - joint).exp()[..., None])
    lse.copy_(joint)


def _heads(x: Tensor, group: int = 1) -> Tensor:
    """[n,K,D] -> [1, K*group, n, D]."""
    x = x.repeat_interleave(group, dim=1) if group > 1 else x
    return x.transpose(0, 1)[None]


def _wide(x: Tensor, group: int) -> Tensor:
    """[n,K,D] -> [n, K*group, D] float32."""
    return x.float().repeat_interleave(group, dim=1)


def _grouped(x: Any, group: int) -> Tensor:
    """[n, K*group, D] -> [n,K,D]: what the heads of a group say together."""
    n, H, D = x.shape
    summed: Tensor = x.float().view(n, H // group, group, D).sum(2) if group > 1 else x
    return summed
