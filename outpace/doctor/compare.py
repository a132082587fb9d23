"""Ours against a reference, layer by layer; where a half of a layer departs, the mistake that explains it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outpace.doctor.forward import read_attention, read_mlp
from outpace.doctor.mistakes import Mistake, attention_mistakes, mlp_mistakes
from outpace.doctor.reading import Reading, right_reading
from outpace.doctor.search import EXACT, Search, search
from outpace.doctor.sides import LayerSteps, Walk, engine_attention, engine_mlp
from outpace.doctor.weights import (
    attention_weights,
    mlp_different,
    mlp_weights,
    most_different,
    relative,
)
from outpace.models.blocks import Experts
from outpace.models.decoder import Block, Decoder

Half = Literal["attention", "mlp"]
Whose = Literal["ours", "theirs"]
HALVES: tuple[Half, ...] = ("attention", "mlp")

# Two files of one model in different number formats: what each half adds may differ by this many times
# the largest relative difference of its tensors. A tensor that differs by more than DIFFERENT is another
# tensor, not a rounded one.
NOISE_FACTOR, MOST_NOISE, DIFFERENT = 10.0, 0.5, 0.25
ROWS = 8  # of the MLP, where mistakes are tried: its rows do not know each other


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
class Finding:
    """A half of a layer that departs. `whose`: whose weights, read with the mistake, say what the other
    side says. `names`: mistakes that explain it equally well; () where none does."""

    half: Half
    whose: Whose
    names: tuple[str, ...]
    error: float  # with the mistake
    before: float  # without
    nearest: str | None  # the best of those that do not explain it
    tensors: tuple[str, ...]  # those that differ between the two files


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
    findings: tuple[Finding, ...]

    @property
    def departs(self) -> tuple[Half, ...]:
        return tuple(h for h in HALVES if not getattr(self, h).error <= self.limits[h])


def compare_layers(model: Decoder, ours: Walk, reference: Reference) -> Iterator[LayerApart]:
    """One after the other; what explained a layer is tried first on the next."""
    known: dict[tuple[Half, Whose], list[Mistake]] = {}
    for i, theirs in enumerate(reference.walk.layers[: len(ours.layers)]):
        yield _compare_layer(model, i, ours.layers[i], theirs, reference, known)


def _compare_layer(
    model: Decoder,
    i: int,
    ours: LayerSteps,
    theirs: LayerSteps,
    reference: Reference,
    known: dict[tuple[Half, Whose], list[Mistake]],
) -> LayerApart:
    block = model.get_submodule(f"layers.{i}")
    assert isinstance(block, Block)
    other = None if reference.model is None else reference.model.get_submodule(f"layers.{i}")
    assert other is None or isinstance(other, Block)
    said = engine_attention(model, block, theirs.x).float().cpu()
    mlp, chosen = engine_mlp(block, theirs.middle)
    mlp = mlp.float().cpu()
    different = _different(block, other)
    noise = {h: max((e for e in different[h].values() if e <= DIFFERENT), default=0.0) for h in HALVES}
    limits: dict[Half, float] = {h: max(EXACT, min(NOISE_FACTOR * noise[h], MOST_NOISE)) for h in HALVES}
    parts = {"attention": apart(said, theirs.attention), "mlp": apart(mlp, theirs.mlp)}
    departs: list[Half] = [h for h in HALVES if not parts[h].error <= limits[h]]
    findings: list[Finding] = []
    for half in departs:
        got = said if half == "attention" else mlp
        tensors = tuple(name for name, e in different[half].items() if e > DIFFERENT)
        sides: list[tuple[Whose, Decoder, Block, Tensor]] = [("ours", model, block, getattr(theirs, half))]
        if reference.model is not None and other is not None:
            sides.append(("theirs", reference.model, other, got))
        for whose, weights, its, wanted in sides:
            tried = known.setdefault((half, whose), [])
            result = _explain(half, weights, its, i, theirs, wanted, got, limits[half], tried)
            findings.append(_finding(half, whose, result, tensors))
    return LayerApart(
        layer=i,
        window=block.self_attn.window,
        so_far=apart(ours.out, theirs.out),
        routed_alike=_alike(chosen, theirs.chosen),
        limits=limits,
        findings=tuple(findings),
        **parts,
    )


def _explain(
    half: Half,
    model: Decoder,
    block: Block,
    layer: int,
    theirs: LayerSteps,
    wanted: Tensor,
    got: Tensor,
    limit: float,
    known: list[Mistake],
) -> Search:
    """Tries what is known from earlier layers, then every mistake, then pairs; remembers what it found."""
    reading = right_reading(model.config, layer)
    run: Callable[[Reading], Tensor]
    if half == "attention":
        attention = attention_weights(block)
        mistakes = attention_mistakes(reading, model.config)

        def run(r: Reading) -> Tensor:
            return read_attention(theirs.x, attention, r).out

    else:
        mlp, experts = mlp_weights(block), isinstance(block.mlp, Experts)
        mistakes = mlp_mistakes(reading, model.config, experts=experts)
        rows = _telling_rows(got, getattr(theirs, half))
        middle, wanted = theirs.middle[rows], wanted[rows]

        def run(r: Reading) -> Tensor:
            return read_mlp(middle, mlp, r).out

    with torch.inference_mode():
        result = search(known, reading, run, wanted, limit, in_pairs=False)
        if not result.found:
            result = search(mistakes, reading, run, wanted, limit)
    known += [t.mistake for t in result.found if t.mistake not in known]
    return result


def _telling_rows(got: Tensor, wanted: Tensor) -> Tensor:
    """The rows in which the two sides differ most, relative to their size."""
    size = wanted.norm(dim=-1).clamp(min=1e-30)
    share = ((got - wanted).norm(dim=-1) / size).nan_to_num(torch.inf)
    return share.topk(min(ROWS, len(share))).indices


def _finding(half: Half, whose: Whose, result: Search, tensors: tuple[str, ...]) -> Finding:
    best = result.found[0] if result.found else result.nearest
    return Finding(
        half=half,
        whose=whose,
        names=tuple(t.mistake.name for t in result.found),
        error=best.error if best is not None else result.before,
        before=result.before,
        nearest=None if result.found or best is None else best.mistake.name,
        tensors=tensors,
    )


def _different(block: Block, other: Block | None) -> dict[Half, dict[str, float]]:
    """How far the two files' tensors are apart; nothing where there is one file only."""
    if other is None:
        return {"attention": {}, "mlp": {}}
    mine, theirs = mlp_weights(block), mlp_weights(other)
    alike = (mine.router is None) == (theirs.router is None)
    return {
        "attention": most_different(attention_weights(block), attention_weights(other)),
        "mlp": mlp_different(mine, theirs) if alike else {},
    }


def _alike(ours: Tensor | None, theirs: Tensor | None) -> float | None:
    if ours is None or theirs is None:
        return None
    same = (ours.sort(-1).values == theirs.sort(-1).values.cpu()).all(-1)
    return float(same.float().mean())
