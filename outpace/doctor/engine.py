"""The engine, layer by layer on a text, and checks that it computes what the plain forward does."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.doctor.check import Check, check_of, skipped
from outpace.doctor.mistakes import AS_IS, Half
from outpace.doctor.reference import (
    AttentionSteps,
    MlpSteps,
    attention_weights,
    concentration,
    frequencies,
    layer_of,
    mlp_weights,
    read_attention,
    read_mlp,
    relative,
    right_reading,
    rotate,
)
from outpace.doctor.search import EXACT, Explainer, half_layer, rows_to_try
from outpace.models.attention import DecoderBlock
from outpace.models.blocks import Experts
from outpace.models.decoder import Decoder
from outpace.ops.attention import causal_attend
from outpace.ops.rope import rotate as engine_rotate

MOSTLY = 0.95  # of the tokens must go to the same experts
SUM_LIMIT = 1e-5  # of a row of attention weights and its sink, from 1
ANGLE_LIMIT = 1e-6  # of cos and sin, which are float32
FEW = 4  # rows: the engine computes a few at once otherwise than a whole text
TIE = 1e-4  # router logits this near each other may be ranked either way


@dataclass(frozen=True, kw_only=True)
class LayerSteps:
    """One layer on one text of T tokens; [T, C] float32, on the CPU."""

    x: Tensor  # input
    attention: Tensor  # what attention adds
    middle: Tensor  # x + attention, the input of the second norm
    mlp: Tensor  # what the MLP adds
    out: Tensor
    chosen: Tensor | None = None  # [T, k] experts, in any order


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A whole model, or its first layers, on one text."""

    embedded: Tensor  # [T, C]
    layers: list[LayerSteps]
    logits: Tensor  # [T, V]


@torch.inference_mode()
def walk(model: Decoder, tokens: list[int], *, plain: bool = False) -> Walk:
    """The embedding, every layer, the final norm and the head; `plain`: layers by the plain forward."""
    x = model.embed(torch.tensor([tokens], device=model.device))[0].float().cpu()
    embedded, steps = x, []
    for i in range(len(model.layers)):
        attention = run_attention(model, i, x, plain=plain)
        middle = x + attention
        mlp, chosen = run_mlp(model, i, middle, plain=plain)
        step = LayerSteps(x=x, attention=attention, middle=middle, mlp=mlp, out=middle + mlp, chosen=chosen)
        steps.append(step)
        x = step.out
    return Walk(embedded=embedded, layers=steps, logits=head_logits(model, x))


def head_logits(model: Decoder, x: Tensor) -> Tensor:
    """[T, C] after the last layer -> [T, V] float32."""
    return model.logits(model.norm(x.to(model.device, model.dtype))).float().cpu()


@torch.inference_mode()
def run_attention(model: Decoder, layer: int, x: Tensor, *, plain: bool = False) -> Tensor:
    """x [T, C] -> [T, C], what a layer's attention adds, in the engine or in the plain forward; positions
    0 .. T-1, no cache."""
    block = layer_of(model, layer)
    if plain:
        return read_attention(x, attention_weights(block), right_reading(model, layer)).out
    x = x.to(model.device, model.dtype)[None]
    cos, sin = model.rope(torch.arange(x.shape[1], device=x.device)[None])
    result: Tensor = block.self_attn(block.input_layernorm(x), cos, sin, None, None)
    return result[0].float().cpu()


@torch.inference_mode()
def run_mlp(model: Decoder, layer: int, x: Tensor, *, plain: bool = False) -> tuple[Tensor, Tensor | None]:
    """x [T, C] -> what a layer's MLP adds [T, C]; the experts it chose [T, k]."""
    block = layer_of(model, layer)
    if plain:
        its = read_mlp(x, mlp_weights(block), right_reading(model, layer))
        return its.out, None if its.logits is None else its.chosen
    normed = block.post_attention_layernorm(x.to(model.device, model.dtype)[None])
    if not isinstance(block.mlp, Experts):
        return block.mlp(normed)[0].float().cpu(), None
    logits: list[Tensor] = []
    out = block.mlp(normed, logits)
    return out[0].float().cpu(), logits[0].topk(block.mlp.per_token, dim=-1).indices.cpu()


