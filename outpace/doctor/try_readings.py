"""Without a reference: would the text be predicted better if the weights were read with a known mistake?

A checkpoint that was written with a mistake is read right by the same mistake. A trained model tells by the
text: its own reading is the best there is, every other costs it. One that knows nothing tells nothing.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.doctor.check import Check
from outpace.doctor.reference import (
    Reading,
    attention_weights,
    mlp_weights,
    read_attention,
    read_mlps,
    right_reading,
)
from outpace.doctor.search import Mistake, attention_mistakes, mlp_mistakes
from outpace.doctor.sides import layer_of
from outpace.doctor.speech import CHANCE, token_losses
from outpace.models.blocks import Experts
from outpace.models.decoder import Decoder
from outpace.ops.linear import linear

Names = tuple[str, ...]  # mistakes made at once; () is the weights as they are
AS_IS: Names = ()
KNOWN = "known mistakes"
SCALES = ("expert scale off by one: doubled", "expert scale off by one: halved")
# A gain counts when it is large and sure: some mistakes happen to help on one text by less than a tenth.
GAIN, SURE = 0.25, 4.0


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What reading with mistakes saves on the text, in nats per token; `z`: over its standard error."""

    names: Names
    loss: float
    gain: float
    z: float

    @property
    def label(self) -> str:
        return " and ".join(self.names)

    @property
    def better(self) -> bool:
        return self.gain >= GAIN and self.z >= SURE

    @property
    def worse(self) -> bool:
        return self.gain <= -GAIN and self.z <= -SURE


@dataclass(frozen=True, kw_only=True)
class LayerReadings:
    """The right reading of a layer, and the known mistakes in it by name."""

    right: Reading
    attention: dict[str, Mistake]
    mlp: dict[str, Mistake]

    def attention_with(self, names: Names) -> Reading:
        return _with(self.right, self.attention, names)

    def mlp_with(self, names: Names) -> Reading:
        return _with(self.right, self.mlp, names)


def _with(reading: Reading, known: dict[str, Mistake], names: Names) -> Reading:
    for name in names:
        reading = known[name].apply(reading) if name in known else reading
    return reading


def layer_readings(model: Decoder, layer: int) -> LayerReadings:
    block = layer_of(model, layer)
    right = right_reading(model.config, layer)
    mlp = mlp_mistakes(right, model.config, experts=isinstance(block.mlp, Experts))
    return LayerReadings(
        right=right,
        attention={m.name: m for m in attention_mistakes(right, model.config)},
        mlp={m.name: m for m in mlp},
    )


def known_fields(model: Decoder) -> dict[str, set[str]]:
    """Every mistake that some layer could make, and the fields of the Reading that it gets wrong."""
    fields: dict[str, set[str]] = {}
    for i in range(len(model.layers)):
        readings = layer_readings(model, i)
        for mistake in (*readings.attention.values(), *readings.mlp.values()):
            fields.setdefault(mistake.name, set()).update(mistake.change)
    return fields


@torch.inference_mode()
def read_with(model: Decoder, tokens: list[int], readings: Sequence[Names]) -> dict[Names, Tensor]:
    """Mistakes -> [T-1] losses of the text when they are made in every layer that they apply to.

    Layer by layer, all readings at once, so that an expert is decoded once for all of them.
    """
    start = model.embed(torch.tensor([tokens], device=model.device))[0].float().cpu()
    states = [start] * len(readings)
    for i in range(len(model.layers)):
        block = layer_of(model, i)
        known, attention = layer_readings(model, i), attention_weights(block)
        states = [
            x + read_attention(x, attention, known.attention_with(names)).out
            for x, names in zip(states, readings, strict=True)
        ]
        steps = read_mlps(states, mlp_weights(block), [known.mlp_with(names) for names in readings])
        states = [x + its.out for x, its in zip(states, steps, strict=True)]
    losses = (token_losses(_logits(model, x), tokens) for x in states)
    return dict(zip(readings, losses, strict=True))


def _logits(model: Decoder, x: Tensor) -> Tensor:
    """[T, C] after the last layer -> [T, V] float32."""
    return model.logits(model.norm(x.to(model.device, model.dtype))).float().cpu()


@torch.inference_mode()
def _tied(model: Decoder, tokens: list[int]) -> Tensor:
    hidden = model(torch.tensor([tokens], device=model.device)).hidden[0]
    return token_losses(linear(hidden, model.embed_tokens.weight).float().cpu(), tokens)


