"""Several kernels in one call: a list of them, packed once for buffers that stay, and run again and again."""

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.kernels import bindings, expert_bindings
from outpace.kernels.bindings import KIND, HeadNorms, Matrix, _address, _c, _matrix
from outpace.kernels.draft_bindings import Noise, pack_conv, pack_paths, pack_walk
from outpace.kernels.layouts import cases, sources


class Rings:
    """Where `append` and `attend` find each layer's keys and values: to run a program over another cache,
    `point_to` it, and no call is packed again."""

    def __init__(self, layers: int) -> None:
        self._size = len(_c.Ring(0, 0, 0, 0))
        self._entries = ctypes.create_string_buffer(layers * self._size)

    def address(self, layer: int) -> int:
        return ctypes.addressof(self._entries) + layer * self._size

    def point_to(self, rings: bytes) -> None:
        """`rings` of `pack_rings`; who runs the program keeps the tensors alive."""
        ctypes.memmove(self._entries, rings, len(self._entries))


def pack_rings(memories: Iterable[tuple[Tensor, Tensor] | None]) -> bytes:
    """k and v [B, K, S + 1, D] of every layer, the last slot a trash slot; None: no program reads them."""
    items = []
    for pair in memories:
        if pair is None:
            items.append(_c.Ring(0, 0, 0, 0))
            continue
        k, v = pair
        assert k.is_contiguous() and v.is_contiguous() and k.shape == v.shape and k.dtype == v.dtype
        items.append(_c.Ring(k.data_ptr(), v.data_ptr(), k.shape[2] - 1, KIND[k.dtype]))
    return b"".join(items)


