"""Route tokens to experts, run each expert once for all its tokens, weigh the results back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels import bindings, expert_bindings
from outpace.kernels.bindings import captured, use_kernel, use_triton
from outpace.ops import mxfp4
from outpace.ops.norm import ALPHA, clamped_swiglu, silu_mul
from outpace.ops.quant import Quant, Weight, dense, round_activations

Packed = tuple[Tensor, Tensor]  # MXFP4 blocks and scales, as safetensors hold them
Experts = Tensor | Packed | Quant  # [E, N, K]
MOST_GATHERED = 64  # (token, choice) pairs that bring their matrices along
MOST_PACKED = 32768  # pairs that Triton unpacks for: more than a pass of decoding has: its bits hang on it
ROUNDED = 128  # rows of an expert in training, a multiple: a new shape costs the library a new kernel
MOST_TOKENS = 128  # tokens a call of the kernel: what lies between up and down stays in the cache
if bindings.TRITON:
    from outpace.kernels.triton_experts import Tiles, down_product, up_product


def router_logits(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [M,C], weight [E,C] -> [M,E] float32."""
    return F.linear(x.float(), dense(weight), None if bias is None else bias.float())


def route(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    k: int,
    *,
    softmax_first: bool = False,
    renormalise: bool = True,
) -> tuple[Tensor, Tensor]:
    """x [M,C], weight [E,C] -> experts [M,k] int64 and their weights [M,k] float32, largest first.

    gpt-oss takes the top k logits first and softmaxes those; Qwen3-MoE softmaxes all, then takes
    the top k and, with `norm_topk_prob`, renormalises.
    """
    if use_kernel(x) and isinstance(weight, Tensor):
        return bindings.route(x, weight, bias, k, softmax_first, renormalise)
    logits = router_logits(x, weight, bias)
    if not softmax_first:
        top, experts = logits.topk(k, dim=-1)
        return experts, top.softmax(-1)
    top, experts = logits.softmax(-1).topk(k, dim=-1)
    if renormalise:
        top = top / top.sum(-1, keepdim=True)
    return experts, top


class Matrices(NamedTuple):
    """Of a layer's experts: see `run_experts`."""

    up: Experts
    up_bias: Tensor | None
    down: Experts
    down_bias: Tensor | None
    limit: float | None
    gate: Experts | None = None
    gate_bias: Tensor | None = None
    rounded: bool = False

    def round(self, x: Tensor) -> Tensor:
        """What meets a matrix."""
        if not self.rounded:
            return x
        return round_activations(x, self.up, self.down, *(() if self.gate is None else (self.gate,)))

    def activation(self, h: Tensor) -> Tensor:
        """Of gates and ups, as down meets it."""
        return self.round(silu_mul(h) if self.limit is None else clamped_swiglu(h, self.limit))


