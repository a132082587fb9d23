"""One step of a target as one native call: the modules' forward, recorded as a `Program` over static buffers.

`Decoder.forward` says what is computed; here is the same to the bit, for one size of batch and step.
Attention over latent KV, an index or recorded queries is its module's, between two programs; so are what
several processes add up, and the experts that they share. A step that no program covers (`native_step`
returns None) runs through the modules.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from outpace.kv.base import KVCache
from outpace.kv.latent import LatentCache
from outpace.kv.metadata import FEW, StepMetadata
from outpace.models.attention import Attention, DecoderBlock
from outpace.models.blocks import MLP, Embedding, Experts, Linear, RMSNorm
from outpace.models.config import ModelConfig
from outpace.ops.dispatch import Ahead, Draws, Program, Rings, VerifyPass, use_kernel, why_not
from outpace.ops.moe import MOST_TOKENS
from outpace.ops.norm import ALPHA
from outpace.ops.quant import Joined, Weight
from outpace.ops.ranks import Group

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Output:
    """hidden [B,T,C] after the final norm; aux [n,B,T,C] in the order asked for, None without any;
    routing: one [B*T,E] of router logits per expert layer, where it was asked for; logits [B,T,V], where
    they were, and of these, where the step knows it: best [B,T] int64, the argmax; whether all are finite."""

    hidden: Tensor
    aux: Tensor | None
    routing: list[Tensor] = field(default_factory=list)
    logits: Tensor | None = None
    best: Tensor | None = None
    finite: bool | None = None


def joined(outs: Sequence[Output]) -> Output:
    """Of forwards whose tokens follow one another."""
    return _of_all(outs, lambda parts, dim: np.concatenate(parts, dim + 1))


def spread(outs: Sequence[Output], rows: Sequence[Sequence[int]], B: int, T: int) -> Output:
    """Of forwards of these rows of a batch each; 0 at what none of them computed."""

    def placed(parts: list[Array], dim: int) -> Array:
        shape = parts[0].shape
        whole = np.zeros((*shape[:dim], B, T, *shape[dim + 2 :]), parts[0].dtype)
        for some, part in zip(rows, parts, strict=True):
            at: Any = (*[slice(None)] * dim, list(some), slice(part.shape[dim + 1]))
            whole[at] = part
        return whole

    return _of_all(outs, placed)


def _of_all(outs: Sequence[Output], assembled: Callable[[list[Array], int], Array]) -> Output:
    """`assembled`: arrays [.., B, T, ..] with so many axes before B -> the whole one. By one thread: see
    `copied`."""

    def whole(dim: int, parts: list[Tensor | None]) -> Tensor | None:
        there = [part.numpy() for part in parts if part is not None]
        return torch.from_numpy(assembled(there, dim)) if len(there) == len(parts) else None

    hidden = whole(0, [out.hidden for out in outs])
    assert hidden is not None
    return Output(
        hidden,
        whole(1, [out.aux for out in outs]),
        [],
        whole(0, [out.logits for out in outs]),
        whole(0, [out.best for out in outs]),
        None if any(out.finite is None for out in outs) else all(out.finite for out in outs),
    )


MOST_STEPS = 512  # that a model keeps, a step for each size: of some 15 kB for each layer
MOST_ROWS = 512  # of a step's buffers
ALONE = 2**15  # numbers that torch copies by one thread (at::internal::GRAIN_SIZE)


class NativeSteps(dict[tuple[object, ...], "NativeStep"]):
    """A model's steps by their size. One of them runs at a time, over buffers that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()  # for threads that share the model
        self.buffers: dict[str, Tensor] = {}

    def __reduce__(self) -> tuple[type["NativeSteps"], tuple[()]]:
        """Of a copy: none, because steps point at the weights of this model."""
        return NativeSteps, ()

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Float32 numbers of any value. A larger one takes another's place, which stays with its steps."""
        count = math.prod(shape)
        known = self.buffers.get(name, torch.empty(0))
        if len(known) < count:
            # the system gives memory to what is written: room for twice as much costs nothing
            known = self.buffers[name] = torch.empty(max(count, 2 * len(known)))
        return known[:count].view(shape)

    def clear(self) -> None:
        super().clear()
        self.buffers.clear()