def same_experts(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    """[T, k] experts of two sides, in any order -> [T] bool; None where one side routes nothing."""
    if ours is None or theirs is None:
        return None
    return (ours.sort(-1).values == theirs.cpu().sort(-1).values).all(-1)


def comparable_rows(same: Tensor | None, rows: int) -> Tensor:
    """[T] bool: the rows on which two MLPs can be compared. Rounding decides a router's near tie, and then
    the MLP computes something else altogether: a few such tokens are left out, many are a difference."""
    if same is not None and float(same.float().mean()) >= MOSTLY:
        return same
    return torch.ones(rows, dtype=torch.bool)


# ---- against the plain forward --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LayerExam:
    """One layer of the engine against the plain forward, on the same input."""

    layer: int
    errors: dict[Half, float]  # relative
    row_error: float  # largest |sum of a row's attention weights + its sink - 1|
    sink_share: float | None  # mean weight of the sinks
    routed_alike: float | None  # share of tokens; ties count as alike
    experts_used: int
    mistakes: tuple[str, ...] = field(default=())  # that the engine seems to make

    @property
    def exact(self) -> bool:
        return all(error <= EXACT for error in self.errors.values())


@torch.inference_mode()
def examine_layers(model: Decoder, ours: Walk) -> list[LayerExam]:
    explainer = Explainer()
    return [_examine(model, i, steps, explainer) for i, steps in enumerate(ours.layers)]


def _examine(model: Decoder, i: int, steps: LayerSteps, explainer: Explainer) -> LayerExam:
    block, reading = layer_of(model, i), right_reading(model, i)
    a = read_attention(steps.x, attention_weights(block), reading)
    m = read_mlp(steps.middle, mlp_weights(block), reading)
    few = run_attention(model, i, steps.x[:FEW]), run_mlp(model, i, steps.middle[:FEW])[0]
    note = comparable_rows(same_experts(steps.chosen, m.chosen), len(steps.x))
    every = torch.ones_like(note)
    errors: dict[Half, float] = {}
    mistakes: list[str] = []
    halves: tuple[tuple[Half, Tensor, Tensor, Tensor, Tensor, Tensor], ...] = (
        ("attention", steps.x, steps.attention, a.out, every, few[0]),
        ("mlp", steps.middle, steps.mlp, m.out, note, few[1]),
    )
    for half, x, engine, plain, kept, first in halves:
        start = kept[:FEW]
        errors[half] = max(
            relative(engine[kept], plain[kept]),
            relative(first[start], plain[:FEW][start]),
        )
        if not errors[half] <= EXACT:
            rows = rows_to_try(half, engine, plain, kept)
            mine = half_layer(half, model, i, x, rows)
            right = mine.under([AS_IS])[AS_IS]
            mistakes += explainer.explain(mine, None, right, engine[rows], EXACT).named
    return LayerExam(
        layer=i,
        errors=errors,
        row_error=row_error(block, a, model.device),
        sink_share=None if a.sink is None else float(a.sink.mean()),
        routed_alike=routed_alike(steps, m),
        experts_used=len(m.chosen.unique()),
        mistakes=tuple(mistakes),
    )


def row_error(block: DecoderBlock, a: AttentionSteps, device: torch.device) -> float:
    """The engine's attention over values of 1 gives the sum of each row's weights; the plain forward's sinks
    must complete it to 1."""
    its = block.self_attn
    q, k = (x.to(device)[None].transpose(1, 2) for x in (a.q, a.k))  # [1, H|K, T, D]
    out = causal_attend(q.transpose(1, 2), k, torch.ones_like(k), its.window, its.sinks, its.scale)
    sums = out.view(len(a.q), its.heads, its.head_dim)[..., 0].float().cpu()  # [T, H]
    total = sums if a.sink is None else sums + a.sink.mT
    return float((total - 1).abs().max())


def routed_alike(steps: LayerSteps, m: MlpSteps) -> float | None:
    if steps.chosen is None or m.logits is None:
        return None
    ours = m.logits.gather(1, steps.chosen).sort(-1).values
    plain = m.logits.gather(1, m.chosen).sort(-1).values
    return float(((ours - plain).abs() <= TIE).all(-1).float().mean())


def check_engine(exams: list[LayerExam]) -> Check:
    name = "engine against a plain forward"
    errors = {f"{e.layer}": list(e.errors.values()) for e in exams}
    wrong = [e for e in exams if not e.exact]
    if not wrong:
        most = max(max(e.errors.values()) for e in exams)
        return check_of(name, f"{len(exams)} layers, relative error at most {most:.1e}", evidence=errors)
    first = wrong[0]
    mistakes = tuple(dict.fromkeys(m for e in wrong for m in e.mistakes))
    text = (
        f"the engine is wrong in {len(wrong)} of {len(exams)} layers, first in {first.layer} (attention "
        f"{first.errors['attention']:.1e}, MLP {first.errors['mlp']:.1e}), as if by: "
        f"{' or '.join(mistakes) or 'no known mistake'}. Please report it"
    )
    return Check(name=name, status="fail", message=text, evidence=errors, mistakes=mistakes)


def check_rows(exams: list[LayerExam]) -> Check:
    worst = max(exams, key=lambda e: e.row_error if e.row_error == e.row_error else float("inf"))
    shares = [round(e.sink_share, 4) for e in exams if e.sink_share is not None]
    text = f"within {worst.row_error:.0e} in {len(exams)} layers"
    if shares:
        text += f"; sinks take {min(shares):.1%} to {max(shares):.1%} of a row"
    wrong = f"layer {worst.layer}: weights and sink sum to 1 only within {worst.row_error:.2g}"
    errors = [] if worst.row_error <= SUM_LIMIT else [wrong]
    evidence = {"largest_error": worst.row_error, "sink_share": shares}
    return check_of("attention rows sum to 1", text, errors=errors, evidence=evidence)


def check_router(exams: list[LayerExam], experts: int) -> Check:
    name = "router"
    routed = [e for e in exams if e.routed_alike is not None]
    if not routed:
        return skipped(name, "no layer has experts")
    alike, used = [e.routed_alike or 0.0 for e in routed], [e.experts_used for e in routed]
    text = (
        f"the same experts for {min(alike):.1%} of the tokens; {min(used)} to {max(used)} of {experts} used"
    )
    evidence = {"alike": alike, "experts_used": used}
    return check_of(name, text, errors=[] if min(alike) == 1 else [text], evidence=evidence)


def check_rope(model: Decoder) -> Check:
    """No rotation at position 0; products depend on the distance alone; angles hold at the last position."""
    rope, D = model.config.rope, model.config.head_dim
    last = max(model.config.max_position_embeddings - 1, 1)
    factor = concentration(rope)
    q, k = torch.randn(2, 1, 1, 1, D, generator=torch.Generator().manual_seed(0))

    def turned(x: Tensor, position: int) -> Tensor:
        cos, sin = model.rope(torch.tensor([[position]], device=model.device))
        return engine_rotate(x, cos.cpu(), sin.cpu()).double()

    at_zero = float((turned(q, 0) - q * factor).abs().max())
    near, far = ((turned(q, n) * turned(k, n - 7)).sum() for n in (7, last))
    distance = float((near - far).abs() / (q.norm() * k.norm() * factor**2))
    angle = max(_angle_error(model, last, width) for width in (1, 256))
    agree = float((turned(q, last)[0] - rotate(q[0], rope, first=last).double()).abs().max())
    limits = (
        (f"position 0 changes a head by {at_zero:.1e}", at_zero, 1e-5),
        (f"q.k at distance 7 differs by {distance:.1e} between positions 7 and {last:,}", distance, 1e-5),
        (f"cos and sin are off by {angle:.1e} at position {last:,}", angle, ANGLE_LIMIT * factor),
        (f"a head at position {last:,} is off by {agree:.1e}", agree, 1e-5),
    )
    text = f"no rotation at position 0, q.k depends on the distance alone, angles hold at position {last:,}"
    text += f"; concentration {factor:.4f}" if factor != 1 else ""
    errors = [wrong for wrong, error, limit in limits if not error <= limit]
    evidence = {"at_position_0": at_zero, "by_distance": distance, "angles_at_last_position": angle}
    evidence |= {"last_position": last, "concentration": factor}
    return check_of("RoPE", text, errors=errors, evidence=evidence)


def _angle_error(model: Decoder, last: int, width: int) -> float:
    """Of the engine's cos and sin for `width` positions up to the last, against float64; the engine computes
    few positions otherwise than many."""
    positions = torch.arange(max(last - width + 1, 0), last + 1)
    cos, sin = model.rope(positions[None].to(model.device))
    angles = positions[:, None].double() * frequencies(model.config.rope, model.config.head_dim)
    factor = concentration(model.config.rope)
    values = ((cos, angles.cos()), (sin, angles.sin()))
    return max(float((mine[0].double().cpu() - book * factor).abs().max()) for mine, book in values)
