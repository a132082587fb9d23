"""Ours against a reference, layer by layer; where a half of a layer departs, the mistake that explains it."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from outpace.doctor.search import EXACT
from outpace.doctor.sides import (
    LayerSteps,
    Walk,
    engine_attention,
    engine_mlp,
    layer_of,
    same_experts,
    telling,
)
from outpace.doctor.trial import HALVES, Half, TrialCache, TrialResult, telling_rows, trial
from outpace.doctor.weights import attention_weights, mlp_different, mlp_weights, most_different, relative
from outpace.models.decoder import Decoder, DecoderBlock

# Two files of one model in different number formats: what each half adds may differ by this many times
# what its matrices do. Beyond these relative differences a tensor is another one, not a rounded one; norms,
# biases and sinks stay in 16 bits or more in every format.
NOISE_FACTOR, MOST_NOISE = 10.0, 0.5
OTHER_MATRIX, OTHER_VECTOR = 0.25, 0.02
MATRICES = {"q", "k", "v", "o", "router", "gate_up", "down"}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """`walk`: what it did on the text. `model`: its weights in our engine; None where they are the same
    files as ours."""

    name: str
    walk: Walk
    model: Decoder | None = None


@dataclass(frozen=True, kw_only=True)
class Apart:
    """How far ours is from the reference: cosine over everything, largest difference, relative error."""

    cosine: float
    largest: float
    error: float


def apart(ours: Tensor, theirs: Tensor) -> Apart:
    flat = ours.flatten().double(), theirs.flatten().double()
    return Apart(
        cosine=float(torch.nn.functional.cosine_similarity(*flat, dim=0)),
        largest=float((flat[0] - flat[1]).abs().max()),
        error=relative(*flat),
    )


@dataclass(frozen=True, kw_only=True)
class LayerApart:
    """attention and mlp are fed with what the reference's got; `so_far` is ours from the embedding on."""

    layer: int
    window: int
    attention: Apart
    mlp: Apart
    so_far: Apart
    routed_alike: float | None  # share of the text's tokens that go to the same experts
    limits: dict[Half, float]
    tensors: dict[Half, tuple[str, ...]]  # those that differ by more than two number formats do
    findings: tuple[TrialResult, ...]

    @property
    def departs(self) -> tuple[Half, ...]:
        return tuple(h for h in HALVES if not getattr(self, h).error <= self.limits[h])


def compare_layers(model: Decoder, ours: Walk, reference: Reference) -> Iterator[LayerApart]:
    """One after the other."""
    memory = TrialCache()
    for i, theirs in enumerate(reference.walk.layers[: len(ours.layers)]):
        yield _compare_layer(model, i, ours.layers[i], theirs, reference, memory)


def _compare_layer(
    model: Decoder, i: int, ours: LayerSteps, theirs: LayerSteps, reference: Reference, memory: TrialCache
) -> LayerApart:
    block = layer_of(model, i)
    mlp, chosen = engine_mlp(block, theirs.middle)
    values: dict[Half, Tensor] = {
        "attention": engine_attention(model, block, theirs.x).float().cpu(),
        "mlp": mlp.float().cpu(),
    }
    wanted: dict[Half, Tensor] = {"attention": theirs.attention, "mlp": theirs.mlp}
    alike = same_experts(chosen, theirs.chosen)
    note = telling(alike, len(theirs.x))
    different = _different(block, None if reference.model is None else layer_of(reference.model, i))
    limits = {half: noise_limit(different[half]) for half in HALVES}
    halves: dict[Half, Apart] = {
        "attention": apart(values["attention"], wanted["attention"]),
        "mlp": apart(values["mlp"][note], wanted["mlp"][note]),
    }
    findings: list[TrialResult] = []
    for half in (h for h in HALVES if not halves[h].error <= limits[h]):
        rows = telling_rows(values[half], wanted[half], note)
        tried = trial(half, model, i, theirs, rows)
        mine = memory.explain(tried, "ours", wanted[half], limits[half], in_pairs=True)
        findings.append(mine)
        if reference.model is not None:
            tried = trial(half, reference.model, i, theirs, rows)
            its = memory.explain(tried, "theirs", values[half], limits[half], in_pairs=not mine.names)
            findings.append(its)
    return LayerApart(
        layer=i,
        window=block.self_attn.window,
        attention=halves["attention"],
        mlp=halves["mlp"],
        so_far=apart(ours.out, theirs.out),
        routed_alike=None if alike is None else float(alike.float().mean()),
        limits=limits,
        tensors={half: other_tensors(different[half]) for half in HALVES},
        findings=tuple(findings),
    )


def other_tensors(different: dict[str, float]) -> tuple[str, ...]:
    """Those that no number format explains."""
    return tuple(n for n, e in different.items() if e > (OTHER_MATRIX if n in MATRICES else OTHER_VECTOR))


def noise_limit(different: dict[str, float]) -> float:
    """What may differ by rounding: the median matrix states how coarse the formats are. Not the largest one:
    it may be a little wrong."""
    rounded = [e for n, e in different.items() if n in MATRICES and e <= OTHER_MATRIX]
    return max(EXACT, min(NOISE_FACTOR * median(rounded or [0.0]), MOST_NOISE))


def _different(block: DecoderBlock, other: DecoderBlock | None) -> dict[Half, dict[str, float]]:
    """How far the two files' tensors are apart; nothing where there is one file only."""
    if other is None:
        return {"attention": {}, "mlp": {}}
    mine, theirs = mlp_weights(block), mlp_weights(other)
    alike = (mine.router is None) == (theirs.router is None)
    return {
        "attention": most_different(attention_weights(block), attention_weights(other)),
        "mlp": mlp_different(mine, theirs) if alike else {},
    }
