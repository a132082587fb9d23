"""`outpace doctor`: every check on a checkpoint, in order, and the comparison with a reference."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from outpace.checkpoint.open import Checkpoint, open_checkpoint
from outpace.checkpoint.shipped import target_path
from outpace.checkpoint.tokenizer import open_template, open_tokenizer
from outpace.doctor import engine, prediction, text_checks, weights
from outpace.doctor.check import Check, skipped
from outpace.doctor.compare import Reference, check_configs, compare
from outpace.doctor.sample import Sample, sample
from outpace.doctor.transformers_reference import open_transformers, walk_transformers
from outpace.models.decoder import Decoder
from outpace.models.load import load_target, parse_config

HF, GGUF = "hf", "gguf"
SECONDS = 30.0  # limit of the search for known mistakes, without --thorough


@dataclass(frozen=True, kw_only=True)
class Examination:
    """`reference`: None, "hf" (transformers, on `other` or on the same folder), "gguf" (a file, `other`), or
    a path to any checkpoint we load. `layers`: the first of both sides alone."""

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

    @property
    def reference_path(self) -> Path | None:
        if self.reference is None:
            return None
        other = self.path if self.other is None else self.other
        return target_path(other if self.reference in (HF, GGUF) else self.reference)


def examine(what: Examination) -> Iterator[Check]:
    """Raises ValueError for what cannot be opened: `outpace inspect` gives the reasons."""
    other = what.reference_path
    if other is not None:
        open_checkpoint(other)  # errors in it come first, not after minutes
    checkpoint = open_checkpoint(target_path(what.path))
    model = load_target(checkpoint, layers=what.layers, finite=False)
    tokenizer: Tokenizer | None = None
    try:
        tokenizer = open_tokenizer(checkpoint)
        yield from check_tokenizer(tokenizer, model, checkpoint)
    except ValueError as error:
        if tokenizer is not None:
            raise
        yield skipped("tokenizer", str(error))
    text = sample(tokenizer, model.config.vocab_size, what.tokens, what.text)
    ids = text.tokens
    yield weights.check_embedding(model, checkpoint, ids)
    yield weights.check_head(model, checkpoint)
    yield weights.check_config_values(model.config)
    yield weights.check_sinks(model)
    yield weights.check_decoding(model)
    yield weights.check_codes(model)
    marks = weights.gather_marks(model)
    yield from weights.check_orders(marks)
    ours = engine.walk(model, ids)
    exams = engine.examine_layers(model, ours)
    yield engine.check_engine(exams)
    yield engine.check_rows(exams)
    yield engine.check_rope(model)
    yield engine.check_router(exams, model.config.num_experts)
    yield prediction.check_growth(ours)
    whole = model.config.num_layers == parse_config(checkpoint.config).num_layers
    if tokenizer is None or not whole:
        reason = "there is no tokenizer" if tokenizer is None else "only the first layers were run"
        yield skipped("prediction of a text", reason)
    else:
        yield prediction.check_text(ours.logits, text)
        greedy = prediction.greedy_text(model, text)
        yield prediction.check_greedy(greedy, tokenizer.decode(greedy.tokens), model.config.vocab_size)
        seconds = float("inf") if what.thorough else SECONDS
        yield from prediction.try_mistakes(model, text, seconds, weights.mistakes_in_order(marks))
    if other is not None:
        plain = not all(e.exact for e in exams)
        yield from check_against(what, other, model, text, plain, whole and tokenizer is not None)


def check_tokenizer(tokenizer: Tokenizer, model: Decoder, checkpoint: Checkpoint) -> Iterator[Check]:
    config = model.config
    yield text_checks.check_round_trip(tokenizer)
    yield text_checks.check_vocabulary(tokenizer, config)
    yield text_checks.check_special(tokenizer, config, checkpoint.folder)
    yield text_checks.check_beginning(tokenizer, config)
    yield text_checks.check_harmony(tokenizer, config)
    stops = text_checks.stop_ids(config, checkpoint.folder)
    yield text_checks.check_template(tokenizer, config, open_template(checkpoint), stops)


def check_against(
    what: Examination, other: Path, model: Decoder, text: Sample, plain: bool, loss_counts: bool
) -> Iterator[Check]:
    """`plain`: the engine is wrong on this machine, so both sides go through the plain forward."""
    same = other == target_path(what.path)
    its = None if same else load_target(other, layers=what.layers, finite=False)
    if its is not None:
        configs = check_configs(model.config, its.config)
        yield configs
        if configs.status == "fail":
            return
    ids = text.tokens
    ours = engine.walk(model, ids, plain=plain)
    if what.reference == HF:
        theirs = walk_transformers(open_transformers(other, model.config.num_layers), ids)
    else:
        theirs = engine.walk(its or model, ids, plain=plain)
    reference = Reference(walk=theirs, model=its, ours_plain=plain)
    yield from compare(model, ours, reference, text, loss_counts=loss_counts)
