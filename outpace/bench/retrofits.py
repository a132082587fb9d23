"""The suites memory and pareto: memory, speed and quality of a target with latent KV and sparse attention."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench import plots
from outpace.bench.methods import Case, run_case
from outpace.bench.metrics import (
    PLAIN,
    LosslessCheck,
    compare,
    first_difference,
    joined,
    ratio_error,
    speed_ratio,
)
from outpace.bench.prompts import held_out_prompts
from outpace.bench.recall import RecallSettings, find_needles, long_texts
from outpace.bench.report import KV_BYTES, QUALITY, TAU, Columns, Page, Report, table, table_of
from outpace.bench.run import Bar, Method, Prompts, Run, Runs, Timed, at_least, interleave
from outpace.decode.generate import generate
from outpace.decode.partial import Partial
from outpace.decode.request import Request
from outpace.drafts.base import Draft
from outpace.kv.partial import PartialConfig
from outpace.kv.topk import TopKConfig
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.retrofit import dsa, mla
from outpace.retrofit.dsa import DsaSettings
from outpace.retrofit.evaluate import evaluate, texts_of
from outpace.retrofit.mla import MlaSettings
from outpace.text.corpus import Document

# ---- quality of a changed target -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class QualitySettings:
    """`texts` held-out files of `length` tokens; greedy answers of `new_tokens` to `prompts` held-out
    prompts of `prompt_tokens`; `needles` at each of `distances`."""

    texts: int = 4
    length: int = 4096
    prompts: int = 8
    prompt_tokens: int = 2048
    new_tokens: int = 128
    needles: int = 16
    distances: tuple[int, ...] = (256, 2048)
    seed: int = 1

    def __post_init__(self) -> None:
        at_least(self, "quality", texts=1, prompts=1, prompt_tokens=1, new_tokens=1, needles=0, length=2)
        if self.needles % min(8, self.needles or 1):
            raise ValueError(f"quality: needles {self.needles}: eight are asked for at a time")


class Quality:
    """Quality of a target in different states, relative to its state when this is created. All states read
    the same texts. Raises ValueError for too little text."""

    def __init__(
        self, target: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], settings: QualitySettings
    ) -> None:
        self.target, self.tokenizer, self.settings = target, tokenizer, settings
        self.texts = long_texts(tokenizer, documents, settings.length, settings.texts)
        self.prompts = held_out_prompts(tokenizer, documents, settings.prompts, settings.prompt_tokens)
        self.original = evaluate(target, self.texts)
        self.answers = self._answers()

    def _answers(self) -> list[list[int]]:
        request = Request(max_new_tokens=self.settings.new_tokens)
        return [generate(self.target, [prompt], request).tokens[0] for prompt in self.prompts]

    def of_original(self) -> dict[str, Any]:
        nats = self.original["nats_per_token"]
        return {"nats": nats, "kl": 0.0, "same_likeliest": 1.0, "agreement": 1.0} | self._needles()

    def measure(self) -> dict[str, Any]:
        """nats per token; kl(original || now); share of the same top-1 token; agreement: share of the greedy
        answers before their first difference; needles found."""
        value = evaluate(self.target, self.texts, self.original["log_probabilities"])
        agreed = [agreeing(a, b) / len(a) for a, b in zip(self.answers, self._answers(), strict=True)]
        return {
            "nats": value["nats_per_token"],
            "kl": value["kl"],
            "same_likeliest": value["same_likeliest"],
            "agreement": round(sum(agreed) / len(agreed), 4),
        } | self._needles()

    def _needles(self) -> dict[str, Any]:
        s = self.settings
        if not s.needles:
            return {"needles": []}
        settings = RecallSettings(
            needles=s.needles, distances=s.distances, batch=min(8, s.needles), seed=s.seed
        )
        needles = [find_needles(self.target, self.tokenizer, self.texts, n, settings) for n in s.distances]
        return {"needles": needles}


def agreeing(a: list[int], b: list[int]) -> int:
    """Tokens before the first difference."""
    i = first_difference(a, b)
    return len(a) if i is None else i


@torch.inference_mode()
def kv_memory(target: Decoder, length: int) -> dict[str, float]:
    """bytes_per_token: cache growth per token with the current retrofits; bytes_read: bytes that a step after
    `length` tokens reads, per token of context; cache_bytes: of a cache of that length."""
    config, size, kept, read = target.config, target.dtype.itemsize, 0, 0.0
    for i in config.full_layers:
        kv_dtype = None if target.attentions[i].use_latent else target.kv_cache_dtype
        kv, index = (kv_dtype or target.dtype).itemsize * config.kv_numbers(i), size * config.index_numbers(i)
        indexed = config.use_dsa and i in config.dsa_layers
        kept += kv + index
        read += index + kv * (config.dsa_keep.most(length) / length if indexed else 1.0)
    cache = target.make_cache(1, length)
    return {"bytes_per_token": kept, "bytes_read": read, "cache_bytes": cache.nbytes}


def describe_retrofits(target: Decoder) -> dict[str, Any]:
    config = target.config
    return {
        "mla_ranks": list(config.mla_ranks),
        "dsa_layers": list(config.dsa_layers),
        "dsa_index": [config.dsa_index_heads, config.dsa_index_dim],
        "dsa_keep": dataclasses.asdict(config.dsa_keep),
    }


# ---- memory: one target with and without its retrofits, a draft, partial KV ----------------------------


@dataclass(frozen=True, kw_only=True)
class MemorySettings(QualitySettings):
    """`prompts` of `prompt_tokens`, decoded one at a time, `new_tokens` each, `repeats` times; partial KV of
    `partial` tokens. The rest as in `bench/retrofits.py: QualitySettings`."""

    prompts: int = 4
    repeats: int = 3
    partial: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "memory", repeats=1, partial=1)
        _ = self.partial_kv

    @property
    def partial_kv(self) -> Partial:
        return Partial(config=PartialConfig.within(self.partial))


@dataclass(frozen=True)
class Setting:
    """A row: the retrofits switched on in the target, and how it decodes."""

    name: str
    mla: bool = False
    dsa: bool = False
    draft: bool = False
    partial: bool = False

    @property
    def state(self) -> tuple[bool, bool]:
        return self.mla, self.dsa

    def apply(self, target: Decoder) -> None:
        if target.config.mla_ranks:
            target.use_mla_kv(self.mla)
        if target.config.dsa_layers:
            target.use_dsa(self.dsa)


def settings_for(target: Decoder) -> list[Setting]:
    """Rows for the retrofits that a target has. Raises ValueError where it has none."""
    has_mla, has_dsa = bool(target.config.mla_ranks), bool(target.config.dsa_layers)
    if not has_mla and not has_dsa:
        raise ValueError(
            "the suite memory compares retrofits, and this target has none: see outpace retrofit mla and dsa"
        )
    rows = [Setting(PLAIN), Setting("+ draft", draft=True)]
    rows += [Setting("+ draft, partial KV", draft=True, partial=True)]
    if has_mla:
        rows += [Setting("latent KV", mla=True), Setting("latent KV + draft", mla=True, draft=True)]
    if has_dsa:
        rows += [Setting("sparse", dsa=True), Setting("sparse + draft", dsa=True, draft=True)]
    if has_mla and has_dsa:
        rows.append(Setting("latent KV, sparse", mla=True, dsa=True))
    return [*rows, Setting("all", mla=has_mla, dsa=has_dsa, draft=True, partial=True)]


def run_memory(
    target: Decoder,
    tokenizer: Tokenizer,
    draft: Draft,
    draft_name: str,
    documents: Sequence[Document],
    settings: MemorySettings,
    folder: Path,
    console: Console,
) -> Report:
    """-> the report. A stopped run continues from folder/progress.jsonl."""
    rows = settings_for(target)
    run = Run(target, folder, settings=settings, draft=draft_name)
    prompts = held_out_prompts(tokenizer, documents, settings.prompts, settings.prompt_tokens)
    states = {row.state: Setting("", row.mla, row.dsa) for row in rows}
    steps = len(states) + settings.repeats * len(prompts) * len(rows)

    @cache
    def original() -> Quality:
        Setting(PLAIN).apply(target)
        return Quality(target, tokenizer, documents, settings)

    def quality(state: Setting) -> dict[str, Any]:
        of = original()
        state.apply(target)
        return of.measure() if any(state.state) else of.of_original()

    qualities = {}
    with Bar(console, "memory", steps) as bar:
        for (has_mla, has_dsa), state in states.items():
            name = f"quality, latents {has_mla}, sparse {has_dsa}"
            bar.step(name)
            qualities[state.state] = run.once(name, partial(quality, state))
        methods = {row.name: _method(target, draft, row, settings) for row in rows}
        groups = [[prompt] for prompt in prompts]
        runs = interleave("decoding", methods, groups, settings.new_tokens, settings, run, bar.step)
    reports = [_memory_row(target, row, rows, runs, prompts, settings, qualities[row.state]) for row in rows]
    Setting("restored", mla=bool(target.config.mla_ranks), dsa=bool(target.config.dsa_layers)).apply(target)
    violations = sum(row["lossless"]["violations"] for row in reports)
    return run.report(retrofits=describe_retrofits(target), rows=reports, violations=violations)


def _method(target: Decoder, draft: Draft, row: Setting, settings: MemorySettings) -> Method:
    used, partial_kv = draft if row.draft else None, settings.partial_kv if row.partial else None
    decode = run_case(Case(method=row.name, temperature=0.0), target, used, partial=partial_kv)

    def run(prompts: Prompts, new_tokens: int, seed: int) -> Timed:
        row.apply(target)
        return decode(prompts, new_tokens, seed)

    return run


def _memory_row(
    target: Decoder,
    row: Setting,
    rows: list[Setting],
    runs: dict[str, Runs],
    prompts: list[list[int]],
    settings: MemorySettings,
    quality: dict[str, Any],
) -> dict[str, Any]:
    """Speed over autoregressive decoding of the original; tokens against autoregressive decoding of the same
    state."""
    reference = next(r.name for r in rows if r.state == row.state and not r.draft)
    row.apply(target)
    check, ours = LosslessCheck(), runs[row.name]
    for (repeat, group), run in ours.items():
        check += compare(target, prompts[group], run.tokens[0], runs[reference][repeat, group].tokens[0])
    trace = joined(run.trace for run in ours.values())
    speed = sum(run.decoded for run in ours.values()) / sum(run.decode_s for run in ours.values())
    return dataclasses.asdict(row) | {
        "tokens_per_s": round(speed, 2),
        "over_plain": round(speed_ratio(ours, runs[PLAIN]), 4),
        "error": round(ratio_error(ours, runs[PLAIN]), 4),
        "tau": round(trace.tau, 3) if row.draft else None,
        "confirmed": list(trace.confirmed) if row.partial else None,
        "memory": kv_memory(target, settings.prompt_tokens + settings.new_tokens),
        "quality": quality,
        "lossless_against": reference,
        "lossless": dataclasses.asdict(check),
    }


memory_table = table_of(
    "rows",
    ("", "name", "{}"),
    ("tokens/s", "tokens_per_s", "{:.1f}"),
    ("speedup", "over_plain", "{:.2f}"),
    TAU,
    *KV_BYTES,
    ("loss", "quality.nats", "{:.4f}"),
    ("KL", "quality.kl", "{:.3f}"),
    *QUALITY,
    ("violations, ties", lambda r: [r["lossless"]["violations"], r["lossless"]["ties"]], "{}, {}"),
    (
        "lossless against",
        lambda r: "itself" if r["lossless_against"] == r["name"] else r["lossless_against"],
        "{}",
    ),
)
MEMORY_LEGEND = """\
- tokens/s, speedup: decoding alone, prompts one by one, rows interleaved; over autoregressive decoding of
the original.
- KV, bytes: what a token adds to the memory of layers with full attention, keys of an index included.
- read: what a step looks at, for each token of the text; partial KV reads its budget between full passes.
- loss, KL, same top-1: held-out text against the original. agrees: greedy answers, up to the first
difference.
- lossless: against autoregressive decoding of the target as the row has it, named in the last column.
"""


def _memory_line(report: Report) -> str:
    s = report["settings"]
    return (
        f"draft `{report['draft']}`, {s['prompts']} held-out prompts of {s['prompt_tokens']:,} tokens, "
        f"{s['new_tokens']} new tokens each, {s['repeats']} repeats; partial KV of {s['partial']:,} tokens"
    )


def _memory_plot(report: Report) -> Any:
    figure, (left, right) = plots.figure(1, 2, 3.8, "Memory and speed")
    rows = report["rows"]
    places = range(len(rows))
    left.barh(places, [row["over_plain"] for row in rows], color=plots.BLUE)
    left.axvline(1.0, color=plots.GREY, linewidth=0.8)
    right.barh(places, [row["memory"]["bytes_per_token"] for row in rows], color=plots.RED)
    right.barh(places, [row["memory"]["bytes_read"] for row in rows], color="#61304b", height=0.4)
    plots.named_rows(left, [row["name"] for row in rows])
    plots.named_rows(right, [""] * len(rows))
    plots.label(left, "speed over autoregressive decoding")
    plots.label(right, "bytes per token: cached, and (dark) read")
    return figure


MEMORY_PAGE = Page(
    "Memory, speed and quality of retrofits",
    lambda report: [*memory_table(report), MEMORY_LEGEND],
    _memory_line,
    {"memory.png": ("Speed and memory", _memory_plot)},
)


# ---- pareto: bytes per token against quality, for retrofits of several sizes ---------------------------

BALANCE_TEXTS = 4  # texts used to choose the balance of keys and values


@dataclass(frozen=True, kw_only=True)
class RetrofitSizes:
    """`fractions` of keys and values by each of `methods`; `shares` of the context that a query attends to,
    by an index of `index_dim` (0: half a head); both computed from `rows` texts of `row_tokens`."""

    fractions: tuple[float, ...] = (0.75, 0.5, 0.25)
    methods: tuple[str, ...] = mla.METHODS
    shares: tuple[float, ...] = (0.5, 0.25, 0.125)
    index_dim: int = 0
    rows: int = 16
    row_tokens: int = 1024

    def check_sizes(self, suite: str) -> None:
        """Raises ValueError for sizes that no retrofit has."""
        for name in ("fractions", "shares"):
            wrong = [x for x in getattr(self, name) if not 0 < x < 1]
            if wrong:
                raise ValueError(f"{suite}: {name} {wrong[0]}: a share between 0 and 1")
        unknown = [m for m in self.methods if m not in mla.METHODS]
        if unknown:
            raise ValueError(f"{suite}: method {unknown[0]!r}: known are {', '.join(mla.METHODS)}")
        _ = DsaSettings(index_dim=self.index_dim), MlaSettings(rows=self.rows)


@dataclass(frozen=True, kw_only=True)
class ParetoSettings(QualitySettings, RetrofitSizes):
    """`trained`: folders of retrofits of the same target. The rest as in `bench/retrofits.py:
    QualitySettings` and `RetrofitSizes`."""

    trained: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_sizes("pareto")


def run_pareto(
    target: Decoder,
    tokenizer: Tokenizer,
    trained: dict[str, Decoder],
    train: Sequence[Document],
    held_out: Sequence[Document],
    settings: ParetoSettings,
    folder: Path,
    console: Console,
) -> Report:
    """-> the report. `target`: without retrofits, the first point; `trained`: those of the settings. A
    stopped run continues from folder/progress.jsonl. Raises ValueError for a target with retrofits, and for
    a trained one that was made from another target."""
    if target.config.mla_ranks or target.config.dsa_layers:
        raise ValueError("the suite pareto starts from a target without retrofits: name the original")
    fingerprints = {name: fingerprint(other) for name, other in trained.items()}
    run = Run(target, folder, settings=settings, trained=fingerprints)
    for name, other in trained.items():
        if fingerprint(other, retrofits=False) != run.header["target"]["fingerprint"]:
            raise ValueError(f"{name} was not made from this target: its backbone is another")
    points: list[dict[str, Any]] = []
    count = 1 + len(settings.fractions) * len(settings.methods) + len(settings.shares) + len(trained)
    with Bar(console, "reading the original", count) as bar:
        quality = Quality(target, tokenizer, held_out, settings)

        def measure(decoder: Decoder, kind: str) -> dict[str, Any]:
            quality.target = decoder
            return {
                "quality": quality.of_original() if kind == "original" else quality.measure(),
                "memory": kv_memory(decoder, settings.length),
                "retrofits": describe_retrofits(decoder),
            }

        def point(name: str, kind: str, decoder: Decoder) -> None:
            bar.step(name)
            points.append({"name": name, "kind": kind, **run.once(name, partial(measure, decoder, kind))})

        point("original", "original", target)
        for name, other in trained.items():
            point(name, "trained", other)
        count, length = settings.rows + BALANCE_TEXTS, settings.row_tokens
        texts = texts_of(tokenizer, train, count, length, settings.seed)
        for name, _ in attach_latents(target, texts, settings):
            point(name, "latents", target)
        for name in attach_indexes(target, texts, settings):
            point(name, "index", target)
    return run.report(points=points)


def attach_latents(
    target: Decoder, texts: list[list[int]], settings: RetrofitSizes
) -> Iterator[tuple[str, list[mla.Error]]]:
    """Names of points, and what their latents lose of the keys and values of each layer; the target has them
    until the next one is requested. texts: `rows` to compute them from, and BALANCE_TEXTS more."""
    numbers = 2 * target.config.num_kv_heads * target.config.head_dim
    moments = mla.calibrate(target, texts[: settings.rows], target.config.full_layers)
    for method in settings.methods:
        how = MlaSettings(method=method, allocate="equal" if method == mla.SVD else "marginal")
        for fraction in settings.fractions:
            rank = max(1, round(fraction * numbers))
            balance, _ = mla.chosen_balance(target, moments, rank, how, texts[settings.rows :])
            bases = mla.bases_of(target, moments, method, balance)
            ranks = how.ranks(bases, rank)
            lost = mla.errors(target, bases, moments, ranks)
            mla.attach(target, bases, ranks)
            yield f"latents, {method}, {100 * fraction:g}%", lost
            mla.detach(target)


def attach_indexes(target: Decoder, texts: list[list[int]], settings: RetrofitSizes) -> Iterator[str]:
    """The same for indexes."""
    layers, heads, dim = DsaSettings(index_dim=settings.index_dim).resolve(target.config)
    indexes = dsa.initial_indexers(target, texts[: settings.rows], layers, heads, dim)
    for share in settings.shares:
        dsa.attach_index(target, indexes, TopKConfig(top_k=share, min_context=0))
        yield f"index, {100 * share:g}% of the context"
        dsa.detach_index(target)


PARETO: Columns = (
    ("", "name", "{}"),
    *KV_BYTES,
    ("loss", "quality.nats", "{:.4f}"),
    ("change", "change", "{:+.2%}"),
    ("KL", "quality.kl", "{:.4f}"),
    *QUALITY,
)
PARETO_LEGEND = """\
- KV, bytes: what a token adds to the memory of layers with full attention; read: what a step looks at, for
  each token of the text, keys of an index included.