def step_bytes(config: ModelConfig, rows: int, aux: int = 0, logits: int = 0) -> int:
    """Of the buffers of a step of so many rows, `logits` of them with logits, and of what it returns."""
    c = config
    heads = (2 * c.num_heads + 2 * c.num_kv_heads + 1) * c.head_dim  # with cosines and sines
    mlp = 0 if all(c.moe_layers) and c.moe_layers else 3 * c.intermediate_size
    returned = rows * (1 + aux) * c.hidden_size + logits * c.vocab_size
    return 4 * (rows * (3 * c.hidden_size + heads + mlp) + 2 * returned)


class Layers(Protocol):
    """What a step runs of a `Decoder`."""

    config: ModelConfig
    dtype: torch.dtype
    activation_dtype: torch.dtype | None
    embed_tokens: Embedding
    layers: nn.ModuleList
    norm: RMSNorm
    inv: Tensor  # [D/2] float64
    group: Group | None

    @property
    def head(self) -> Weight: ...

    @property
    def native_steps(self) -> NativeSteps: ...


class Piece:
    """Tokens begin .. end - 1 of the B rows of a step: they are appended and looked at before the next ones,
    so that a prompt's keys are in the same order, and overwrite no more, than those of many short steps."""

    def __init__(self, begin: int, end: int, B: int) -> None:
        self.begin, self.end = begin, end
        self.start, self.counts = (ctypes.c_int64 * B)(), (ctypes.c_int64 * B)()
        self.start_tensor, self.counts_tensor = (
            torch.frombuffer(numbers, dtype=torch.int64) for numbers in (self.start, self.counts)
        )

    def point_to(self, step: StepMetadata) -> None:
        self.start[:] = [start + self.begin for start in step.start]
        self.counts[:] = [min(max(n - self.begin, 0), self.end - self.begin) for n in step.counts]


def pieces_of(T: int, most: int, B: int) -> list[Piece]:
    return [Piece(begin, min(begin + most, T), B) for begin in range(0, T, most)]


