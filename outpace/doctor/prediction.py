"""Checks on a text, without a reference: prediction, greedy decoding, and the mistakes that a text shows.

A checkpoint that was written with a mistake is read right by undoing it. A trained model predicts a text best
under the reading its weights were written for; every other costs it. An untrained model gives nothing away.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.doctor.check import Check, Status, check_of, skipped
from outpace.doctor.engine import Walk, head_logits
from outpace.doctor.mistakes import AS_IS, DOUBLED, HALVED, HALVES, Mistake, Names, apply, mistakes_of
from outpace.doctor.reference import (
    attention_weights,
    layer_of,
    mlp_weights,
    read_attention,
    read_mlps,
    relative,
    right_reading,
)
from outpace.doctor.sample import Sample
from outpace.models.decoder import Decoder
from outpace.ops.linear import linear

# Of ln V, the nats per token of a model that has learnt nothing. Trained models of any size need less than
# half on plain text; one with scaled experts or scrambled heads needs 0.8 and more.
GOOD, CHANCE = 0.7, 0.9
GROWTH = 1000.0  # between two layers; massive activations of real models reach some 100
NEW = 32  # tokens of the greedy continuation
CACHE_LIMIT = 1e-3  # of logits, one token at a time against all at once


def token_losses(logits: Tensor, text: Sample) -> Tensor:
    """logits [T, V] -> loss of each next token that counts, [up to T-1] nats."""
    return F.cross_entropy(logits[:-1].float()[text.judged], text.wanted, reduction="none")


def check_growth(ours: Walk) -> Check:
    sizes = [_rms(ours.embedded), *(_rms(s.out) for s in ours.layers)]
    added = [(_rms(s.attention), _rms(s.mlp)) for s in ours.layers]
    broken = [i for i, s in enumerate(sizes) if not math.isfinite(s)]
    errors, warnings = [], []
    if broken:
        where = "the embedding" if broken[0] == 0 else f"layer {broken[0] - 1}"
        errors = [f"NaN or Inf, first out of {where}"]
    else:
        warnings = [f"layer {i} adds nothing at all" for i, pair in enumerate(added) if min(pair) == 0][:1]
        leaps = [(i, b / max(a, 1e-30)) for i, (a, b) in enumerate(pairwise(sizes))]
        warnings += [f"it grows {by:.0f} times in layer {i}" for i, by in leaps if by > GROWTH][:1]
    text = f"rms {sizes[0]:.3g} after the embedding, {sizes[-1]:.3g} after the last layer"
    evidence: dict[str, Any] = {"rms": [float(f"{s:.4g}") for s in sizes]}
    evidence["added"] = [[float(f"{x:.4g}") for x in pair] for pair in added]
    return check_of("residual stream", text, errors=errors, warnings=warnings, evidence=evidence)


def _rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())


def check_text(logits: Tensor, text: Sample) -> Check:
    """Nats per token."""
    losses, most = token_losses(logits, text), math.log(logits.shape[-1])
    mean = float(losses.mean())
    first = float((logits[:-1].argmax(-1)[text.judged] == text.wanted).float().mean())
    message = f"{mean:.2f} nats per token over {len(losses)} (chance: {most:.2f}); top-1 {first:.0%}"
    status: Status = "pass" if mean < GOOD * most else "warn" if mean < CHANCE * most else "fail"
    if status == "fail":
        message += ": no better than chance, so the weights are untrained, or a mistake reaches every layer"
    elif status == "warn":
        message += ": poor, for any trained model"
    evidence = {"nats_per_token": mean, "of_chance": mean / most, "top_1": first, "tokens": len(losses)}
    return Check(name="prediction of a text", status=status, message=message, evidence=evidence)


@dataclass(frozen=True, kw_only=True)
class GreedyText:
    tokens: list[int]
    entropies: list[float]  # nats, of the distribution of each token
    apart: float  # relative difference of the cached logits from those of one whole forward


@torch.inference_mode()
def greedy_text(model: Decoder, text: Sample) -> GreedyText:
    """A few tokens after the prompt of the text, one at a time through the cache, and all at once."""
    prompt = text.prompt
    cache = model.make_cache(1, len(prompt) + NEW)
    ids, rows = list(prompt), []
    hidden = model(torch.tensor([prompt], device=model.device), cache).hidden[0, -1]
    for _ in range(NEW):
        rows.append(model.logits(hidden[None])[0].float().cpu())
        ids.append(int(rows[-1].argmax()))
        hidden = model(torch.tensor([ids[-1:]], device=model.device), cache).hidden[0, -1]
    whole = model(torch.tensor([ids[:-1]], device=model.device)).hidden[0, len(prompt) - 1 :]
    cached, at_once = torch.stack(rows), model.logits(whole).float().cpu()
    p = cached.softmax(-1)
    entropies = -(p * p.clamp(min=1e-30).log()).sum(-1)
    return GreedyText(
        tokens=ids[len(prompt) :], entropies=entropies.tolist(), apart=relative(cached, at_once)
    )


def check_greedy(greedy: GreedyText, text: str, vocab_size: int) -> Check:
    mean, most = sum(greedy.entropies) / len(greedy.entropies), math.log(vocab_size)
    loop = shortest_loop(greedy.tokens)
    errors, warnings = [], []
    if not math.isfinite(mean):
        errors.append("the logits contain NaN or Inf")
    if not greedy.apart <= CACHE_LIMIT:
        errors.append(f"logits through the cache are off by {greedy.apart:.1e} from a whole forward's")
    if mean > CHANCE * most:
        errors.append("the distribution is nearly uniform")
    if loop and loop <= 2:
        warnings.append(f"it repeats the same {'token' if loop == 1 else 'two tokens'}")
    message = f"{text!r} (entropy {mean:.2f} of {most:.2f} nats)"
    evidence = {"text": text, "tokens": greedy.tokens, "entropy": mean, "loop": loop}
    evidence |= {"cached_against_whole": greedy.apart}
    return check_of("greedy continuation", message, errors=errors, warnings=warnings, evidence=evidence)


def shortest_loop(tokens: list[int], least: int = 8) -> int:
    """The period with which the last `least` tokens or more repeat; 0 where they do not."""
    tail = tokens[-least:]
    for period in range(1, least // 2 + 1):
        if all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return period
    return 0


# ---- which mistakes a text shows -------------------------------------------------------------------

KNOWN = "known mistakes"
# A gain counts when it is large and significant: some mistakes happen to help on one text by less than a
# tenth.
GAIN, SIGNIFICANT = 0.25, 4.0
BEAM = 3  # readings that a further mistake is added to


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Saving of a reading on the text, in nats per token; `z`: over its standard error."""

    names: Names
    loss: float
    gain: float
    z: float

    @property
    def label(self) -> str:
        return " and ".join(self.names)

    @property
    def better(self) -> bool:
        return self.gain >= GAIN and self.z >= SIGNIFICANT

    @property
    def worse(self) -> bool:
        return self.gain <= -GAIN and self.z <= -SIGNIFICANT


