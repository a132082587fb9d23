"""One drafting step taken apart: a DFlash's own modules called one by one, timed, and what each reads."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from outpace.drafts.base import Proposal
from outpace.drafts.dflash import BoundDFlash, DFlash, DFlashSession
from outpace.drafts.dflash_decode import Head
from outpace.drafts.dflash_heads import BlockConv
from outpace.drafts.dflash_layer import DFlashLayer
from outpace.drafts.sampler import DraftSampler, Greedy
from outpace.kv.metadata import StepMetadata
from outpace.models.blocks import RMSNorm
from outpace.models.decoder import Decoder
from outpace.ops.attention import attend_view
from outpace.ops.quant import Joined, Weight
from outpace.ops.rope import rotate_heads

Variant = Literal["cached", "recomputed", "noise cached"]
VARIANTS: tuple[Variant, ...] = ("cached", "recomputed", "noise cached")
ABOUT = {
    "cached": "keys and values of verified tokens are kept, formed once (as it is served)",
    "recomputed": "the fused states c_s are kept; every round forms the whole context's keys and values",
    "noise cached": "the rows that an accepted draft token had in its block are kept, and nothing is formed",
}


class Recomputed(DFlashSession):
    """Keeps c_s [B, n, C] and forms every layer's keys and values again in each step. Drafts what the served
    session drafts."""

    def __init__(
        self,
        draft: DFlash,
        target: Decoder,
        batch: int,
        length: int,
        offset: int,
        head: Head | None = None,
        slack: int = 0,
    ) -> None:
        super().__init__(draft, target, batch, length, offset, head, slack)
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
        """Keys and values of everything that a layer can still see; of a window not the whole context."""
        config, cache = self.draft.config, self.cache
        windows = [config.window(i) for i in range(config.num_layers)]
        reach = max(windows) if all(windows) else max(self.seen)
        first = max(0, min(self.seen) - reach)
        counts = tuple(n - first for n in self.seen)
        step = StepMetadata((first,) * len(counts), counts, max(counts), cache.device)
        form(self, self.features[:, first : first + step.T], step)
        cache.advance(step)


class NoiseCached(DFlashSession):
    """After the prompt nothing is formed from the target's states: an accepted token keeps the keys and
    values that its MASK had. Faster by `fc` and the k/v projections, and the context blurs: the paper's loop
    crops these rows away. The text stays the target's, as with any draft; fewer draft tokens are right."""

    drafted = False

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        if not self.drafted:
            super().observe(tokens, aux, counts)
        elif max(counts):
            self.cache.advance(self.cache.begin(max(counts), counts))

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        self.drafted = True
        return super().propose(last, width, sampler)


def form(session: DFlashSession, features: Tensor, step: StepMetadata) -> None:
    """Append the keys and values of features [B, T, C] in every layer."""
    cos, sin = session.draft.rope(step.storage + session.cache.offset)
    parts = zip(session.draft.layers, session.cache.layers, session.weights, strict=True)
    for layer, memory, weights in parts:
        assert isinstance(layer, DFlashLayer)
        memory.append(*layer.context_kv(features, cos, sin, weights), step)


SESSIONS: dict[Variant, type[DFlashSession]] = {
    "cached": DFlashSession,
    "recomputed": Recomputed,
    "noise cached": NoiseCached,
}


@dataclass(frozen=True)
class Remembering(BoundDFlash):
    """A DFlash bound to its target, with one of the three memories."""

    variant: Variant

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> DFlashSession:
        return SESSIONS[self.variant](self.draft, self.target, batch, length, offset, self.head, slack)


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