class Program:
    """Each method adds a kernel that reads and writes the given tensors, at every `run`; they are kept alive.
    A kernel computes what its function in bindings.py does, to the bit. `rounded`: of all its products."""

    def __init__(self, rounded: bool = False) -> None:
        self.rounded = rounded
        self._numbers = cases(sources())
        self._calls: list[tuple[int, ctypes.Array[ctypes.c_char]]] = []
        self._used: list[object] = []
        self._packed: bytes | None = None
        self._placed: ctypes.Array[ctypes.c_char] | None = None

    def call(self, kernel: str, packed: bytes, *used: object) -> None:
        """Adds a call of `kernel` with these arguments; `used` is kept alive."""
        self._calls.append((self._numbers[kernel], ctypes.create_string_buffer(packed, len(packed))))
        self._used += used
        self._packed = None

    def extend(self, other: "Program") -> None:
        """Adds all calls of another program."""
        self._calls += other._calls
        self._used += other._used
        self._packed = None

    def linear(self, x: Tensor, w: Matrix, bias: Tensor | None, y: Tensor) -> None:
        self.call("linear", bindings.pack_linear(x, w, bias, y, self.rounded), x, w, bias, y)

    def rms_norm(self, x: Tensor, w: Tensor, eps: float, y: Tensor) -> None:
        self.call("rms_norm", bindings.pack_norm(x, w, eps, y), x, w, y)

    def rope(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, norms: HeadNorms | None
    ) -> None:
        """In place."""
        packed = bindings.pack_rope(qkv, cos, sin, heads, kv_heads, 2 * cos.shape[1], norms)
        self.call("rope", packed, qkv, cos, sin, norms)

    def gated(self, gate_up: Tensor, y: Tensor) -> None:
        """SiLU over halves."""
        self.call("gated", bindings.pack_gates(gate_up, None, y, None, 1.0), gate_up, y)

    def block_conv(self, x: Tensor, base: Tensor, delta: Tensor, block: int, side: int, y: Tensor) -> None:
        """delta [M, sides, taps, G]."""
        self.call("block_conv", pack_conv(x, base, delta, block, side, y), x, base, delta, y)

    def angles(self, positions: Tensor, inv: Tensor, concentration: float, cos: Tensor, sin: Tensor) -> None:
        packed = bindings.pack_angles(positions, inv, concentration, cos, sin)
        self.call("angles", packed, positions, inv, cos, sin)

    def route(
        self, x: Tensor, w: Tensor, b: Tensor | None, index: Tensor, weight: Tensor, **rules: bool
    ) -> None:
        """`rules`: softmax_first, renormalise."""
        self.call("route", bindings.pack_route(x, w, b, index, weight, **rules), x, w, b, index, weight)

    def moe(self, x: Tensor, index: Tensor, weight: Tensor, y: Tensor, *experts: Any) -> None:
        """`experts`: what `expert_bindings.pack_moe` takes after y, but for its last."""
        packed = expert_bindings.pack_moe(x, index, weight, y, *experts, rounded=self.rounded)
        self.call("moe", packed, x, index, weight, y, *experts)

    def places(self, start: Tensor, depth: Tensor | None, held: int, offset: int, positions: Tensor) -> None:
        """positions [B, T] = offset + start [B] + depth [B, T], or + held + t."""
        sizes = *positions.shape, held, offset
        packed = _c.Places(start.data_ptr(), _address(depth), positions.data_ptr(), *sizes)
        self.call("places", packed, start, depth, positions)

    def family(
        self,
        parents: Tensor,
        held: int,
        window: int,
        sees: Tensor,
        depth: Tensor,
        wrong: ctypes.c_int64,
    ) -> None:
        """parents [B, U] int64 of trees -> sees [B, T, U] bool and depth [B, T] int64 of the nodes from
        `held` on, see `kv.tree.Tree`; `wrong`: how many parents are no earlier node."""
        assert parents.dtype == depth.dtype == torch.int64 and sees.is_contiguous() and depth.is_contiguous()
        pointers = parents.data_ptr(), sees.data_ptr(), depth.data_ptr(), ctypes.addressof(wrong)
        packed = _c.Family(*pointers, *parents.shape, held, window)
        self.call("family", packed, parents, sees, depth, wrong)

    def argmax(self, x: Tensor, y: Tensor, odd: ctypes.c_int64) -> None:
        """x [M, N] -> y [M] int64; `odd`: how many rows hold a NaN, or have no finite largest value."""
        assert x.is_contiguous() and y.is_contiguous() and y.dtype == torch.int64
        pointers = x.data_ptr(), y.data_ptr(), ctypes.addressof(odd)
        self.call("argmax", _c.Largest(*pointers, *x.shape, bindings._threads()), x, y, odd)

    def top(self, x: Tensor, ids: Tensor, values: Tensor, lse: Tensor) -> None:
        """x [M, N] -> ids and values [M, k] and lse [M]."""
        self.call("top", bindings.pack_top(x, ids, values, lse), x, ids, values, lse)

    def walk(self, inputs: tuple[Tensor, ...], out: Tensor, confidence: Tensor, noise: Noise) -> None:
        """`inputs`: those of `draft_bindings.walk` -> out and confidence [M, n]."""
        self.call("walk", pack_walk(inputs, out, confidence, noise), inputs, out, confidence, noise)

    def paths(
        self, inputs: tuple[Tensor, ...], books: tuple[Tensor, Tensor, Tensor] | None, *tree: Tensor
    ) -> None:
        """See `draft_bindings.pack_paths`; `tree`: tokens, parents, counts, reach."""
        self.call("paths", pack_paths(inputs, books, *tree), inputs, books, *tree)

    def gather(self, x: Tensor, index: Tensor, y: Tensor) -> None:
        """x [N], index [M] and y [M] int64: y = x[index]."""
        assert x.dtype == index.dtype == y.dtype == torch.int64 and x.is_contiguous()
        pointers = x.data_ptr(), index.data_ptr(), y.data_ptr()
        self.call("gather", _c.Gather(*pointers, len(index)), x, index, y)

    def embed(self, tokens: Tensor, w: Matrix, y: Tensor, outside: ctypes.c_int64) -> None:
        """tokens [M] int64, w [V, C] -> y [M, C] float32; `outside`: how many tokens w has no row for."""
        assert tokens.dtype == torch.int64 and y.is_contiguous()
        pointers = tokens.data_ptr(), *_matrix(w), y.data_ptr(), ctypes.addressof(outside)
        self.call("embed", _c.Embed(*pointers, len(tokens), *w.shape), tokens, w, y, outside)

    def append(
        self,
        qkv: Tensor,
        ring: int,
        start: Tensor,
        counts: Tensor,
        heads: int,
        kv_heads: int,
        held: int,
        rows: Tensor | None = None,
    ) -> None:
        """The keys and values in qkv [B, T, (H + 2K) * D] to `rows` [B] of the ring of this address (None:
        the first B): the first counts [B] of each sequence at storage index start [B] + held and on. The
        rows of qkv may lie apart."""
        B, T, width = qkv.shape
        apart, column, one = qkv.stride()
        assert start.dtype == counts.dtype == torch.int64 and column == width and one == 1
        sizes = B, T, heads, kv_heads, width // (heads + 2 * kv_heads), apart // width, held
        packed = _c.Append(qkv.data_ptr(), start.data_ptr(), counts.data_ptr(), *sizes, ring, _address(rows))
        self.call("append", packed, qkv, rows, start, counts)

    def attend(
        self,
        q: Tensor,
        ring: int,
        kv_heads: int,
        start: Tensor,
        y: Tensor,
        window: int,
        sinks: Tensor | None,
        scale: float,
        tree: Tensor | None = None,
        depth: Tensor | None = None,
        both_ways: bool = False,
        rows: Tensor | None = None,
    ) -> None:
        """See `pack_attend`: q [B, T, H, D] over `rows` of the ring of this address (None: its
        first B) -> y [B, T, H * D]."""
        B, _, _, D = q.shape
        absent = torch.empty(B, kv_heads, 1, D, device="meta")  # k and v are the ring's
        rules = window, sinks, scale, tree, depth, both_ways
        packed = bindings.pack_attend(q, absent, absent, start, y, *rules, ring=ring, rows=rows)
        self.call("attend", packed, q, rows, start, y, *rules)

    def add(self, x: Tensor, y: Tensor) -> None:
        """y += x."""
        self.call("add_to", self._pair(x, y), x, y)

    def copy(self, x: Tensor, y: Tensor) -> None:
        self.call("copy", self._pair(x, y), x, y)

    def _pair(self, x: Tensor, y: Tensor) -> bytes:
        assert x.shape == y.shape and x.is_contiguous() and y.is_contiguous()
        packed: bytes = _c.Copy(x.data_ptr(), y.data_ptr(), y.numel())
        return packed

    def run(self) -> None:
        _c.run(self._once_packed())

    def address(self) -> int:
        """Of the packed program, for a kernel that runs it."""
        if self._packed is None or self._placed is None:
            self._placed = ctypes.create_string_buffer(self._once_packed())
        return ctypes.addressof(self._placed)

    def run_ahead(self, most: int, stops: Tensor, step: "Ahead", draws: "Draws | None" = None) -> int:
        """As one step of B rows, up to `most` times -> how often: see `run_ahead` in cpu_program.c. `stops`
        [n] int64."""
        taken = ctypes.c_int64()
        (B, *_), aux = step.tokens.shape, step.aux
        assert step.out.shape == (most, B) and step.out.is_contiguous()
        inputs = self.address(), step.tokens.data_ptr(), step.start.data_ptr(), step.best.data_ptr()
        rules = ctypes.addressof(step.odd), stops.data_ptr(), _address(aux)
        outputs = step.out.data_ptr(), _address(step.all_aux), ctypes.addressof(taken)
        noise: tuple[int, ...] = (0, 0, 0)
        if draws is not None:
            assert draws.keys.shape == step.out.shape and draws.keys.is_contiguous()
            noise = draws.keys.data_ptr(), draws.temperature.data_ptr(), step.logits.data_ptr()
        sizes = B, step.logits.shape[-1], most, len(stops), 0 if aux is None else aux.numel()
        _c.run_ahead(_c.Ahead(*inputs, *rules, *outputs, *noise, *sizes, bindings._threads()))
        return taken.value

    def _once_packed(self) -> bytes:
        if self._packed is None:
            calls = b"".join(_c.Call(number, ctypes.addressof(packed)) for number, packed in self._calls)
            self._list = ctypes.create_string_buffer(calls, len(calls))
            self._packed = _c.Program(ctypes.addressof(self._list), len(self._calls))
        return self._packed


class Draws(NamedTuple):
    """Noise of several steps, keys [steps, B] int64, and the temperatures [B] float32, 0: the argmax."""

    keys: Tensor
    temperature: Tensor


class Ahead(NamedTuple):
    """Buffers of a step of one token: its inputs tokens and start [B], its outputs logits [B, V], best [B],
    odd and aux; and where the outputs of many steps go: out [most, B], all_aux [most, *aux.shape]."""

    tokens: Tensor
    start: Tensor
    logits: Tensor
    best: Tensor
    odd: ctypes.c_int64
    aux: Tensor | None
    out: Tensor
    all_aux: Tensor | None
