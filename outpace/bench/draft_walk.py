"""One drafting round taken apart: a DFlash's own modules called one by one, timed, and what each reads."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.bench.draft_variants import NoiseCached, Recomputed, Variant, form
from outpace.drafts.choice import Likeliest
from outpace.drafts.dflash import DFlash, DFlashLayer, DFlashSession
from outpace.drafts.proposal import Proposal
from outpace.models.decoder import Decoder
from outpace.ops.attention import attend_view
from outpace.ops.quant import Joined, Weight
from outpace.ops.rope import rotate_heads

OPERATIONS = (
    "fc",
    "context kv",
    "embedding",
    "q/k/v",
    "attention",
    "o",
    "mlp",
    "head",
    "argmax",
    "rope and norm",
)


class Clock:
    """Seconds by operation."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(OPERATIONS, 0.0)

    @contextmanager
    def __call__(self, operation: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[operation] += time.perf_counter() - began


def walk_block(session: DFlashSession, last: Tensor, clock: Clock) -> Proposal:
    """What `session.propose(last, block_size, Likeliest())` does, one operation at a time."""
    draft, target, cache = session.draft, session.target, session.cache
    config = draft.config
    with clock("embedding"):
        x = draft.embed_block(last, target)
    with clock("rope and norm"):
        step = cache.begin(config.block_size, both_ways=True)
        cos, sin = draft.rope(step.storage + cache.offset)
    for i, layer in enumerate(draft.layers):
        assert isinstance(layer, DFlashLayer)
        with clock("q/k/v"):
            qkv = layer.qkv_proj(layer.input_layernorm(x))
            norms = (layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
            q, k, v = rotate_heads(qkv, cos, sin, layer.heads, layer.kv_heads, norms)
        with clock("attention"):
            view = cache.layers[i].append(k.transpose(1, 2), v.transpose(1, 2), step)
            out = attend_view(q, view, step, config.window(i), None, config.head_dim**-0.5)
        with clock("o"):
            x = x + layer.o_proj(out)
        with clock("mlp"):
            x = x + layer.mlp(layer.post_attention_layernorm(x))
    with clock("rope and norm"):
        hidden = draft.norm(x)
    with clock("head"):
        logits = target.logits(hidden[:, 1:])
    with clock("argmax"):
        guesses, _ = Likeliest().tokens(logits, 1)
    return Proposal(torch.cat((last[:, None], guesses), dim=1), [config.block_size] * len(last))


def walk_round(session: DFlashSession, last: Tensor, aux: Tensor, clock: Clock) -> Proposal:
    """One round: a block drafted after `last` [B], then aux [n, B, T, C] of T verified tokens observed."""
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
    """What an operation of one round must read, in bytes, and compute, in floating-point operations."""

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
    """By operation, of a round at batch 1: weights once, as they are stored, and the activations and the
    remembered keys and values that are read. Norm weights are left out."""
    config, size = draft.config, target.dtype.itemsize
    H, K, D, N = config.num_heads, config.num_kv_heads, config.head_dim, config.block_size
    found = dict.fromkeys(OPERATIONS, Work())
    formed = {"cached": observed, "recomputed": context, "noise cached": 0}[variant]
    if variant != "noise cached":
        found["fc"] = product(draft.fc.weight, observed, size)
    found["embedding"] = Work(N * stored(target.embed_tokens.weight) / config.vocab_size)
    found["head"] = product(target.head, N - 1, size)
    found["argmax"] = Work((N - 1) * config.vocab_size * size)
    windows = [config.window(i) for i in range(config.num_layers)]
    for layer, window in zip(draft.layers, windows, strict=True):
        assert isinstance(layer, DFlashLayer)
        qkv = layer.qkv_proj.weight
        rows = min(formed, max(windows)) if all(windows) else formed
        if rows:
            found["context kv"] += product(qkv, rows, size, 2 * K / (H + 2 * K))
        found["q/k/v"] += product(qkv, N, size)
        seen = (min(context, window - 1) if window else context) + N
        found["attention"] += Work(2 * seen * K * D * size, 4 * N * seen * H * D)
        found["o"] += product(layer.o_proj.weight, N, size)
        found["mlp"] += product(layer.mlp.gate_up_proj.weight, N, size)
        found["mlp"] += product(layer.mlp.down_proj.weight, N, size)
    return found