- loss, KL, same top-1: held-out text against the original. agrees: greedy answers, up to the first
difference.
- needles: found at each distance, as the settings name them.
"""
MARKS = {
    "original": ("*", "#222222"),
    "trained": ("D", plots.PURPLE),
    "latents": ("o", plots.RED),
    "index": ("s", plots.BLUE),
}


def pareto_table(report: Report) -> list[str]:
    base = report["points"][0]["quality"]["nats"]
    return table(PARETO, (p | {"change": p["quality"]["nats"] / base - 1} for p in report["points"]))


def _pareto_line(report: Report) -> str:
    s = report["settings"]
    return (
        f"{s['texts']} held-out files of {s['length']:,} tokens; {s['prompts']} prompts of "
        f"{s['prompt_tokens']:,} tokens with {s['new_tokens']} greedy ones; needles at "
        + ", ".join(f"{n:,}" for n in s["distances"])
        + " tokens"
    )


def _pareto_plot(report: Report) -> Any:
    figure, panels = plots.figure(1, 2, 3.8, "Bytes per token against quality")
    measures: tuple[tuple[str, Callable[[Any], float]], ...] = (
        ("KL to the original, nats", lambda q: q["kl"]),
        ("greedy answers that differ, %", lambda q: 100 * (1 - q["agreement"])),
    )
    for axes, (name, loss) in zip(panels, measures, strict=True):
        for kind, (mark, colour) in MARKS.items():
            points = [p for p in report["points"] if p["kind"] == kind]
            x = [p["memory"]["bytes_read"] for p in points]
            axes.plot(x, [loss(p["quality"]) for p in points], mark, color=colour, label=kind, markersize=5)
        plots.label(axes, "bytes read per token of context", name)
        axes.set_xlim(left=0)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


PARETO_PAGE = Page(
    "Bytes per token against quality",
    lambda report: [*pareto_table(report), PARETO_LEGEND],
    _pareto_line,
    {"pareto.png": ("Bytes against quality", _pareto_plot)},
)


# ---- tables of the training reports of `outpace retrofit` ----------------------------------------------

MASS_SHARE = 0.25  # of the context
MASS: Columns = (
    ("layer", "layer", "{}"),
    ("the latest", "recent", "{:.1%}"),
    ("index, untrained", "untrained", "{:.1%}"),
    ("index", "index", "{:.1%}"),
    ("best choice", "best", "{:.1%}"),
)
HELD_OUT: Columns = (
    ("", "name", "{}"),
    ("loss, nats", "nats_per_token", "{:.4f}"),
    ("change", "change", "{:+.2%}"),
    ("KL", "kl", "{:.4f}"),
    ("same top-1 token", lambda r: r["same_likeliest"] if "kl" in r else None, "{:.1%}"),
)


def mass_table(report: Report) -> list[str]:
    """Share of the attention mass within a quarter of the context, by layer: the latest tokens, an index
    before and after training, and the best choice."""
    after, before = (
        {row["layer"]: row for row in report[name] if row["share"] == MASS_SHARE}
        for name in ("mass", "mass_untrained")
    )
    rows = [row | {"untrained": before[i]["index"]} for i, row in sorted(after.items())]
    keys = ("recent", "untrained", "index", "best")
    return table(MASS, [*rows, {"layer": "mean"} | {key: fmean(row[key] for row in rows) for key in keys}])


def held_out_table(report: Report) -> list[str]:
    """Held-out loss of the original, and of the retrofit before and after training."""
    held_out = report["held_out"]
    base = held_out["original"]["nats_per_token"]
    names = {"original": "original", "untrained": "untrained", "after": "trained"}
    rows = [{"name": name, **held_out[key]} for key, name in names.items()]
    return table(HELD_OUT, (row | {"change": row["nats_per_token"] / base - 1} for row in rows))
