"""attend(q, k, v, ...) -> out: the plain reference, and the flash form used on whole sequences.

Letters, for the whole package: B batch, T new tokens, S remembered tokens, H query heads, K kv heads,
G = H/K, D head dim, C model dim, F expert width, E experts, N proposal nodes, V vocabulary, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels import bindings
from outpace.kernels.bindings import use_kernel, use_triton
from outpace.kv.metadata import FEW, KVView

if bindings.TRITON:
    from outpace.kernels.triton_attention import HEAD_DIMS, cached_attention

MOST_FLASH = 256  # numbers of a head that CUDA's flash kernel takes


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    """The reference. q [B,T,H,D], k and v [B,K,S,D], allowed [B,T,S] bool, sinks [H] -> [B,T,H*D].

    Query head h reads kv head h // (H/K). A sink is one more logit per query head, unscaled, in the
    denominator only. Softmax in float32.
    """
    B, T, H, D = q.shape
    K = k.shape[1]
    grouped = q.float().reshape(B, T, K, H // K, D)
    scores = torch.einsum("btkgd,bksd->bkgts", grouped, k.float()) * scale
    # not -inf: a row of padding may see nothing at all, and its NaN would reach others as 0 * NaN
    scores = scores.masked_fill(~allowed[:, None, None], torch.finfo(torch.float32).min)
    if sinks is not None:
        sink = sinks.float().reshape(1, K, H // K, 1, 1).expand(B, -1, -1, T, 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = torch.einsum("bkgts,bksd->btkgd", weights, v.float())
    return out.reshape(B, T, H * D).to(q.dtype)


def attend_view(q: Tensor, view: KVView, window: int, sinks: Tensor | None, scale: float) -> Tensor:
    """New tokens against what their layer remembers: q [B,T,H,D] -> [B,T,H*D]. The one place where a
    kernel is chosen for cached attention. For a chain of more than FEW the flash kernel's blocked products
    win."""
    (B, T, H, D), step = q.shape, view.step
    if D % 8 == 0 and use_kernel(q):
        inputs = q, view.k, view.v, step.starts, window, sinks, scale
        rules: dict[str, Any] | None = None
        if view.lists is not None:
            rules = {"lists": view.lists}
        elif step.tree is not None:
            # of any width: the flash kernel's answers are not autoregressive decoding's to the bit
            rules = {"tree": step.tree.within(window), "depth": step.tree.depth, "first": view.first}
        elif T <= FEW:
            rules = {"both_ways": step.both_ways, "first": view.first}
        if rules is not None and view.values is None:
            return bindings.attend(*inputs, **rules)
        if rules is not None and view.values is not None:
            kv_share = torch.empty(B, T, H)
            latents = bindings.attend(*inputs, **rules, kv_share=kv_share).unflatten(-1, (H, -1))
            return view.values(latents, kv_share)
    assert view.values is None, "latents mean values where the kernel runs"
    one_way = not step.both_ways and step.tree is None and view.lists is None
    if T > FEW and not any(step.start) and one_way:  # nothing is remembered yet
        new = slice(T) if view.first is None else slice(-T, None)
        k, v = (x[:, :, new].to(q.dtype) for x in (view.k, view.v))
        return causal_attend(q, k, v, window, sinks, scale)
    if use_triton(q) and view.lists is None and D in HEAD_DIMS:
        return in_triton(q, view, window, sinks, scale)
    allowed = view.allowed(window)
    if T <= FEW:
        return attend(q, view.k, view.v, allowed, sinks, scale)
    if q.device.type != "cpu":  # few queries at once: their scores are [B,H,T,S] float32
        parts = zip(q.split(FEW, dim=1), allowed.split(FEW, dim=1), strict=True)
        return torch.cat([attend(part, view.k, view.v, seen, sinks, scale) for part, seen in parts], dim=1)
    k, v = (x.to(q.dtype).repeat_interleave(H // x.shape[1], dim=1) for x in (view.k, view.v))
    mask = _bias(allowed, q.dtype)[:, None]
    out = SinkFlash.apply(q.transpose(1, 2), k, v, sinks, mask, scale)
    return out.transpose(1, 2).reshape(B, T, H * D)


def in_triton(q: Tensor, view: KVView, window: int, sinks: Tensor | None, scale: float) -> Tensor:
    """`attend_view` by a kernel that reads no more than is remembered."""
    step, tree = view.step, None
    if step.tree is not None:
        tree = step.tree.depth, step.tree.within(window)
    known = step.starts, step.counts_tensor, step.held, window, sinks, scale
    return cached_attention(q, view.k, view.v, *known, first=view.first, both_ways=step.both_ways, tree=tree)


def causal(T: int, window: int, device: torch.device) -> Tensor:
    """[T, T] bool: row t sees columns max(0, t-window+1) .. t; window 0 is no window."""
    t = torch.arange(T, device=device)
    behind = t[:, None] - t
    return (behind >= 0) & (behind < window) if window else behind >= 0


@dataclass(frozen=True)
class Packed:
    """Sequences end to end in one row of N tokens: `positions` [1,N] of each token in its own sequence,
    `cu_seqlens` [R+1] int32, where each of them begins and the last one ends, and the longest's length."""

    positions: Tensor
    cu_seqlens: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Packed":
        ends = torch.tensor([0, *lengths]).cumsum(0)
        positions = torch.arange(int(ends[-1])) - ends[:-1].repeat_interleave(torch.tensor(lengths))
        return cls(positions[None], ends.to(torch.int32), max(lengths))

    def to(self, device: torch.device) -> "Packed":
        return Packed(self.positions.to(device), self.cu_seqlens.to(device), self.longest)

    def allowed(self, window: int) -> Tensor:
        """[1,N,N] bool: each token sees those before it in its own sequence."""
        begin = torch.arange(self.positions.shape[1], device=self.positions.device) - self.positions
        same = begin[0, :, None] == begin
        return (same & causal(len(same), window, same.device))[None]


