"""What each size of a retrofit costs: latents of several ranks and methods, indexes of several reaches."""

import dataclasses
import importlib.util
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench.interleave import Kept, progress
from outpace.bench.machine import describe_target, machine, provenance, versions
from outpace.bench.memory import described
from outpace.bench.quality import Quality, QualitySettings, remembered
from outpace.bench.report import (
    bare,
    figure_of,
    lines_of,
    machine_line,
    run_line,
    save_figure,
    table,
    target_line,
    versions_line,
)
from outpace.checkpoint.save import write_atomically, write_json
from outpace.kv.topk import TopKConfig
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.retrofit import dsa, mla
from outpace.retrofit.dsa import DsaSettings, asked_of, first_indexes
from outpace.retrofit.evaluate import texts_of
from outpace.retrofit.mla import MlaSettings, bases_of, calibrate, chosen_balance
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


LEGEND = """\
- KV, bytes: what a token adds to the memory of layers with full attention; read: what a step looks at, for
  each token of the text, keys of an index included.
- loss, KL, same top-1: held-out text against the original. agrees: greedy answers, up to the first
difference.
- needles: found at each distance, as the settings name them.
"""
COLUMNS = ("", "KV, bytes", "read", "loss", "change", "KL", "same top-1", "agrees", "needles")
MARKS = {
    "original": ("*", "#222222"),
    "trained": ("D", "#61304b"),
    "latents": ("o", "#c1666b"),
    "index": ("s", "#2a6f97"),
}


def write_pareto(report: dict[str, Any], folder: Path) -> None:
    """folder/report.json, report.md and pareto.png; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = importlib.util.find_spec("matplotlib") is not None
    write_json(folder / "report.json", report)
    if pictures:
        save_figure(_picture(report), folder / "pareto.png")
    write_atomically(folder / "report.md", pareto_markdown(report, pictures).encode())


def pareto_markdown(report: dict[str, Any], pictures: bool = True) -> str:
    lines = machine_line(report), versions_line(report), target_line(report["target"]), run_line(report)
    s = report["settings"]
    message = f"{s['texts']} held-out files of {s['length']:,} tokens; {s['prompts']} prompts of "
    message += f"{s['prompt_tokens']:,} tokens with {s['new_tokens']} greedy ones; needles at "
    message += ", ".join(f"{n:,}" for n in s["distances"]) + " tokens."
    page = [
        "# Bytes per token against damage",
        "",
        *lines_of(*lines),
        message,
        "",
        *pareto_table(report),
        LEGEND,
    ]
    return "\n".join([*page, *(["![Bytes against damage](pareto.png)", ""] if pictures else [])])


def pareto_table(report: dict[str, Any]) -> list[str]:
    base = report["points"][0]["quality"]["nats"]
    return table(COLUMNS, [_cells(point, base) for point in report["points"]])


def _cells(point: dict[str, Any], base: float) -> list[str]:
    quality, memory = point["quality"], point["memory"]
    return [
        point["name"],
        f"{memory['bytes_per_token']:,.0f}",
        f"{memory['bytes_read']:,.0f}",
        f"{quality['nats']:.4f}",
        f"{100 * (quality['nats'] / base - 1):+.2f} %",
        f"{quality['kl']:.4f}",
        f"{100 * quality['same_likeliest']:.1f} %",
        f"{100 * quality['agreement']:.0f} %",
        ", ".join(f"{n['found']} of {n['of']}" for n in quality["needles"]) or "-",
    ]


def _picture(report: dict[str, Any]) -> Any:
    figure, (left, right) = figure_of(1, 2, 3.8, "Bytes per token against damage")
    for axes, damage, label in (
        (left, lambda q: q["kl"], "KL to the original, nats"),
        (right, lambda q: 100 * (1 - q["agreement"]), "greedy answers that differ, %"),
    ):
        for kind, (mark, color) in MARKS.items():
            points = [p for p in report["points"] if p["kind"] == kind]
            x = [p["memory"]["bytes_read"] for p in points]
            axes.plot(x, [damage(p["quality"]) for p in points], mark, color=color, label=kind, markersize=5)
        axes.set_xlabel("bytes read a token of context")
        axes.set_ylabel(label)
        axes.set_xlim(left=0)
        bare(axes)
    left.legend(frameon=False, fontsize=8)
    return figure


SHARE = 0.25


def mass_table(report: dict[str, Any]) -> list[str]:
    """At a quarter of the context, layer by layer: what the latest tokens alone would keep of the attention's
    mass, an index before and after training, and the best choice."""
    after, before = (
        {row["layer"]: row for row in report[name] if row["share"] == SHARE}
        for name in ("mass", "mass_untrained")
    )
    kept = {i: [r["recent"], before[i]["index"], r["index"], r["best"]] for i, r in sorted(after.items())}
    lines: dict[Any, list[float]] = kept | {"mean": [fmean(x) for x in zip(*kept.values(), strict=True)]}
    rows = [[str(name), *(f"{100 * x:.1f} %" for x in line)] for name, line in lines.items()]
    return table(("layer", "the latest", "index, untrained", "index", "best choice"), rows)


def held_table(report: dict[str, Any]) -> list[str]:
    """Held-out loss of the original, of the retrofit as it came, and trained."""
    held = report["held_out"]
    base = held["original"]["nats_per_token"]
    rows = []
    for name, key in (("original", "original"), ("untrained", "untrained"), ("trained", "after")):
        value = held[key]
        change = f"{100 * (value['nats_per_token'] / base - 1):+.2f} %"
        same = f"{100 * value['same_likeliest']:.1f} %" if "kl" in value else "-"
        kl = f"{value['kl']:.4f}" if "kl" in value else "-"
        rows.append([name, f"{value['nats_per_token']:.4f}", change, kl, same])
    return table(("", "loss, nats", "change", "KL", "same top-1 token"), rows)
