"""One layer of gpt-oss, Llama or Qwen3 in plain torch and float32, in every way that it can be read.

It shares no arithmetic with the engine except the decoding of packed blocks, which has a check of its own:
rotary frequencies come from the published formulas, attention and experts are loops and einsums.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outpace.models.attention import DecoderBlock
from outpace.models.blocks import MLP, ExpertMatrix, Experts, Linear
from outpace.models.decoder import Decoder
from outpace.ops import mxfp4
from outpace.ops.norm import ALPHA
from outpace.ops.quant import dense
from outpace.ops.rope import RopeConfig

BLOCK = mxfp4.BLOCK  # values that share a scale
_PAIRS = torch.arange(BLOCK).view(16, 2)  # the values of a block's 16 bytes, low nibble first
# Where value i of a block of 32 lies in the file; "split": GGML's order, byte j holds values j and 16 + j.
NIBBLE_ORDERS = {
    "as stored": torch.arange(BLOCK),
    "from split": _PAIRS.T.flatten(),
    "to split": torch.arange(BLOCK).view(2, 16).T.flatten(),
    "high first": _PAIRS.flip(1).flatten(),
    "bytes reversed": _PAIRS.flip(0).flatten(),
}
BlockOrder = Literal["as stored", "reversed", "reversed, scales in place"]
HeadSet = Literal["all", "first half", "second half"]
ALL_BIASES = frozenset({"q", "k", "v", "o", "router", "gate_up", "down"})


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the weights of one layer are read. Defaults are what all families share."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float  # of q.k before the softmax
    rope: RopeConfig | None  # None: no rotation at all
    window: int  # keys a query sees, its own included; 0: all before it
    qk_norm: Literal["none", "before rope", "after rope", "without weights"]
    sinks: Literal["none", "in the denominator", "scaled", "zero"]
    experts: int = 0  # 0: a dense MLP
    packed: bool = False  # experts in MXFP4 with scales apart
    experts_per_token: int = 0
    renormalise: bool = True  # the chosen experts' weights sum to 1, as softmax after top-k gives
    gate_up: Literal["interleaved", "halves"] = "halves"
    limit: float | None = None  # clamp of gate and up
    alpha: float = 1.0  # gate * sigmoid(alpha * gate)
    one: float = 0.0  # added to the up branch

    causal: bool = True
    # kv head of query head h: h // G, h % K
    groups: Literal["blocked", "cyclic", "cyclic, inverse"] = "blocked"
    rope_heads: HeadSet = "all"  # heads that are rotated
    rope_share: float = 1.0  # of each head's dimensions that are rotated
    pairs: Literal["halves", "neighbours"] = "halves"  # RoPE rotates (i, i + D/2), or (2i, 2i + 1)
    pair_heads: HeadSet = "all"  # heads that `pairs` holds for
    qk_rows: Literal["as stored", "from neighbours", "to neighbours"] = "as stored"
    norm_weights: bool = True
    biases: frozenset[str] = ALL_BIASES
    gate_up_nibbles: str = "as stored"  # NIBBLE_ORDERS
    down_nibbles: str = "as stored"
    gate_up_blocks: BlockOrder = "as stored"
    down_blocks: BlockOrder = "as stored"
    expert_scale: float = 1.0
    gate_first: bool = True
    down_transposed: bool = False


def right_reading(model: Decoder, layer: int) -> Reading:
    """The reading that the config specifies for a layer."""
    config, mlp = model.config, layer_of(model, layer).mlp
    clamped = config.swiglu_limit is not None
    experts = isinstance(mlp, Experts)
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
        experts=config.num_experts if experts else 0,
        packed=isinstance(mlp, Experts) and mlp.down.weight is None,
        experts_per_token=config.experts_per_token,
        renormalise=clamped or config.norm_topk_prob,
        gate_up="interleaved" if clamped else "halves",
        limit=config.swiglu_limit,
        alpha=ALPHA if clamped else 1.0,
        one=1.0 if clamped else 0.0,
    )


# ---- weights --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """weight [N, C], bias [N] or None, float32; exponents [N, C/32] of MXFP4 scales kept apart."""

    weight: Tensor
    bias: Tensor | None = None
    exponents: Tensor | None = None


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
    in float32 does not fit next to a large model."""

    norm: Tensor  # [C]
    router: Matrix | None  # [E, C]
    count: int
    expert: Callable[[int], Expert]


