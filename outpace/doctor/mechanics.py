"""What must hold in any model: engine and plain forward agree, rows sum to 1, RoPE turns, routers choose."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.doctor.check import Check
from outpace.doctor.reference import (
    AttentionSteps,
    MlpSteps,
    attention_weights,
    concentration,
    frequencies,
    mlp_weights,
    read_attention,
    read_mlp,
    relative,
    right_reading,
    rotate,
)
from outpace.doctor.search import EXACT, search
from outpace.doctor.sides import (
    LayerSteps,
    Walk,
    engine_attention,
    engine_mlp,
    layer_of,
    same_experts,
    telling,
)
from outpace.doctor.trial import Trial, attention_trial, mlp_trial, telling_rows
from outpace.models.decoder import Decoder, DecoderBlock
from outpace.ops.attention import causal_attend
from outpace.ops.rope import rotate as engine_rotate

SUM_LIMIT = 1e-5  # of a row of weights and its sink, from 1
ANGLE_LIMIT = 1e-6  # of cos and sin, which are handed out in float32
FEW = 4  # rows: a few at once take another way through the engine than a whole text
TIE = 1e-4  # router logits this near each other may be ranked either way


@dataclass(frozen=True, kw_only=True)
class LayerExam:
    """One layer of ours against the plain forward, both fed with what came into it."""

    layer: int
    attention_error: float
    mlp_error: float
    row_error: float  # largest |sum of a row's weights + its sink - 1|
    sink_share: float | None  # mean weight that the sinks take
    routed_alike: float | None  # share of tokens; ties count as alike
    experts_used: int
    explained_by: tuple[str, ...]  # mistakes that the engine seems to make here


def examine_layers(model: Decoder, ours: Walk) -> Iterator[LayerExam]:
    for i, steps in enumerate(ours.layers):
        with torch.inference_mode():
            yield _examine(model, i, steps)


def _examine(model: Decoder, i: int, steps: LayerSteps) -> LayerExam:
    block = layer_of(model, i)
    reading = right_reading(model.config, i)
    attention, mlp = attention_weights(block), mlp_weights(block)
    a, m = read_attention(steps.x, attention, reading), read_mlp(steps.middle, mlp, reading)
    few = engine_attention(model, block, steps.x[:FEW]), engine_mlp(block, steps.middle[:FEW])[0]
    note = telling(same_experts(steps.chosen, m.chosen), len(steps.x))
    errors = (
        max(relative(steps.attention, a.out), _first_rows(few[0], a.out, torch.ones_like(note))),
        max(relative(steps.mlp[note], m.out[note]), _first_rows(few[1], m.out, note)),
    )
    explained: list[str] = []
    if not errors[0] <= EXACT:
        explained += _as_if_by(attention_trial(model, i, steps), steps.attention)
    if not errors[1] <= EXACT:
        explained += _as_if_by(mlp_trial(model, i, steps, telling_rows(steps.mlp, m.out, note)), steps.mlp)
    return LayerExam(
        layer=i,
        attention_error=errors[0],
        mlp_error=errors[1],
        row_error=row_error(block, a, model.device),
        sink_share=None if a.sink is None else float(a.sink.mean()),
        routed_alike=routed_alike(steps, m),
        experts_used=len(m.chosen.unique()),
        explained_by=tuple(explained),
    )


def _as_if_by(tried: Trial, value: Tensor) -> list[str]:
    result = search(tried.mistakes, tried.reading, tried.run, value[tried.rows], EXACT).matches
    return [t.mistake.name for t in result]


def _first_rows(ours: Tensor, plain: Tensor, value: Tensor) -> float:
    value = value[: len(ours)]
    return relative(ours.float().cpu()[value], plain[: len(ours)][value])


def row_error(block: DecoderBlock, a: AttentionSteps, device: torch.device) -> float:
    """The engine's attention over values of 1 gives the sum of each row's weights; what the plain forward
    states the sink takes must make it 1."""
    its = block.self_attn
    q, k = (x.to(device)[None].transpose(1, 2) for x in (a.q, a.k))  # [1, H|K, T, D]
    ones = torch.ones_like(k)
    out = causal_attend(q.transpose(1, 2), k, ones, its.window, its.sinks, its.scale)
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
    errors = {f"{e.layer}": [e.attention_error, e.mlp_error] for e in exams}
    wrong = [e for e in exams if not max(e.attention_error, e.mlp_error) <= EXACT]
    if not wrong:
        most = max(max(e.attention_error, e.mlp_error) for e in exams)
        text = f"{len(exams)} layers, relative error at most {most:.1e}"
        return Check(name=name, status="pass", message=text, evidence=errors)
    first = wrong[0]
    why = " or ".join(first.explained_by) or "no known mistake"
    text = (
        f"our own engine is wrong in {len(wrong)} of {len(exams)} layers, first in {first.layer} (attention "
        f"{first.attention_error:.1e}, MLP {first.mlp_error:.1e}), as if by: {why}. Please report it"
    )
    return Check(name=name, status="fail", message=text, evidence=errors)


def check_rows(exams: list[LayerExam]) -> Check:
    name = "attention rows sum to 1"
    worst = max(exams, key=lambda e: e.row_error if e.row_error == e.row_error else float("inf"))
    shares = [round(e.sink_share, 4) for e in exams if e.sink_share is not None]
    text = f"within {worst.row_error:.0e} in {len(exams)} layers"
    if shares:
        text += f"; sinks take {min(shares):.1%} to {max(shares):.1%} of a row"
    evidence = {"largest_error": worst.row_error, "sink_share": shares}
    if worst.row_error <= SUM_LIMIT:
        return Check(name=name, status="pass", message=text, evidence=evidence)
    text = f"layer {worst.layer}: weights and sink sum to 1 only within {worst.row_error:.2g}"
    return Check(name=name, status="fail", message=text, evidence=evidence)


def check_router(exams: list[LayerExam], experts: int) -> Check:
    name = "router"
    routed = [e for e in exams if e.routed_alike is not None]
    if not routed:
        return Check(name=name, status="skipped", message="no layer has experts")
    alike = [e.routed_alike or 0.0 for e in routed]
    used = [e.experts_used for e in routed]
    evidence = {"alike": alike, "experts_used": used}
    text = (
        f"the same experts for {min(alike):.1%} of the tokens; of {experts}, {min(used)} to {max(used)} used"
    )
    return Check(name=name, status="pass" if min(alike) == 1 else "fail", message=text, evidence=evidence)


def check_rope(model: Decoder) -> Check:
    """Position 0 turns nothing; products depend on the distance alone; angles hold at the last position."""
    name = "RoPE"
    rope, D = model.config.rope, model.config.head_dim
    last = max(model.config.max_position_embeddings - 1, 1)
    factor = concentration(rope)
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, D, generator=rng)

    def turned(x: Tensor, position: int) -> Tensor:
        cos, sin = model.rope(torch.tensor([[position]], device=model.device))
        return engine_rotate(x, cos.cpu(), sin.cpu()).double()

    at_zero = float((turned(q, 0) - q * factor).abs().max())
    near, far = ((turned(q, n) * turned(k, n - 7)).sum() for n in (7, last))
    distance = float((near - far).abs() / (q.norm() * k.norm() * factor**2))
    angle = max(_angle_error(model, last, width) for width in (1, 256))
    agree = float((turned(q, last)[0] - rotate(q[0], rope, first=last).double()).abs().max())
    evidence = {
        "at_position_0": at_zero,
        "by_distance": distance,
        "angles_at_last_position": angle,
        "last_position": last,
        "concentration": factor,
    }
    wrong = [
        text
        for text, error, limit in (
            (f"position 0 changes a head by {at_zero:.1e}", at_zero, 1e-5),
            (f"q.k at distance 7 differs by {distance:.1e} between positions 7 and {last:,}", distance, 1e-5),
            (f"cos and sin are off by {angle:.1e} at position {last:,}", angle, ANGLE_LIMIT * factor),
            (f"a head at position {last:,} is off by {agree:.1e}", agree, 1e-5),
        )
        if not error <= limit
    ]
    description = f"position 0 turns nothing, distance is all that counts, angles hold at position {last:,}"
    description += f"; concentration {factor:.4f}" if factor != 1 else ""
    return Check(
        name=name,
        status="fail" if wrong else "pass",
        message="; ".join(wrong) or description,
        evidence=evidence,
    )


def _angle_error(model: Decoder, last: int, width: int) -> float:
    """Of the engine's cos and sin for `width` positions up to the last, against float64. A few positions at
    once and many take different ways through the engine."""
    positions = torch.arange(max(last - width + 1, 0), last + 1)
    cos, sin = model.rope(positions[None].to(model.device))
    angles = positions[:, None].double() * frequencies(model.config.rope, model.config.head_dim)
    factor = concentration(model.config.rope)
    pairs = ((cos, angles.cos()), (sin, angles.sin()))
    return max(float((mine[0].double().cpu() - book * factor).abs().max()) for mine, book in pairs)
