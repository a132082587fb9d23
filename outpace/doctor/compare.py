"""Ours against a reference: configs, embedding, halves of layers and what explains them, logits."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from outpace.doctor.check import Check, check_of
from outpace.doctor.engine import (
    LayerSteps,
    Walk,
    comparable_rows,
    head_logits,
    run_attention,
    run_mlp,
    same_experts,
)
from outpace.doctor.mistakes import COMMON_EPS, HALVES, Half, Mistake, Names
from outpace.doctor.prediction import known_mistakes, token_losses
from outpace.doctor.reference import (
    Matrix,
    attention_weights,
    concentration,
    frequencies,
    layer_of,
    mlp_weights,
    relative,
    rms_norm,
)
from outpace.doctor.sample import Sample
from outpace.doctor.search import EXACT, Explainer, Explanation, half_layer, rows_to_try
from outpace.doctor.weights import spread_rows, weight_rows
from outpace.models.attention import DecoderBlock
from outpace.models.config import ModelConfig
from outpace.models.decoder import Decoder
from outpace.ops.linear import linear
from outpace.ops.quant import Weight

# Config fields that two files of one model may set differently without a different forward.
UNREAD = {"eos_token_ids", "bos_token_id", "pad_token_id", "max_position_embeddings"}
SIZES = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "num_experts")
CLEARLY = 0.5  # nats per token by which the right side predicts the text better
# Two files of one model in different number formats: the output of each half may differ by this many times
# the difference of its matrices. Beyond these relative differences a tensor is another one, not a rounded
# one; norms, biases and sinks stay in 16 bits or more in every format.
NOISE_FACTOR, MOST_NOISE = 10.0, 0.5
OTHER_MATRIX, OTHER_VECTOR = 0.25, 0.02
MATRICES = {"q", "k", "v", "o", "router", "gate_up", "down"}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """`walk`: its layers on the text. `model`: its weights in our engine; None where they are our files.
    `ours_plain`: compare our weights under the plain forward, since the engine is wrong on this machine."""

    walk: Walk
    model: Decoder | None = None
    ours_plain: bool = False


def compare(
    model: Decoder, ours: Walk, reference: Reference, text: Sample, *, loss_counts: bool
) -> Iterator[Check]:
    """Two walks over the same tokens. `loss_counts`: these are a text, so its loss shows which side is
    wrong."""
    yield check_embedded(ours, reference.walk, text.tokens)
    layers = compare_layers(model, ours, reference)
    yield check_layers(layers)
    losses = [float(token_losses(w.logits, text).mean()) for w in (ours, reference.walk)]
    yield from explanations(layers, known_mistakes(model), side_by_text(*losses) if loss_counts else "")
    agree = not any(one.departs for one in layers)
    yield check_logits(model, ours, reference, layers_agree=agree)


# ---- configs and embedding ------------------------------------------------------------------------


def check_configs(ours: ModelConfig, theirs: ModelConfig) -> Check:
    """Field by field. Other sizes end the comparison; other choices show in the layers."""
    a, b = asdict(ours), asdict(theirs)
    rope_a, rope_b = a.pop("rope"), b.pop("rope")
    differ = {k: [a[k], b[k]] for k in a if k not in UNREAD and not _alike(a[k], b[k])}
    if "head_dim" not in differ and not _same_rotation(ours, theirs):
        differ |= {f"rope.{k}": [rope_a[k], rope_b[k]] for k in rope_a if not _alike(rope_a[k], rope_b[k])}
    text = "; ".join(f"{k} {x} here, {y} there" for k, (x, y) in list(differ.items())[:6])
    fatal = [f"two different models: {text}"] if any(k in differ for k in SIZES) else []
    warnings = [text] if differ and not fatal else []
    alike = "both sides are configured alike"
    return check_of("configs", alike, errors=fatal, warnings=warnings, evidence=differ)


def _alike(a: Any, b: Any) -> bool:
    """Equal; a number that one side stores in float32 counts as equal."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _same_rotation(ours: ModelConfig, theirs: ModelConfig) -> bool:
    """The same angles, in whichever form: GGUF writes llama3's rule as a table."""
    a, b = (frequencies(c.rope, c.head_dim) for c in (ours, theirs))
    factors = concentration(ours.rope), concentration(theirs.rope)
    return torch.allclose(a, b, rtol=1e-5, atol=0.0) and math.isclose(*factors, rel_tol=1e-5)