class NativeStep:
    """B rows of T tokens. `run` copies the inputs into buffers that stay, and points the program to the rings
    of another cache where it has to."""

    def __init__(
        self, model: Layers, cache: KVCache, step: StepMetadata, aux: Sequence[int], logits: bool
    ) -> None:
        c, (B, T) = model.config, (len(step.start), step.T)
        M, C, D, self.held = B * T, c.hidden_size, c.head_dim, step.held
        self.group = model.group
        self.nodes = step.held + T  # of a tree
        self.steps, buffer = model.native_steps, model.native_steps.buffer
        self.rings = Rings(len(model.layers))
        self._point_to(cache)
        self.tokens = torch.zeros(M, dtype=torch.int64)
        self.rows = (ctypes.c_int64 * B)()  # cheaper to set than a tensor
        self.row_tensor = torch.frombuffer(self.rows, dtype=torch.int64)
        whole, ring = (T, T) if step.tree is not None else (FEW, min(cache.room, FEW))
        self.pieces = pieces_of(T, whole, B)
        self.ring_pieces = self.pieces if ring == whole or T <= ring else pieces_of(T, ring, B)
        self.all_pieces = tuple(dict.fromkeys((*self.pieces, *self.ring_pieces)))
        self.masks: dict[int, Tensor] = {}  # of a tree, by window [B, T, U]
        self.parents = torch.zeros(B, self.nodes, dtype=torch.int64)
        self.depth = None if step.tree is None else torch.zeros(B, T, dtype=torch.int64)
        self.orphans = ctypes.c_int64()  # nodes of a tree whose parent is none before them
        self.x, self.normed, self.y = (buffer(name, M, C) for name in ("x", "normed", "y"))
        self.cos, self.sin = buffer("cos", M, D // 2), buffer("sin", M, D // 2)
        n = 1 if self.group is None else self.group.size
        self.qkv = buffer("qkv", M, (c.num_heads + 2 * c.num_kv_heads) // n * D)
        self.attended = buffer("attended", B, T, c.num_heads // n * D)
        self.hidden = buffer("hidden", B, T, C)
        self.aux = buffer("aux", len(aux), B, T, C) if aux else None
        self.rounded = model.activation_dtype == torch.bfloat16
        self.program = program = Program(self.rounded)
        # run one after the other
        self.parts: list[Program | tuple[int, Attention] | Group | Experts] = [program]
        self._trees(c)
        positions = torch.zeros(B, T, dtype=torch.int64)
        program.places(self.pieces[0].start_tensor, self.depth, step.held, cache.offset, positions)
        program.angles(positions.view(-1), model.inv, c.rope.concentration, self.cos, self.sin)
        embedding = model.embed_tokens.weight
        assert not isinstance(embedding, Joined), "an embedding is one matrix"
        self.vocab_size, self.outside = c.vocab_size, ctypes.c_int64()
        program.embed(self.tokens, embedding, self.x, self.outside)
        for i, block in enumerate(model.layers):
            assert isinstance(block, DecoderBlock)
            pieces = self.ring_pieces if c.window(i) else self.pieces
            self._layer(block, i, i in cache.module_layers, pieces)
            for j, _ in (pair for pair in enumerate(aux) if pair[1] == i):
                assert self.aux is not None
                self.program.copy(self.x.view(B, T, C), self.aux[j])
        self.program.rms_norm(self.x, model.norm.weight, model.norm.eps, self.hidden.view(M, C))
        self.logits, self.best, self.odd = None, torch.empty(B, T, dtype=torch.int64), ctypes.c_int64()
        if logits:
            head = model.head
            assert not isinstance(head, Joined), "a head is one matrix"
            self.logits = buffer("logits", B, T, c.vocab_size)
            rows = self.logits.view(M, -1)
            self.program.linear(self.hidden.view(M, C), head, None, rows)
            self.program.argmax(rows, self.best.view(-1), self.odd)

    def _trees(self, config: ModelConfig) -> None:
        """What each node of a tree sees, for every window that a layer has."""
        if self.depth is None:
            return
        B, T = self.depth.shape
        for window in {config.window(i) for i in range(config.num_layers)}:
            mask = self.masks[window] = torch.empty(B, T, self.nodes, dtype=torch.bool)
            self.program.family(self.parents, self.held, window, mask, self.depth, self.orphans)

    def _layer(self, block: DecoderBlock, layer: int, by_module: bool, pieces: list[Piece]) -> None:
        norm = block.input_layernorm
        self.program.rms_norm(self.x, norm.weight, norm.eps, self.normed)
        if by_module:
            self._between((layer, block.self_attn))
        else:
            self._attention(block.self_attn, self.rings.address(layer), pieces)
        norm = block.post_attention_layernorm
        self.program.add(self.y, self.x)
        self.program.rms_norm(self.x, norm.weight, norm.eps, self.normed)
        if not isinstance(block.mlp, Experts):
            assert isinstance(block.mlp, MLP)
            self._mlp(block.mlp)
        elif self.group is None:
            self._experts(block.mlp)
        else:
            self._between(block.mlp)
        self.program.add(self.y, self.x)

    def _between(self, part: tuple[int, Attention] | Group | Experts) -> None:
        """Run `part` before the calls to come."""
        self.program = Program(self.rounded)
        self.parts += [part, self.program]

    def _linear(self, x: Tensor, layer: Linear, y: Tensor) -> None:
        if not isinstance(layer.weight, Joined):
            self.program.linear(x, layer.weight, layer.bias, y)
            return
        rows = layer.weight.rows
        biases = [None] * len(rows) if layer.bias is None else layer.bias.split(rows)
        for part, bias, columns in zip(layer.weight.parts, biases, y.split(rows, dim=1), strict=True):
            self.program.linear(x, part, bias, columns)

    def _attention(self, a: Attention, ring: int, pieces: list[Piece]) -> None:
        program, (B, T, _), H, K = self.program, self.attended.shape, a.heads, a.kv_heads
        norms = None
        if a.q_norm is not None and a.k_norm is not None:
            norms = (a.q_norm.weight, a.k_norm.weight, a.q_norm.eps)
        self._linear(self.normed, a.qkv_proj, self.qkv)
        program.rope(self.qkv, self.cos, self.sin, H, K, norms)
        rules = a.window, a.sinks, a.scale, self.masks.get(a.window), self.depth
        for piece in pieces:
            qkv, y = (x[:, piece.begin : piece.end] for x in (self.qkv.view(B, T, -1), self.attended))
            start, counts = piece.start_tensor, piece.counts_tensor
            program.append(qkv, ring, start, counts, H, K, self.held, self.row_tensor)
            q = qkv.unflatten(-1, (-1, a.head_dim))[:, :, :H]
            program.attend(q, ring, K, start, y, *rules, rows=self.row_tensor)
        self._linear(self.attended.view(B * T, -1), a.o_proj, self.y)
        if self.group is not None:
            self._between(self.group)

    def _point_to(self, cache: KVCache) -> None:
        self.seen = cache.rings
        self.rings.point_to(self.seen)

    def _mlp(self, mlp: MLP) -> None:
        wide = mlp.gate_up_proj.weight.shape[0]
        gate_up = self.steps.buffer("gate_up", len(self.x), wide)
        act = self.steps.buffer("act", len(self.x), wide // 2)
        self._linear(self.normed, mlp.gate_up_proj, gate_up)
        self.program.gated(gate_up, act)
        self._linear(act, mlp.down_proj, self.y)
        if self.group is not None:
            self._between(self.group)

    def _experts(self, e: Experts) -> None:
        index = torch.zeros(len(self.x), e.per_token, dtype=torch.int64)
        weight = torch.empty(index.shape)
        router, style = e.router.weight, "silu" if e.limit is None else "gpt_oss"
        assert isinstance(router, Tensor)
        rules = {"softmax_first": e.limit is None, "renormalise": e.renormalise}
        self.program.route(self.normed, router, e.router.bias, index, weight, **rules)
        gates = (None, None) if e.gate is None else (e.gate.data, e.gate.bias)
        matrices = e.up.data, e.up.bias, e.down.data, e.down.bias, style, e.limit or 0.0, ALPHA, *gates
        tensors = self.normed, index, weight, self.y
        for some in zip(*(t.split(MOST_TOKENS) for t in tensors), strict=True):
            self.program.moe(*some, *matrices)

    def _by_module(self, layer: int, attention: Attention, step: StepMetadata, cache: KVCache) -> None:
        size = len(step.start), step.T, -1
        angles = self.cos.view(size), self.sin.view(size)
        self.y.view(size).copy_(attention(self.normed.view(size), *angles, cache.layers[layer], step))

    def knows(self, cache: KVCache) -> bool:
        return self.seen is cache.rings

    def _begin(self, tokens: Tensor, step: StepMetadata, cache: KVCache) -> None:
        self._over(cache)
        self.tokens.copy_(tokens.reshape(-1))
        for piece in self.all_pieces:
            piece.point_to(step)

    def _over(self, cache: KVCache) -> None:
        if not self.knows(cache):
            self._point_to(cache)
        self.rows[:] = list(cache.rows or range(len(self.rows)))

    def verify_pass(self, cache: KVCache) -> VerifyPass | None:
        """This step over the one row of `cache`, as a part of `Rounds`; None where it is more than a program,
        or keeps nothing for a draft."""
        if len(self.parts) > 1 or len(self.all_pieces) > 1 or self.logits is None or self.aux is None:
            return None
        self._over(cache)
        inputs = self.tokens, self.pieces[0].start_tensor, self.pieces[0].counts_tensor
        return VerifyPass(self.program, *inputs, self.best, self.odd, self.logits, self.aux, self)

    def run(self, tokens: Tensor, step: StepMetadata, cache: KVCache) -> Output:
        """tokens [B, T] -> copies of the buffers. Raises IndexError, as an embedding does, for a token
        outside the vocabulary."""
        with self.steps.lock:
            self._begin(tokens, step, cache)
            if step.tree is not None:
                self.parents.copy_(step.tree.parents)
            for part in self.parts:
                if isinstance(part, Program):
                    part.run()
                elif isinstance(part, Group):
                    self.y.copy_(part.sum(self.y))
                elif isinstance(part, Experts):
                    self.y.copy_(part(self.normed))
                else:
                    self._by_module(*part, step, cache)
            if self.outside.value:
                raise IndexError(f"a token is outside the vocabulary of {self.vocab_size:,}")
            assert not self.orphans.value, "a parent is before its child"
            hidden, aux = copied(self.hidden), None if self.aux is None else copied(self.aux)
            if self.logits is None:
                return Output(hidden, aux)
            return Output(hidden, aux, [], copied(self.logits), self.best.clone(), not self.odd.value)

    def run_ahead(
        self,
        last: Tensor,
        step: StepMetadata,
        cache: KVCache,
        most: int,
        stops: Tensor,
        draws: Draws | None = None,
    ) -> "Steps | None":
        """`Decoder.run_ahead`, where this is a step of one token, and one program."""
        if len(self.parts) > 1 or self.logits is None:
            return None
        B = len(step.start)
        with self.steps.lock:
            self._begin(last, step, cache)
            out = torch.empty(most + 1, B, dtype=torch.int64)
            out[0] = last
            all_aux = None if self.aux is None else torch.empty(most, *self.aux.shape)
            outputs = self.logits.view(B, -1), self.best.view(B), self.odd, self.aux, out[1:], all_aux
            ahead = Ahead(self.tokens, self.pieces[0].start_tensor, *outputs)
            n = self.program.run_ahead(most, stops, ahead, draws)
            if self.outside.value:
                raise IndexError(f"a token is outside the vocabulary of {self.vocab_size:,}")
            aux = None if all_aux is None else all_aux[:n, :, :, 0].permute(1, 2, 0, 3)
            return Steps(out[:n].T, out[1 : n + 1].T, aux, not self.odd.value)


class Steps(NamedTuple):
    """given [B, n], the inputs; tokens [B, n], what was chosen; aux [layers, B, n, C], as of an `Output`;
    whether all logits were finite."""

    given: Tensor
    tokens: Tensor
    aux: Tensor | None
    finite: bool


@lru_cache(64)
def stop_ids(stop: frozenset[int]) -> Tensor:
    """Those of a request, for all its calls."""
    return torch.tensor(sorted(stop), dtype=torch.int64)


def copied(x: Tensor) -> Tensor:
    """A large one by one thread: torch would wake its own, which spin on the cores that the next steps need
    for milliseconds, unless this package was imported before torch."""
    return x.clone() if x.numel() <= ALONE else torch.from_numpy(x.numpy().copy())


def step_sizes(model: Layers, cache: KVCache, T: int) -> list[int]:
    """Of the forwards that append a chain of T tokens a row: FEW times a power of two each, and a rest, so
    that most are native and their sizes are few. One forward on a machine without the kernels."""
    if T <= FEW or why_modules(model, cache) is not None:
        return [T]
    widest = FEW
    while not cache.module_layers and 2 * widest * cache.batch <= MOST_ROWS:
        widest *= 2
    sizes = []
    while T:
        while widest > max(T, FEW):
            widest //= 2
        sizes.append(min(widest, T))
        T -= sizes[-1]
    return sizes


def row_groups(model: Layers, cache: KVCache, step: StepMetadata) -> list[list[int]]:
    """Rows of the forwards that append to a batch: as many as a native step takes, one where its tokens are
    many, so that a short prompt is not padded to a long one. None: one forward of all."""
    B, T = len(step.start), step.T
    if B == 1 or B * T <= MOST_ROWS or cache.module_layers or why_modules(model, cache) is not None:
        return []
    rows = [b for b in range(B) if step.counts[b]]
    most = 1 if T > FEW else MOST_ROWS // T
    return [rows[i : i + most] for i in range(0, len(rows), most)]


def native_step(
    model: Layers, cache: KVCache, step: StepMetadata, aux: Sequence[int], logits: bool = False
) -> NativeStep | None:
    """The step of this size, made at its first use; None where the modules must run it."""
    if not _by_kernels(model, cache):
        return None
    U = 0 if step.tree is None else step.tree.parents.shape[1]
    key = _key(cache, (len(step.start), step.T, U), aux, logits)
    known = model.native_steps.get(key)
    if known is not None and known.knows(cache):
        return known
    if not _covered(model, cache, step, aux):
        return None
    if known is None:
        if len(model.native_steps) == MOST_STEPS:
            model.native_steps.pop(next(iter(model.native_steps)), None)
        known = model.native_steps[key] = NativeStep(model, cache, step, aux, logits)
    return known


def _key(cache: KVCache, size: tuple[int, int, int], aux: Sequence[int], logits: bool) -> tuple[object, ...]:
    """size: rows, tokens of each, nodes of a tree."""
    own = cache.offset, torch.get_num_threads(), cache.module_layers, min(cache.room, size[1])
    return size, own, tuple(aux), logits


def verify_passes(model: Layers, cache: KVCache, most: int, aux: Sequence[int]) -> dict[int, VerifyPass]:
    """The steps of 2 to `most` tokens of one row, by their number, of those that were made before."""
    if not _by_kernels(model, cache):
        return {}
    known = {n: model.native_steps.get(_key(cache, (1, n, 0), aux, True)) for n in range(2, most + 1)}
    passes = {n: step.verify_pass(cache) for n, step in known.items() if step is not None}
    return {n: own for n, own in passes.items() if own is not None}


def _covered(model: Layers, cache: KVCache, step: StepMetadata, aux: Sequence[int]) -> bool:
    """Few tokens, or all layers take them in pieces; no ring is too small for a tree."""
    rows, long = len(step.start) * step.T, step.tree is None and step.T > FEW
    if rows > MOST_ROWS or (long and cache.module_layers) or step.both_ways:
        return False
    if not set(aux) <= set(range(len(model.layers))) or why_modules(model, cache) is not None:
        return False
    return step.tree is None or step.held + step.T <= cache.room


def _by_kernels(model: Layers, cache: KVCache) -> bool:
    return model.dtype == torch.float32 and use_kernel(cache.layers[0].k, stored=True)


def why_modules(model: Layers, cache: KVCache) -> str | None:
    """Why no step over this cache is a native call, but runs through the modules; None: short ones are."""
    if not _by_kernels(model, cache):
        return why_not() or "the C kernels compute in float32 on a CPU, without gradients"
    if model.config.head_dim % 8:
        return f"head_dim {model.config.head_dim} is no multiple of 8"
    return "experts are rounded anew in every step" if any(map(_rounds, model.layers)) else None


def module_attention(cache: KVCache) -> str:
    """Which layers' attention is their module's in a native step, and why; empty: none."""
    kinds: dict[str, list[str]] = {}
    for i in cache.module_layers:
        memory = cache.layers[i]
        latent = "latent KV" if isinstance(memory, LatentCache) else "partial KV"
        kind = latent if memory.keys is None else "an index"
        kinds.setdefault(kind, []).append(str(i))
    return "; ".join(f"{kind} in layers {', '.join(layers)}" for kind, layers in kinds.items())


def _rounds(block: nn.Module) -> bool:
    """Whether a layer in training rounds its experts anew in every forward."""
    mlp = block.mlp
    return isinstance(mlp, Experts) and (mlp.up.round_to_mxfp4 or mlp.down.round_to_mxfp4)
