"""A DFlash step for measurement: shapes, cache variants, a timer per operation, and the work of each."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from outpace.bench.machine import parameters
from outpace.drafts.base import Proposal
from outpace.drafts.dflash import BoundDFlash, DFlash, DFlashSession
from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.sampler import DraftSampler
from outpace.kv.metadata import StepMetadata
from outpace.models.config import FULL
from outpace.models.decoder import Decoder
from outpace.models.load import named_tensors, parse_config
from outpace.models.published import PUBLISHED
from outpace.ops.quant import Joined, Weight
from outpace.ops.sampling import seeded

# ---- shapes: the given draft with and without its window, and gpt-oss-20b's ----------------------------

GIVEN, UNWINDOWED, PUBLISHED_20B = SHAPES = ("draft", "draft, full attention", "gpt-oss-20b")


def published_draft() -> DFlashConfig:
    """gpt-oss-20b's: 8 layers of full attention, blocks of 8. Heads and MLP width as published with it."""
    target = parse_config(PUBLISHED["gpt-oss-20b"])
    return DFlashConfig(
        hidden_size=target.hidden_size,
        num_layers=8,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=7680,
        vocab_size=target.vocab_size,
        rope=target.rope,
        rms_norm_eps=target.rms_norm_eps,
        block_size=8,
        target_layer_ids=(1, 6, 11, 16, 21),
        num_target_layers=target.num_layers,
        mask_token_id=200000,
        max_position_embeddings=target.max_position_embeddings,
    )


def shapes_of(
    names: tuple[str, ...], draft: DFlash, target: Decoder, seed: int
) -> Iterator[tuple[str, DFlash, Decoder]]:
    """(name, draft, its target) of each requested shape, created one at a time to save memory. A draft
    without a window is not measured twice."""
    config = draft.config
    for name in names:
        if name == GIVEN:
            yield name, draft, target
        elif name == PUBLISHED_20B:
            yield name, *_random_pair(published_draft(), name, seed)
        elif any(config.window(i) for i in range(config.num_layers)):
            twin = copy.copy(draft)  # the same modules: the session applies the window
            twin.config = replace(config, layer_types=(FULL,) * config.num_layers, sliding_window=0)
            yield name, twin, target


def _random_pair(config: DFlashConfig, like: str, seed: int) -> tuple[DFlash, Decoder]:
    """A draft of random bfloat16 weights, and only embedding and head of its target."""
    rng = seeded(seed)
    with torch.device("meta"):
        draft, ends = DFlash(config), Decoder(parse_config(PUBLISHED[like]), [])
    for module in (draft, ends):
        for name, old in list(module.named_parameters()):
            value = torch.ones(old.shape, dtype=torch.bfloat16)
            if old.dim() > 1:  # uniform, so that products of unit vectors are about one
                bound = (3 / old.shape[-1]) ** 0.5
                value.uniform_(-bound, bound, generator=rng)
            owner, _, field = name.rpartition(".")
            setattr(module.get_submodule(owner), field, nn.Parameter(value, requires_grad=False))
    return draft.eval(), ends.eval()


def needed_bytes(draft: DFlash, target: Decoder, longest: int) -> dict[str, int]:
    """By part, at a context of `longest`: peak memory of the largest cell."""
    config, size = draft.config, target.dtype.itemsize
    windows = [config.window(i) for i in range(config.num_layers)]
    rows = [min(longest, w + config.block_size) if w else longest for w in windows]
    kv_row = 2 * config.num_kv_heads * config.head_dim * size
    return {
        "weights": sum(t.nbytes for m in (draft, target) for _, t in named_tensors(m)),
        "keys and values": sum(rows) * kv_row,
        "fused states": longest * config.hidden_size * size,
        "one layer's rows in the making": 6 * max(rows) * kv_row,
    }


def describe(draft: DFlash, target: Decoder, longest: int) -> dict[str, Any]:
    config = draft.config
    matrices = (t for _, t in named_tensors(draft) if t.dim() > 1)
    return {
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "windows": [config.window(i) for i in range(config.num_layers)],
        "parameters": parameters(draft),
        "weights": sorted({str(t.dtype).removeprefix("torch.") for t in matrices}),
        "keys_and_values": str(target.dtype).removeprefix("torch."),
        "needed_bytes": needed_bytes(draft, target, longest),
    }


