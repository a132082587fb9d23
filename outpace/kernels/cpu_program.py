"""Several kernels in one call: a list of them, packed once for buffers that stay, and run again and again."""

import ctypes
import struct

import torch
from torch import Tensor

from outpace.kernels import cpu, cpu_drafts
from outpace.kernels.cpu import KIND, Matrix, _c, _matrix, _of, _threads

LINEAR, RMS_NORM, ROPE, GATED, BLOCK_CONV, ANGLES, ADD = range(7)  # as in cpu_program.c
SUM, CALL, PROGRAM = struct.Struct("3q").pack, struct.Struct("2q"), struct.Struct("2q").pack


class Program:
    """Each method adds a kernel that reads and writes the given tensors, [M, ..] and contiguous, at every
    `run`; they are kept alive. What a kernel computes is what its wrapper in cpu.py does, to the bit."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, ctypes.Array[ctypes.c_char]]] = []
        self._kept: list[object] = []
        self._packed: bytes | None = None

    def _add(self, which: int, packed: bytes, *used: object) -> int:
        assert all(t.is_contiguous() for t in used if isinstance(t, Tensor))
        self._calls.append((which, ctypes.create_string_buffer(packed, len(packed))))
        self._kept += used
        self._packed = None
        return len(self._calls) - 1

    def linear(self, x: Tensor, w: Matrix, bias: Tensor | None, y: Tensor) -> int:
        """-> the place of this call, for `read_from`."""
        (m, k), (n, _) = x.shape, w.shape
        assert y.shape == (m, n) and w.shape[1] == k
        given = x.data_ptr(), *_matrix(w), *_of(bias), y.data_ptr()
        return self._add(LINEAR, cpu.LINEAR(*given, m, n, k, _threads()), x, w, bias, y)

    def rms_norm(self, x: Tensor, w: Tensor, eps: float, y: Tensor) -> int:
        tensors = x.data_ptr(), w.data_ptr(), y.data_ptr(), KIND[x.dtype], KIND[w.dtype]
        return self._add(RMS_NORM, cpu.NORM(*tensors, eps, *x.shape, _threads()), x, w, y)

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
        (q, q_kind), (k, k_kind) = _of(norms[0]), _of(norms[1])
        tables = qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), q, k, q_kind, k_kind
        sizes = len(qkv), heads, kv_heads, 2 * cos.shape[1], _threads()
        return self._add(ROPE, cpu.ROPE(*tables, norms[2], *sizes), qkv, cos, sin, *norms)

    def gated(self, gate_up: Tensor, y: Tensor) -> int:
        """SiLU over halves."""
        m, f = y.shape
        assert gate_up.shape == (m, 2 * f)
        tensors = gate_up.data_ptr(), 0, y.data_ptr(), KIND[gate_up.dtype]
        return self._add(GATED, cpu.GATES(*tensors, m, f, False, 0.0, 1.0, _threads()), gate_up, y)

    def block_conv(self, x: Tensor, base: Tensor, delta: Tensor, block: int, side: int, y: Tensor) -> int:
        """delta [M, sides, taps, G]."""
        packed = cpu_drafts.pack_conv(x, base, delta, block, side, None, y, None, None)
        return self._add(BLOCK_CONV, packed, x, base, delta, y)

    def angles(self, positions: Tensor, inv: Tensor, concentration: float, cos: Tensor, sin: Tensor) -> int:
        assert positions.dtype == torch.int64 and inv.dtype == torch.float64
        tensors = positions.data_ptr(), inv.data_ptr(), concentration, cos.data_ptr(), sin.data_ptr()
        used = positions, inv, cos, sin
        return self._add(ANGLES, cpu.ANGLES(*tensors, len(positions), len(inv)), *used)

    def add(self, x: Tensor, y: Tensor) -> int:
        """y += x."""
        assert x.shape == y.shape
        return self._add(ADD, SUM(x.data_ptr(), y.data_ptr(), y.numel()), x, y)

    def read_from(self, place: int, x: Tensor) -> None:
        """From now on the `linear` at `place` reads x, which the caller keeps alive until `run`."""
        assert self._calls[place][0] == LINEAR and x.is_contiguous()
        ctypes.c_int64.from_buffer(self._calls[place][1]).value = x.data_ptr()

    def run(self) -> None:
        if self._packed is None:
            calls = b"".join(CALL.pack(which, ctypes.addressof(packed)) for which, packed in self._calls)
            self._list = ctypes.create_string_buffer(calls, len(calls))
            self._packed = PROGRAM(ctypes.addressof(self._list), len(self._calls))
        _c.run(self._packed)
