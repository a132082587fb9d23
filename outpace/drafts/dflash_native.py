"""A DFlash's step in two native calls: one for its draft tokens, one for the context of verified tokens.

`DFlash.denoise`, `dflash_decode.guess` and `DFlashLayer.context_kv` say what is computed; here is the same to
the bit, over static buffers, for one size of batch and block.
"""

import ctypes
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.drafts.base import HostProposal
from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.dflash_decode import Head
from outpace.drafts.dflash_heads import AFTER, BEFORE, BlockConv, Selector
from outpace.drafts.dflash_layer import DFlashLayer
from outpace.drafts.native import whole
from outpace.kv.base import KVCache
from outpace.kv.metadata import StepMetadata
from outpace.models.blocks import Linear, RMSNorm
from outpace.ops.candidates import walkable
from outpace.ops.dispatch import Chain, Context, Program, Rings, Rounds
from outpace.ops.quant import Weight


class NativeBlock:
    """The layers of a draft and its last norm, for B blocks of T rows behind what a cache holds; `inv` are
    its rope's frequencies, from position `offset` on. The blocks' own keys are not advanced over: the next
    append replaces them."""

    def __init__(
        self,
        c: DFlashConfig,
        layers: Sequence[DFlashLayer],
        norm: RMSNorm,
        inv: Tensor,
        offset: int,
        B: int,
        T: int,
    ) -> None:
        self.T, self.rings, self.lock = T, Rings(len(layers)), Lock()
        M, H, K, D = B * T, c.num_heads, c.num_kv_heads, c.head_dim
        self.start, self.counts, self.rows = (
            torch.zeros(B, dtype=torch.int64),
            torch.full((B,), T),
            torch.arange(B),
        )
        self._start, self._rows = self.start.numpy(), self.rows.numpy()
        self.x, self.h, self.y, self.z = (torch.empty(M, c.hidden_size) for _ in range(4))
        self.hidden = torch.empty(B, T, c.hidden_size)
        self.cos, self.sin = torch.empty(M, D // 2), torch.empty(M, D // 2)
        self.qkv, self.attended = torch.empty(B, T, (H + 2 * K) * D), torch.empty(B, T, H * D)
        self.gate_up, self.act = torch.empty(M, 2 * c.intermediate_size), torch.empty(M, c.intermediate_size)
        taps, groups = c.conv_kernel_size, c.hidden_size // (c.conv_group_size or c.hidden_size)
        self.deltas = [torch.empty(M, 2, taps, groups) for _ in range(2)]  # of attention and of the MLP
        self.program = program = Program(layers[0].qkv_proj.rounded)
        positions = torch.zeros(B, T, dtype=torch.int64)
        program.places(self.start, None, 0, offset, positions)
        program.angles(positions.view(-1), inv, c.rope.concentration, self.cos, self.sin)
        for i, layer in enumerate(layers):
            self._attention(layer, self.rings.address(i), c.window(i), not c.hides(i))
            self._mlp(layer)
        program.rms_norm(self.x, norm.weight, norm.eps, self.hidden.view(M, -1))

    def _attention(self, layer: DFlashLayer, ring: int, window: int, both_ways: bool) -> None:
        program, norm, M = self.program, layer.input_layernorm, len(self.x)
        H, K, D = layer.heads, layer.kv_heads, layer.head_dim
        program.rms_norm(self.x, norm.weight, norm.eps, self.h)
        h = self._before(layer.attention_conv, self.h, self.deltas[0])
        qkv = self.qkv.view(M, -1)
        program.linear(h, whole(layer.qkv_proj.weight), layer.qkv_proj.bias, qkv)
        norms = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
        program.rope(qkv, self.cos, self.sin, H, K, norms)
        program.append(self.qkv, ring, self.start, self.counts, H, K, 0, self.rows)
        q = self.qkv.unflatten(-1, (-1, D))[:, :, :H]
        rules = window, None, D**-0.5, None, None, both_ways
        program.attend(q, ring, K, self.start, self.attended, *rules, rows=self.rows)
        program.linear(self.attended.view(M, -1), whole(layer.o_proj.weight), layer.o_proj.bias, self.y)
        program.add(self._after(layer.attention_conv, self.deltas[0]), self.x)

    def _mlp(self, layer: DFlashLayer) -> None:
        program, norm, down = self.program, layer.post_attention_layernorm, layer.mlp.down_proj
        program.rms_norm(self.x, norm.weight, norm.eps, self.h)
        h = self._before(layer.mlp_conv, self.h, self.deltas[1])
        program.linear(h, whole(layer.mlp.gate_up_proj.weight), layer.mlp.gate_up_proj.bias, self.gate_up)
        program.gated(self.gate_up, self.act)
        program.linear(self.act, whole(down.weight), down.bias, self.y)
        program.add(self._after(layer.mlp_conv, self.deltas[1]), self.x)

    def _before(self, conv: BlockConv | None, x: Tensor, delta: Tensor) -> Tensor:
        if conv is None:
            return x
        self.program.linear(x, whole(conv.kernel_projection.weight), None, delta.view(len(x), -1))
        self.program.block_conv(x, conv.base_kernel[BEFORE], delta, self.T, BEFORE, self.z)
        return self.z

    def _after(self, conv: BlockConv | None, delta: Tensor) -> Tensor:
        if conv is None:
            return self.y
        self.program.block_conv(self.y, conv.base_kernel[AFTER], delta, self.T, AFTER, self.z)
        return self.z

    def denoise(self, x: Tensor, step: StepMetadata, cache: KVCache) -> Tensor:
        """`DFlash.denoise` behind the cached tokens: x [B,T,C] -> hidden [B,T,C]."""
        with self.lock:
            self.x.view(x.shape).copy_(x)
            self.point_to(step, cache)
            self.program.run()
            return self.hidden.clone()

    def point_to(self, step: StepMetadata, cache: KVCache) -> None:
        self.rings.point_to(cache.rings)
        self._start[:] = step.start
        self._rows[:] = step.cache_rows or range(len(step.start))


class Parts(NamedTuple):
    """What draft tokens come from. `masked`: the embedding of MASK [1,C], or its token."""

    block: NativeBlock
    embedding: Weight
    masked: Tensor | int
    head: Head
    selector: Selector | None


class NativeCandidates:
    """The `k` most probable tokens of each of `width` - 1 places of B blocks of T rows, and their logits."""

    def __init__(self, parts: Parts, width: int, k: int) -> None:
        block, embedding, masked, head, selector = parts
        B, T, C = block.hidden.shape
        n, N = width - 1, head.weight.shape[0]
        k = min(k, N)
        self.block, self.lock, self.program = block, Lock(), Program(head.rounded)
        self.last = torch.zeros(B, dtype=torch.int64)
        self.tokens = torch.full((B, T), masked if isinstance(masked, int) else 0)
        self._last, self._anchors = self.last.numpy(), self.tokens.numpy()[:, 0]
        self._embed(embedding, masked)
        self.program.extend(block.program)
        hidden = block.hidden[0, 1:width]
        if B > 1:
            hidden = torch.empty(B * n, C)
            for states, packed in zip(block.hidden, hidden.view(B, n, C), strict=True):
                self.program.copy(states[1:width], packed)
        logits, rows = torch.empty(B * n, N), torch.empty(B * n, k, dtype=torch.int64)
        values, lse = torch.empty(B * n, k), torch.empty(B * n)
        self.program.linear(hidden, whole(head.weight), None, logits)
        self.program.top(logits, rows, values, lse)
        ids = rows
        if head.ids is not None:
            ids = torch.empty_like(rows)
            self.program.gather(head.ids, rows.view(-1), ids.view(-1))
        self.candidates = ids.view(B, n, k), values.view(B, n, k), lse.view(B, n)
        self.books: tuple[Tensor, Tensor, Tensor] | None = None
        if selector is not None:
            project = selector.hidden_projection
            h = torch.empty(B, n, project.weight.shape[0])
            self.program.linear(hidden, whole(project.weight), project.bias, h.view(B * n, -1))
            self.books = h, selector.predecessor_codebook, selector.successor_codebook

    def _embed(self, embedding: Weight, masked: Tensor | int) -> None:
        x, outside = self.block.x, ctypes.c_int64()  # an anchor was chosen from the vocabulary
        if isinstance(masked, int):
            self.program.embed(self.tokens.view(-1), whole(embedding), x, outside)
            return
        for tokens, of_block in zip(self.tokens, x.view(*self.tokens.shape, -1), strict=True):
            self.program.embed(tokens[:1], whole(embedding), of_block[:1], outside)
            self.program.embed(torch.zeros_like(tokens[1:]), masked, of_block[1:], outside)

    def _run(self, last: list[int], step: StepMetadata, cache: KVCache) -> None:
        self.block.point_to(step, cache)
        self._last[:] = self._anchors[:] = last
        self.program.run()


class NativeChain(NativeCandidates):
    """`width` - 1 draft tokens of each block: the most probable of each place, or, where there is a selector
    (DFlash 2), each after the one before it, perhaps with the noise of its place."""

    def __init__(self, parts: Parts, width: int, k: int) -> None:
        super().__init__(parts, width, k)
        ids, self.values, self.lse = self.candidates
        self.chosen = ids[..., 0]
        self.sure: Tensor | None = None
        self.keys, self.temperatures = (
            torch.zeros(self.chosen.shape, dtype=torch.int64),
            torch.zeros(len(ids)),
        )
        self._temperatures = self.temperatures.numpy()
        self._rounds_of: tuple[object, ...] = ()
        self._rounds: Rounds | None = None
        if self.books is not None:
            self.chosen, self.sure = (
                torch.empty(self.keys.shape, dtype=torch.int64),
                torch.empty(self.lse.shape),
            )
            inputs, noise = (self.last, *self.candidates, *self.books), (self.keys, self.temperatures)
            self.program.walk(inputs, self.chosen, self.sure, noise)

    def run(
        self,
        last: list[int],
        temperatures: list[float],
        keys: Tensor | None,
        step: StepMetadata,
        cache: KVCache,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """After the tokens `last` of B rows, `temperatures` and `keys` as of `sampler.coupling`: the tokens
        and `sure` of `DraftTokens`, on the host."""
        with self.lock, self.block.lock:
            self._temperatures[:] = temperatures
            if keys is not None:
                assert self.sure is not None, "without a selector there is no noise"
                self.keys.copy_(keys)
            self._run(last, step, cache)
            sure = (self.values[..., 0] - self.lse).exp() if self.sure is None else self.sure
            return self.chosen.tolist(), sure.tolist()

    def rounds(self, contexts: Sequence["NativeContext"], softness: Sequence[float], most: int) -> Rounds:
        """Rounds of one row, drafted by a selector, which the next ones of the same contexts use again."""
        if (*contexts, most) != self._rounds_of or self._rounds is None:
            assert self.sure is not None, "a selector's"
            inputs = self.last, self.tokens[:, :1], self.block.start
            chain = Chain(self.program, *inputs, self.chosen, self.sure, self.keys)
            self._rounds_of = *contexts, most
            self._rounds = Rounds(chain, [c.of_round for c in contexts], softness, most)
        return self._rounds


class NativeTree(NativeCandidates):
    """`drafts.tree.best_first` of the `branch` most probable tokens of each place."""

    def __init__(self, parts: Parts, width: int, branch: int, nodes: int) -> None:
        super().__init__(parts, width, branch)
        B = len(self.last)
        self.positions, self.parents = (torch.empty(B, nodes, dtype=torch.int64) for _ in range(2))
        self.counts, self.reach = torch.empty(B, dtype=torch.int64), torch.empty(B, nodes)
        tree = self.positions, self.parents, self.counts, self.reach
        self.program.paths((self.last, *self.candidates), self.books, *tree)

    def run(self, last: list[int], step: StepMetadata, cache: KVCache) -> HostProposal:
        """After the tokens `last` of B rows."""
        with self.lock, self.block.lock:
            self._run(last, step, cache)
            counts: list[int] = self.counts.tolist()
            tree = (part[:, : max(counts)].tolist() for part in (self.positions, self.parents, self.reach))
            tokens, parents, reach = tree
            return HostProposal(tokens, counts, parents, reach, torch.device("cpu"))


def in_one_call(head: Head, selector: Selector | None, k: int) -> bool:
    """Whether programs take k candidates of each place."""
    books = () if selector is None else (selector.predecessor_codebook, selector.successor_codebook)
    return walkable(min(k, head.weight.shape[0]), *books)


class NativeContext:
    """Keys and values of B rows of up to T verified tokens, appended in all layers."""

    def __init__(
        self,
        c: DFlashConfig,
        layers: Sequence[DFlashLayer],
        fc: Linear,
        norm: RMSNorm,
        inv: Tensor,
        offset: int,
        B: int,
        T: int,
    ) -> None:
        K, D, M = c.num_kv_heads, c.head_dim, B * T
        self.rings, self.lock = Rings(len(layers)), Lock()
        self.aux = torch.zeros(B, T, len(c.target_layer_ids), c.hidden_size)
        self.start, self.counts, self.rows = (torch.zeros(B, dtype=torch.int64) for _ in range(3))
        views = (x.numpy() for x in (self.aux, self.start, self.counts, self.rows))
        self._aux, self._start, self._counts, self._rows = views
        fused, features = torch.empty(M, c.hidden_size), torch.empty(M, c.hidden_size)
        cos, sin = torch.empty(M, D // 2), torch.empty(M, D // 2)
        positions, kv = torch.zeros(B, T, dtype=torch.int64), torch.empty(B, T, 2 * K * D)
        self.program = program = Program(fc.rounded)
        program.linear(self.aux.view(M, -1), whole(fc.weight), fc.bias, fused)
        program.rms_norm(fused, norm.weight, norm.eps, features)
        program.places(self.start, None, 0, offset, positions)
        program.angles(positions.view(-1), inv, c.rope.concentration, cos, sin)
        for i, layer in enumerate(layers):
            weight, bias = layer.context_weights()
            program.linear(features, whole(weight), bias, kv.view(M, -1))
            norms = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
            program.rope(kv.view(M, -1), cos, sin, 0, K, norms)
            program.append(kv, self.rings.address(i), self.start, self.counts, 0, K, 0, self.rows)

    def append(self, aux: Tensor, step: StepMetadata, cache: KVCache) -> None:
        """aux [n,B,up to T,C] of the step's tokens."""
        with self.lock:
            self._aux[:, : aux.shape[2]] = aux.numpy().transpose(1, 2, 0, 3)  # see `kv.base.zeros`
            self.point_to(step, cache)
            self.program.run()

    def point_to(self, step: StepMetadata, cache: KVCache) -> None:
        self.rings.point_to(cache.rings)
        self._start[:], self._counts[:] = step.start, step.counts
        self._rows[:] = step.cache_rows or range(len(step.start))

    @property
    def of_round(self) -> Context:
        return Context(self.program, self.aux, self.start, self.counts)