def check_embedded(ours: Walk, theirs: Walk, tokens: list[int]) -> Check:
    result = apart(ours.embedded, theirs.embedded)
    rows = (ours.embedded - theirs.embedded).norm(dim=-1) / theirs.embedded.norm(dim=-1).clamp(min=1e-30)
    text, errors = f"cosine {result.cosine:.6f}", []
    if float(rows.max()) > 0.1:
        odd = sorted({t for t, off in zip(tokens, (rows > 0.1).tolist(), strict=True) if off})
        size = float(ours.embedded.norm() / theirs.embedded.norm())
        errors = [f"{len(odd)} of {len(set(tokens))} tokens have other rows, such as {odd[:5]}"]
        if relative(ours.embedded / size, theirs.embedded) < EXACT:
            errors = [f"the rows are {size:.4g} times as long"]
    elif result.error > EXACT:
        text += f", rows differ by {float(rows.max()):.1%} at most: another number format"
    return check_of("embedding against the reference", text, errors=errors, evidence=asdict(result))


# ---- layers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of ours from the reference: cosine over everything, largest difference, relative error."""

    cosine: float
    largest: float
    error: float


def apart(ours: Tensor, theirs: Tensor) -> Difference:
    a, b = ours.flatten().double(), theirs.flatten().double()
    cosine = float(torch.nn.functional.cosine_similarity(a, b, dim=0))
    return Difference(cosine=cosine, largest=float((a - b).abs().max()), error=relative(a, b))


@dataclass(frozen=True, kw_only=True)
class LayerDifference:
    """halves: each on the reference's input; so_far: ours from the embedding on."""

    layer: int
    window: int
    halves: dict[Half, Difference]
    so_far: Difference
    routed_alike: float | None  # share of the text's tokens that go to the same experts
    limits: dict[Half, float]
    tensors: dict[Half, tuple[str, ...]]  # those that differ by more than two number formats do
    explanations: dict[Half, Explanation]  # of the halves that depart

    @property
    def departs(self) -> tuple[Half, ...]:
        return tuple(self.explanations)


def compare_layers(model: Decoder, ours: Walk, reference: Reference) -> list[LayerDifference]:
    explainer = Explainer()
    layers = reference.walk.layers[: len(ours.layers)]
    return [
        _compare_layer(model, i, ours.layers[i], theirs, reference, explainer)
        for i, theirs in enumerate(layers)
    ]


@torch.inference_mode()
def _compare_layer(
    model: Decoder, i: int, ours: LayerSteps, theirs: LayerSteps, reference: Reference, explainer: Explainer
) -> LayerDifference:
    attention = run_attention(model, i, theirs.x, plain=reference.ours_plain)
    mlp, chosen = run_mlp(model, i, theirs.middle, plain=reference.ours_plain)
    same = same_experts(chosen, theirs.chosen)
    every = torch.ones(len(theirs.x), dtype=torch.bool)
    sides: dict[Half, tuple[Tensor, Tensor, Tensor, Tensor]] = {
        "attention": (theirs.x, attention, theirs.attention, every),
        "mlp": (theirs.middle, mlp, theirs.mlp, comparable_rows(same, len(theirs.x))),
    }
    different = _different(model, reference.model, i)
    halves: dict[Half, Difference] = {}
    limits: dict[Half, float] = {}
    explanations: dict[Half, Explanation] = {}
    for half, (x, mine, its, rows) in sides.items():
        halves[half] = apart(mine[rows], its[rows])
        limits[half] = noise_limit(different[half])
        if not halves[half].error <= limits[half]:
            few = rows_to_try(half, mine, its, rows)
            other = None if reference.model is None else half_layer(half, reference.model, i, x, few)
            own = half_layer(half, model, i, x, few)
            explanations[half] = explainer.explain(own, other, mine[few], its[few], limits[half])
    return LayerDifference(
        layer=i,
        window=model.config.window(i),
        halves=halves,
        so_far=apart(ours.out, theirs.out),
        routed_alike=None if same is None else float(same.float().mean()),
        limits=limits,
        tensors={half: other_tensors(different[half]) for half in HALVES},
        explanations=explanations,
    )


def _different(model: Decoder, other: Decoder | None, layer: int) -> dict[Half, dict[str, float]]:
    """Tensor name -> ||ours - theirs|| / ||theirs|| for tensors of equal shape, of the first expert for
    experts; empty where both sides are one file."""
    if other is None:
        return {"attention": {}, "mlp": {}}
    ours, theirs = (_tensors(layer_of(side, layer)) for side in (model, other))
    return {
        half: {n: relative(a, b[n]) for n, a in ours[half].items() if n in b and a.shape == b[n].shape}
        for half, b in theirs.items()
    }


def _tensors(block: DecoderBlock) -> dict[Half, dict[str, Tensor]]:
    mlp = mlp_weights(block)
    parts = {"attention": vars(attention_weights(block)), "mlp": vars(mlp) | vars(mlp.expert(0))}
    return {half: _named(parts[half]) for half in HALVES}