class DraftTimer:
    """Seconds by operation. One inside another stops the outer one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(OPERATIONS, 0.0)
        self.running: list[str] = []
        self.since = 0.0

    @contextmanager
    def __call__(self, operation: str) -> Iterator[None]:
        self._charge()
        self.running.append(operation)
        yield
        self._charge()
        self.running.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self.running:
            self.seconds[self.running[-1]] += now - self.since
        self.since = now


@dataclass(frozen=True)
class ClockedHead(Head):
    """A head under its own clock, inside the choosing of draft tokens."""

    clock: DraftTimer

    def logits(self, hidden: Tensor) -> Tensor:
        with self.clock("head"):
            return super().logits(hidden)


def walk_block(session: DFlashSession, last: Tensor, clock: DraftTimer) -> Proposal:
    """What `session.propose(last, block_size, Greedy())` does, one operation at a time."""
    draft, cache = session.draft, session.cache
    config, head = draft.config, session.head
    with clock("embedding"):
        x = draft.embed_block(last, session.target)
    with clock("rope and norm"):
        step = cache.begin(config.block_size, both_ways=True)
        cos, sin = draft.rope(step.storage + cache.offset)
    for i, layer in enumerate(draft.layers):
        assert isinstance(layer, DFlashLayer)
        sees = replace(step, both_ways=False) if config.hides(i) else step
        x = x + _convolved(
            layer.attention_conv,
            layer.input_layernorm,
            x,
            clock,
            "q/k/v",
            _attention(session, i, cos, sin, sees, clock),
        )
        x = x + _convolved(
            layer.mlp_conv, layer.post_attention_layernorm, x, clock, "mlp", _mlp(layer, clock)
        )
    with clock("rope and norm"):
        hidden = draft.norm(x)
    with clock("argmax"):
        timed_head = ClockedHead(head.weight, head.ids, head.vocab_size, clock)
        result = draft.guess(timed_head, hidden[:, 1:], last, Greedy())
        tokens = torch.cat((last[:, None], result.tokens), dim=1)
    return Proposal(tokens, [config.block_size] * len(last))


def _convolved(
    conv: BlockConv | None,
    norm: RMSNorm,
    x: Tensor,
    clock: DraftTimer,
    normed_in: str,
    sublayer: Callable[[Tensor], Tensor],
) -> Tensor:
    """One sublayer between its norm and the residual sum; with its convolutions where it has any."""
    with clock(normed_in):
        h = norm(x)
    if conv is None:
        return sublayer(h)
    with clock("convolution"):
        h, delta = conv.before(h)
    out = sublayer(h)
    with clock("convolution"):
        return conv.after(out, delta)


def _attention(
    session: DFlashSession, i: int, cos: Tensor, sin: Tensor, sees: StepMetadata, clock: DraftTimer
) -> Callable[[Tensor], Tensor]:
    config, layer = session.draft.config, session.draft.layers[i]
    assert isinstance(layer, DFlashLayer)

    def run(h: Tensor) -> Tensor:
        with clock("q/k/v"):
            norms = (layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
            q, k, v = rotate_heads(layer.qkv_proj(h), cos, sin, layer.heads, layer.kv_heads, norms)
        with clock("attention"):
            view = session.cache.layers[i].append(k.transpose(1, 2), v.transpose(1, 2), sees)
            out = attend_view(q, view, config.window(i), None, config.head_dim**-0.5)
        with clock("o"):
            mixed: Tensor = layer.o_proj(out)
        return mixed

    return run


def _mlp(layer: DFlashLayer, clock: DraftTimer) -> Callable[[Tensor], Tensor]:
    def run(h: Tensor) -> Tensor:
        with clock("mlp"):
            out: Tensor = layer.mlp(h)
        return out

    return run


def walk_round(session: DFlashSession, last: Tensor, aux: Tensor, clock: DraftTimer) -> Proposal:
    """One step: a block drafted after `last` [B], then aux [n, B, T, C] of T verified tokens observed."""
    if isinstance(session, Recomputed):
        with clock("context kv"):
            session.project()
    proposal = walk_block(session, last, clock)
    B, T = aux.shape[1:3]
    if isinstance(session, NoiseCached):
        session.cache.advance(session.cache.begin(T))
        return proposal
    with clock("fc"):
        features = session.draft.context(aux)
    if isinstance(session, Recomputed):
        with clock("fc"):
            session.store(features, [T] * B)
        return proposal
    with clock("context kv"):
        step = session.cache.begin(T)
        form(session, features, step)
        session.cache.advance(step)
    return proposal


@dataclass(frozen=True)
class Work:
    """What an operation of one step must read, in bytes, and compute, in floating-point operations."""

    nbytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.nbytes + other.nbytes, self.flops + other.flops)


def product(weight: Weight, rows: int, itemsize: int = 4, share: float = 1.0) -> Work:
    """`rows` rows of activations through a matrix [N, C], or through a `share` of its rows."""
    N, C = weight.shape
    return Work(share * stored(weight) + rows * C * itemsize, 2 * share * N * C * rows)


def stored(weight: Weight) -> int:
    """Bytes of a matrix as it lies in memory."""
    if isinstance(weight, Joined):
        return sum(map(stored, weight.parts))
    return weight.data.nbytes


def work_of_round(
    draft: DFlash, target: Decoder, variant: Variant, context: int, observed: int
) -> dict[str, Work]:
    """By operation, of a step at batch 1: weights once, as they are stored, and the activations and the
    remembered keys and values that are read. Norms and a selector's few rows are left out."""
    config, size = draft.config, target.dtype.itemsize
    H, K, D, N = config.num_heads, config.num_kv_heads, config.head_dim, config.block_size
    result = dict.fromkeys(OPERATIONS, Work())
    formed = {"cached": observed, "recomputed": context, "noise cached": 0}[variant]
    if variant != "noise cached":
        result["fc"] = product(draft.fc.weight, observed, size)
    result["embedding"] = Work(N * stored(target.embed_tokens.weight) / config.vocab_size)
    words = (config.draft_vocab_size or config.vocab_size) / config.vocab_size
    result["head"] = product(target.head, N - 1, size, words)
    result["argmax"] = Work((N - 1) * words * config.vocab_size * size)
    windows = [config.window(i) for i in range(config.num_layers)]
    for layer, window in zip(draft.layers, windows, strict=True):
        assert isinstance(layer, DFlashLayer)
        qkv = layer.qkv_proj.weight
        rows = min(formed, max(windows)) if all(windows) else formed
        if rows:
            result["context kv"] += product(qkv, rows, size, 2 * K / (H + 2 * K))
        result["q/k/v"] += product(qkv, N, size)
        seen = (min(context, window - 1) if window else context) + N
        result["attention"] += Work(2 * seen * K * D * size, 4 * N * seen * H * D)
        result["o"] += product(layer.o_proj.weight, N, size)
        result["mlp"] += product(layer.mlp.gate_up_proj.weight, N, size)
        result["mlp"] += product(layer.mlp.down_proj.weight, N, size)
        for conv in (layer.attention_conv, layer.mlp_conv):
            if conv is not None:
                result["convolution"] += product(conv.kernel_projection.weight, N, size)
    return result
