"""The cost of a step against context: one token, a full verification, one on partial KV, and what settles it.

The cache is filled with random numbers: what keys say changes no time. The head and the draft are left out.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from outpace.bench.machine import read_bandwidth, weight_bytes
from outpace.bench.report import Column, Page, Report, context_axis, figure_of, table
from outpace.bench.run import Run, plain_json, progress
from outpace.kv.base import KVCache
from outpace.kv.partial import PartialCache, PartialConfig
from outpace.kv.topk import TopKConfig
from outpace.models.decoder import Decoder
from outpace.models.indexer import Indexer
from outpace.ops.sampling import seeded
from outpace.retrofit.dsa import attach_index, detach_index
from outpace.retrofit.mla import Basis, attach, detach


@dataclass(frozen=True, kw_only=True)
class Retrofits:
    """Those of random weights. `latent`: numbers of a token, as a share of keys and values."""

    latent: float
    index_heads: int
    index_dim: int
    keep: TopKConfig
    seed: int


@dataclass(frozen=True)
class Space:
    """`near`: partial KV of a full cache; `latents`: the same text in latents; `keys` of an index by layer,
    the same for both."""

    target: Decoder
    near: PartialCache
    latents: KVCache
    keys: dict[int, Tensor]
    keep: TopKConfig

    @property
    def full(self) -> KVCache:
        return self.near.full

    def switch(self, mla: bool, dsa: bool) -> KVCache:
        """The target, and the cache that goes with it."""
        self.target.use_mla_kv(mla)
        self.target.use_dsa(dsa)
        cache = self.latents if mla else self.full
        for layer, keys in self.keys.items():
            memory = cache.layers[layer]
            memory.keys, memory.keep_few = (keys, self.keep) if dsa else (None, None)
        return cache

    def grow(self, context: int) -> None:
        """What fills the caches is there already."""
        for cache in (self.full, self.latents):
            cache.advance(cache.begin(context - cache.lengths[0]))


def filled(target: Decoder, length: int, headroom: int, partial: PartialConfig, seed: int) -> Space:
    """Of a target with latents and an index. `room`: columns of partial KV's buffer."""
    made = []
    for mla in (False, True):
        target.use_mla_kv(mla)
        made.append(target.make_cache(1, length, slack=headroom, index=True))
        rng = seeded(seed)
        for x in (x for memory in made[-1].layers for x in memory.parts):
            x.copy_(torch.randn(x.shape[1:], generator=rng)[None])
    full, latents = made
    keys = {layer: k for layer, memory in enumerate(full.layers) if (k := memory.keys) is not None}
    result = Space(target, PartialCache(full, partial, headroom), latents, keys, target.config.dsa_keep)
    for mla in (True, False):
        result.switch(mla, False)
    return result


@contextmanager
def retrofitted(target: Decoder, wanted: Retrofits) -> Iterator[None]:
    """Inside, the target has latents and an index; afterwards it is as it was."""
    config = target.config
    if not config.mla_ranks:
        random_latents(target, wanted.latent)
    if not config.dsa_layers:
        attach_index(target, random_indexes(target, wanted), wanted.keep)
    try:
        yield
    finally:
        target.use_dsa(config.use_dsa)
        target.use_mla_kv(config.use_mla_kv)
        if not config.dsa_layers:
            detach_index(target)
        if not config.mla_ranks:
            detach(target)


