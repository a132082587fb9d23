"""What each size of a retrofit costs: latents of several ranks and methods, indexes of several reaches."""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench.machine import machine, provenance, versions
from outpace.bench.memory import described
from outpace.bench.metadata import describe_target
from outpace.bench.progress import progress
from outpace.bench.quality import Quality, QualitySettings, remembered
from outpace.bench.resume import Kept
from outpace.kv.topk import TopKConfig
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.retrofit import dsa, mla
from outpace.retrofit.calibrate import calibrate
from outpace.retrofit.evaluate import texts_of
from outpace.retrofit.pipeline_dsa import DsaSettings, asked_of, first_indexes
from outpace.retrofit.pipeline_mla import MlaSettings, bases_of, chosen_balance
from outpace.text.corpus import Document

TRIED = 4  # texts by which a balance of keys against values is chosen


@dataclass(frozen=True, kw_only=True)
class ParetoSettings(QualitySettings):
    """`fractions` of keys and values by each of `methods`; `shares` of the context that a query looks at, by
    an index of `index_dim` (0: half a head); both made of `rows` texts of `row_tokens`. `trained`: folders of
    retrofits of the same target. The rest as in quality.py."""

    trained: tuple[str, ...] = ()
    fractions: tuple[float, ...] = (0.75, 0.5, 0.25)
    methods: tuple[str, ...] = mla.METHODS
    shares: tuple[float, ...] = (0.5, 0.25, 0.125)
    index_dim: int = 0
    rows: int = 16
    row_tokens: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fractions", "shares"):
            wrong = [x for x in getattr(self, name) if not 0 < x < 1]
            if wrong:
                raise ValueError(f"pareto: {name} {wrong[0]}: a share between 0 and 1")
        unknown = [m for m in self.methods if m not in mla.METHODS]
        if unknown:
            raise ValueError(f"pareto: method {unknown[0]!r}: known are {', '.join(mla.METHODS)}")
        _ = DsaSettings(index_dim=self.index_dim), MlaSettings(rows=self.rows)


def run_pareto(
    target: Decoder,
    tokenizer: Tokenizer,
    trained: dict[str, Decoder],
    train: Sequence[Document],
    held_out: Sequence[Document],
    settings: ParetoSettings,
    folder: Path,
    console: Console,
) -> dict[str, Any]:
    """-> the report. `target`: without retrofits, as the first point; `trained`: those of the settings. What
    was measured before a stop is read from folder/progress.jsonl. Raises ValueError for a target that has
    retrofits, and for a trained one that was made of another."""
    began, before, about = time.perf_counter(), machine(target.device), describe_target(target)
    if target.config.mla_ranks or target.config.dsa_layers:
        raise ValueError("the suite pareto starts from a target without retrofits: name the original")
    for name, other in trained.items():
        if fingerprint(other, retrofits=False) != about["fingerprint"]:
            raise ValueError(f"{name} was not made from this target: its backbone is another")
    asked = json.loads(json.dumps(dataclasses.asdict(settings)))
    others = {name: fingerprint(other) for name, other in trained.items()}
    kept = Kept(folder, {"settings": asked, "target": about, "trained": others})
    points: list[dict[str, Any]] = []
    count = 1 + len(settings.fractions) * len(settings.methods) + len(settings.shares) + len(trained)
    with progress(console) as bar:
        task = bar.add_task("reading the original", total=count)
        quality = Quality(target, tokenizer, held_out, settings)

        def point(name: str, kind: str, decoder: Decoder) -> None:
            bar.update(task, description=name)
            if name not in kept:
                quality.target = decoder
                first = decoder is target and not (decoder.config.mla_ranks or decoder.config.dsa_layers)
                value = quality.of_first() if first else quality.now()
                kept[name] = {"quality": value, "memory": remembered(decoder, settings.length)}
                kept[name] |= {"retrofits": described(decoder)}
            points.append({"name": name, "kind": kind, **kept[name]})
            bar.advance(task)

        point("original", "original", target)
        for name, other in trained.items():
            point(name, "trained", other)
        texts = texts_of(tokenizer, train, settings.rows + TRIED, settings.row_tokens, settings.seed)
        for name in _latents(target, texts, settings):
            point(name, "latents", target)
        for name in _indexes(target, texts, settings):
            point(name, "index", target)
    kept.done()
    return {
        **provenance(),
        "machine": before,
        "versions": versions(),
        "target": about,
        "settings": asked,
        "trained": others,
        "points": points,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _latents(target: Decoder, texts: list[list[int]], settings: ParetoSettings) -> Iterator[str]:
    """Names of points; while one is out, the target is as it states."""
    whole = 2 * target.config.num_kv_heads * target.config.head_dim
    moments = calibrate(target, texts[: settings.rows], target.config.full_layers)
    for method in settings.methods:
        how = MlaSettings(method=method, allocate="equal" if method == mla.SVD else "marginal")
        for fraction in settings.fractions:
            rank = max(1, round(fraction * whole))
            balance, _ = chosen_balance(target, moments, rank, how, texts[settings.rows :])
            bases = bases_of(target, moments, method, balance)
            mla.attach(target, bases, how.ranks(bases, rank))
            yield f"latents, {method}, {100 * fraction:g} %"
            mla.detach(target)


def _indexes(target: Decoder, texts: list[list[int]], settings: ParetoSettings) -> Iterator[str]:
    layers, heads, dim = asked_of(target, DsaSettings(index_dim=settings.index_dim))
    made = first_indexes(target, texts[: settings.rows], layers, heads, dim)
    for share in settings.shares:
        dsa.attach_index(target, made, TopKConfig(top_k=share, min_context=0))
        yield f"index, {100 * share:g} % of the context"
        dsa.detach_index(target)