def gains(losses: dict[Names, Tensor]) -> list[Gain]:
    """Against the weights as they are, best first."""
    base = losses[AS_IS]
    entries = []
    for names, loss in losses.items():
        if names != AS_IS:
            saved = (base - loss).double().nan_to_num(-100.0)
            error = float(saved.std()) / math.sqrt(len(saved))
            mean = float(saved.mean())
            z = mean / error if error else 0.0
            entries.append(Gain(names=names, loss=float(loss.mean()), gain=mean, z=z))
    return sorted(entries, key=lambda g: -g.gain)


def try_readings(model: Decoder, tokens: list[int], seconds: float) -> Iterator[Check]:
    """The scale of the experts; then all that is known, if that takes at most `seconds`; and where a mistake
    helps, every second one next to it."""
    began = time.perf_counter()
    fields = known_fields(model)
    scales: list[Names] = [(name,) for name in SCALES if name in fields]
    losses = read_with(model, tokens, [AS_IS, *scales])
    each = (time.perf_counter() - began) / (1 + len(scales))
    yield check_scale(losses, model.config.vocab_size)
    others: list[Names] = [(name,) for name in fields if (name,) not in scales]
    if each * len(others) > seconds:
        minutes = each * len(others) / 60
        text = f"{len(others)} readings would take about {minutes:.0f} minutes: --thorough tries them"
        yield Check(name=KNOWN, status="skipped", message=text)
        return
    losses |= read_with(model, tokens, others)
    best = gains(losses)[0]
    if best.better:
        taken = fields[best.names[0]]
        seconds_too = [(best.names[0], n) for n in fields if not fields[n] & taken and n not in best.names]
        losses |= read_with(model, tokens, seconds_too)
    if model.lm_head is not None:
        losses["tied head (the embedding used as the head)",] = _tied(model, tokens)
    yield check_readings(losses, model.config.vocab_size)


def check_scale(losses: dict[Names, Tensor], vocab: int) -> Check:
    """Scale bias 127 or 128: twice or half of what the experts' scales say."""
    name = "scale of the experts"
    result = gains(losses)
    if not result:
        return Check(name=name, status="skipped", message="the model has no experts")
    base, chance = float(losses[AS_IS].mean()), CHANCE * math.log(vocab)
    text = ", ".join(f"{g.loss:.2f} {g.label.split(': ')[1]}" for g in result)
    text = f"{base:.2f} nats per token as it is, {text}"
    evidence = {"as it is": base} | _figures(result)
    best = result[0]
    if best.better and best.loss < chance:
        text = f"{best.label}: read so, the text is predicted better ({text}; z = {best.z:.0f})"
        return Check(name=name, status="fail", message=text, evidence=evidence)
    if base < chance and all(g.worse for g in result):
        return Check(name=name, status="pass", message=text, evidence=evidence)
    reason = (
        "the text does not separate them" if base < chance else "the text is predicted under none of them"
    )
    return Check(name=name, status="skipped", message=f"undecided, {reason}: {text}", evidence=evidence)


def check_readings(losses: dict[Names, Tensor], vocab: int) -> Check:
    result, base = gains(losses), float(losses[AS_IS].mean())
    best, chance = _plainest(result), CHANCE * math.log(vocab)
    evidence = _figures(result)
    if best.better and best.loss < chance:
        others = [g.label for g in result if _as_good(g, best, losses)]
        also = f" (or {' or '.join(others)}: this text does not tell them apart)" if others else ""
        text = (
            f"read with {best.label}{also}, the text is predicted better: {best.loss:.2f} nats per token, "
            f"not "
            f"{base:.2f} (z = {best.z:.0f}). The checkpoint, or its config, seems to say it that way"
        )
        return Check(name=KNOWN, status="fail", message=text, evidence=evidence)
    if not base < chance:
        text = f"undecided: the text is not predicted under any of {len(result)} readings"
        return Check(name=KNOWN, status="skipped", message=text, evidence=evidence)
    text = f"{len(result)} tried, none predicts the text better"
    costly = sum(g.worse for g in result)
    text += f"; {costly} of them clearly worse, the rest cannot be told by this text"
    return Check(name=KNOWN, status="pass", message=text, evidence=evidence)


def _plainest(items: list[Gain]) -> Gain:
    """The best one; a second mistake must pay for itself as the first did."""
    alone = next(g for g in items if len(g.names) == 1)
    return items[0] if items[0].gain >= alone.gain + GAIN else alone


def _as_good(gain: Gain, best: Gain, losses: dict[Names, Tensor]) -> bool:
    """Another explanation of as many mistakes, which costs the text no more than chance would have it."""
    if gain is best or len(gain.names) != len(best.names) or not gain.better:
        return False
    return not gains({AS_IS: losses[best.names], gain.names: losses[gain.names]})[0].worse


def _figures(items: list[Gain]) -> dict[str, dict[str, float]]:
    return {g.label: {"loss": g.loss, "gain": g.gain, "z": g.z} for g in items}
