"""The examination: every check in order, as they come; with a reference, the comparison too."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from outpace.checkpoint.open import Checkpoint, open_checkpoint, target_path
from outpace.checkpoint.tokenizer import open_template, open_tokenizer
from outpace.doctor.blocks import check_codes, check_decoding
from outpace.doctor.check import Check
from outpace.doctor.compare import Reference, compare_layers
from outpace.doctor.embedding import check_embedding, check_head
from outpace.doctor.explain import (
    check_configs,
    check_embedded,
    check_layers,
    check_logits,
    explanations,
    judge,
)
from outpace.doctor.mechanics import check_engine, check_rope, check_router, check_rows, examine_layers
from outpace.doctor.number_format import check_orders, gather_marks
from outpace.doctor.prompt import check_beginning, check_harmony, check_template
from outpace.doctor.sides import Walk, walk
from outpace.doctor.speech import check_growth, check_speech, check_text, speak, token_losses
from outpace.doctor.text import sample_tokens
from outpace.doctor.tokens import check_round_trip, check_special, check_vocabulary, stop_ids
from outpace.doctor.transformers_side import open_transformers, walk_transformers
from outpace.doctor.try_readings import try_readings
from outpace.models.decoder import Decoder
from outpace.models.load import load_target, parse_config

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
    """Raises ValueError for what cannot be opened: `outpace inspect` states why."""
    other = _other(what)
    if other is not None:
        open_checkpoint(other)  # what is wrong with it is reported at once, not after the rest
    checkpoint = open_checkpoint(target_path(what.path))
    model = load_target(checkpoint, layers=what.layers)
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
        yield Check(name="tokenizer", verdict="skipped", message=why)
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
        yield Check(name="prediction of a text", verdict="skipped", message=text)
        return
    yield check_text(ours.logits, ids)
    result = speak(model, ids)
    yield check_speech(result, tokenizer.decode(result.tokens), model.config.vocab_size)
    yield from try_readings(model, ids, float("inf") if thorough else SECONDS)


def _against(
    what: Examination, other: Path, model: Decoder, ours: Walk, ids: list[int], validation: bool
) -> Iterator[Check]:
    """`judged`: the text means something to both sides, so that its loss tells which is wrong."""
    same = other == target_path(what.path)
    its = None if same else load_target(other, layers=what.layers)
    if its is not None:
        configs = check_configs(model.config, its.config)
        yield configs
        if configs.verdict == "fail":
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
    """What a reference's walk over the same tokens states about ours."""
    yield check_embedded(ours, reference.walk, ids)
    layers = list(compare_layers(model, ours, reference))
    yield check_layers(layers)
    losses = [float(token_losses(w.logits, ids).mean()) for w in (ours, reference.walk)]
    yield from explanations(layers, judge(*losses) if validation else "")
    agree = not any(one.departs for one in layers)
    yield check_logits(model, ours, reference, layers_agree=agree)
