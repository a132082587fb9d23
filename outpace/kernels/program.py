"""Several kernels in one call: a list of them, packed once for buffers that stay, and run again and again."""

import ctypes

import torch
from torch import Tensor

from outpace.kernels.bindings import KIND, Matrix, _address_and_kind, _c, _matrix, _pack_conv, _threads
from outpace.kernels.layouts import cases, sources


class Program:
    """Each method adds a kernel that reads and writes the given tensors, [M, ..] and contiguous, at every
    `run`; they are kept alive. A kernel computes what its function in bindings.py does, to the bit."""

    def __init__(self) -> None:
        self._numbers = cases(sources())
        self._calls: list[tuple[int, ctypes.Array[ctypes.c_char]]] = []
        self._used: list[object] = []
        self._packed: bytes | None = None

    def _add(self, kernel: str, packed: bytes, *used: object) -> int:
        assert all(t.is_contiguous() for t in used if isinstance(t, Tensor))
        self._calls.append((self._numbers[kernel], ctypes.create_string_buffer(packed, len(packed))))
        self._used += used
        self._packed = None
        return len(self._calls) - 1

    def linear(self, x: Tensor, w: Matrix, bias: Tensor | None, y: Tensor) -> int:
        """-> the index of this call, for `read_from`."""
        (m, k), (n, _) = x.shape, w.shape
        assert y.shape == (m, n) and w.shape[1] == k
        tensors = x.data_ptr(), *_matrix(w), *_address_and_kind(bias), y.data_ptr()
        return self._add("linear", _c.Linear(*tensors, m, n, k, _threads()), x, w, bias, y)

    def rms_norm(self, x: Tensor, w: Tensor, eps: float, y: Tensor) -> int:
        tensors = x.data_ptr(), w.data_ptr(), y.data_ptr(), KIND[x.dtype], KIND[w.dtype]
        return self._add("rms_norm", _c.Norm(*tensors, eps, *x.shape, _threads()), x, w, y)

    def rope(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv_heads: int,
        norms: tuple[Tensor, Tensor, float],
    ) -> int:
        """In place."""
        (q, q_kind), (k, k_kind) = _address_and_kind(norms[0]), _address_and_kind(norms[1])
        tensors = qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), q, k, q_kind, k_kind
        sizes = len(qkv), heads, kv_heads, 2 * cos.shape[1], _threads()
        return self._add("rope", _c.Rope(*tensors, norms[2], *sizes), qkv, cos, sin, *norms)

    def gated(self, gate_up: Tensor, y: Tensor) -> int:
        """SiLU over halves."""
        m, f = y.shape
        assert gate_up.shape == (m, 2 * f)
        tensors = gate_up.data_ptr(), 0, y.data_ptr(), KIND[gate_up.dtype]
        return self._add("gated", _c.Gates(*tensors, m, f, False, 0.0, 1.0, _threads()), gate_up, y)

    def block_conv(self, x: Tensor, base: Tensor, delta: Tensor, block: int, side: int, y: Tensor) -> int:
        """delta [M, sides, taps, G]."""
        return self._add("block_conv", _pack_conv(x, base, delta, block, side, y), x, base, delta, y)

    def angles(self, positions: Tensor, inv: Tensor, concentration: float, cos: Tensor, sin: Tensor) -> int:
        assert positions.dtype == torch.int64 and inv.dtype == torch.float64
        tensors = positions.data_ptr(), inv.data_ptr(), concentration, cos.data_ptr(), sin.data_ptr()
        packed = _c.Angles(*tensors, len(positions), len(inv))
        return self._add("angles", packed, positions, inv, cos, sin)

    def add(self, x: Tensor, y: Tensor) -> int:
        """y += x."""
        assert x.shape == y.shape
        return self._add("add_to", _c.Sum(x.data_ptr(), y.data_ptr(), y.numel()), x, y)

    def read_from(self, call: int, x: Tensor) -> None:
        """From now on the `linear` of index `call` reads x, which the caller keeps alive until `run`."""
        number, packed = self._calls[call]
        assert number == self._numbers["linear"] and x.is_contiguous()
        ctypes.c_int64.from_buffer(packed).value = x.data_ptr()  # x is the struct's first field

    def run(self) -> None:
        if self._packed is None:
            calls = b"".join(_c.Call(number, ctypes.addressof(packed)) for number, packed in self._calls)
            self._list = ctypes.create_string_buffer(calls, len(calls))
            self._packed = _c.Program(ctypes.addressof(self._list), len(self._calls))
        _c.run(self._packed)