def random_latents(target: Decoder, share: float) -> None:
    """For each layer with full attention, in place: the first directions of keys and values."""
    config = target.config
    n = 2 * config.num_kv_heads * config.head_dim
    eye, zeros = torch.eye(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    bases = dict.fromkeys(config.full_layers, Basis(eye, eye, zeros, zeros))
    attach(target, bases, dict.fromkeys(bases, max(1, round(share * n))))


def random_indexes(target: Decoder, wanted: Retrofits) -> dict[int, Indexer]:
    """One for each layer with full attention."""
    config, rng = target.config, seeded(wanted.seed, 1)
    made = {}
    for layer in config.full_layers:
        indexer = Indexer(config.hidden_size, wanted.index_heads, wanted.index_dim)
        with torch.no_grad():
            for p in indexer.proj.parameters():
                p.copy_(torch.randn(p.shape, generator=rng) * config.hidden_size**-0.5)
        made[layer] = indexer.to(target.device)
    return made


def kv_bytes(target: Decoder, context: int, seen: int) -> int:
    """Of a context: `seen` tokens in layers with full attention, a window's in the others."""
    config = target.config
    windows = [config.window(i) for i in range(config.num_layers)]
    tokens = [min(w, context) if w else seen for w in windows]
    return target.dtype.itemsize * sum(config.kv_numbers(i) * n for i, n in enumerate(tokens))


K = 1024
METHODS = ("plain", "full", "partial", "settle", "refresh", "sparse", "sparse full")
PLAIN, FULL, PARTIAL, SETTLE, REFRESH, SPARSE, SPARSE_FULL = METHODS
LATENTS = ("latent", "latent full", "latent, sparse", "latent, sparse full")
LATENT, LATENT_FULL, BOTH, BOTH_FULL = LATENTS
ABOUT = {
    PLAIN: "one token over the whole cache",
    FULL: "a block verified over the whole cache",
    PARTIAL: "a block verified on partial KV",
    SETTLE: "the full pass over a full buffer and the next block",
    REFRESH: "the blocks of partial KV chosen again and copied",
    SPARSE: "one token, which looks at what an index picks",
    SPARSE_FULL: "a block verified so",
    LATENT: "one token over latents, all keys made of them again",
    LATENT_FULL: "a block verified so",
    BOTH: "one token, and keys of what the index picks alone",
    BOTH_FULL: "a block verified so",
}
SPARSELY, IN_LATENTS = {SPARSE, SPARSE_FULL, BOTH, BOTH_FULL}, set(LATENTS)


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """`columns` of a block; `budget`: tokens of partial KV, the buffer not among them. Each method is
    repeated until it took `cell_s` seconds at a context, at most `repeats` times and at least twice. `tau`:
    tokens that a step brings, taken as given for the time of a token; the draft's time is not in it."""

    contexts: tuple[int, ...] = (K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K)
    columns: int = 8
    budget: int = 4096
    block_size: int = 16
    n_spec_tokens_buf: int = 20
    selector: str = "quest"
    top_k: int = 2048  # of sparse attention
    index_dim: int = 64
    index_heads: int = 8
    latent: float = 0.5  # of keys and values
    tau: float = 3.0
    repeats: int = 9
    cell_s: float = 10.0
    memory_gib: float = 20.0
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < 1 or list(self.contexts) != sorted(set(self.contexts)):
            raise ValueError(
                f"context: contexts {list(self.contexts)}: give counts of tokens, ascending, each once"
            )
        for name in ("columns", "repeats", "index_dim", "index_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"context: {name} {getattr(self, name)}: it must be at least 1")
        if not 1 <= self.tau <= self.columns:
            raise ValueError(f"context: tau {self.tau}: from 1 to the {self.columns} positions of a step")
        if not 0 < self.latent <= 1:
            raise ValueError(f"context: latent {self.latent}: a share of keys and values, above 0, up to 1")
        _ = self.partial(), self.retrofits()

    def retrofits(self) -> Retrofits:
        keep = TopKConfig(top_k=self.top_k, min_context=self.top_k)
        return Retrofits(
            latent=self.latent,
            index_heads=self.index_heads,
            index_dim=self.index_dim,
            keep=keep,
            seed=self.seed,
        )

    def partial(self) -> PartialConfig:
        return PartialConfig.within(
            self.budget,
            block_size=self.block_size,
            n_spec_tokens_buf=self.n_spec_tokens_buf,
            selector=self.selector,
        )


def run_context(target: Decoder, settings: ContextSettings, folder: Path, console: Console) -> dict[str, Any]:
    """-> the report. What was measured before a stop is read from folder/progress.jsonl. Raises ValueError
    where a context does not fit the model's positions or the memory."""
    run = Run(target, folder, settings=plain_json(settings), threads=torch.get_num_threads())
    headroom = settings.partial().buffer_size(settings.columns)
    check(target, max(settings.contexts) + headroom, settings)
    made: list[Space] = []
    with retrofitted(target, settings.retrofits()), progress(console) as bar, torch.inference_mode():
        task = bar.add_task("context", total=len(settings.contexts))
        for context in settings.contexts:
            bar.update(task, description=f"context {context:,}")
            if f"cell {context}" not in run.kept:
                if not made:
                    longest = max(settings.contexts) + headroom
                    made.append(filled(target, longest, headroom, settings.partial(), settings.seed))
                run.kept[f"floor {context}"] = read_bandwidth(repeats=3)
                run.kept[f"cell {context}"] = measure(target, made[0], context, settings)
            bar.advance(task)
    kept = run.kept
    floor = max(kept[name] for name in kept.names if name.startswith("floor "))
    return run.report(
        methods=ABOUT,
        floor={"read_bytes_per_s": round(floor)},
        cells=[rated(kept[f"cell {n}"], floor, settings) for n in settings.contexts],
    )


def check(target: Decoder, longest: int, settings: ContextSettings) -> None:
    if longest > target.config.max_position_embeddings:
        raise ValueError(
            f"context: {max(settings.contexts):,} tokens and a full buffer reach position {longest:,}; this "
            f"model's positions end at {target.config.max_position_embeddings:,}: ask for shorter contexts"
        )
    needed = (1 + settings.latent) * kv_bytes(target, longest, longest)
    if needed > settings.memory_gib * 2**30:
        raise ValueError(
            f"context: keys, values and latents take {needed / 2**30:.1f} GiB at {longest:,} tokens, and "
            f"memory_gib is {settings.memory_gib:g}: ask for shorter contexts, or for fewer layers "
            "(outpace synth)"
        )


def measure(target: Decoder, space: Space, context: int, settings: ContextSettings) -> dict[str, Any]:
    """One context: the methods take turns. Partial KV and an index have no rows where they hold all of the
    text."""
    near, columns = space.near, settings.columns
    rng = seeded(settings.seed, context)
    space.grow(context)
    tokens = torch.randint(0, target.config.vocab_size, (1, near.headroom), generator=rng).to(target.device)
    touched: dict[str, float] = {}

    def over(name: str, cache: KVCache, columns: int) -> Callable[[], None]:
        def way() -> None:
            out = target(tokens[:, :columns], cache, routing=name not in touched)
            if name not in touched:
                touched[name] = distinct(out.routing, target.config.experts_per_token)
            cache.rewind([context])

        return way

    ways = {PLAIN: over(PLAIN, space.full, 1), FULL: over(FULL, space.full, columns)}
    if context > near.config.static_size:
        ways |= {SETTLE: over(SETTLE, space.full, near.headroom), REFRESH: near.refresh}
        ways |= {PARTIAL: over(PARTIAL, near, columns)}
    ways |= {LATENT: over(LATENT, space.latents, 1), LATENT_FULL: over(LATENT_FULL, space.latents, columns)}
    if not space.keep.sees_all(context + columns):
        ways |= {SPARSE: over(SPARSE, space.full, 1), SPARSE_FULL: over(SPARSE_FULL, space.full, columns)}
        ways |= {BOTH: over(BOTH, space.latents, 1), BOTH_FULL: over(BOTH_FULL, space.latents, columns)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(-1, settings.repeats):
        for name, way in ways.items():
            if len(taken[name]) >= 2 and sum(taken[name]) > settings.cell_s:
                continue
            space.switch(name in IN_LATENTS, name in SPARSELY)
            began = time.perf_counter()
            way()
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            if repeat >= 0:  # the first is a rehearsal
                taken[name].append(time.perf_counter() - began)
    return {
        "context": context,
        "kv_bytes": switched_bytes(space, context, False),
        "latent_kv_bytes": switched_bytes(space, context, True),
        "partial_kv_bytes": near.nbytes if PARTIAL in ways else 0,
        "methods": {
            name: {
                "repeats": len(result),
                "seconds": statistics.median(result),
                "fastest": min(result),
                "slowest": max(result),
                "experts_touched": touched.get(name),
                "bytes": read_bytes(space, context, name, touched[name]) if name in touched else None,
            }
            for name, result in taken.items()
        },
    }


def switched_bytes(headroom: Space, context: int, mla: bool) -> int:
    """Of a context's keys and values, or of its latents."""
    headroom.switch(mla, False)
    return kv_bytes(headroom.target, context, context)


def read_bytes(headroom: Space, context: int, name: str, touched: float) -> int:
    """What a method's step must read; an index reads all its keys."""
    sparse, target = name in SPARSELY, headroom.target
    seen = headroom.keep.most(context) if sparse else context
    if name == PARTIAL:
        seen = headroom.near.config.static_size
    headroom.switch(name in IN_LATENTS, sparse)
    index = len(headroom.keys) * target.config.dsa_index_dim * context * target.dtype.itemsize
    return weight_bytes(target, touched) + kv_bytes(target, context, seen) + sparse * index


def distinct(routing: list[torch.Tensor], k: int) -> float:
    """Experts that a forward's tokens touch, the mean over layers; 0 where there are none."""
    items = [len(logits.topk(k, dim=-1).indices.unique()) for logits in routing]
    return statistics.fmean(items) if items else 0.0


def rated(cell: dict[str, Any], floor: float, settings: ContextSettings) -> dict[str, Any]:
    """Next to the times: the share of the floor, and the time of a token if a step brings `tau`."""
    methods = {
        name: m | {"share_of_floor": round(m["bytes"] / floor / m["seconds"], 4) if m["bytes"] else None}
        for name, m in cell["methods"].items()
    }
    s = {name: m["seconds"] for name, m in methods.items()}
    a_token = {PLAIN: s[PLAIN], FULL: s[FULL] / settings.tau}
    speedup = None
    if PARTIAL in s:
        rounds = math.ceil(settings.n_spec_tokens_buf / settings.tau)
        cycle = rounds * s[PARTIAL] + s[SETTLE] + s[REFRESH]
        a_token[PARTIAL] = cycle / ((rounds + 1) * settings.tau)
        speedup = round(s[FULL] / s[PARTIAL], 3)
    few = {"sparse_speedup": round(s[PLAIN] / s[SPARSE], 3)} if SPARSE in s else {}
    values = {"methods": methods, "seconds_per_token": a_token, "verification_speedup": speedup}
    return cell | values | few


COLOURS = {PLAIN: "#8f8f8f", FULL: "#c1666b", PARTIAL: "#2a6f97", SETTLE: "#e3a857", REFRESH: "#5b8c5a"}
COLOURS |= {SPARSE: "#61304b", SPARSE_FULL: "#9a6fb0", LATENT: "#b8860b", LATENT_FULL: "#d9c27a"}
COLOURS |= {BOTH: "#2f4f2f", BOTH_FULL: "#8fae8f"}
LEGEND = """\
- ms: medians of the repeats at batch 1, of the layers alone: neither head nor draft.
- of the floor: the bytes that must be read (weights once, experts as touched, keys and values), over the
  machine's reading rate, over the time. Low where arithmetic takes the time, as verifying many positions does
  on a CPU.
- ms per token: what these times come to where a step brings tau tokens and all that passes on partial KV
  is: steps on partial KV until the buffer is full, then a refresh and the full pass. Computed, not run.
"""


def milliseconds(name: str) -> Column:
    return (
        f"{name}, ms",
        lambda r: 1000 * r["methods"][name]["seconds"] if name in r["methods"] else None,
        "{:,.1f}",
    )


def _megabytes(key: str) -> Callable[[Report], float | None]:
    return lambda r: r[key] / 1e6 if r[key] else None


def _a_token(name: str) -> Callable[[Report], float | None]:
    times = "seconds_per_token"
    return lambda r: 1000 * r[times][name] if name in r[times] else None


COST: tuple[Column, ...] = (
    ("context", "context", "{:,}"),
    *map(milliseconds, METHODS),
    ("full / partial", "verification_speedup", "{:.2f}x"),
    ("plain / sparse", "sparse_speedup", "{:.2f}x"),
    ("ms per token, full", _a_token(FULL), "{:,.1f}"),
    ("with partial", _a_token(PARTIAL), "{:,.1f}"),
    ("of the floor, plain", f"methods.{PLAIN}.share_of_floor", "{:.0%}"),
    ("full", f"methods.{FULL}.share_of_floor", "{:.0%}"),
    ("KV, MB", _megabytes("kv_bytes"), "{:,.0f}"),
    ("partial, MB", _megabytes("partial_kv_bytes"), "{:,.0f}"),
)
LATENT_COST: tuple[Column, ...] = (
    COST[0],
    *map(milliseconds, (PLAIN, *LATENTS)),
    ("KV, MB", _megabytes("kv_bytes"), "{:,.0f}"),
    ("latents, MB", _megabytes("latent_kv_bytes"), "{:,.0f}"),
)


def cost_table(report: Report) -> list[str]:
    return table(COST, report["cells"])


def latent_table(report: Report) -> list[str]:
    return table(LATENT_COST, report["cells"])


def _body(report: Report) -> list[str]:
    about = [f"- **{name}**: {what}." for name, what in report["methods"].items()]
    return [*cost_table(report), *latent_table(report), *about, LEGEND]


def _measured(report: Report) -> str:
    s = report["settings"]
    return (
        f"blocks of {s['columns']} positions, partial KV of {s['budget']:,} tokens chosen by "
        f"{s['selector']}, {s['n_spec_tokens_buf']} tokens buffered, tau {s['tau']:g}; all threads together "
        f"read {report['floor']['read_bytes_per_s'] / 1e9:.1f} GB/s"
    )


def _over_context(report: dict[str, Any]) -> Any:
    figure, (axes,) = figure_of(1, 1, 4.2, "A step against context")
    for name in (*METHODS, *LATENTS):
        items = [cell for cell in report["cells"] if name in cell["methods"]]
        at = [c["context"] for c in items], [1000 * c["methods"][name]["seconds"] for c in items]
        axes.plot(*at, "o-", color=COLOURS[name], label=name, markersize=3.5)
    context_axis(axes, [cell["context"] for cell in report["cells"]])
    axes.set_ylabel("ms")
    axes.legend(frameon=False, fontsize=8)
    return figure


PAGE = Page(
    "The cost of a step against context",
    _body,
    _measured,
    {"context.png": ("Time against context", _over_context)},
)
