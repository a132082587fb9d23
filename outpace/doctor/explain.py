"""What a comparison with a reference comes to: configs, embedding, layers, what explains them, logits."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outpace.checkpoint.open import Checkpoint, open_checkpoint, target_path
from outpace.checkpoint.tokenizer import open_template, open_tokenizer
from outpace.doctor.check import Check
from outpace.doctor.compare import (
    MOST_ROWS,
    LayerApart,
    Reference,
    apart,
    check_embedding,
    check_head,
    compare_layers,
    noise_limit,
    open_transformers,
    walk_transformers,
    weight_rows,
)
from outpace.doctor.mechanics import check_engine, check_rope, check_router, check_rows, examine_layers
from outpace.doctor.number_format import check_codes, check_decoding, check_orders, gather_marks
from outpace.doctor.reference import concentration, frequencies, relative, rms_norm
from outpace.doctor.search import COMMON_EPS, EXACT
from outpace.doctor.sides import Walk, walk
from outpace.doctor.speech import check_growth, check_speech, check_text, sample_tokens, speak, token_losses
from outpace.doctor.tokens import (
    check_beginning,
    check_harmony,
    check_round_trip,
    check_special,
    check_template,
    check_vocabulary,
    stop_ids,
)
from outpace.doctor.trial import HALVES, Half, TrialResult
from outpace.doctor.try_readings import try_readings
from outpace.models.config import ModelConfig
from outpace.models.decoder import Decoder
from outpace.models.load import load_target, parse_config
from outpace.ops.linear import linear
from outpace.ops.quant import Weight

# What two files of one model may say differently without meaning anything else.
UNREAD = {"eos_token_ids", "bos_token_id", "pad_token_id", "max_position_embeddings"}
SIZES = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "num_experts")
CLEARLY = 0.5  # nats per token: by so much the right side predicts the text better


def check_configs(ours: ModelConfig, theirs: ModelConfig) -> Check:
    """Field by field. Other sizes end the comparison; other choices are what the layers will show."""
    name = "configs"
    a, b = asdict(ours), asdict(theirs)
    rope_a, rope_b = a.pop("rope"), b.pop("rope")
    differ = {k: [a[k], b[k]] for k in a if k not in UNREAD and not _alike(a[k], b[k])}
    if "head_dim" not in differ and not _turn_alike(ours, theirs):
        differ |= {f"rope.{k}": [rope_a[k], rope_b[k]] for k in rope_a if not _alike(rope_a[k], rope_b[k])}
    if not differ:
        return Check(name=name, status="pass", message="both sides are configured alike")
    text = "; ".join(f"{k} {x} here, {y} there" for k, (x, y) in list(differ.items())[:6])
    fatal = [k for k in SIZES if k in differ]
    if fatal:
        text = f"two different models: {text}"
    return Check(name=name, status="fail" if fatal else "warn", message=text, evidence=differ)


def _alike(a: Any, b: Any) -> bool:
    """Equal; a number that one side keeps in float32 counts as equal."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _turn_alike(ours: ModelConfig, theirs: ModelConfig) -> bool:
    """The same angles, however they are reported: GGUF writes llama3's rule as a table."""
    a, b = (frequencies(c.rope, c.head_dim) for c in (ours, theirs))
    factors = concentration(ours.rope), concentration(theirs.rope)
    return torch.allclose(a, b, rtol=1e-5, atol=0.0) and math.isclose(*factors, rel_tol=1e-5)


def check_embedded(ours: Walk, theirs: Walk, tokens: list[int]) -> Check:
    name = "embedding against the reference"
    result = apart(ours.embedded, theirs.embedded)
    rows = (ours.embedded - theirs.embedded).norm(dim=-1) / theirs.embedded.norm(dim=-1).clamp(min=1e-30)
    evidence = asdict(result)
    if result.error <= EXACT:
        return Check(name=name, status="pass", message=f"cosine {result.cosine:.6f}", evidence=evidence)
    most = float(rows.max())
    if most <= 0.1:
        text = f"cosine {result.cosine:.6f}, rows differ by {most:.1%} at most: another number format"
        return Check(name=name, status="pass", message=text, evidence=evidence)
    odd = sorted({t for t, off in zip(tokens, (rows > 0.1).tolist(), strict=True) if off})
    text = f"{len(odd)} of {len(set(tokens))} tokens have other rows, such as {odd[:5]}"
    size = float(ours.embedded.norm() / theirs.embedded.norm())
    if relative(ours.embedded / size, theirs.embedded) < EXACT:
        text = f"the rows are {size:.4g} times as long"
    return Check(name=name, status="fail", message=text, evidence=evidence)