Losses = dict[
    Names, Tensor
]  # of the tokens that count, under mistakes made in every layer that can have them


def known_mistakes(model: Decoder) -> dict[str, Mistake]:
    """Every mistake that some layer can have, by name."""
    known: dict[str, Mistake] = {}
    for i in range(len(model.layers)):
        for half in HALVES:
            for name, mistake in mistakes_of(half, right_reading(model, i), model.config).items():
                known.setdefault(name, mistake)
    return known


@torch.inference_mode()
def read_with(model: Decoder, text: Sample, readings: Sequence[Names]) -> Losses:
    """Layer by layer, all readings at once: an expert is decoded once for all of them."""
    start = model.embed(torch.tensor([text.tokens], device=model.device))[0].float().cpu()
    states = [start] * len(readings)
    for i in range(len(model.layers)):
        block, right = layer_of(model, i), right_reading(model, i)
        a, m = (mistakes_of(half, right, model.config) for half in HALVES)
        attention = attention_weights(block)
        states = [
            x + read_attention(x, attention, apply(names, a, right)).out
            for x, names in zip(states, readings, strict=True)
        ]
        steps = read_mlps(states, mlp_weights(block), [apply(names, m, right) for names in readings])
        states = [x + its.out for x, its in zip(states, steps, strict=True)]
    losses = (token_losses(head_logits(model, x), text) for x in states)
    return dict(zip(readings, losses, strict=True))


