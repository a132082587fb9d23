"""Without a reference: would the text be predicted better if the weights were read with a known mistake?

A checkpoint that was written with a mistake is read right by the same mistake. A trained model tells by the
text: its own reading is the best there is, every other costs it. One that knows nothing tells nothing.
"""

import functools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.doctor.check import Check
from outpace.doctor.forward import read_attention, read_mlp
from outpace.doctor.mistakes import Mistake, attention_mistakes, mlp_mistakes
from outpace.doctor.reading import Reading, right_reading
from outpace.doctor.speech import CHANCE, token_losses
from outpace.doctor.weights import attention_weights, mlp_weights
from outpace.models.blocks import Experts
from outpace.models.decoder import Block, Decoder
from outpace.ops.linear import linear

AS_IS = "as it is"
SCALES = ("expert scale off by one: doubled", "expert scale off by one: halved")
# A gain counts when it is large and sure: some mistakes happen to help on one text by less than a tenth.
GAIN, SURE = 0.25, 4.0


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What reading with a mistake saves on the text, in nats a token; `z`: over its standard error."""

    name: str
    loss: float
    gain: float
    z: float

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

    def named(self, half: dict[str, Mistake], name: str) -> Reading:
        return half[name].apply(self.right) if name in half else self.right


def layer_readings(model: Decoder, layer: int, block: Block) -> LayerReadings:
    right = right_reading(model.config, layer)
    mlp = mlp_mistakes(right, model.config, experts=isinstance(block.mlp, Experts))
    return LayerReadings(
        right=right,
        attention={m.name: m for m in attention_mistakes(right, model.config)},
        mlp={m.name: m for m in mlp},
    )


def known_names(model: Decoder) -> list[str]:
    """Every mistake that some layer could make."""
    found: dict[str, None] = {}
    for i, block in enumerate(model.layers):
        assert isinstance(block, Block)
        readings = layer_readings(model, i, block)
        found |= dict.fromkeys([*readings.attention, *readings.mlp])
    return list(found)


@torch.inference_mode()
def read_with(model: Decoder, tokens: list[int], names: Sequence[str]) -> dict[str, Tensor]:
    """Name -> [T-1] losses of the text under that mistake, made in every layer that it applies to.

    Layer by layer, all readings at once: an expert is decoded once for all of them, and one layer's
    decoded experts are all that is held beside the model.
    """
    start = model.embed(torch.tensor([tokens], device=model.device))[0].float().cpu()
    states = dict.fromkeys(names, start)
    for i, block in enumerate(model.layers):
        assert isinstance(block, Block)
        readings, attention = layer_readings(model, i, block), attention_weights(block)
        mlp = mlp_weights(block)
        mlp = replace(mlp, expert=functools.cache(mlp.expert))
        for name, x in states.items():
            x = x + read_attention(x, attention, readings.named(readings.attention, name)).out
            states[name] = x + read_mlp(x, mlp, readings.named(readings.mlp, name)).out
    return {name: token_losses(logits_of(model, x), tokens) for name, x in states.items()}


def logits_of(model: Decoder, x: Tensor) -> Tensor:
    """[T, C] after the last layer -> [T, V] float32."""
    return model.logits(model.norm(x.to(model.device, model.dtype))).float().cpu()


def gains(losses: dict[str, Tensor]) -> list[Gain]:
    """Against "as it is", best first."""
    base = losses[AS_IS]
    found = []
    for name, loss in losses.items():
        if name != AS_IS:
            saved = (base - loss).double().nan_to_num(-100.0)
            error = float(saved.std()) / math.sqrt(len(saved))
            mean = float(saved.mean())
            z = mean / error if error else 0.0
            found.append(Gain(name=name, loss=float(loss.mean()), gain=mean, z=z))
    return sorted(found, key=lambda g: -g.gain)


def try_readings(model: Decoder, tokens: list[int], seconds: float) -> Iterator[Check]:
    """The scale of quantised experts first; then all that is known, if that takes at most `seconds`."""
    began = time.perf_counter()
    names = known_names(model)
    scales = [name for name in SCALES if name in names]
    losses = read_with(model, tokens, [AS_IS, *scales])
    each = (time.perf_counter() - began) / (1 + len(scales))
    yield check_scale(losses, model.config.vocab_size)
    others = [name for name in names if name not in scales]
    if each * len(others) > seconds:
        minutes = each * len(others) / 60
        said = f"{len(others)} readings would take about {minutes:.0f} minutes: --thorough tries them"
        yield Check(name="other readings", verdict="skipped", said=said)
        return
    losses |= read_with(model, tokens, others)
    if model.lm_head is not None:
        losses["tied head (the embedding used as the head)"] = _tied(model, tokens)
    yield check_readings(losses, model.config.vocab_size)


@torch.inference_mode()
def _tied(model: Decoder, tokens: list[int]) -> Tensor:
    hidden = model(torch.tensor([tokens], device=model.device)).hidden[0]
    return token_losses(linear(hidden, model.embed_tokens.weight).float().cpu(), tokens)


def check_scale(losses: dict[str, Tensor], vocab: int) -> Check:
    """Scale bias 127 or 128: twice or half of what the experts' scales say."""
    name = "scale of the experts"
    found = gains(losses)
    if not found:
        return Check(name=name, verdict="skipped", said="the model has no experts")
    base = float(losses[AS_IS].mean())
    said = ", ".join(f"{g.loss:.2f} {g.name.split(': ')[1]}" for g in found)
    said = f"nats a token: {base:.2f} as it is, {said}"
    evidence = {"as it is": base} | {g.name: {"loss": g.loss, "gain": g.gain, "z": g.z} for g in found}
    best = found[0]
    if best.better and best.loss < CHANCE * math.log(vocab):
        said = f"{best.name}: read so, the text is predicted better ({said}; z = {best.z:.0f})"
        return Check(name=name, verdict="fail", said=said, evidence=evidence)
    if all(g.worse for g in found):
        return Check(name=name, verdict="pass", said=said, evidence=evidence)
    said = f"undecided, the text does not separate them (z = {best.z:.1f}); {said}"
    return Check(name=name, verdict="skipped", said=said, evidence=evidence)


def check_readings(losses: dict[str, Tensor], vocab: int) -> Check:
    name = "other readings"
    found, base = gains(losses), float(losses[AS_IS].mean())
    best, chance = found[0], CHANCE * math.log(vocab)
    evidence = {g.name: {"loss": g.loss, "gain": g.gain, "z": g.z} for g in found}
    if best.better and best.loss < chance:
        said = (
            f"read with {best.name}, the text is predicted better: {best.loss:.2f} nats a token instead of "
            f"{base:.2f} (z = {best.z:.0f}). The checkpoint seems to be written that way"
        )
        return Check(name=name, verdict="fail", said=said, evidence=evidence)
    if not base < chance:
        said = f"undecided: the text is not predicted under any of {len(found)} readings"
        return Check(name=name, verdict="skipped", said=said, evidence=evidence)
    said = f"{len(found)} known mistakes tried, none predicts the text better"
    costly = sum(g.worse for g in found)
    said += f"; {costly} of them clearly worse, the rest cannot be told by this text"
    return Check(name=name, verdict="pass", said=said, evidence=evidence)