def check_layers(layers: list[LayerApart]) -> Check:
    """Where ours departs, each half fed with what the reference's got."""
    name = "layers against the reference"
    evidence = {str(one.layer): _row(one) for one in layers}
    departing = [one for one in layers if one.departs]
    if not departing:
        worst = max(one.so_far.error for one in layers)
        cosine = min(min(one.attention.cosine, one.mlp.cosine) for one in layers)
        text = f"{len(layers)} layers agree: cosine {cosine:.6f} or more, error from end to end {worst:.1e}"
        if max(max(one.limits.values()) for one in layers) > EXACT:
            text += " (within what two number formats differ by)"
        tensors = sorted({t for one in layers for half in HALVES for t in one.tensors[half]})
        if tensors:
            text += f". But some tensors are not the same at all: {', '.join(tensors)}"
        return Check(name=name, status="warn" if tensors else "pass", message=text, evidence=evidence)
    first = departing[0]
    half = first.departs[0]
    figures = first.attention if half == "attention" else first.mlp
    text = (
        f"layer {first.layer} is the first that departs: after {_spoken(half)} cosine {figures.cosine:.4f}, "
        f"largest difference {figures.largest:.2g}, relative error {figures.error:.1e}"
    )
    for other in HALVES:
        count = sum(other in one.departs for one in layers)
        text += f"; {_spoken(other)} departs in {count} of {len(layers)}"
    return Check(name=name, status="fail", message=text, evidence=evidence)


def _row(one: LayerApart) -> dict[str, Any]:
    return {
        "attention": asdict(one.attention),
        "mlp": asdict(one.mlp),
        "so_far": asdict(one.so_far),
        "routed_alike": one.routed_alike,
        "window": one.window,
        "departs": list(one.departs),
        "tensors": {half: list(names) for half, names in one.tensors.items()},
    }


Explanation = tuple[Half, tuple[str, ...], tuple[str, ...]]  # half, mistakes of ours, mistakes of theirs


def explanations(layers: list[LayerApart], favoured: str) -> Iterator[Check]:
    """One check per half and set of mistakes, over all layers that they explain. `favoured`: the side
    that predicts the text better."""
    groups: dict[Explanation, list[tuple[LayerApart, list[TrialResult]]]] = {}
    for one in layers:
        for half in one.departs:
            entries = [f for f in one.findings if f.half == half]
            names = {f.whose: f.names for f in entries}
            key: Explanation = (half, names.get("ours", ()), names.get("theirs", ()))
            groups.setdefault(key, []).append((one, entries))
    for (half, ours, theirs), members in groups.items():
        where = _layers([one.layer for one, _ in members])
        entries = members[0][1]
        text = _explained(ours, theirs, entries) if ours or theirs else _unexplained(half, entries)
        tensors = sorted({t for one, _ in members for t in one.tensors[half]})
        if tensors:
            text += f". Tensors that differ between the two files: {', '.join(tensors)}"
        evidence = {
            "half": half,
            "layers": [one.layer for one, _ in members],
            "ours": list(ours),
            "theirs": list(theirs),
            "findings": [asdict(f) for f in entries],
        }
        name = f"why {_spoken(half)} departs"
        text = f"{where}: {text}" + (f". {favoured}" if favoured else "")
        yield Check(name=name, status="fail", message=text, evidence=evidence)


def _explained(ours: tuple[str, ...], theirs: tuple[str, ...], items: list[TrialResult]) -> str:
    best = next(f for f in items if f.names)
    figures = f"(error {best.error:.0e}, {best.before:.1e} without)"
    if ours and theirs and set(ours) & set(theirs):
        return f"the two sides differ by: {_any(ours)} {figures}"
    if ours:
        message = f"read with {_any(ours)}, our weights give what the reference computes {figures}"
        return message + (f"; the other way round it is {_any(theirs)}" if theirs else "")
    return f"read with {_any(theirs)}, the reference's weights say what ours say {figures}"


