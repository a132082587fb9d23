"""One layer's weights as float32 matrices, taken out of the engine's modules; experts one at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.models.blocks import MLP, ExpertMatrix, Experts, Linear
from outpace.models.decoder import DecoderBlock
from outpace.ops import mxfp4
from outpace.ops.quant import dense


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """weight [N, C], bias [N] or None; float32."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    norm: Tensor  # [C]
    q: Matrix  # [H*D, C]
    k: Matrix  # [K*D, C]
    v: Matrix
    o: Matrix  # [C, H*D]
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None
    sinks: Tensor | None = None  # [H]


@dataclass(frozen=True, kw_only=True)
class Expert:
    gate_up: Matrix  # [2F, C], as stored
    down: Matrix  # [C, F]


@dataclass(frozen=True, kw_only=True)
class MlpWeights:
    """A dense MLP is one expert without a router. `expert` decodes when it is called: a layer of experts
    in float32 would not fit next to a large model."""

    norm: Tensor  # [C]
    router: Matrix | None  # [E, C]
    count: int
    expert: Callable[[int], Expert]


def attention_weights(block: DecoderBlock) -> AttentionWeights:
    a = block.self_attn
    rows = [a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim]
    qkv = linear_matrix(a.qkv_proj)
    weights = qkv.weight.split(rows)
    biases = [None] * 3 if qkv.bias is None else list(qkv.bias.split(rows))
    q, k, v = (Matrix(weight=w, bias=b) for w, b in zip(weights, biases, strict=True))
    return AttentionWeights(
        norm=block.input_layernorm.weight.float(),
        q=q,
        k=k,
        v=v,
        o=linear_matrix(a.o_proj),
        q_norm=None if a.q_norm is None else a.q_norm.weight.float(),
        k_norm=None if a.k_norm is None else a.k_norm.weight.float(),
        sinks=None if a.sinks is None else a.sinks.float(),
    )


def mlp_weights(block: DecoderBlock) -> MlpWeights:
    norm, mlp = block.post_attention_layernorm.weight.float(), block.mlp
    if isinstance(mlp, MLP):
        only = Expert(gate_up=linear_matrix(mlp.gate_up_proj), down=linear_matrix(mlp.down_proj))
        return MlpWeights(norm=norm, router=None, count=1, expert=lambda e: only)
    return MlpWeights(
        norm=norm,
        router=linear_matrix(mlp.router),
        count=mlp.router.weight.shape[0],
        expert=lambda e: Expert(gate_up=gate_up_matrix(mlp, e), down=expert_matrix(mlp.down, e)),
    )


def linear_matrix(linear: Linear) -> Matrix:
    return Matrix(weight=dense(linear.weight), bias=None if linear.bias is None else linear.bias.float())


def gate_up_matrix(experts: Experts, e: int) -> Matrix:
    """One expert's gate and up rows as its family's safetensors files hold them, also where a GGUF file
    holds them apart: in turn for gpt-oss (with its clamp), one half after the other for Qwen3-MoE."""
    up = expert_matrix(experts.up, e)
    if experts.gate is None:
        return up
    gate, axis = expert_matrix(experts.gate, e), 0 if experts.limit is None else 1

    def both(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack((a, b), dim=axis).flatten(0, 1)

    weight = both(gate.weight, up.weight)
    if gate.bias is None or up.bias is None:
        return Matrix(weight=weight)
    return Matrix(weight=weight, bias=both(gate.bias, up.bias))


def expert_matrix(matrix: ExpertMatrix, e: int) -> Matrix:
    if matrix.weight is None:
        weight = mxfp4.unpack(matrix.blocks[e], matrix.scales[e])
    else:
        weight = dense(matrix.weight[e])
    return Matrix(weight=weight, bias=None if matrix.bias is None else matrix.bias[e].float())


def most_different(ours: AttentionWeights, theirs: AttentionWeights) -> dict[str, float]:
    """Tensor name -> ||ours - theirs|| / ||theirs||, for tensors of equal shape on both sides."""
    values = {}
    for name in ("norm", "q", "k", "v", "o", "q_norm", "k_norm", "sinks"):
        for part, a, b in _parts(getattr(ours, name), getattr(theirs, name)):
            values[name + part] = relative(a, b)
    return values


def mlp_different(ours: MlpWeights, theirs: MlpWeights) -> dict[str, float]:
    """As `most_different`, of the norm, the router and the first expert."""
    a, b = ours.expert(0), theirs.expert(0)
    pairs = {
        "norm": (ours.norm, theirs.norm),
        "router": (ours.router, theirs.router),
        "gate_up": (a.gate_up, b.gate_up),
        "down": (a.down, b.down),
    }
    return {n + part: relative(x, y) for n, pair in pairs.items() for part, x, y in _parts(*pair)}


def _parts(a: Tensor | Matrix | None, b: Tensor | Matrix | None) -> list[tuple[str, Tensor, Tensor]]:
    if isinstance(a, Matrix) and isinstance(b, Matrix):
        return _parts(a.weight, b.weight) + [(f"{p}.bias", x, y) for p, x, y in _parts(a.bias, b.bias)]
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
        return [("", a, b)]
    return []


def relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, 0 where both are nothing."""
    size = float(torch.linalg.vector_norm(b))
    apart = float(torch.linalg.vector_norm(a - b))
    return apart / size if size else (0.0 if apart == 0 else float("inf"))
