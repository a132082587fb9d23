"""All that makes a target remember less, side by side: a draft, partial KV, latents, an index, and all."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from outpace.bench.lossless import LosslessCheck, compare
from outpace.bench.prompts import held_out_prompts
from outpace.bench.quality import Quality, QualitySettings, needle_counts, remembered
from outpace.bench.report import Column, Page, Report, bare, figure_of, table
from outpace.bench.results import error, joined, over
from outpace.bench.run import (
    Method,
    Prompts,
    Run,
    Runs,
    Timed,
    advancing,
    plain_json,
    progress,
    take_turns,
    timed,
)
from outpace.decode.generate import generate
from outpace.decode.partial import Partial
from outpace.decode.request import Request
from outpace.drafts.base import Draft
from outpace.kv.partial import PartialConfig
from outpace.models.decoder import Decoder
from outpace.text.corpus import Document


@dataclass(frozen=True, kw_only=True)
class MemorySettings(QualitySettings):
    """`prompts` of `prompt_tokens`, decoded one at a time, `new_tokens` each, `repeats` times; partial KV of
    `partial` tokens. The rest as in quality.py: QualitySettings."""

    prompts: int = 4
    repeats: int = 3
    partial: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompts", "prompt_tokens", "new_tokens", "repeats", "partial"):
            if getattr(self, name) < 1:
                raise ValueError(f"memory: {name} {getattr(self, name)}: it must be at least 1")
        _ = self.near

    @property
    def near(self) -> Partial:
        return Partial(config=PartialConfig.within(self.partial))


@dataclass(frozen=True)
class Way:
    """A row: what of the target is switched on, and how it decodes."""

    name: str
    mla: bool = False
    dsa: bool = False
    draft: bool = False
    partial: bool = False

    @property
    def state(self) -> tuple[bool, bool]:
        """Of the target."""
        return self.mla, self.dsa


def ways_of(target: Decoder) -> list[Way]:
    """Rows for the retrofits that a target has. Raises ValueError where it has none."""
    mla, dsa = bool(target.config.mla_ranks), bool(target.config.dsa_layers)
    if not mla and not dsa:
        raise ValueError(
            "the suite memory compares retrofits, and this target has none: see outpace retrofit mla and dsa"
        )
    items = [Way("plain"), Way("+ draft", draft=True), Way("+ draft, partial KV", draft=True, partial=True)]
    if mla:
        items += [Way("latent KV", mla=True), Way("latent KV + draft", mla=True, draft=True)]
    if dsa:
        items += [Way("sparse", dsa=True), Way("sparse + draft", dsa=True, draft=True)]
    if mla and dsa:
        items.append(Way("latent KV, sparse", mla=True, dsa=True))
    items.append(Way("all", mla=mla, dsa=dsa, draft=True, partial=True))
    return items


def run_memory(
    target: Decoder,
    tokenizer: Tokenizer,
    draft: Draft,
    draft_text: str,
    documents: Sequence[Document],
    settings: MemorySettings,
    folder: Path,
    console: Console,
) -> dict[str, Any]:
    """-> the report. What was measured before a stop is read from folder/progress.jsonl."""
    ways = ways_of(target)
    run = Run(target, folder, settings=plain_json(settings), draft=draft_text)
    prompts = held_out_prompts(tokenizer, documents, settings.prompts, settings.prompt_tokens)
    states = list(dict.fromkeys(way.state for way in ways))
    with progress(console) as bar:
        task = bar.add_task("memory", total=len(states) + settings.repeats * len(prompts) * len(ways))
        qualities = _qualities(target, tokenizer, documents, settings, states, run, lambda: bar.advance(task))
        methods = {way.name: method_of(target, draft, way, settings) for way in ways}
        groups = [[prompt] for prompt in prompts]
        turns = (groups, settings.new_tokens, settings.repeats, settings.seed, run.kept, advancing(bar, task))
        runs = take_turns("decoding", methods, *turns)
    rows = [_row(target, way, ways, runs, prompts, settings, qualities[way.state]) for way in ways]
    switch(target, Way("as it was", mla=bool(target.config.mla_ranks), dsa=bool(target.config.dsa_layers)))
    violations = sum(row["lossless"]["violations"] for row in rows)
    return run.report(retrofits=described(target), rows=rows, violations=violations)


def _row(
    target: Decoder,
    way: Way,
    ways: list[Way],
    runs: dict[str, Runs],
    prompts: list[list[int]],
    settings: MemorySettings,
    quality: dict[str, Any],
) -> dict[str, Any]:
    """Speed over autoregressive decoding of the original; text against autoregressive decoding of the same
    state."""
    alone = next(w.name for w in ways if w.state == way.state and not w.draft)
    switch(target, way)
    check, ours = LosslessCheck(), runs[way.name]
    for (repeat, group), run in ours.items():
        check += compare(target, prompts[group], run.tokens[0], runs[alone][repeat, group].tokens[0])
    trace = joined(run.trace for run in ours.values())
    speed = sum(run.decoded for run in ours.values()) / sum(run.decode_s for run in ours.values())
    memory = remembered(target, settings.prompt_tokens + settings.new_tokens)
    return dataclasses.asdict(way) | {
        "tokens_per_s": round(speed, 2),
        "over_plain": round(over(ours, runs["plain"]), 4),
        "error": round(error(ours, runs["plain"]), 4),
        "tau": round(trace.tau, 3) if way.draft else None,
        "confirmed": list(trace.confirmed) if way.partial else None,
        "memory": memory,
        "quality": quality,
        "lossless_against": alone,
        "lossless": dataclasses.asdict(check),
    }


def switch(target: Decoder, way: Way) -> None:
    if target.config.mla_ranks:
        target.use_mla_kv(way.mla)
    if target.config.dsa_layers:
        target.use_dsa(way.dsa)


def method_of(target: Decoder, draft: Draft, way: Way, settings: MemorySettings) -> Method:
    def run(prompts: Prompts, new_tokens: int, seed: int) -> Timed:
        switch(target, way)
        request = Request(max_new_tokens=new_tokens)
        used = draft if way.draft else None
        near = settings.near if way.partial else None
        return timed(lambda note: generate(target, prompts, request, used, partial=near, on_tokens=note))

    return run


def described(target: Decoder) -> dict[str, Any]:
    config = target.config
    return {
        "mla_ranks": list(config.mla_ranks),
        "dsa_layers": list(config.dsa_layers),
        "dsa_index": [config.dsa_index_heads, config.dsa_index_dim],
        "dsa_keep": dataclasses.asdict(config.dsa_keep),
    }


def _qualities(
    target: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    settings: MemorySettings,
    states: list[tuple[bool, bool]],
    run: Run,
    on_one: Callable[[], None],
) -> dict[tuple[bool, bool], dict[str, Any]]:
    """Of each state of the target against the first, which is the original."""
    quality: Quality | None = None

    def measure(way: Way) -> dict[str, Any]:
        nonlocal quality
        if quality is None:
            switch(target, Way("plain"))
            quality = Quality(target, tokenizer, documents, settings)
        switch(target, way)
        return quality.now() if way.mla or way.dsa else quality.of_first()

    values = {}
    for mla, dsa in states:
        name = f"quality, latents {mla}, sparse {dsa}"
        values[mla, dsa] = run.once(name, partial(measure, Way(name, mla=mla, dsa=dsa)))
        on_one()
    return values


LEGEND = """\
- tokens/s, speedup: decoding alone, prompts one by one, rows interleaved; over autoregressive decoding of
the original.
- KV, bytes: what a token adds to the memory of layers with full attention, keys of an index included.
- read: what a step looks at, for each token of the text; partial KV reads its budget between full passes.
- loss, KL, same top-1: held-out text against the original. agrees: greedy answers, up to the first
difference.
- lossless: against autoregressive decoding of the target as the row has it, named in the last column.
"""
MEMORY: tuple[Column, ...] = (
    ("", "name", "{}"),
    ("tokens/s", "tokens_per_s", "{:.1f}"),
    ("speedup", "over_plain", "{:.2f}"),
    ("tau", "tau", "{:.2f}"),
    ("KV, bytes", "memory.bytes_per_token", "{:,.0f}"),
    ("read", "memory.bytes_read", "{:,.0f}"),
    ("loss", "quality.nats", "{:.4f}"),
    ("KL", "quality.kl", "{:.3f}"),
    ("same top-1", "quality.same_likeliest", "{:.1%}"),
    ("agrees", "quality.agreement", "{:.0%}"),
    ("needles", needle_counts, "{}"),
    ("violations, ties", lambda r: [r["lossless"]["violations"], r["lossless"]["ties"]], "{}, {}"),
    (
        "lossless against",
        lambda r: "itself" if r["lossless_against"] == r["name"] else r["lossless_against"],
        "{}",
    ),
)


def memory_table(report: Report) -> list[str]:
    return table(MEMORY, report["rows"])


def _measured(report: Report) -> str:
    s = report["settings"]
    return (
        f"draft `{report['draft']}`, {s['prompts']} held-out prompts of {s['prompt_tokens']:,} tokens, "
        f"{s['new_tokens']} new tokens each, {s['repeats']} repeats; partial KV of {s['partial']:,} tokens"
    )


def _plot(report: Report) -> Any:
    figure, (left, right) = figure_of(1, 2, 3.8, "Remembering less")
    rows = report["rows"]
    names, place = [row["name"] for row in rows], range(len(rows))
    left.barh(place, [row["over_plain"] for row in rows], color="#2a6f97")
    left.set_yticks(place, names)
    left.axvline(1.0, color="#888888", linewidth=0.8)
    left.set_xlabel("speed over autoregressive decoding")
    right.barh(place, [row["memory"]["bytes_per_token"] for row in rows], color="#c1666b")
    right.barh(place, [row["memory"]["bytes_read"] for row in rows], color="#61304b", height=0.4)
    right.set_yticks(place, [""] * len(rows))
    right.set_xlabel("bytes per token: kept, and (dark) read")
    for axes in (left, right):
        axes.invert_yaxis()
        bare(axes)
    return figure


PAGE = Page(
    "What a target has to remember",
    lambda report: [*memory_table(report), LEGEND],
    _measured,
    {"memory.png": ("Speed and memory", _plot)},
)