def _unexplained(half: Half, items: list[TrialResult]) -> str:
    message = "none of the known mistakes explains it, nor any two of them"
    near = [f for f in items if f.nearest is not None]
    if near:
        best = min(near, key=lambda f: f.error)
        message += f"; nearest comes {best.nearest} (error {best.error:.2g}, {best.before:.2g} without)"
    return message


def _any(names: tuple[str, ...]) -> str:
    """Several that explain equally well cannot be told apart by this text."""
    return names[0] if len(names) == 1 else " or ".join(names) + " (this text does not tell them apart)"


def _layers(items: list[int]) -> str:
    if len(items) == 1:
        return f"layer {items[0]}"
    steps = {b - a for a, b in pairwise(items)}
    if steps == {1}:
        return f"layers {items[0]} to {items[-1]}"
    return "layers " + ", ".join(map(str, items))


def _spoken(half: Half) -> str:
    return "the MLP" if half == "mlp" else "attention"


def favoured_by_text(ours: float, theirs: float) -> str:
    """Losses of the text on both sides, in nats per token -> which of them speaks."""
    message = f"The text costs {ours:.2f} nats per token here and {theirs:.2f} there: "
    if ours < theirs - CLEARLY:
        return message + "the reference is the one that is wrong"
    if theirs < ours - CLEARLY or ours != ours:
        return message + "ours is the one that is wrong"
    return message + "that does not tell which side is wrong"


@torch.inference_mode()
def check_logits(model: Decoder, ours: Walk, reference: Reference, *, layers_agree: bool) -> Check:
    """End to end, and final norm and head by themselves, fed with what the reference's last layer stated."""
    name = "logits against the reference"
    limit = _head_limit(model, reference)
    theirs = reference.walk
    whole = apart(ours.logits, theirs.logits)
    last = theirs.layers[-1].out.to(model.device, model.dtype)
    alone = relative(model.logits(model.norm(last)).float().cpu(), theirs.logits)
    same = (ours.logits.argmax(-1) == theirs.logits.argmax(-1)).float().mean()
    evidence = asdict(whole) | {"head_alone": alone, "same_top_1": float(same)}
    text = f"cosine {whole.cosine:.6f}, largest difference {whole.largest:.2g}, top-1 alike {float(same):.1%}"
    if alone <= limit and layers_agree:
        return Check(name=name, status="pass", message=text, evidence=evidence)
    if alone <= limit:
        text += "; final norm and head agree, the layers before them do not"
        return Check(name=name, status="fail", message=text, evidence=evidence)
    errors = _head_mistakes(model, last, theirs.logits)
    best = min(errors, key=lambda k: errors[k])
    evidence["head_mistakes"] = errors
    text += f"; final norm and head by themselves are off by {alone:.2g}"
    text += (
        f": explained by {best} (error {errors[best]:.0e})"
        if errors[best] <= limit
        else ", which none of the known mistakes explains"
    )
    return Check(name=name, status="fail", message=text, evidence=evidence)