def _named(parts: dict[str, Any]) -> dict[str, Tensor]:
    tensors = {n: t for n, t in parts.items() if isinstance(t, Tensor)}
    matrices = {n: m for n, m in parts.items() if isinstance(m, Matrix)}
    biases = {f"{n}.bias": m.bias for n, m in matrices.items() if m.bias is not None}
    return tensors | {n: m.weight for n, m in matrices.items()} | biases


def other_tensors(different: dict[str, float]) -> tuple[str, ...]:
    """Those that no number format explains."""
    return tuple(n for n, e in different.items() if e > (OTHER_MATRIX if n in MATRICES else OTHER_VECTOR))


def noise_limit(different: dict[str, float]) -> float:
    """Difference that rounding explains, from the median matrix: the largest one may be a little wrong."""
    rounded = [e for n, e in different.items() if n in MATRICES and e <= OTHER_MATRIX]
    return max(EXACT, min(NOISE_FACTOR * median(rounded or [0.0]), MOST_NOISE))


def check_layers(layers: list[LayerDifference]) -> Check:
    """Where ours departs, each half on the reference's input."""
    name = "layers against the reference"
    evidence = {str(one.layer): _row(one) for one in layers}
    departing = [one for one in layers if one.departs]
    if departing:
        first, half = departing[0], departing[0].departs[0]
        figures = first.halves[half]
        text = (
            f"layer {first.layer} is the first that departs: after {_title(half)} cosine "
            f"{figures.cosine:.4f}, largest difference {figures.largest:.2g}, "
            f"relative error {figures.error:.1e}"
        )
        for half in HALVES:
            count = sum(half in one.departs for one in layers)
            text += f"; {_title(half)} departs in {count} of {len(layers)}"
        return check_of(name, "", errors=[text], evidence=evidence)
    worst = max(one.so_far.error for one in layers)
    cosine = min(part.cosine for one in layers for part in one.halves.values())
    text = f"{len(layers)} layers agree: cosine {cosine:.6f} or more, error from end to end {worst:.1e}"
    if max(max(one.limits.values()) for one in layers) > EXACT:
        text += " (within the difference of two number formats)"
    tensors = sorted({t for one in layers for half in HALVES for t in one.tensors[half]})
    warnings = [f"{text}. But some tensors are not the same at all: {', '.join(tensors)}"] if tensors else []
    return check_of(name, text, warnings=warnings, evidence=evidence)


def _row(one: LayerDifference) -> dict[str, Any]:
    return {
        **{half: asdict(figures) for half, figures in one.halves.items()},
        "so_far": asdict(one.so_far),
        "routed_alike": one.routed_alike,
        "window": one.window,
        "departs": list(one.departs),
        "tensors": {half: list(names) for half, names in one.tensors.items()},
    }


def explanations(layers: list[LayerDifference], known: dict[str, Mistake], side: str) -> Iterator[Check]:
    """One check per half and set of mistakes, over all layers that they explain. `side`: a sentence on which
    side predicts the text better."""
    groups: dict[tuple[Any, ...], list[LayerDifference]] = {}
    for one in layers:
        for half, result in one.explanations.items():
            groups.setdefault((half, result.ours, result.theirs, result.both), []).append(one)
    for (half, *_), members in groups.items():
        best = members[0].explanations[half]
        text = _explained(best, known) if best.named else _unexplained(best)
        tensors = sorted({t for one in members for t in one.tensors[half]})
        if tensors:
            text += f". Tensors that differ between the two files: {', '.join(tensors)}"
        numbers = [one.layer for one in members]
        yield Check(
            name=f"why {_title(half)} departs",
            status="fail",
            message=f"{_layers(numbers)}: {text}" + (f". {side}" if side else ""),
            evidence={
                "half": half,
                "layers": numbers,
                "ours": [_label(names) for names in best.ours],
                "theirs": [_label(names) for names in best.theirs],
                "both": [[_label(a), _label(b)] for a, b in best.both],
                "error": best.error,
                "before": best.before,
            },
            mistakes=best.named,
        )