def gains(losses: Losses, base: Names = AS_IS) -> list[Gain]:
    """Against one reading, best first."""
    results = []
    for names, loss in losses.items():
        if names != base:
            saved = (losses[base] - loss).double().nan_to_num(-100.0)
            error = float(saved.std()) / math.sqrt(len(saved))
            mean = float(saved.mean())
            z = mean / error if error else 0.0
            results.append(Gain(names=names, loss=float(loss.mean()), gain=mean, z=z))
    return sorted(results, key=lambda g: -g.gain)


def try_mistakes(
    model: Decoder, text: Sample, seconds: float, seeds: Sequence[Names] = ()
) -> Iterator[Check]:
    """The scale of the experts; then all known mistakes, if that takes at most `seconds`. Where the text is
    predicted badly or a mistake helps, a second one is added to the best readings, and to `seeds`, the
    mistakes that the weights alone show."""
    began = time.perf_counter()
    known = known_mistakes(model)
    scales: list[Names] = [(name,) for name in (DOUBLED, HALVED) if name in known]
    losses = read_with(model, text, [AS_IS, *scales])
    each = (time.perf_counter() - began) / (1 + len(scales))
    scale = check_scale(losses, model.config.vocab_size)
    rest = [names for names in [*((n,) for n in known), *seeds] if names not in losses]
    if each * len(rest) > seconds:
        minutes = each * len(rest) / 60
        message = f"{len(rest)} readings would take about {minutes:.0f} minutes: --thorough tries them"
        yield scale
        yield skipped(KNOWN, message)
        return
    losses |= read_with(model, text, rest)
    best = gains(losses)[0]
    if best.better or not float(losses[AS_IS].mean()) < GOOD * math.log(model.config.vocab_size):
        first = [*seeds, *(g.names for g in gains(losses) if g.names not in seeds)][: BEAM + len(seeds)]
        losses |= read_with(model, text, _one_more(first, known, losses))
        best = gains(losses)[0]
        if seeds and len(best.names) > 1:  # two in the weights' order alone leave a third to the text
            losses |= read_with(model, text, _one_more([best.names], known, losses))
    if model.lm_head is not None:
        losses["tied head (the embedding used as the head)",] = _tied(model, text)
    verdict = check_mistakes(losses, model.config.vocab_size, known, seeds)
    if verdict.mistakes and not set(scale.mistakes) <= set(verdict.mistakes):
        scale = skipped(scale.name, "undecided: another mistake explains the text better", scale.evidence)
    yield scale
    yield verdict


def _one_more(first: Sequence[Names], known: dict[str, Mistake], losses: Losses) -> list[Names]:
    """Each of `first` with every mistake that changes other fields, in one order."""
    more: dict[frozenset[str], Names] = {}
    done = {frozenset(names) for names in losses}
    for names in first:
        fields = {f for name in names if name in known for f in known[name].change}
        for name, mistake in known.items():
            if not fields & mistake.change.keys() and {*names, name} not in done:
                more.setdefault(frozenset({*names, name}), (*names, name))
    return list(more.values())


