"""One layer of gpt-oss, Llama or Qwen3 in plain torch, float32, every step kept: slow, and made to be read.

It shares no arithmetic with the engine, but for the decoding of packed blocks, which has a check of its own:
the rotary frequencies are formed again from the published formulas, attention and experts are loops and
einsums. The letters are those of `ops/attention.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outpace.models.blocks import MLP, ExpertMatrix, Experts, Linear
from outpace.models.config import ModelConfig
from outpace.models.decoder import DecoderBlock
from outpace.ops import mxfp4
from outpace.ops.norm import ALPHA
from outpace.ops.quant import dense
from outpace.ops.rope import RopeConfig

Nibbles = Literal["as stored", "from split", "to split"]
ALL_BIASES = frozenset({"q", "k", "v", "o", "router", "gate_up", "down"})


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How one layer is read. Defaults are what all our families share."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float  # of q.k before the softmax
    rope: RopeConfig | None  # None: no rotation at all
    window: int  # keys a query sees, itself included; 0: all before it
    qk_norm: Literal["none", "before rope", "after rope", "without weights"]
    sinks: Literal["none", "in the denominator", "scaled", "zero"]
    experts_per_token: int = 0
    renormalise: bool = True  # the chosen experts' weights sum to 1: what softmax after top-k gives
    gate_up: Literal["interleaved", "halves"] = "halves"
    limit: float | None = None  # the clamp of gate and up
    alpha: float = 1.0  # gate * sigmoid(alpha * gate)
    one: float = 0.0  # added to the up branch

    causal: bool = True
    groups: Literal["blocked", "cyclic"] = "blocked"  # query head h reads kv head h // G, or h % K
    pairs: Literal["halves", "neighbours"] = "halves"  # RoPE turns (i, i + D/2), or (2i, 2i + 1)
    qk_rows: Literal["as stored", "from neighbours", "to neighbours"] = "as stored"
    norm_weights: bool = True
    biases: frozenset[str] = ALL_BIASES
    gate_up_nibbles: Nibbles = "as stored"  # the columns within blocks of 32
    down_nibbles: Nibbles = "as stored"
    expert_scale: float = 1.0
    gate_first: bool = True
    down_transposed: bool = False


def right_reading(config: ModelConfig, layer: int) -> Reading:
    """What the config specifies of a layer."""
    clamped = config.swiglu_limit is not None
    return Reading(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
        rope=config.rope,
        window=config.window(layer),
        qk_norm="before rope" if config.qk_norm else "none",
        sinks="in the denominator" if config.sinks else "none",
        experts_per_token=config.experts_per_token,
        renormalise=clamped or config.norm_topk_prob,
        gate_up="interleaved" if clamped else "halves",
        limit=config.swiglu_limit,
        alpha=ALPHA if clamped else 1.0,
        one=1.0 if clamped else 0.0,
    )


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


BACK: dict[Nibbles, Nibbles] = {
    "as stored": "as stored",
    "from split": "to split",
    "to split": "from split",
}


@dataclass(frozen=True, kw_only=True)
class AttentionSteps:
    normed: Tensor  # [T, C]
    q: Tensor  # [T, H, D], after norm and rotation
    k: Tensor  # [T, K, D]
    v: Tensor  # [T, K, D]
    weights: Tensor  # [H, T, T] over the keys
    sink: Tensor | None  # [H, T] what the sink takes
    out: Tensor  # [T, C], what attention adds to the residual stream


@dataclass(frozen=True, kw_only=True)
class MlpSteps:
    normed: Tensor  # [T, C]
    logits: Tensor | None  # [T, E] of the router
    chosen: Tensor  # [T, k] experts, largest first
    weights: Tensor  # [T, k]
    out: Tensor  # [T, C], what the MLP adds


def read_attention(x: Tensor, w: AttentionWeights, r: Reading) -> AttentionSteps:
    """x [T, C] float32 at positions 0 .. T-1."""
    T, H, K, D = len(x), r.heads, r.kv_heads, r.head_dim
    normed = rms_norm(x, w.norm if r.norm_weights else None, r.eps)
    q = _product(normed, _in_order(w.q, r), "q" in r.biases).view(T, H, D)
    k = _product(normed, _in_order(w.k, r), "k" in r.biases).view(T, K, D)
    v = _product(normed, w.v, "v" in r.biases).view(T, K, D)
    if r.qk_norm in ("before rope", "without weights"):
        q, k = _norm_heads(q, k, w, r)
    if r.rope is not None:
        q, k = (rotate(heads, r.rope, r.pairs) for heads in (q, k))
    if r.qk_norm == "after rope":
        q, k = _norm_heads(q, k, w, r)
    head = torch.arange(H)
    read = head // (H // K) if r.groups == "blocked" else head % K
    scores = torch.einsum("thd,shd->hts", q, k[:, read]) * r.scale
    scores = scores.masked_fill(~visible(T, r.window, r.causal), -torch.inf)
    sink = None
    if r.sinks == "none" or w.sinks is None:
        weights = scores.softmax(-1)
    else:
        by = {"in the denominator": 1.0, "scaled": r.scale, "zero": 0.0}[r.sinks]
        beside = (w.sinks * by)[:, None, None].expand(H, T, 1)
        weights, last = torch.cat((scores, beside), dim=-1).softmax(-1).split((T, 1), dim=-1)
        sink = last[..., 0]
    heads = torch.einsum("hts,shd->thd", weights, v[:, read])
    out = _product(heads.reshape(T, H * D), w.o, "o" in r.biases)
    return AttentionSteps(normed=normed, q=q, k=k, v=v, weights=weights, sink=sink, out=out)


def read_mlp(x: Tensor, w: MlpWeights, r: Reading) -> MlpSteps:
    """x [T, C] float32. Rows do not know each other: any choice of rows gives those rows' results."""
    return read_mlps([x], w, [r])[0]