def _explained(e: Explanation, known: dict[str, Mistake]) -> str:
    figures = f"(error {e.error:.0e}, {e.before:.1e} without)"
    if e.both:
        ways = [f"ours with {_label(a)} and the reference's with {_label(b)}" for a, b in e.both]
        return f"read {_any(ways)}, the weights of both sides agree {figures}" + _fixes(e.both[0][0], known)
    ours, theirs = ([_label(names) for names in side] for side in (e.ours, e.theirs))
    if set(ours) & set(theirs):
        return f"the two sides differ by: {_any(ours)} {figures}" + _fixes(e.ours[0], known)
    if ours:
        message = f"read with {_any(ours)}, our weights give what the reference computes {figures}"
        message += f"; the other way round it is {_any(theirs)}" if theirs else ""
        return message + _fixes(e.ours[0], known)
    return f"read with {_any(theirs)}, the reference's weights give our output {figures}" + _fixes(
        e.theirs[0], known
    )


def _fixes(names: Names, known: dict[str, Mistake]) -> str:
    """For the side that is wrong."""
    return ". Fix of the wrong side: " + "; ".join(known[name].fix for name in names if name in known)


def _unexplained(e: Explanation) -> str:
    message = "none of the known mistakes explains it, nor any two of them"
    if e.nearest is not None:
        message += f"; the nearest is {e.nearest} (error {e.error:.2g}, {e.before:.2g} without)"
    return message


def _label(names: Names) -> str:
    return " + ".join(names)


def _any(labels: list[str]) -> str:
    """Several that explain equally well cannot be told apart by this text."""
    return labels[0] if len(labels) == 1 else " or ".join(labels) + " (this text does not tell them apart)"


def _layers(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if {b - a for a, b in pairwise(numbers)} == {1}:
        return f"layers {numbers[0]} to {numbers[-1]}"
    return "layers " + ", ".join(map(str, numbers))


def _title(half: Half) -> str:
    return "the MLP" if half == "mlp" else "attention"


def side_by_text(ours: float, theirs: float) -> str:
    """Losses of the text on both sides, in nats per token -> which of them is wrong."""
    message = f"The text costs {ours:.2f} nats per token here and {theirs:.2f} there: "
    if ours < theirs - CLEARLY:
        return message + "the reference is the one that is wrong"
    if theirs < ours - CLEARLY or ours != ours:
        return message + "ours is the one that is wrong"
    return message + "that does not tell which side is wrong"


# ---- logits ---------------------------------------------------------------------------------------


@torch.inference_mode()
def check_logits(model: Decoder, ours: Walk, reference: Reference, *, layers_agree: bool) -> Check:
    """End to end, and final norm and head alone, on the output of the reference's last layer."""
    limit, theirs = _head_limit(model, reference), reference.walk
    whole = apart(ours.logits, theirs.logits)
    last = theirs.layers[-1].out.to(model.device, model.dtype)
    alone = relative(head_logits(model, last), theirs.logits)
    same = float((ours.logits.argmax(-1) == theirs.logits.argmax(-1)).float().mean())
    evidence: dict[str, Any] = asdict(whole) | {"head_alone": alone, "same_top_1": same}
    text = f"cosine {whole.cosine:.6f}, largest difference {whole.largest:.2g}, top-1 alike {same:.1%}"
    errors = []
    if not alone <= limit:
        tried = _head_mistakes(model, last, theirs.logits)
        best = min(tried, key=lambda k: tried[k])
        evidence["head_mistakes"] = tried
        why = ", which none of the known mistakes explains"
        if tried[best] <= limit:
            why = f": explained by {best} (error {tried[best]:.0e})"
        errors = [f"{text}; final norm and head alone are off by {alone:.2g}{why}"]
    elif not layers_agree:
        errors = [f"{text}; final norm and head agree, the layers before them do not"]
    return check_of("logits against the reference", text, errors=errors, evidence=evidence)


def _head_limit(model: Decoder, reference: Reference) -> float:
    """The head's number format decides how much rounding explains."""
    if reference.model is None:
        return EXACT
    ids = spread_rows(model.config.vocab_size)
    ours, theirs = (weight_rows(m.head, ids).cpu() for m in (model, reference.model))
    return noise_limit({"o": relative(ours, theirs)})


def _head_mistakes(model: Decoder, last: Tensor, wanted: Tensor) -> dict[str, float]:
    """Name -> relative error of the logits under that mistake."""
    weight, eps = model.norm.weight.float(), model.config.rms_norm_eps
    normed = {
        "no final norm": last,
        "final norm without its weights": rms_norm(last, None, eps),
        **{f"RMSNorm eps {e:g}": rms_norm(last, weight, e) for e in COMMON_EPS if e != eps},
    }
    tried: dict[str, tuple[Tensor, Weight]] = {name: (x, model.head) for name, x in normed.items()}
    tied = "tied head (the embedding used as the head)"
    tried[tied] = rms_norm(last, weight, eps), model.embed_tokens.weight
    return {k: relative(linear(x, w).float().cpu(), wanted) for k, (x, w) in tried.items()}
