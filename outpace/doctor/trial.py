"""Trying mistakes on half a layer: how it runs under a reading, on which rows, and what was learnt before."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from outpace.doctor.reference import (
    Reading,
    attention_weights,
    mlp_weights,
    read_attention,
    read_mlps,
    right_reading,
)
from outpace.doctor.search import Mistake, Run, Search, attention_mistakes, mlp_mistakes, search
from outpace.doctor.sides import LayerSteps, layer_of
from outpace.models.blocks import Experts
from outpace.models.decoder import Decoder

Half = Literal["attention", "mlp"]
Whose = Literal["ours", "theirs"]
HALVES: tuple[Half, ...] = ("attention", "mlp")
ROWS = 8  # of the MLP, where mistakes are tried: its rows do not know each other


@dataclass(frozen=True, kw_only=True)
class Trial:
    """`run` gives what the half states of `rows` of the text, [len(rows), C] under each reading."""

    half: Half
    reading: Reading  # the right one
    mistakes: list[Mistake]
    run: Run
    rows: Tensor


def attention_trial(model: Decoder, layer: int, fed: LayerSteps) -> Trial:
    """On what came into the layer: all rows, for they see each other."""
    weights, reading = attention_weights(layer_of(model, layer)), right_reading(model.config, layer)

    def run(readings: Sequence[Reading]) -> list[Tensor]:
        return [read_attention(fed.x, weights, r).out for r in readings]

    return Trial(
        half="attention",
        reading=reading,
        mistakes=attention_mistakes(reading, model.config),
        run=run,
        rows=torch.arange(len(fed.x)),
    )


def mlp_trial(model: Decoder, layer: int, fed: LayerSteps, rows: Tensor) -> Trial:
    """On what came into the second norm."""
    block, reading = layer_of(model, layer), right_reading(model.config, layer)
    weights, x = mlp_weights(block), fed.middle[rows]

    def run(readings: Sequence[Reading]) -> list[Tensor]:
        return [steps.out for steps in read_mlps([x] * len(readings), weights, readings)]

    mistakes = mlp_mistakes(reading, model.config, experts=isinstance(block.mlp, Experts))
    return Trial(half="mlp", reading=reading, mistakes=mistakes, run=run, rows=rows)


def trial(half: Half, model: Decoder, layer: int, fed: LayerSteps, rows: Tensor) -> Trial:
    """`rows`: those on which the MLP is tried."""
    if half == "attention":
        return attention_trial(model, layer, fed)
    return mlp_trial(model, layer, fed, rows)


def telling_rows(got: Tensor, wanted: Tensor, note: Tensor) -> Tensor:
    """Rows of [T, C] in which two sides differ most for their size, of those that `told` [T] allows."""
    size = wanted.norm(dim=-1).clamp(min=1e-30)
    share = ((got - wanted).norm(dim=-1) / size).nan_to_num(torch.inf).masked_fill(~note, -1.0)
    return share.topk(min(ROWS, int(note.sum()))).indices


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """A half of a layer that departs. `whose`: where the weights, read with the mistake, say what the other
    side states. `names`: mistakes that explain it equally well; () where none does."""

    half: Half
    whose: Whose
    names: tuple[str, ...]
    error: float  # with the mistake
    before: float  # without
    nearest: str | None  # the best of those that do not explain it


@dataclass
class TrialCache:
    """What explained a layer is tried first on the next; what no two mistakes explain is not tried in pairs
    again."""

    known: dict[tuple[Half, Whose], list[Mistake]] = field(default_factory=dict)
    hopeless: set[tuple[Half, Whose]] = field(default_factory=set)

    @torch.inference_mode()
    def explain(
        self, tried: Trial, whose: Whose, wanted: Tensor, limit: float, *, in_pairs: bool
    ) -> TrialResult:
        """`wanted` [T, C]: what the half should say."""
        place = tried.half, whose
        known = self.known.setdefault(place, [])
        in_pairs = in_pairs and place not in self.hopeless
        wanted = wanted[tried.rows]
        result = search(known, tried.reading, tried.run, wanted, limit, in_pairs=False)
        if not result.matches:
            result = search(tried.mistakes, tried.reading, tried.run, wanted, limit, in_pairs=in_pairs)
        known += [t.mistake for t in result.matches if t.mistake not in known]
        if in_pairs and not result.matches:
            self.hopeless.add(place)
        return _finding(tried.half, whose, result)


def _finding(half: Half, whose: Whose, result: Search) -> TrialResult:
    best = result.matches[0] if result.matches else result.nearest
    return TrialResult(
        half=half,
        whose=whose,
        names=tuple(t.mistake.name for t in result.matches),
        error=best.error if best is not None else result.before,
        before=result.before,
        nearest=None if result.matches or best is None else best.mistake.name,
    )