def read_mlps(xs: Sequence[Tensor], w: MlpWeights, readings: Sequence[Reading]) -> list[MlpSteps]:
    """Several readings of one layer, each of its own x: an expert is decoded once for all of them."""
    items = [_routed(x, w, r) for x, r in zip(xs, readings, strict=True)]
    for e in sorted({e for steps in items for e in steps.chosen.unique().tolist()}):
        expert = w.expert(e)
        for steps, r in zip(items, readings, strict=True):
            row, place = (steps.chosen == e).nonzero(as_tuple=True)
            steps.out[row] += steps.weights[row, place, None] * _through(steps.normed[row], expert, r)
    return items


def _routed(x: Tensor, w: MlpWeights, r: Reading) -> MlpSteps:
    """Everything but the experts: `out` is still 0."""
    normed = rms_norm(x, w.norm if r.norm_weights else None, r.eps)
    logits, chosen, weights = choose_experts(normed, w, r)
    return MlpSteps(normed=normed, logits=logits, chosen=chosen, weights=weights, out=torch.zeros_like(x))


def choose_experts(normed: Tensor, w: MlpWeights, r: Reading) -> tuple[Tensor | None, Tensor, Tensor]:
    """normed [T, C] -> router logits [T, E] or None, experts [T, k], their weights [T, k].

    Softmax over the chosen logits is softmax over all of them, renormalised over the chosen.
    """
    if w.router is None:
        only = torch.zeros(len(normed), 1, dtype=torch.int64)
        return None, only, torch.ones(len(normed), 1)
    logits = _product(normed, w.router, "router" in r.biases)
    top, chosen = logits.softmax(-1).topk(r.experts_per_token, dim=-1)
    return logits, chosen, top / top.sum(-1, keepdim=True) if r.renormalise else top


def _through(x: Tensor, expert: Expert, r: Reading) -> Tensor:
    """x [n, C] through one expert -> [n, C]."""
    both = _expert_product(x, expert.gate_up, r.gate_up_nibbles, r.expert_scale, "gate_up" in r.biases)
    gate, up = (both[:, ::2], both[:, 1::2]) if r.gate_up == "interleaved" else both.chunk(2, dim=-1)
    if not r.gate_first:
        gate, up = up, gate
    if r.limit is not None:
        gate, up = gate.clamp(max=r.limit), up.clamp(-r.limit, r.limit)
    hidden = gate * torch.sigmoid(r.alpha * gate) * (up + r.one)
    down, nibbles = expert.down, r.down_nibbles
    if r.down_transposed:
        down, nibbles = Matrix(weight=reordered(down.weight, nibbles).mT, bias=down.bias), "as stored"
    return _expert_product(hidden, down, nibbles, r.expert_scale, "down" in r.biases)


def _expert_product(x: Tensor, matrix: Matrix, nibbles: Nibbles, scale: float, biased: bool) -> Tensor:
    """Under another number format a matrix has its columns in another order, and another power of two on
    all of them: the way back on x gives the same products, and x is small."""
    return _product(reordered(x, BACK[nibbles]) * scale, matrix, biased)


