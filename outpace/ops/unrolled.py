"""Attention of an unrolled draft: the first step's keys up to the query, and its own of later steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

TILE = 128  # queries that share a mask: fewer, and calls cost more than the hidden scores

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Unrolled:
    """R rows of text, packed: row r owns the first step's keys keys[r] .. keys[r+1] and the queries
    queries[r] .. queries[r+1]. Query n is at key at[n], ascending within its row."""

    keys: list[int]  # [R+1]
    queries: list[int]  # [R+1]
    at: Tensor  # [N] int64

    @cached_property
    def rows(self) -> list["UnrolledRow"]:
        """Those that have a query."""
        items = []
        for r in range(len(self.keys) - 1):
            begin, end = self.queries[r], self.queries[r + 1]
            if begin < end:
                first, last = int(self.at[begin]), int(self.at[end - 1])
                gaps = last - first != end - 1 - begin
                items.append(
                    UnrolledRow(slice(begin, end), self.keys[r], first, last, self.at[begin:end], gaps)
                )
        return items


@dataclass(frozen=True)
class UnrolledRow:
    queries: slice
    begin: int  # its first key,
    first: int  # the key its first query is at,
    last: int  # and its last
    at: Tensor  # [n] int64
    gaps: bool  # some keys between first and last have no query

    def allowed(self, ahead: int, window: int) -> Tensor:
        """[n, last + 1 - begin] bool: key s is seen from index t where s <= t; a window hides what lies that
        far behind the query's position, t + ahead."""
        return _seen(self.at, self.begin, self.last, ahead, window)


def _seen(at: Tensor, first: int, last: int, ahead: int, window: int) -> Tensor:
    """at [n] -> [n, last + 1 - first]."""
    keys, at = torch.arange(first, last + 1, device=at.device), at[:, None]
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
    items = []
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
        items.append(out)
    return torch.cat(items).to(q.dtype).flatten(1)


class _Unrolled(torch.autograd.Function):
    """Softmax over keys that come in parts: each part gives its out and log-sum-exp, and out = sum_i out_i
    exp(lse_i - lse). The backward of a part needs only the joint out and lse: its weights are exp(score -
    lse), and rowsum(grad * out) is the same for all."""

    @staticmethod
    def forward(ctx, q, k, v, layout, window, scale, *own):  # type: ignore[no-untyped-def]
        group, ahead = q.shape[1] // k.shape[1], len(own) // 2
        out = torch.zeros(q.shape, dtype=torch.float32)
        lse = torch.full(q.shape[:2], -torch.inf)  # [N,H]
        for queries, keys, mask, causal in _parts(layout, ahead, window):
            given = (_heads(q[queries]), *(_heads(t[keys], group) for t in (k, v)))
            bias = None if mask is None else _bias(mask, q.dtype)
            part, part_lse = flash(*given, 0.0, causal, attn_mask=bias, scale=scale)
            _merge(out[queries], lse[queries], part[0].transpose(0, 1).float(), part_lse[0].transpose(0, 1))
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
        # float32: the kernel's backward is faster in it than in bfloat16, and dk and dv are sums of parts
        wide_k, wide_v = k.float(), v.float()
        wide, by_head, joint = q.float(), grad.float(), out.float()
        dq, dk, dv = (torch.zeros_like(t) for t in (wide, wide_k, wide_v))
        for queries, keys, mask, causal in _parts(ctx.layout, ahead, ctx.window):
            given = [_heads(t[queries]) for t in (by_head, wide)]
            given += [_heads(t[keys], group) for t in (wide_k, wide_v)]
            given += [_heads(joint[queries]), lse[queries].T.contiguous()[None]]
            bias = None if mask is None else _bias(mask, torch.float32)
            result = flash_backward(*given, 0.0, causal, attn_mask=bias, scale=scale)
            dq[queries] += result[0][0].transpose(0, 1)
            for whole, part in ((dk, result[1]), (dv, result[2])):
                whole[keys] += _grouped(part[0].transpose(0, 1), group)
        delta = (by_head * joint).sum(-1)
        d_own = []
        for own_k, own_v in zip(own[::2], own[1::2], strict=True):
            near_k, near_v = _wide(own_k, group), _wide(own_v, group)
            weight = ((wide * near_k).sum(-1) * scale - lse).exp()
            ds = weight * ((by_head * near_v).sum(-1) - delta) * scale
            dq += ds[..., None] * near_k
            d_own.append(_grouped(ds[..., None] * wide, group).to(own_k.dtype))
            d_own.append(_grouped(weight[..., None] * by_head, group).to(own_v.dtype))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, *d_own


def _parts(layout: Unrolled, ahead: int, window: int) -> Iterator[tuple[slice, slice, Tensor | None, bool]]:
    """Queries, the first step's keys that they see, a mask [n, keys], and whether they are a triangle: of a
    row without gaps all that lies before its queries, and a triangle; else tiles of queries, with masks."""
    for row in layout.rows:
        if row.gaps or window:
            for begin in range(0, len(row.at), TILE):
                at = row.at[begin : begin + TILE]
                last, first = int(at[-1]), row.begin
                if window:
                    first = max(first, int(at[0]) + ahead - window + 1)
                queries = slice(row.queries.start + begin, row.queries.start + begin + len(at))
                yield queries, slice(first, last + 1), _seen(at, first, last, ahead, window), False
        else:
            if row.first > row.begin:
                yield row.queries, slice(row.begin, row.first), None, False
            yield row.queries, slice(row.first, row.last + 1), None, True


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)[None, None]


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
