"""The suite context: time of a target's step against context; full, partial, sparse and latent KV.

The cache is filled with random numbers, which does not influence the time. Head and draft are left out.
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

from outpace.bench import plots
from outpace.bench.machine import read_bandwidth, weight_bytes
from outpace.bench.metrics import spread
from outpace.bench.report import Column, Page, Report, scaled, table_of
from outpace.bench.run import Bar, Run, at_least, check_contexts
from outpace.kv.base import KVCache
from outpace.kv.partial import PartialCache, PartialConfig
from outpace.kv.topk import TopKConfig
from outpace.models.decoder import Decoder
from outpace.models.indexer import Indexer
from outpace.ops.sampling import seeded
from outpace.retrofit.dsa import attach_index, detach_index
from outpace.retrofit.mla import Basis, attach, detach

K = 1024
PLAIN, FULL, PARTIAL, SETTLE, REFRESH = "plain", "full", "partial", "settle", "refresh"
ABOUT = {
    PLAIN: "one token over the whole cache",
    FULL: "a block verified over the whole cache",
    PARTIAL: "a block verified on partial KV",
    SETTLE: "the full pass over a full buffer and the next block",
    REFRESH: "the blocks of partial KV chosen again and copied",
    "sparse": "one token, which attends to the tokens that an index picks",
    "sparse full": "a block verified so",
    "latent": "one token over latents, all keys computed from them again",
    "latent full": "a block verified so",
    "latent, sparse": "one token, with keys computed for the tokens that the index picks",
    "latent, sparse full": "a block verified so",
}
METHODS, LATENTS = tuple(ABOUT)[:7], tuple(ABOUT)[7:]


def is_sparse(method: str) -> bool:
    return "sparse" in method


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """`columns`: positions of a block; `budget`: tokens of partial KV, without its buffer. A method is
    repeated for `cell_s` seconds per context, at most `repeats` times and at least twice. `tau`: tokens
    committed per step, assumed for the time per token, which leaves the draft's time out. `top_k`,
    `index_dim`, `index_heads`: the sparse attention, and `latent`: the share of keys and values, of a target
    without its own retrofits."""

    contexts: tuple[int, ...] = (K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K)
    columns: int = 8
    budget: int = 4096
    block_size: int = 16
    n_spec_tokens_buf: int = 20
    selector: str = "quest"
    top_k: int = 2048
    index_dim: int = 64
    index_heads: int = 8
    latent: float = 0.5
    tau: float = 3.0
    repeats: int = 9
    cell_s: float = 10.0
    memory_gib: float = 20.0
    seed: int = 1

    def __post_init__(self) -> None:
        check_contexts("context", self.contexts)
        at_least(self, "context", columns=1, repeats=1, index_dim=1, index_heads=1)
        if not 1 <= self.tau <= self.columns:
            raise ValueError(f"context: tau {self.tau}: from 1 to the {self.columns} positions of a step")
        if not 0 < self.latent <= 1:
            raise ValueError(f"context: latent {self.latent}: a share of keys and values, above 0, up to 1")
        _ = self.partial(), self.top_k_config()

    def top_k_config(self) -> TopKConfig:
        return TopKConfig(top_k=self.top_k, min_context=self.top_k)

    def partial(self) -> PartialConfig:
        return PartialConfig.within(
            self.budget,
            block_size=self.block_size,
            n_spec_tokens_buf=self.n_spec_tokens_buf,
            selector=self.selector,
        )


# ---- caches of random numbers --------------------------------------------------------------------------


@dataclass(frozen=True)
class FilledCaches:
    """`partial`: partial KV over the full cache; `latents`: a cache of latents; `keys`: of the index by
    layer, which both use."""

    target: Decoder
    partial: PartialCache
    latents: KVCache
    keys: dict[int, Tensor]
    top_k: TopKConfig

    def select(self, latent: bool, sparse: bool) -> KVCache:
        """Switches the target; -> the matching cache."""
        self.target.use_mla_kv(latent)
        self.target.use_dsa(sparse)
        cache = self.latents if latent else self.partial.full
        for layer, keys in self.keys.items():
            layer_cache = cache.layers[layer]
            layer_cache.keys, layer_cache.top_k_config = (keys, self.top_k) if sparse else (None, None)
        return cache

    def grow(self, context: int) -> None:
        for cache in (self.partial.full, self.latents):
            cache.advance(cache.begin(context - cache.lengths[0]))


def fill_caches(
    target: Decoder, length: int, headroom: int, partial: PartialConfig, seed: int
) -> FilledCaches:
    """Of a target with latents and an index. `headroom`: positions of partial KV's buffer."""
    caches = []
    for latent in (False, True):
        target.use_mla_kv(latent)
        caches.append(target.make_cache(1, length, slack=headroom, index=True))
        rng = seeded(seed)
        for x in (x for layer in caches[-1].layers for x in layer.parts):
            x.copy_(torch.randn(x.shape[1:], generator=rng)[None])
    full, latents = caches
    keys = {i: k for i, layer in enumerate(full.layers) if (k := layer.keys) is not None}
    filled = FilledCaches(
        target, PartialCache(full, partial, headroom), latents, keys, target.config.dsa_keep
    )
    for latent in (True, False):
        filled.select(latent, False)
    return filled