def layer_of(model: Decoder, layer: int) -> DecoderBlock:
    block = model.layers[layer]
    assert isinstance(block, DecoderBlock)
    return block


def attention_weights(block: DecoderBlock) -> AttentionWeights:
    a = block.self_attn
    rows = [a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim]
    qkv = linear_matrix(a.qkv_proj)
    biases = [None] * 3 if qkv.bias is None else list(qkv.bias.split(rows))
    q, k, v = (Matrix(weight=w, bias=b) for w, b in zip(qkv.weight.split(rows), biases, strict=True))
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
    """One expert's gate and up rows as its family's safetensors files order them, also where a GGUF file
    stores them apart: interleaved for gpt-oss (with its clamp), in halves for Qwen3-MoE."""
    up = expert_matrix(experts.up, e)
    if experts.gate is None:
        return up
    gate, axis = expert_matrix(experts.gate, e), 0 if experts.limit is None else 1

    def both(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack((a, b), dim=axis).flatten(0, 1)

    bias = None if gate.bias is None or up.bias is None else both(gate.bias, up.bias)
    return Matrix(weight=both(gate.weight, up.weight), bias=bias)


def expert_matrix(matrix: ExpertMatrix, e: int) -> Matrix:
    bias = None if matrix.bias is None else matrix.bias[e].float()
    if matrix.weight is not None:
        return Matrix(weight=dense(matrix.weight[e]), bias=bias)
    weight = mxfp4.unpack(matrix.blocks[e], matrix.scales[e])
    return Matrix(weight=weight, bias=bias, exponents=matrix.scales[e].float())


def relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, 0 where both are zero."""
    size = float(torch.linalg.vector_norm(b))
    apart = float(torch.linalg.vector_norm(a - b))
    return apart / size if size else (0.0 if apart == 0 else float("inf"))


# ---- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionSteps:
    q: Tensor  # [T, H, D], after norm and rotation
    k: Tensor  # [T, K, D]
    sink: Tensor | None  # [H, T], attention weight of the sinks
    out: Tensor  # [T, C], what attention adds to the residual stream


def read_attention(x: Tensor, w: AttentionWeights, r: Reading) -> AttentionSteps:
    """x [T, C] float32 at positions 0 .. T-1."""
    T, H, K, D = len(x), r.heads, r.kv_heads, r.head_dim
    normed = rms_norm(x, w.norm if r.norm_weights else None, r.eps)
    q = _product(normed, _in_order(w.q, r), "q" in r.biases).view(T, H, D)
    k = _product(normed, _in_order(w.k, r), "k" in r.biases).view(T, K, D)
    v = _product(normed, w.v, "v" in r.biases).view(T, K, D)
    if r.qk_norm in ("before rope", "without weights"):
        q, k = _norm_heads(q, k, w, r)
    q, k = _rotated(q, r), _rotated(k, r)
    if r.qk_norm == "after rope":
        q, k = _norm_heads(q, k, w, r)
    kv = kv_heads_of(r)
    scores = torch.einsum("thd,shd->hts", q, k[:, kv]) * r.scale
    scores = scores.masked_fill(~visible(T, r.window, r.causal), -torch.inf)
    sink = None
    if r.sinks == "none" or w.sinks is None:
        weights = scores.softmax(-1)
    else:
        by = {"in the denominator": 1.0, "scaled": r.scale, "zero": 0.0}[r.sinks]
        last = (w.sinks * by)[:, None, None].expand(H, T, 1)
        weights, last = torch.cat((scores, last), dim=-1).softmax(-1).split((T, 1), dim=-1)
        sink = last[..., 0]
    heads = torch.einsum("hts,shd->thd", weights, v[:, kv])
    out = _product(heads.reshape(T, H * D), w.o, "o" in r.biases)
    return AttentionSteps(q=q, k=k, sink=sink, out=out)


def kv_heads_of(r: Reading) -> Tensor:
    """[H], the kv head that each query head reads. "cyclic, inverse": what "cyclic" undoes."""
    head, G = torch.arange(r.heads), r.heads // r.kv_heads
    if r.groups == "cyclic":
        return head % r.kv_heads
    return (head % G * r.kv_heads + head // G) // G if r.groups == "cyclic, inverse" else head // G


def _heads_in(count: int, which: HeadSet) -> Tensor:
    """[count] bool."""
    head = torch.arange(count)
    first = head < -(-count // 2)
    return first if which == "first half" else ~first if which == "second half" else head >= 0


def _rotated(x: Tensor, r: Reading) -> Tensor:
    """x [T, heads, D] after RoPE."""
    if r.rope is None:
        return x
    rotated = rotate(x, r.rope, r.pairs)
    if r.pair_heads != "all":
        chosen = _heads_in(x.shape[1], r.pair_heads)
        rotated = torch.where(chosen[:, None], rotated, rotate(x, r.rope, "halves"))
    if r.rope_share < 1:
        part = int(x.shape[-1] * r.rope_share)
        rotated = torch.cat((rotate(x[..., :part], r.rope, r.pairs), x[..., part:]), dim=-1)
    return torch.where(_heads_in(x.shape[1], r.rope_heads)[:, None], rotated, x)


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


def _norm_heads(q: Tensor, k: Tensor, w: AttentionWeights, r: Reading) -> tuple[Tensor, Tensor]:
    weights = (None, None) if r.qk_norm == "without weights" else (w.q_norm, w.k_norm)
    return rms_norm(q, weights[0], r.eps), rms_norm(k, weights[1], r.eps)


def visible(T: int, window: int, causal: bool = True) -> Tensor:
    """[T, T] bool: keys s that query t sees. A window counts the query's own key."""
    behind = torch.arange(T)[:, None] - torch.arange(T)
    seen = behind >= 0 if causal else torch.ones(T, T, dtype=torch.bool)
    return seen & (behind < window) if window else seen


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y if weight is None else y * weight


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
    """YaRN's factor on cos and sin: 0.1 ln(factor) + 1, or what the config sets instead."""
    if rope.kind != "yarn":
        return 1.0
    return rope.attention_factor or 0.1 * math.log(max(rope.factor, 1.0)) + 1


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[D/2] float64, radians per position, one dimension at a time.

    YaRN: Peng et al. 2023, eq. 17-23; llama3: the rule of Llama 3.1's config. `truncate` rounds YaRN's
    range outwards to whole dimensions; gpt-oss's config specifies not to.
    """
    theta, span = rope.theta, rope.original_max_position
    values = []
    for i in range(head_dim // 2):
        turn = theta ** (-2 * i / head_dim)
        slow = turn / rope.factor
        if rope.kind == "linear":
            turn = slow
        elif rope.kind == "factors":
            turn /= rope.factors[i]
        elif rope.kind == "llama3":
            turns = span * turn / (2 * math.pi)  # over the original context
            share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            share = min(max(share, 0.0), 1.0)
            turn = share * turn + (1 - share) * slow
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
        values.append(turn)
    return torch.tensor(values, dtype=torch.float64)


# ---- MLP ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MlpSteps:
    normed: Tensor  # [T, C]
    logits: Tensor | None  # [T, E] of the router
    chosen: Tensor  # [T, k] experts, largest first
    weights: Tensor  # [T, k]
    out: Tensor  # [T, C], what the MLP adds


def read_mlp(x: Tensor, w: MlpWeights, r: Reading) -> MlpSteps:
    """x [T, C] float32. Rows are independent: any selection of rows gives those rows' results."""
    return read_mlps([x], w, [r])[0]


def read_mlps(xs: Sequence[Tensor], w: MlpWeights, readings: Sequence[Reading]) -> list[MlpSteps]:
    """Several readings of one layer, each on its own x: an expert is decoded once for all of them."""
    results = [_routed(x, w, r) for x, r in zip(xs, readings, strict=True)]
    for e in sorted({e for steps in results for e in steps.chosen.unique().tolist()}):
        expert = w.expert(e)
        for steps, r in zip(results, readings, strict=True):
            row, place = (steps.chosen == e).nonzero(as_tuple=True)
            if len(row):
                steps.out[row] += steps.weights[row, place, None] * _through(steps.normed[row], expert, r)
    return results


def _routed(x: Tensor, w: MlpWeights, r: Reading) -> MlpSteps:
    """Everything but the experts: `out` is still 0. Softmax over the chosen logits is softmax over all of
    them, renormalised over the chosen."""
    normed = rms_norm(x, w.norm if r.norm_weights else None, r.eps)
    if w.router is None:
        logits, top = None, torch.ones(len(x), 1)
        chosen = torch.zeros(len(x), 1, dtype=torch.int64)
    else:
        logits = _product(normed, w.router, "router" in r.biases)
        top, chosen = logits.softmax(-1).topk(r.experts_per_token, dim=-1)
        top = top / top.sum(-1, keepdim=True) if r.renormalise else top
    return MlpSteps(normed=normed, logits=logits, chosen=chosen, weights=top, out=torch.zeros_like(x))


def _through(x: Tensor, expert: Expert, r: Reading) -> Tensor:
    """x [n, C] through one expert -> [n, C]."""
    gate_up = block_order(expert.gate_up, r.gate_up_blocks)
    both = _expert_product(x, gate_up, r.gate_up_nibbles, r.expert_scale, "gate_up" in r.biases)
    gate, up = (both[:, ::2], both[:, 1::2]) if r.gate_up == "interleaved" else both.chunk(2, dim=-1)
    if not r.gate_first:
        gate, up = up, gate
    if r.limit is not None:
        gate, up = gate.clamp(max=r.limit), up.clamp(-r.limit, r.limit)
    hidden = gate * torch.sigmoid(r.alpha * gate) * (up + r.one)
    down, nibbles = block_order(expert.down, r.down_blocks), r.down_nibbles
    if r.down_transposed:
        down, nibbles = Matrix(weight=reordered(down.weight, nibbles).mT, bias=down.bias), "as stored"
    return _expert_product(hidden, down, nibbles, r.expert_scale, "down" in r.biases)


def _expert_product(x: Tensor, matrix: Matrix, nibbles: str, scale: float, biased: bool) -> Tensor:
    """Another nibble order moves the columns within blocks, another scale bias multiplies them all: the
    inverse on x gives the same products, and x is small."""
    if nibbles != "as stored":
        x = x.unflatten(-1, (-1, BLOCK))[..., NIBBLE_ORDERS[nibbles].argsort()].flatten(-2)
    return _product(x * scale, matrix, biased)


def reordered(x: Tensor, nibbles: str) -> Tensor:
    """[..., K], the values of each block of 32 read in one of the NIBBLE_ORDERS."""
    if nibbles == "as stored":
        return x
    return x.unflatten(-1, (-1, BLOCK))[..., NIBBLE_ORDERS[nibbles]].flatten(-2)


def block_order(matrix: Matrix, order: BlockOrder) -> Matrix:
    """The blocks of each row in reverse, with their scales or under the scales in place."""
    if order == "as stored":
        return matrix
    blocks = matrix.weight.unflatten(-1, (-1, BLOCK)).flip(-2)
    if order == "reversed, scales in place":
        assert matrix.exponents is not None
        blocks = blocks * torch.exp2(matrix.exponents - matrix.exponents.flip(-1))[..., None]
    return Matrix(weight=blocks.flatten(-2), bias=matrix.bias)


def _product(x: Tensor, matrix: Matrix, biased: bool) -> Tensor:
    y = x @ matrix.weight.mT
    return y + matrix.bias if biased and matrix.bias is not None else y