def causal_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    sinks: Tensor | None,
    scale: float,
    packed: Packed | None = None,
) -> Tensor:
    """Whole sequences without a cache: q [B,T,H,D], k and v [B,K,T,D] -> [B,T,H*D]; with `packed`, those that
    lie end to end in one row.

    Without ever forming [T, T] scores: numbers of two bytes by a flash kernel on a GPU and by the C kernel in
    training on a CPU; else on a CPU by torch's flash kernel, with a band of two window-wide tiles per query
    tile where there is a window. Elsewhere through the reference.
    """
    B, T, H, D = q.shape
    on_cuda = q.device.type == "cuda" and q.element_size() == 2 and D % 8 == 0 and D <= MOST_FLASH
    if on_cuda or _by_kernel(q):
        ends = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
        ends, longest = (ends, T) if packed is None else (packed.cu_seqlens, packed.longest)
        rows = (x.flatten(0, 1) for x in (q, k.transpose(1, 2), v.transpose(1, 2)))
        if on_cuda:
            out = DeviceFlash.apply(*rows, ends, longest, window, sinks, scale)  # type: ignore[no-untyped-call]
        else:
            out = Sequences.apply(*rows, ends, window, sinks, scale)  # type: ignore[no-untyped-call]
        return out.view(B, T, H * D)  # type: ignore[no-any-return]
    if q.device.type != "cpu":
        seen = causal(T, window, q.device).expand(B, -1, -1) if packed is None else packed.allowed(window)
        return attend(q, k, v, seen, sinks, scale)
    if packed is not None:
        lengths = packed.cu_seqlens.diff().tolist()
        each = zip(q.split(lengths, dim=1), k.split(lengths, dim=2), v.split(lengths, dim=2), strict=True)
        return torch.cat([causal_attend(*some, window, sinks, scale) for some in each], dim=1)
    group = H // k.shape[1]
    q = q.transpose(1, 2)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    if not window or T <= 2 * window:
        mask = _bias(causal(T, window, q.device), q.dtype) if window and T > window else None
        out = SinkFlash.apply(q, k, v, sinks, mask, scale)
    else:
        out = _banded(q, k, v, window, sinks, scale)
    return out.transpose(1, 2).reshape(B, T, H * D)


def _by_kernel(q: Tensor) -> bool:
    """Whether the C kernel takes whole sequences: bfloat16 that records a gradient."""
    trained = q.dtype == torch.bfloat16 and torch.is_grad_enabled() and q.shape[-1] % 64 == 0
    return trained and use_kernel(q, backward=True) and bindings.bfloat16()


