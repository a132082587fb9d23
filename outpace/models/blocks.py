"""Linear, RMSNorm, MLP and experts: the parts every architecture is made of."""

from typing import Literal

import torch
from torch import Tensor, nn

from outpace.ops import mxfp4
from outpace.ops.linear import linear
from outpace.ops.moe import Packed, route, router_logits, run_experts
from outpace.ops.norm import rms_norm, silu_mul
from outpace.ops.quant import Quant, Weight, rows

Layout = Literal["dense", "mxfp4", "split"]  # of experts; split: gates and ups apart, as in GGUF files


class Linear(nn.Module):
    """weight [N, C] kept in the checkpoint's precision; the product is formed in x's. `rounded`: see
    `use_activation_dtype`."""

    weight: Weight

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.rounded = False

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.rounded)


class Embedding(nn.Module):
    weight: Weight

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """tokens [..] -> [.., C] in `dtype`."""
        return rows(self.weight, tokens, dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """silu(gate) * up, then down; gate and up are one matrix [2F, C]."""

    def __init__(self, hidden: int, intermediate: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden, 2 * intermediate, bias)
        self.down_proj = Linear(intermediate, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(x)))


class ExpertMatrix(nn.Module):
    """[E, N, K] of all experts: dense or GGUF's blocks, or MXFP4 blocks and scales (no `weight`)."""

    weight: Tensor | Quant | None
    blocks: Tensor
    scales: Tensor

    def __init__(self, experts: int, rows: int, columns: int, bias: bool, packed: bool) -> None:
        super().__init__()
        self.weight = None if packed else nn.Parameter(torch.empty(experts, rows, columns))
        self.bias = nn.Parameter(torch.empty(experts, rows)) if bias else None
        groups = columns // mxfp4.BLOCK
        blocks = torch.empty(experts, rows, groups, mxfp4.BLOCK // 2, dtype=torch.uint8)
        self.register_buffer("blocks", blocks if packed else None)
        scales = torch.empty(experts, rows, groups, dtype=torch.uint8)
        self.register_buffer("scales", scales if packed else None)
        self.round_to_mxfp4 = False  # in training: feel the rounding that packing will bring

    @property
    def data(self) -> Tensor | Quant | Packed:
        if self.weight is None:
            return self.blocks, self.scales
        if self.round_to_mxfp4 and isinstance(self.weight, Tensor):
            return mxfp4.fake_quantize(self.weight)
        return self.weight


class Experts(nn.Module):
    """Router and experts. gpt-oss: biases, clamped SwiGLU (`limit`) over gate and up rows in turn, softmax of
    the top k. Qwen3-MoE: no biases, silu over halves, softmax before the top k. Layout "split": gates are a
    matrix of their own, and `up` holds the ups alone."""

    def __init__(
        self,
        hidden: int,
        size: int,
        experts: int,
        per_token: int,
        *,
        limit: float | None,
        bias: bool,
        renormalise: bool = True,
        layout: Layout = "dense",
    ) -> None:
        super().__init__()
        packed, split = layout == "mxfp4", layout == "split"
        self.router = Linear(hidden, experts, bias)
        self.gate = ExpertMatrix(experts, size, hidden, bias, False) if split else None
        self.up = ExpertMatrix(experts, size if split else 2 * size, hidden, bias, packed)
        self.down = ExpertMatrix(experts, hidden, size, bias, packed)
        self.per_token = per_token
        self.limit = limit
        self.renormalise = renormalise
        self.rounded = False

    def forward(self, x: Tensor, routing: list[Tensor] | None = None) -> Tensor:
        """x [B,T,C] -> [B,T,C]; router logits [B*T,E] are appended to `routing` where it is given."""
        flat = x.reshape(-1, x.shape[-1])
        if routing is not None:
            routing.append(router_logits(flat, self.router.weight, self.router.bias))
        chosen, weights = route(
            flat,
            self.router.weight,
            self.router.bias,
            self.per_token,
            softmax_first=self.limit is None,
            renormalise=self.renormalise,
        )
        return self.run(flat, chosen, weights).reshape(x.shape)

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [M,C], chosen and weights [M,k] -> [M,C]."""
        gate, up, down = self.gate, self.up, self.down
        gates = (None, None) if gate is None else (gate.data, gate.bias)
        matrices = up.data, up.bias, down.data, down.bias, self.limit, *gates
        return run_experts(x, chosen, weights, *matrices, rounded=self.rounded)


def use_activation_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """torch.bfloat16: what meets weights of bfloat16 or MXFP4 is rounded to it, but for a router's; sums,
    attention, norms and what lies between layers stay as they are. torch.float32: nothing is rounded."""
    for part in module.modules():
        if isinstance(part, Linear | Experts):
            part.rounded = dtype == torch.bfloat16