def check_fits(name: str, draft: DFlash, context: int, needed: dict[str, int], limit_gib: float) -> None:
    """Raises ValueError for a context past the draft's positions, and for more memory than the limit."""
    last, end = context + draft.block_size, draft.config.max_position_embeddings
    if last > end:
        raise ValueError(
            f"draft-context: a block behind context {context} reaches position {last}, and the positions of "
            f"{name} end at {end}: ask for shorter contexts"
        )
    total = sum(needed.values())
    if total > limit_gib * 2**30:
        parts = ", ".join(f"{part} {n / 2**30:.1f}" for part, n in needed.items())
        raise ValueError(
            f"draft-context: {name} takes {total / 2**30:.1f} GiB ({parts}), and memory_gib is "
            f"{limit_gib:g}: ask for shorter contexts, or leave this shape out"
        )


# ---- variants: what a session caches of verified tokens ------------------------------------------------

Variant = Literal["cached", "recomputed", "noise cached"]
VARIANTS: dict[Variant, str] = {
    "cached": "keys and values of verified tokens are computed once and cached (as served)",
    "recomputed": "the fused states c_s are cached; every step computes all keys and values",
    "noise cached": "accepted draft tokens keep the rows of their block, and nothing is computed",
}


class Recomputed(DFlashSession):
    """Caches c_s [B, n, C] and computes every layer's keys and values in each step. Proposes the same tokens
    as the served session."""

    def __init__(self, draft: DFlash, target: Decoder, batch: int, length: int, *rest: Any) -> None:
        super().__init__(draft, target, batch, length, *rest)
        width = draft.config.hidden_size
        self.features = torch.zeros(batch, length, width, dtype=target.dtype, device=target.device)
        self.seen = [0] * batch

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        assert aux is not None, "DFlash reads the target's hidden states"
        self.store(self.draft.context(aux), counts)

    def store(self, features: Tensor, counts: list[int]) -> None:
        for b, (n, count) in enumerate(zip(self.seen, counts, strict=True)):
            self.features[b, n : n + count] = features[b, :count]
        self.seen = [n + count for n, count in zip(self.seen, counts, strict=True)]

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        self.project()
        return super().propose(last, width, sampler)

    def rewind(self, lengths: list[int]) -> None:
        self.seen = list(lengths)

    def select(self, batch_indices: list[int]) -> None:
        super().select(batch_indices)
        self.features, self.seen = self.features[batch_indices], [self.seen[b] for b in batch_indices]

    def project(self) -> None:
        """Keys and values of everything that a layer can still see; with windows, of the last rows only."""
        config, cache = self.draft.config, self.cache
        windows = [config.window(i) for i in range(config.num_layers)]
        reach = max(windows) if all(windows) else max(self.seen)
        first = max(0, min(self.seen) - reach)
        counts = tuple(n - first for n in self.seen)
        step = StepMetadata((first,) * len(counts), counts, max(counts), cache.device)
        features = self.features[:, first : first + step.T]
        cos, sin = self.draft.rope(step.storage + cache.offset)
        for layer, weights, layer_cache in zip(self.layers, self.weights, cache.layers, strict=True):
            layer_cache.append(*layer.context_kv(features, cos, sin, weights), step)
        cache.advance(step)


class NoiseCached(DFlashSession):
    """After the prompt nothing is computed from the target's states: an accepted token keeps the keys and
    values of its MASK. This saves `fc` and the k/v projections and costs acceptance; the paper's loop
    removes these rows. The output is still the target's, as with any draft."""

    drafted = False

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        if not self.drafted:
            super().observe(tokens, aux, counts)
        elif max(counts):
            self.cache.advance(self.cache.begin(max(counts), counts))

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        self.drafted = True
        return super().propose(last, width, sampler)


SESSIONS: dict[Variant, type[DFlashSession]] = {
    "cached": DFlashSession,
    "recomputed": Recomputed,
    "noise cached": NoiseCached,
}


@dataclass(frozen=True)
class VariantDraft(BoundDFlash):
    """A DFlash bound to its target, with one of the three sessions."""

    variant: Variant

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> DFlashSession:
        return SESSIONS[self.variant](self.draft, self.target, batch, length, offset, self.head, slack)


# ---- time by operation ---------------------------------------------------------------------------------

OPERATIONS = (
    "fc",
    "context kv",
    "embedding",
    "q/k/v",
    "attention",
    "o",
    "mlp",
    "convolution",
    "head",
    "argmax",
    "rope and norm",
)