def _head_limit(model: Decoder, reference: Reference) -> float:
    """The head's own format decides what may differ by rounding."""
    if reference.model is None:
        return EXACT
    ids = list(range(0, model.config.vocab_size, max(model.config.vocab_size // MOST_ROWS, 1)))
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


HF, GGUF = "hf", "gguf"
SECONDS = 30.0  # that trying readings may take unless asked for


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What to look at. `reference`: None, "hf" (transformers, on `other` or on the same folder), "gguf"
    (a file, `other`), or a path to any checkpoint we load. `layers`: only the first so many, of both."""

    path: str
    reference: str | None = None
    other: str | None = None
    layers: int | None = None
    tokens: int = 192
    text: Path | None = None
    thorough: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"--tokens {self.tokens}: at least 2 are needed")
        if self.reference == GGUF and self.other is None:
            raise ValueError("--reference gguf needs a file: outpace doctor PATH FILE.gguf --reference gguf")
        if self.other is not None and self.reference not in (HF, GGUF):
            raise ValueError("a second path belongs to --reference hf or --reference gguf")


def examine(what: Examination) -> Iterator[Check]:
    """Raises ValueError for what cannot be opened: `outpace inspect` says why."""
    other = _other(what)
    if other is not None:
        open_checkpoint(other)  # what is wrong with it is reported at once, not after the rest
    checkpoint = open_checkpoint(target_path(what.path))
    model = load_target(checkpoint, layers=what.layers, finite=False)
    whole = model.config.num_layers == parse_config(checkpoint.config).num_layers
    tokenizer, why = _tokenizer(checkpoint)
    yield from _about_tokens(tokenizer, why, model, checkpoint)
    ids = sample_tokens(tokenizer, model.config.vocab_size, what.tokens, what.text)
    yield check_embedding(model, checkpoint, ids)
    yield check_head(model, checkpoint)
    yield check_decoding(model)
    yield check_codes(model)
    yield from check_orders(gather_marks(model))
    ours = walk(model, ids)
    yield from _about_layers(model, ours)
    yield from _about_speech(model, ours, ids, tokenizer, whole, what.thorough)
    if other is not None:
        yield from _against(what, other, model, ours, ids, validation=whole and tokenizer is not None)


def _other(what: Examination) -> Path | None:
    """Where the reference lies; None where there is none."""
    if what.reference is None:
        return None
    if what.reference in (HF, GGUF):
        return target_path(what.path if what.other is None else what.other)
    return target_path(what.reference)


def _tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, str]:
    try:
        return open_tokenizer(checkpoint), ""
    except ValueError as error:
        return None, str(error)


def _about_tokens(
    tokenizer: Tokenizer | None, why: str, model: Decoder, checkpoint: Checkpoint
) -> Iterator[Check]:
    if tokenizer is None:
        yield Check(name="tokenizer", status="skipped", message=why)
        return
    yield check_round_trip(tokenizer)
    yield check_vocabulary(tokenizer, model.config)
    yield check_special(tokenizer, model.config, checkpoint.folder)
    yield check_beginning(tokenizer, model.config)
    yield check_harmony(tokenizer, model.config)
    stops = stop_ids(model.config, checkpoint.folder)
    yield check_template(tokenizer, model.config, open_template(checkpoint), stops)


def _about_layers(model: Decoder, ours: Walk) -> Iterator[Check]:
    exams = list(examine_layers(model, ours))
    yield check_engine(exams)
    yield check_rows(exams)
    yield check_rope(model)
    yield check_router(exams, model.config.num_experts)
    yield check_growth(ours)


def _about_speech(
    model: Decoder, ours: Walk, ids: list[int], tokenizer: Tokenizer | None, whole: bool, thorough: bool
) -> Iterator[Check]:
    if tokenizer is None or not whole:
        text = "only the first layers were run" if tokenizer is not None else "there is no tokenizer"
        yield Check(name="prediction of a text", status="skipped", message=text)
        return
    yield check_text(ours.logits, ids)
    result = speak(model, ids)
    yield check_speech(result, tokenizer.decode(result.tokens), model.config.vocab_size)
    yield from try_readings(model, ids, float("inf") if thorough else SECONDS)


def _against(
    what: Examination, other: Path, model: Decoder, ours: Walk, ids: list[int], validation: bool
) -> Iterator[Check]:
    """`validation`: the text means something to both sides, so that its loss tells which is wrong."""
    same = other == target_path(what.path)
    its = None if same else load_target(other, layers=what.layers, finite=False)
    if its is not None:
        configs = check_configs(model.config, its.config)
        yield configs
        if configs.status == "fail":
            return
    if what.reference == HF:
        theirs = open_transformers(other, model.config.num_layers)
        reference = Reference(name=f"transformers on {other}", walk=walk_transformers(theirs, ids), model=its)
        del theirs
    else:
        reference = Reference(name=str(other), walk=walk(its or model, ids), model=its)
    yield from compare(model, ours, reference, ids, validation)


def compare(
    model: Decoder, ours: Walk, reference: Reference, ids: list[int], validation: bool
) -> Iterator[Check]:
    """What a reference's walk over the same tokens tells about ours."""
    yield check_embedded(ours, reference.walk, ids)
    layers = list(compare_layers(model, ours, reference))
    yield check_layers(layers)
    losses = [float(token_losses(w.logits, ids).mean()) for w in (ours, reference.walk)]
    yield from explanations(layers, favoured_by_text(*losses) if validation else "")
    agree = not any(one.departs for one in layers)
    yield check_logits(model, ours, reference, layers_agree=agree)