def reordered(x: Tensor, nibbles: Nibbles) -> Tensor:
    """[..., K], the values of each block of 32 in another order. "from split": byte j of a block holds the
    values j and 16 + j, and was read as holding 2j and 2j + 1; "to split" is the way back."""
    if nibbles == "as stored":
        return x
    shape = (16, 2) if nibbles == "from split" else (2, 16)
    return x.unflatten(-1, (-1, *shape)).mT.flatten(-3)


def _in_order(matrix: Matrix, r: Reading) -> Matrix:
    """q or k rows in another order within each head. "from neighbours": row 2i holds what should be row i,
    row 2i + 1 what should be row i + D/2 (GGUF files of some Llama models are written so)."""
    if r.qk_rows == "as stored":
        return matrix
    half = r.head_dim // 2
    shape = (half, 2) if r.qk_rows == "from neighbours" else (2, half)
    order = torch.arange(r.head_dim).view(shape).mT.flatten()
    rows = (torch.arange(len(matrix.weight) // r.head_dim)[:, None] * r.head_dim + order).flatten()
    return Matrix(weight=matrix.weight[rows], bias=None if matrix.bias is None else matrix.bias[rows])


def _product(x: Tensor, matrix: Matrix, biased: bool) -> Tensor:
    y = x @ matrix.weight.mT
    return y + matrix.bias if biased and matrix.bias is not None else y


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y if weight is None else y * weight


def _norm_heads(q: Tensor, k: Tensor, w: AttentionWeights, r: Reading) -> tuple[Tensor, Tensor]:
    if r.qk_norm == "without weights":
        return rms_norm(q, None, r.eps), rms_norm(k, None, r.eps)
    return rms_norm(q, w.q_norm, r.eps), rms_norm(k, w.k_norm, r.eps)


def visible(T: int, window: int, causal: bool = True) -> Tensor:
    """[T, T] bool: may query t see key s? A window counts the query's own key."""
    behind = torch.arange(T)[:, None] - torch.arange(T)
    seen = behind >= 0 if causal else torch.ones(T, T, dtype=torch.bool)
    return seen & (behind < window) if window else seen


def rotate(x: Tensor, rope: RopeConfig, pairs: str = "halves", first: int = 0) -> Tensor:
    """x [T, heads, D] at positions first .. first + T - 1; angles, cos and sin in float64."""
    positions = torch.arange(first, first + len(x), dtype=torch.float64)
    angles = positions[:, None, None] * frequencies(rope, x.shape[-1])  # [T, 1, D/2]
    cos, sin = angles.cos() * concentration(rope), angles.sin() * concentration(rope)
    if pairs == "halves":
        a, b = x.double().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).float()
    a, b = x.double()[..., ::2], x.double()[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).float()


def concentration(rope: RopeConfig) -> float:
    """What YaRN multiplies cos and sin by: 0.1 ln(factor) + 1, or what the config sets instead."""
    if rope.kind != "yarn":
        return 1.0
    return rope.attention_factor or 0.1 * math.log(max(rope.factor, 1.0)) + 1


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[D/2] float64, radians per position, one dimension at a time.

    YaRN: Peng et al. 2023, eq. 17-23; llama3: the rule of Llama 3.1's config. `truncate` rounds YaRN's
    range outwards to whole dimensions; gpt-oss's config specifies not to.
    """
    theta, span = rope.theta, rope.original_max_position
    items = []
    for i in range(head_dim // 2):
        turn = theta ** (-2 * i / head_dim)
        slow = turn / rope.factor
        if rope.kind == "linear":
            turn = slow
        elif rope.kind == "factors":
            turn /= rope.factors[i]
        elif rope.kind == "llama3":
            turns = span * turn / (2 * math.pi)  # over the original context
            kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            kept = min(max(kept, 0.0), 1.0)
            turn = kept * turn + (1 - kept) * slow
        elif rope.kind == "yarn":
            low, high = (
                head_dim * math.log(span / (beta * 2 * math.pi)) / (2 * math.log(theta))
                for beta in (rope.beta_fast, rope.beta_slow)
            )
            if rope.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            ramp = min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0)
            turn = ramp * slow + (1 - ramp) * turn
        items.append(turn)
    return torch.tensor(items, dtype=torch.float64)