def run_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up: Experts,
    up_bias: Tensor | None,
    down: Experts,
    down_bias: Tensor | None,
    limit: float | None,
    gate: Experts | None = None,
    gate_bias: Tensor | None = None,
    *,
    rounded: bool = False,
) -> Tensor:
    """x [M,C], experts and weights [M,k], up [E,2F,C], down [E,C,F] (dense or packed) -> [M,C].

    `limit` set: gpt-oss's clamped SwiGLU over interleaved rows; None: silu(gate) * up over halves. Where
    `gate` is given (GGUF), gates and ups are two matrices [E,F,C]. `rounded`: what the matrices multiply is
    rounded to bfloat16, see `round_activations`.
    """
    if use_kernel(x):
        style = "silu" if limit is None else "gpt_oss"
        rules = (style, limit or 0.0, ALPHA, gate, gate_bias, rounded)

        def weigh(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
            return expert_bindings.moe(x, experts, weights, up, up_bias, down, down_bias, *rules)

        if len(x) <= MOST_TOKENS:
            return weigh(x, experts, weights)
        some = zip(x.split(MOST_TOKENS), experts.split(MOST_TOKENS), weights.split(MOST_TOKENS), strict=True)
        return torch.cat([weigh(*part) for part in some])
    trained = torch.is_grad_enabled() and not _in_one_product(x, up, down)
    matrices = Matrices(up, up_bias, down, down_bias, limit, gate, gate_bias, rounded)
    x = matrices.round(x)
    if captured(x) or (x.device.type != "cpu" and not trained):
        return on_device(x, experts, weights, matrices)
    k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    counts = experts.flatten().bincount(minlength=_shape(up)[0]).tolist()
    parts = []
    ups, downs = _matrices(up, x.dtype), _matrices(down, x.dtype)
    gates = None if gate is None else _matrices(gate, x.dtype)
    for e, rows in enumerate(_Spread.apply(x, order, k).split(counts)):  # type: ignore[no-untyped-call]
        if len(rows):
            filled = F.pad(rows, (0, 0, 0, -len(rows) % ROUNDED)) if rows.requires_grad else rows
            h = _expert_linear(filled, ups(e), up_bias, e)
            if gates is not None:
                h = _interleaved(_expert_linear(filled, gates(e), gate_bias, e), h, limit)
            parts.append(_expert_linear(matrices.activation(h), downs(e), down_bias, e)[: len(rows)])
    return _weighed(torch.cat(parts), weights, order)


def on_device(x: Tensor, experts: Tensor, weights: Tensor, matrices: Matrices) -> Tensor:
    """`run_experts` where the host is not asked who chose whom: MXFP4 by Triton, and else many choices as one
    grouped product, few with matrices of their own."""
    if _stays_packed(x, experts, matrices):
        return in_triton(x, experts, weights, matrices)
    k, (up, up_bias, down, down_bias, limit, gate, gate_bias, _) = experts.shape[1], matrices
    if captured(x) or experts.numel() <= MOST_GATHERED or not _in_one_product(x, up, down):
        few = max(MOST_GATHERED // k, 1)
        some = zip(x.split(few), experts.split(few), weights.split(few), strict=True)
        parts = [_gathered(*part, matrices) for part in some]
        return torch.cat(parts)
    order = experts.flatten().argsort(stable=True)
    rows, chosen = _Spread.apply(x, order, k), experts.flatten()[order]  # type: ignore[no-untyped-call]
    h = _grouped(rows, chosen, up, up_bias)
    if gate is not None:
        h = _interleaved(_grouped(rows, chosen, gate, gate_bias), h, limit)
    return _weighed(_grouped(matrices.activation(h), chosen, down, down_bias), weights, order)


def _stays_packed(x: Tensor, experts: Tensor, matrices: Matrices) -> bool:
    own = [m for m in (matrices.up, matrices.down, matrices.gate) if m is not None]
    if not (all(isinstance(m, tuple) for m in own) and use_triton(x)):
        return False
    return experts.numel() <= MOST_PACKED or not _in_one_product(x, matrices.up, matrices.down)


def in_triton(x: Tensor, experts: Tensor, weights: Tensor, matrices: Matrices) -> Tensor:
    """`on_device` for MXFP4, which stays packed."""
    (up, up_bias, down, down_bias, limit, gate, gate_bias, _), k = matrices, experts.shape[1]
    assert isinstance(up, tuple) and isinstance(down, tuple)
    tiles, x = Tiles.of(experts, _shape(up)[0]), x.contiguous()
    if limit is not None and gate is None:
        h = up_product(x, *up, up_bias, tiles, k, (limit, ALPHA))
    else:
        h = up_product(x, *up, up_bias, tiles, k)
        if isinstance(gate, tuple):
            h = _interleaved(up_product(x, *gate, gate_bias, tiles, k), h, limit)
        h = matrices.activation(h)
    return down_product(h.contiguous(), *down, down_bias, tiles, weights.float().contiguous())


def _weighed(y: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """y [M*k,C] of (token, choice) pairs in `order`, weights [M,k] -> [M,C]."""
    y = y * weights.flatten()[order, None].to(y.dtype)
    out: Tensor = _Gather.apply(y, order, weights.shape[1])  # type: ignore[no-untyped-call]
    return out


def _in_one_product(x: Tensor, up: Experts, down: Experts) -> bool:
    """Whether `grouped_mm` takes these: bfloat16, in rows of a multiple of 16 bytes. In other numbers torch
    asks the host for the counts."""
    return x.dtype == torch.bfloat16 and _shape(up)[2] % 8 == 0 and _shape(down)[2] % 8 == 0


def _grouped(x: Tensor, own: Tensor, matrices: Experts, bias: Tensor | None) -> Tensor:
    """x [n,K] of the experts `own` [n], ascending, matrices [E,N,K] -> [n,N]: one product for all experts, of
    which the host knows no count. What is packed is unpacked for it."""
    known = torch.arange(_shape(matrices)[0], device=x.device)
    ends = torch.searchsorted(own, known, right=True).to(torch.int32)
    whole = mxfp4.unpack(*matrices, x.dtype) if isinstance(matrices, tuple) else dense(matrices, x.dtype)
    y = F.grouped_mm(x, whole.mT, offs=ends)
    # a product, not bias[own]: the gradient of an index is a scattered addition
    return y if bias is None else y + (own[:, None] == known).to(x.dtype) @ bias.to(x.dtype)


def _gathered(x: Tensor, experts: Tensor, weights: Tensor, matrices: Matrices) -> Tensor:
    """Every choice of every token with matrices of its own [M*k,N,K]: nobody asks on the host who chose
    whom, at the price of a copy of what is chosen."""
    (M, k), chosen = experts.shape, experts.flatten()
    up, up_bias, down, down_bias, limit, gate, gate_bias, _ = matrices

    def product(x: Tensor, matrices: Experts, bias: Tensor | None) -> Tensor:
        y = torch.einsum("mk,mnk->mn", x, _expert(matrices, chosen, x.dtype))
        return y if bias is None else y + bias[chosen].to(y.dtype)

    rows = x.repeat_interleave(k, dim=0)
    h = product(rows, up, up_bias)
    if gate is not None:
        h = _interleaved(product(rows, gate, gate_bias), h, limit)
    y = product(matrices.activation(h), down, down_bias) * weights.flatten()[:, None].to(x.dtype)
    return y.view(M, k, -1).sum(1)


def _interleaved(gates: Tensor, ups: Tensor, limit: float | None) -> Tensor:
    """As one matrix would have given them: in turn, or gates first."""
    return torch.cat((gates, ups), -1) if limit is None else torch.stack((gates, ups), -1).flatten(-2)


class _Spread(torch.autograd.Function):
    """x [M,C] -> [M*k,C], a row of every (token, choice) in `order`; back, each token sums its k rows.
    Every token is there exactly k times: no scattered addition is needed either way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _sum_choices(dy, ctx.saved_tensors[0], ctx.k), None, None


class _Gather(torch.autograd.Function):
    """The other way: y [M*k,C] in `order` -> the sum over each token's k rows [M,C]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return _sum_choices(y, order, k)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return dx.index_select(0, ctx.saved_tensors[0] // ctx.k), None, None


def _sum_choices(y: Tensor, order: Tensor, k: int) -> Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return y.index_select(0, back).view(-1, k, y.shape[-1]).sum(1)


def _matrices(experts: Experts, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """The matrix of an expert, dense. In training all are taken apart at once: the gradient of an index would
    be as large as all of them."""
    if isinstance(experts, Tensor) and experts.requires_grad:
        return experts.to(dtype).unbind().__getitem__
    return lambda e: _expert(experts, e, dtype)


def _shape(weight: Experts) -> tuple[int, ...]:
    """(E, N, K)"""
    if isinstance(weight, tuple):
        return *weight[1].shape[:2], weight[1].shape[2] * mxfp4.BLOCK
    return tuple(weight.shape)


def _expert(weight: Experts, e: int | Tensor, dtype: torch.dtype) -> Tensor:
    """[N,K], or of several [n,N,K], dense."""
    if isinstance(weight, tuple):
        return mxfp4.unpack(weight[0][e], weight[1][e], dtype)
    return dense(weight[e], dtype)


def _expert_linear(x: Tensor, matrix: Tensor, bias: Tensor | None, e: int) -> Tensor:
    return F.linear(x, matrix, None if bias is None else bias[e].to(x.dtype))