def _banded(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None, scale: float) -> Tensor:
    """Tiles of `window` queries against their own and the previous tile of keys. All [B,H,T,D]."""
    B, H, T, D = q.shape
    n = -(-T // window)
    pad = n * window - T
    q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))

    def tiles(x: Tensor) -> Tensor:  # [B,H,n*W,D] -> [B*n,H,W,D]
        return x.reshape(B, H, n, window, D).transpose(1, 2).reshape(B * n, H, window, D)

    def pairs(x: Tensor) -> Tensor:  # previous tile next to the own one: [B*n,H,2W,D]
        before = F.pad(x, (0, 0, window, 0))[:, :, : n * window]
        return torch.cat((tiles(before), tiles(x)), dim=2)

    row = torch.arange(window)[:, None]
    column = torch.arange(2 * window)
    band = (column > row) & (column <= row + window)  # own tile starts at column W
    band = band.expand(n, -1, -1).clone()
    band[0, :, :window] = False
    mask = _bias(band, q.dtype)[:, None].repeat(B, 1, 1, 1)
    out = SinkFlash.apply(tiles(q), pairs(k), pairs(v), sinks, mask, scale)
    return out.reshape(B, n, H, window, D).transpose(1, 2).reshape(B, H, n * window, D)[:, :, :T]


def _bias(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf)


class SinkFlash(torch.autograd.Function):
    """CPU flash attention with sinks. q, k, v [B,H,T|S,D]; mask None means causal (T == S).

    With a sink the softmax denominator grows from exp(lse) to exp(lse') = exp(lse) + exp(sink), so
    out' = out * exp(lse - lse'). The flash backward needs only (out', lse'): it rebuilds the weights
    as exp(score - lse') and takes rowsum(dout * out') itself.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, mask, scale):  # type: ignore[no-untyped-def]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        if sinks is not None:
            less, lse = _sink_share(lse, sinks)
            out = (out.float() * less[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, mask, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, sinks, mask, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
        )
        inner = (grad.float() * out.float()).sum(-1)
        return dq, dk, dv, None if sinks is None else _sink_gradient(inner, lse, sinks), None, None


class DeviceFlash(torch.autograd.Function):
    """The same on CUDA, for sequences end to end: q [N,H,D], k and v [N,K,D], `ends` [R+1] int32 as
    `cu_seqlens` of a Packed, `window` 0 for none."""

    @staticmethod
    def forward(ctx, q, k, v, ends, longest, window, sinks, scale):  # type: ignore[no-untyped-def]
        ctx.band = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
        rules = ends, ends, longest, longest, 0.0, True
        out, lse, *state, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *rules, False, scale=scale, **ctx.band
        )
        if sinks is not None:
            less, lse = _sink_share(lse, sinks)
            out = (out.float() * less.mT[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, ends, sinks, out, lse, *state)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, ends, sinks, out, lse, *state = ctx.saved_tensors
        rules = ends, ends, ctx.longest, ctx.longest, 0.0, True
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, lse, *rules, *state, scale=ctx.scale, **ctx.band
        )
        inner = (grad.float() * out.float()).sum(-1).mT
        dsinks = None if sinks is None else _sink_gradient(inner, lse, sinks)
        return dq, dk, dv, None, None, None, dsinks, None


class Sequences(torch.autograd.Function):
    """The same on a CPU, by the C kernel."""

    @staticmethod
    def forward(ctx, q, k, v, ends, window, sinks, scale):  # type: ignore[no-untyped-def]
        inputs = q.contiguous(), k.contiguous(), v.contiguous()
        floats, ends = None if sinks is None else sinks.float(), ends.long()
        out, lse = bindings.sequences(inputs, floats, ends, window, scale)
        ctx.save_for_backward(*inputs, ends, sinks, out, lse)
        ctx.rules = window, scale
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, ends, sinks, out, lse = ctx.saved_tensors
        *grads, inner = bindings.sequences_backward((q, k, v), ends, out, lse, grad.contiguous(), *ctx.rules)
        return *grads, None, None, None if sinks is None else _sink_gradient(inner.T, lse.T, sinks), None


def _sink_share(lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """lse [..., H, T], sinks [H] -> what the sinks leave of the weights, and lse with them, both like lse."""
    total = torch.logaddexp(lse, sinks.float()[:, None])
    return (lse - total).exp(), total


def _sink_gradient(inner: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """inner = rowsum(dout * out) and lse [..., H, T] -> [H]."""
    share = (sinks.float()[:, None] - lse).exp()  # weight of the sink
    return -(share * inner).sum(-1).view(-1, len(sinks)).sum(0).to(sinks.dtype)