class StepTimer:
    """Seconds by operation. An operation inside another one is not counted twice."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(OPERATIONS, 0.0)
        self.running: list[str] = []
        self.since = 0.0

    def wrap(self, operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            self._charge()
            self.running.append(operation)
            result = function(*arguments)
            self._charge()
            self.running.pop()
            return result

        return timed

    def _charge(self) -> None:
        now = time.perf_counter()
        if self.running:
            self.seconds[self.running[-1]] += now - self.since
        self.since = now


@contextmanager
def taken_apart(session: DFlashSession, timer: StepTimer) -> Iterator[None]:
    """Inside, the session runs module by module instead of its fused kernels, each operation under
    `timer`."""
    fused, session.in_one_piece = session.in_one_piece, False
    with ExitStack() as stack:
        for owner, method, operation in _timed_methods(session):
            stack.enter_context(patched(owner, method, timer.wrap(operation, getattr(owner, method))))
        for layer in session.layers:
            stack.enter_context(patched(layer, "attention", _timed_attention(layer.attention, timer)))
        yield
    session.in_one_piece = fused


def _timed_methods(session: DFlashSession) -> Iterator[tuple[object, str, str]]:
    """(owner, method, operation); operations inside are charged to their own name."""
    draft = session.draft
    yield session, "block_hidden", "rope and norm"
    yield session.head, "logits", "head"
    yield draft, "embed_block", "embedding"
    yield draft, "guess", "argmax"
    yield draft, "context", "fc"
    if isinstance(session, Recomputed):
        yield session, "project", "context kv"
    elif not isinstance(session, NoiseCached):
        yield session, "observe", "context kv"
    for layer in session.layers:
        yield layer, "forward", "q/k/v"
        yield layer.o_proj, "forward", "o"
        yield layer.post_attention_layernorm, "forward", "mlp"
        yield layer.mlp, "forward", "mlp"
        for conv in (layer.attention_conv, layer.mlp_conv):
            if conv is not None:
                yield conv, "before", "convolution"
                yield conv, "after", "convolution"


def _timed_attention(attention: Callable[..., Tensor], timer: StepTimer) -> Callable[..., Tensor]:
    def timed(x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Callable[..., Tensor]) -> Tensor:
        return attention(x, cos, sin, layer, timer.wrap("attention", attend))

    return timed


@contextmanager
def patched(owner: object, method: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, this one object has `function` as its method."""
    vars(owner)[method] = function
    try:
        yield
    finally:
        del vars(owner)[method]


# ---- work by operation ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Bytes read and floating-point operations of one operation."""

    nbytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.nbytes + other.nbytes, self.flops + other.flops)


def _product(weight: Weight, rows: int, itemsize: int = 4, share: float = 1.0) -> Work:
    """`rows` rows of activations through a matrix [N, C], or through a `share` of its rows."""
    N, C = weight.shape
    return Work(share * _stored(weight) + rows * C * itemsize, 2 * share * N * C * rows)


def _stored(weight: Weight) -> int:
    """Bytes of a matrix in memory."""
    return sum(map(_stored, weight.parts)) if isinstance(weight, Joined) else weight.data.nbytes


def work_of_step(
    draft: DFlash, target: Decoder, variant: Variant, context: int, observed: int
) -> dict[str, Work]:
    """By operation, at batch 1: weights once, as stored, activations, and the cached keys and values that
    are read. Norms and a selector's few rows are left out."""
    config, size = draft.config, target.dtype.itemsize
    H, K, D, N = config.num_heads, config.num_kv_heads, config.head_dim, config.block_size
    work = dict.fromkeys(OPERATIONS, Work())
    computed = {"cached": observed, "recomputed": context, "noise cached": 0}[variant]
    if variant != "noise cached":
        work["fc"] = _product(draft.fc.weight, observed, size)
    work["embedding"] = Work(N * _stored(target.embed_tokens.weight) / config.vocab_size)
    vocab_share = (config.draft_vocab_size or config.vocab_size) / config.vocab_size
    work["head"] = _product(target.head, N - 1, size, vocab_share)
    work["argmax"] = Work((N - 1) * vocab_share * config.vocab_size * size)
    windows = [config.window(i) for i in range(config.num_layers)]
    rows = min(computed, max(windows)) if all(windows) else computed
    layers: Any = draft.layers
    for layer, window in zip(layers, windows, strict=True):
        qkv = layer.qkv_proj.weight
        if rows:
            work["context kv"] += _product(qkv, rows, size, 2 * K / (H + 2 * K))
        work["q/k/v"] += _product(qkv, N, size)
        seen = (min(context, window - 1) if window else context) + N
        work["attention"] += Work(2 * seen * K * D * size, 4 * N * seen * H * D)
        work["o"] += _product(layer.o_proj.weight, N, size)
        work["mlp"] += _product(layer.mlp.gate_up_proj.weight, N, size)
        work["mlp"] += _product(layer.mlp.down_proj.weight, N, size)
        for conv in (layer.attention_conv, layer.mlp_conv):
            if conv is not None:
                work["convolution"] += _product(conv.kernel_projection.weight, N, size)
    return work