@torch.inference_mode()
def _tied(model: Decoder, text: Sample) -> Tensor:
    hidden = model(torch.tensor([text.tokens], device=model.device)).hidden[0]
    return token_losses(linear(hidden, model.embed_tokens.weight).float().cpu(), text)


def check_scale(losses: Losses, vocab: int) -> Check:
    """Scale bias 127 or 128: the text under half and twice the scale of the experts."""
    name, ranked = "scale of the experts", gains(losses)
    if not ranked:
        return skipped(name, "the model has no experts")
    base, chance = float(losses[AS_IS].mean()), CHANCE * math.log(vocab)
    text = ", ".join(f"{g.loss:.2f} {g.label.split(': ')[1]}" for g in ranked)
    text = f"{base:.2f} nats per token as it is, {text}"
    evidence = {"as it is": base} | _figures(ranked)
    best = ranked[0]
    if best.better and best.loss < chance:
        text = f"{best.label}: the text is predicted better under it ({text}; z = {best.z:.0f})"
        return Check(name=name, status="fail", message=text, evidence=evidence, mistakes=best.names)
    if base < chance and all(g.worse for g in ranked):
        return check_of(name, text, evidence=evidence)
    reason = "does not separate them" if base < chance else "is predicted under none of them"
    return skipped(name, f"undecided, the text {reason}: {text}", evidence)


def check_mistakes(
    losses: Losses, vocab: int, known: dict[str, Mistake], seeds: Sequence[Names] = ()
) -> Check:
    """The mistakes under which the text is predicted better, and those that explain it as well and agree
    with the `seeds`."""
    ranked, base = gains(losses), float(losses[AS_IS].mean())
    best, chance = _plainest(ranked), CHANCE * math.log(vocab)
    evidence = _figures(ranked)
    if best.better and best.loss < chance:
        shown = [set(s) for s in seeds if set(s) <= set(best.names)]
        others = [g for g in ranked if _as_good(g, best, losses)]
        others = [g for g in others if not shown or any(s <= set(g.names) for s in shown)]
        also = (
            f" (or {' or '.join(g.label for g in others)}: this text does not tell them apart)"
            if others
            else ""
        )
        fixes = "; ".join(known[name].fix for name in best.names if name in known)
        text = (
            f"read with {best.label}{also}, the text is predicted better: {best.loss:.2f} nats per token, "
            f"not {base:.2f} (z = {best.z:.0f})" + (f". Fix: {fixes}" if fixes else "")
        )
        mistakes = tuple(dict.fromkeys(name for g in (best, *others) for name in g.names))
        return Check(name=KNOWN, status="fail", message=text, evidence=evidence, mistakes=mistakes)
    if not base < chance:
        text = f"undecided: the text is not predicted under any of {len(ranked)} readings"
        return skipped(KNOWN, text, evidence)
    costly = sum(g.worse for g in ranked)
    text = (
        f"{len(ranked)} tried, none predicts the text better; {costly} of them clearly worse, this text does "
        "not decide on the rest"
    )
    return check_of(KNOWN, text, evidence=evidence)


def _plainest(ranked: list[Gain]) -> Gain:
    """The best with the fewest mistakes: each further one must gain as much as the first."""
    best = next(g for g in ranked if len(g.names) == 1)
    for count in range(2, 1 + max(len(g.names) for g in ranked)):
        more = next((g for g in ranked if len(g.names) == count), best)
        best = more if more.gain >= best.gain + GAIN else best
    return best


def _as_good(gain: Gain, best: Gain, losses: Losses) -> bool:
    """Another explanation with as many mistakes, which does not cost the text significantly more."""
    if gain is best or len(gain.names) != len(best.names) or not gain.better:
        return False
    return not gains({best.names: losses[best.names], gain.names: losses[gain.names]}, best.names)[0].worse


def _figures(ranked: list[Gain]) -> dict[str, dict[str, float]]:
    return {g.label: {"loss": g.loss, "gain": g.gain, "z": g.z} for g in ranked}