@contextmanager
def random_retrofits(target: Decoder, settings: ContextSettings) -> Iterator[None]:
    """Inside, the target has latents and an index on its layers with full attention, of random weights where
    it has none; afterwards it is restored."""
    config, rng = target.config, seeded(settings.seed, 1)
    if not config.mla_ranks:  # the first directions of keys and values
        n = 2 * config.num_kv_heads * config.head_dim
        eye, zeros = torch.eye(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
        bases = dict.fromkeys(config.full_layers, Basis(eye, eye, zeros, zeros))
        attach(target, bases, dict.fromkeys(bases, max(1, round(settings.latent * n))))
    if not config.dsa_layers:
        indexes = {}
        for layer in config.full_layers:
            indexer = Indexer(config.hidden_size, settings.index_heads, settings.index_dim)
            with torch.no_grad():
                for p in indexer.proj.parameters():
                    p.copy_(torch.randn(p.shape, generator=rng) * config.hidden_size**-0.5)
            indexes[layer] = indexer.to(target.device)
        attach_index(target, indexes, settings.top_k_config())
    try:
        yield
    finally:
        target.use_dsa(config.use_dsa)
        target.use_mla_kv(config.use_mla_kv)
        if not config.dsa_layers:
            detach_index(target)
        if not config.mla_ranks:
            detach(target)


def kv_bytes(target: Decoder, context: int, seen: int) -> int:
    """Of a context: `seen` tokens in layers with full attention, the window in the others."""
    config = target.config
    windows = [config.window(i) for i in range(config.num_layers)]
    tokens = [min(w, context) if w else seen for w in windows]
    return target.dtype.itemsize * sum(config.kv_numbers(i) * n for i, n in enumerate(tokens))


# ---- the measurement -----------------------------------------------------------------------------------


def run_context(target: Decoder, settings: ContextSettings, folder: Path, console: Console) -> Report:
    """-> the report. A stopped run continues from folder/progress.jsonl. Raises ValueError for a context
    beyond the model's positions or the memory limit."""
    run = Run(target, folder, settings=settings, threads=torch.get_num_threads())
    headroom = settings.partial().buffer_size(settings.columns)
    longest = max(settings.contexts) + headroom
    check_fits(target, longest, settings)
    caches: FilledCaches | None = None
    with (
        random_retrofits(target, settings),
        Bar(console, "context", len(settings.contexts)) as bar,
        torch.inference_mode(),
    ):
        for context in settings.contexts:
            bar.step(f"context {context:,}")
            if f"cell {context}" not in run:
                caches = caches or fill_caches(target, longest, headroom, settings.partial(), settings.seed)
                run[f"floor {context}"] = read_bandwidth(repeats=3)
                run[f"cell {context}"] = measure(target, caches, context, settings)
    bandwidth = max(run.named("floor ").values())
    return run.report(
        methods=ABOUT,
        floor={"read_bytes_per_s": round(bandwidth)},
        cells=[with_rates(run[f"cell {n}"], bandwidth, settings) for n in settings.contexts],
    )


def check_fits(target: Decoder, longest: int, settings: ContextSettings) -> None:
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


def measure(target: Decoder, caches: FilledCaches, context: int, settings: ContextSettings) -> dict[str, Any]:
    """One context, the methods interleaved. Partial KV and an index are left out where they hold the whole
    context."""
    partial, block = caches.partial, settings.columns
    rng = seeded(settings.seed, context)
    caches.grow(context)
    shape = (1, partial.headroom)
    tokens = torch.randint(0, target.config.vocab_size, shape, generator=rng).to(target.device)
    experts: dict[str, float] = {}

    def forward(name: str, cache: KVCache, positions: int) -> Callable[[], None]:
        def step() -> None:
            out = target(tokens[:, :positions], cache, routing=name not in experts)
            if name not in experts:
                experts[name] = experts_used(out.routing, target.config.experts_per_token)
            cache.rewind([context])

        return step

    widths = {PLAIN: 1, FULL: block, "latent": 1, "latent full": block}
    if not caches.top_k.sees_all(context + block):
        widths |= {"sparse": 1, "sparse full": block, "latent, sparse": 1, "latent, sparse full": block}
    steps = {
        name: forward(name, caches.latents if name in LATENTS else partial.full, width)
        for name, width in widths.items()
    }
    if context > partial.config.static_size:
        steps |= {
            SETTLE: forward(SETTLE, partial.full, partial.headroom),
            REFRESH: partial.refresh,
            PARTIAL: forward(PARTIAL, partial, block),  # needs the blocks that a refresh has chosen
        }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(-1, settings.repeats):
        for name, spent in seconds.items():
            if len(spent) >= 2 and sum(spent) > settings.cell_s:
                continue
            caches.select(name in LATENTS, is_sparse(name))
            began = time.perf_counter()
            steps[name]()
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            if repeat >= 0:  # the first is a warm-up
                spent.append(time.perf_counter() - began)
    sizes = {}
    for key, latent in (("kv_bytes", False), ("latent_kv_bytes", True)):
        caches.select(latent, False)
        sizes[key] = kv_bytes(target, context, context)
    return {
        "context": context,
        **sizes,
        "partial_kv_bytes": partial.nbytes if PARTIAL in steps else 0,
        "methods": {
            name: {
                **spread(spent),
                "experts_touched": experts.get(name),
                "bytes": read_bytes(caches, context, name, experts[name]) if name in experts else None,
            }
            for name, spent in seconds.items()
        },
    }


def read_bytes(caches: FilledCaches, context: int, name: str, experts: float) -> int:
    """Bytes that a method's step must read; an index reads all its keys."""
    sparse, target = is_sparse(name), caches.target
    seen = caches.top_k.most(context) if sparse else context
    if name == PARTIAL:
        seen = caches.partial.config.static_size
    caches.select(name in LATENTS, sparse)
    index = len(caches.keys) * target.config.dsa_index_dim * context * target.dtype.itemsize
    return weight_bytes(target, experts) + kv_bytes(target, context, seen) + sparse * index


def experts_used(routing: list[Tensor], k: int) -> float:
    """Distinct experts of a forward's tokens, the mean over layers; 0 where there are none."""
    counts = [len(logits.topk(k, dim=-1).indices.unique()) for logits in routing]
    return statistics.fmean(counts) if counts else 0.0


def with_rates(cell: dict[str, Any], bandwidth: float, settings: ContextSettings) -> dict[str, Any]:
    """Adds the share of the roofline, and the time per token if a step commits `tau`."""
    methods = {
        name: m | {"share_of_floor": round(m["bytes"] / bandwidth / m["seconds"], 4) if m["bytes"] else None}
        for name, m in cell["methods"].items()
    }
    s = {name: m["seconds"] for name, m in methods.items()}
    per_token = {PLAIN: s[PLAIN], FULL: s[FULL] / settings.tau}
    values: dict[str, Any] = {"methods": methods, "verification_speedup": None}
    if PARTIAL in s:
        steps = math.ceil(settings.n_spec_tokens_buf / settings.tau)
        cycle = steps * s[PARTIAL] + s[SETTLE] + s[REFRESH]
        per_token[PARTIAL] = cycle / ((steps + 1) * settings.tau)
        values["verification_speedup"] = round(s[FULL] / s[PARTIAL], 3)
    if "sparse" in s:
        values["sparse_speedup"] = round(s[PLAIN] / s["sparse"], 3)
    return cell | values | {"seconds_per_token": per_token}


# ---- the report ----------------------------------------------------------------------------------------

LEGEND = """\
- ms: medians of the repeats at batch 1, of the layers alone: neither head nor draft.
- of the floor: the bytes that must be read (weights once, experts as touched, keys and values), over the
  machine's reading rate, over the time. Low where arithmetic takes the time, as verifying many positions does
  on a CPU.
- ms per token: what these times come to where a step brings tau tokens and all that passes on partial KV
  is: steps on partial KV until the buffer is full, then a refresh and the full pass. Computed, not run.
"""


def _ms(name: str) -> Column:
    return (f"{name}, ms", scaled(f"methods.{name}.seconds", 1000), "{:,.1f}")


def _megabytes(heading: str, key: str) -> Column:
    return (f"{heading}, MB", lambda r: r[key] / 1e6 or None, "{:,.0f}")


CONTEXT: Column = ("context", "context", "{:,}")
cost_table = table_of(
    "cells",
    CONTEXT,
    *map(_ms, METHODS),
    ("full / partial", "verification_speedup", "{:.2f}x"),
    ("plain / sparse", "sparse_speedup", "{:.2f}x"),
    ("ms per token, full", scaled(f"seconds_per_token.{FULL}", 1000), "{:,.1f}"),
    ("with partial", scaled(f"seconds_per_token.{PARTIAL}", 1000), "{:,.1f}"),
    ("of the floor, plain", f"methods.{PLAIN}.share_of_floor", "{:.0%}"),
    ("full", f"methods.{FULL}.share_of_floor", "{:.0%}"),
    _megabytes("KV", "kv_bytes"),
    _megabytes("partial", "partial_kv_bytes"),
)
latent_table = table_of(
    "cells",
    CONTEXT,
    *map(_ms, (PLAIN, *LATENTS)),
    _megabytes("KV", "kv_bytes"),
    _megabytes("latents", "latent_kv_bytes"),
)


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


def _plot(report: Report) -> Any:
    figure, (axes,) = plots.figure(1, 1, 4.2, "A step against context")
    for name, colour in zip(ABOUT, plots.PALETTE, strict=True):
        cells = [cell for cell in report["cells"] if name in cell["methods"]]
        ms = [1000 * c["methods"][name]["seconds"] for c in cells]
        axes.plot([c["context"] for c in cells], ms, "o-", color=colour, label=name, markersize=3.5)
    plots.label(axes, y="ms", legend=True)
    plots.context_axis(axes, [cell["context"] for cell in report["cells"]])
    return figure


PAGE = Page(
    "The cost of a step against context",
    _body,
    _measured,
    {"context.png": ("Time against context", _plot)},
)
