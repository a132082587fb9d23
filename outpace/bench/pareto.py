"""What each size of a retrofit costs: latents of several ranks and methods, indexes of several reaches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench.memory import described
from outpace.bench.quality import Quality, QualitySettings, needle_counts, remembered
from outpace.bench.report import Column, Page, Report, bare, figure_of, table
from outpace.bench.run import Run, plain_json, progress
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
    if target.config.mla_ranks or target.config.dsa_layers:
        raise ValueError("the suite pareto starts from a target without retrofits: name the original")
    others = {name: fingerprint(other) for name, other in trained.items()}
    run = Run(target, folder, settings=plain_json(settings), trained=others)
    for name, other in trained.items():
        if fingerprint(other, retrofits=False) != run.frame["target"]["fingerprint"]:
            raise ValueError(f"{name} was not made from this target: its backbone is another")
    points: list[dict[str, Any]] = []
    count = 1 + len(settings.fractions) * len(settings.methods) + len(settings.shares) + len(trained)
    with progress(console) as bar:
        task = bar.add_task("reading the original", total=count)
        quality = Quality(target, tokenizer, held_out, settings)

        def measure(decoder: Decoder) -> dict[str, Any]:
            quality.target = decoder
            first = decoder is target and not (decoder.config.mla_ranks or decoder.config.dsa_layers)
            return {
                "quality": quality.of_first() if first else quality.now(),
                "memory": remembered(decoder, settings.length),
                "retrofits": described(decoder),
            }

        def point(name: str, kind: str, decoder: Decoder) -> None:
            bar.update(task, description=name)
            points.append({"name": name, "kind": kind, **run.once(name, lambda: measure(decoder))})
            bar.advance(task)

        point("original", "original", target)
        for name, other in trained.items():
            point(name, "trained", other)
        texts = texts_of(tokenizer, train, settings.rows + TRIED, settings.row_tokens, settings.seed)
        for name in _latents(target, texts, settings):
            point(name, "latents", target)
        for name in _indexes(target, texts, settings):
            point(name, "index", target)
    return run.report(points=points)


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
            yield f"latents, {method}, {100 * fraction:g}%"
            mla.detach(target)


def _indexes(target: Decoder, texts: list[list[int]], settings: ParetoSettings) -> Iterator[str]:
    layers, heads, dim = asked_of(target, DsaSettings(index_dim=settings.index_dim))
    made = first_indexes(target, texts[: settings.rows], layers, heads, dim)
    for share in settings.shares:
        dsa.attach_index(target, made, TopKConfig(top_k=share, min_context=0))
        yield f"index, {100 * share:g}% of the context"
        dsa.detach_index(target)


LEGEND = """\
- KV, bytes: what a token adds to the memory of layers with full attention; read: what a step looks at, for
  each token of the text, keys of an index included.
- loss, KL, same top-1: held-out text against the original. agrees: greedy answers, up to the first
difference.
- needles: found at each distance, as the settings name them.
"""
PARETO: tuple[Column, ...] = (
    ("", "name", "{}"),
    ("KV, bytes", "memory.bytes_per_token", "{:,.0f}"),
    ("read", "memory.bytes_read", "{:,.0f}"),
    ("loss", "quality.nats", "{:.4f}"),
    ("change", "change", "{:+.2%}"),
    ("KL", "quality.kl", "{:.4f}"),
    ("same top-1", "quality.same_likeliest", "{:.1%}"),
    ("agrees", "quality.agreement", "{:.0%}"),
    ("needles", needle_counts, "{}"),
)
MARKS = {
    "original": ("*", "#222222"),
    "trained": ("D", "#61304b"),
    "latents": ("o", "#c1666b"),
    "index": ("s", "#2a6f97"),
}


def pareto_table(report: Report) -> list[str]:
    base = report["points"][0]["quality"]["nats"]
    return table(PARETO, (p | {"change": p["quality"]["nats"] / base - 1} for p in report["points"]))


def _measured(report: Report) -> str:
    s = report["settings"]
    return (
        f"{s['texts']} held-out files of {s['length']:,} tokens; {s['prompts']} prompts of "
        f"{s['prompt_tokens']:,} tokens with {s['new_tokens']} greedy ones; needles at "
        + ", ".join(f"{n:,}" for n in s["distances"])
        + " tokens"
    )


def _plot(report: Report) -> Any:
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


PAGE = Page(
    "Bytes per token against damage",
    lambda report: [*pareto_table(report), LEGEND],
    _measured,
    {"pareto.png": ("Bytes against damage", _plot)},
)

SHARE = 0.25
MASS: tuple[Column, ...] = (
    ("layer", "layer", "{}"),
    ("the latest", "recent", "{:.1%}"),
    ("index, untrained", "untrained", "{:.1%}"),
    ("index", "index", "{:.1%}"),
    ("best choice", "best", "{:.1%}"),
)
HELD: tuple[Column, ...] = (
    ("", "name", "{}"),
    ("loss, nats", "nats_per_token", "{:.4f}"),
    ("change", "change", "{:+.2%}"),
    ("KL", "kl", "{:.4f}"),
    ("same top-1 token", lambda r: r["same_likeliest"] if "kl" in r else None, "{:.1%}"),
)


def mass_table(report: Report) -> list[str]:
    """At a quarter of the context, layer by layer: what the latest tokens alone would keep of the attention's
    mass, an index before and after training, and the best choice."""
    after, before = (
        {row["layer"]: row for row in report[name] if row["share"] == SHARE}
        for name in ("mass", "mass_untrained")
    )
    rows = [row | {"untrained": before[i]["index"]} for i, row in sorted(after.items())]
    keys = ("recent", "untrained", "index", "best")
    mean = {"layer": "mean"} | {key: fmean(row[key] for row in rows) for key in keys}
    return table(MASS, [*rows, mean])


def held_table(report: Report) -> list[str]:
    """Held-out loss of the original, of the retrofit as it came, and trained."""
    held = report["held_out"]
    base = held["original"]["nats_per_token"]
    names = {"original": "original", "untrained": "untrained", "after": "trained"}
    rows = [{"name": name, **held[key]} for key, name in names.items()]
    return table(HELD, (row | {"change": row["nats_per_token"] / base - 1} for row in rows))
