"""ctypes wrappers of the CPU kernels in cpu.c, built by a C compiler at first use into a per-user cache."""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("cpu.c")
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC"]
KIND = {torch.float32: 0, torch.bfloat16: 1}
MXFP4 = 2
STYLES = ("gpt_oss", "silu")

# Each C function takes the address of one struct, packed here: ctypes would spend 0.1 us on every argument.
# The layouts are the structs of cpu.c in their order; q is an address or an int64, d a double.
LINEAR = struct.Struct("11q").pack
NORM = struct.Struct("3qd4q").pack
ROPE = struct.Struct("7qd5q").pack
ATTEND = struct.Struct("20qdq").pack
ROUTE = struct.Struct("14q").pack
MOE = struct.Struct("20q2dq").pack
PACKED = struct.Struct("5q").pack
GATED = struct.Struct("5q").pack
FUNCTIONS = ("linear", "rms_norm", "rope", "attend", "route", "moe", "unpack_mxfp4", "silu_mul")


def _openmp() -> str | None:
    """The OpenMP runtime that torch has loaded: a second one would bring a second pool of threads."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    mapped = re.findall(r"\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so[^/\s]*", maps)
    return min(mapped, key=lambda path: "torch" not in path, default=None)


def _flags_of_this_cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return next(lines, platform.machine())


def _cache() -> Path:
    return Path(os.environ.get("OUTPACE_CACHE") or Path.home() / ".cache" / "outpace")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _build(compiler: str, openmp: str | None) -> ctypes.CDLL:
    version = _run(compiler, "--version")
    sources = [path.read_text() for path in sorted(SOURCE.parent.glob("*.c"))]
    parts = [*sources, version, _flags_of_this_cpu(), torch.__version__, str(openmp), *FLAGS]
    target = _cache() / f"cpu-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:24]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # under a temporary name, then renamed: no other process may load half a library
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            thing, library = Path(folder, "cpu.o"), Path(folder, "cpu.so")
            _run(compiler, *FLAGS, *(["-fopenmp"] if openmp else []), "-c", str(SOURCE), "-o", str(thing))
            # not -fopenmp here: it would add the compiler's own runtime
            _run(compiler, "-shared", str(thing), *([openmp] if openmp else []), "-lm", "-o", str(library))
            ctypes.CDLL(str(library))
            library.replace(target)
    return ctypes.CDLL(str(target))


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("OUTPACE_KERNELS") == "0":
        return None, "switched off by OUTPACE_KERNELS=0"
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None, "no C compiler (cc, gcc or clang) on the PATH"
    why = ""
    # without OpenMP if the compiler and torch's runtime do not fit: one thread is better than none
    for openmp in dict.fromkeys([_openmp(), None]):
        try:
            library = _build(compiler, openmp)
        except subprocess.CalledProcessError as error:
            why = f"{' '.join(error.cmd)} failed: {error.stderr[:500]}"
        except (OSError, RuntimeError) as error:  # no place to write to; no home
            why = str(error)
        else:
            for name in FUNCTIONS:
                getattr(library, name).argtypes = [ctypes.c_char_p]
                getattr(library, name).restype = None
            return library, None
    return None, why


def available() -> bool:
    return _load()[0] is not None


def why_not() -> str | None:
    """Why the kernels are not available; None if they are."""
    return _load()[1]


class _Library:
    """Holds the C functions; the first one asked for loads them all, later ones are plain attributes."""

    def __getattr__(self, name: str) -> Any:
        library, why = _load()
        if library is None:
            raise RuntimeError(f"CPU kernels are not available: {why}")
        for each in FUNCTIONS:
            setattr(self, each, getattr(library, each))
        return self.__dict__[name]


_c = _Library()
_threads = torch.get_num_threads
_empty = torch.empty


def _of(tensor: Tensor | None) -> tuple[int, int]:
    """Address and kind of a tensor that may be absent."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), KIND[tensor.dtype])


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [M, K] @ w [N, K].T + bias [N] + residual [M, N] -> [M, N]."""
    m, k = x.shape
    n = len(w)
    assert w.shape[1] == k and x.is_contiguous() and w.is_contiguous()
    y = _empty(m, n)
    b, b_kind = (0, 0) if bias is None else (bias.data_ptr(), KIND[bias.dtype])
    r, out = 0 if residual is None else residual.data_ptr(), y.data_ptr()
    _c.linear(LINEAR(x.data_ptr(), w.data_ptr(), KIND[w.dtype], b, b_kind, r, out, m, n, k, _threads()))
    return y


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * w over the last dimension of x [M, C]."""
    m, c = x.shape
    assert x.is_contiguous()
    y = _empty(m, c)
    _c.rms_norm(NORM(x.data_ptr(), w.data_ptr(), KIND[w.dtype], eps, y.data_ptr(), m, c, _threads()))
    return y


def rope_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    n_heads: int,
    n_kv: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Rotates the query and key heads of qkv [M, (H + 2K) * D] in place, after a norm per head if given."""
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    (q, q_kind), (k, k_kind) = _of(q_norm), _of(k_norm)
    address, m = qkv.data_ptr(), len(qkv)
    table, sines = cos.data_ptr(), sin.data_ptr()
    _c.rope(ROPE(address, table, sines, q, k, q_kind, k_kind, eps, m, n_heads, n_kv, head_dim, _threads()))
    return qkv


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    window: int,
    sinks: Tensor | None,
    scale: float,
    tree: Tensor | None = None,
    depth: Tensor | None = None,
) -> Tensor:
    """q [B, T, H, D] over rings k, v [B, K, S, D] that hold start [B] tokens and these T -> [B, T, H * D].

    New token t stands at p = start + t and sees storage indices max(0, p - window + 1)..p (window 0: all of
    them). With tree [B, T, T] and depth [B, T] it stands at start + depth and sees of the new tokens those
    that tree names.
    """
    b, t, h, d = q.shape
    _, kv, s, _ = k.shape
    q_b, q_t, q_h, q_1 = q.stride()
    k_b, k_h, k_s, k_1 = strides = k.stride()
    assert q_h == k_s == d and q_1 == k_1 == 1 and strides == v.stride()
    assert h <= 64 * kv and d <= 256 and d % 8 == 0
    y = _empty(b, t, h * d)
    sink, kind = (0, 0) if sinks is None else (sinks.data_ptr(), KIND[sinks.dtype])
    trees, depths = (0, 0) if tree is None or depth is None else (tree.data_ptr(), depth.data_ptr())
    first = q.data_ptr(), k.data_ptr(), v.data_ptr(), start.data_ptr(), trees, depths, sink, kind
    _c.attend(ATTEND(*first, y.data_ptr(), q_b, q_t, k_b, k_h, b, t, h, kv, d, s, window, scale, _threads()))
    return y


def route(
    x: Tensor, w: Tensor, b: Tensor | None, k: int, softmax_first: bool, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """The k largest of x [M, C] @ w [E, C].T + b [E] -> index int64 [M, k], weight [M, k], sorted."""
    m, c = x.shape
    e = len(w)
    assert x.is_contiguous() and w.is_contiguous() and k <= e
    index, weight = _empty(m, k, dtype=torch.int64), _empty(m, k)
    bias, kind = _of(b)
    tensors = x.data_ptr(), w.data_ptr(), KIND[w.dtype], bias, kind, index.data_ptr(), weight.data_ptr()
    _c.route(ROUTE(*tensors, m, e, c, k, softmax_first, renormalise, _threads()))
    return index, weight


Packed = tuple[Tensor, Tensor]  # MXFP4: blocks uint8 [..., G, 16], scales uint8 [..., G]


def _experts(w: Tensor | Packed, bias: Tensor | None) -> tuple[int, int, int, int, int]:
    b, kind = (0, 0) if bias is None else (bias.data_ptr(), KIND[bias.dtype])
    if isinstance(w, Tensor):
        return w.data_ptr(), 0, KIND[w.dtype], b, kind
    return w[0].data_ptr(), w[1].data_ptr(), MXFP4, b, kind


def moe(
    x: Tensor,
    idx: Tensor,
    weight: Tensor,
    up: Tensor | Packed,
    up_bias: Tensor | None,
    down: Tensor | Packed,
    down_bias: Tensor | None,
    style: str,
    limit: float = 7.0,
    alpha: float = 1.702,
) -> Tensor:
    """x [M, C] through its experts idx [M, k], weighed and summed -> [M, C].

    up [E, 2F, C] and down [E, C, F] are float32, bfloat16 or MXFP4 pairs. style "gpt_oss": rows of up are
    gate and up in turn, clamped; "silu": all gates, then all ups.
    """
    m, c = x.shape
    e, f2 = (up if isinstance(up, Tensor) else up[0]).shape[:2]
    assert x.is_contiguous() and idx.is_contiguous() and weight.is_contiguous() and style in STYLES
    y = _empty(m, c)
    experts = *_experts(up, up_bias), *_experts(down, down_bias)
    clamped = style == "gpt_oss"
    sizes = y.data_ptr(), m, c, f2 // 2, e, idx.shape[1], clamped, limit, alpha if clamped else 1.0
    _c.moe(MOE(x.data_ptr(), idx.data_ptr(), weight.data_ptr(), *experts, *sizes, _threads()))
    return y


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [..., G, 16], scales uint8 [..., G] -> float32 [..., G * 32]."""
    assert blocks.is_contiguous() and scales.is_contiguous() and blocks.shape[-1] == 16
    y = _empty(*scales.shape[:-1], scales.shape[-1] * 32)
    _c.unpack_mxfp4(PACKED(blocks.data_ptr(), scales.data_ptr(), y.data_ptr(), scales.numel(), _threads()))
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of gate_up [M, 2F] -> [M, F]."""
    m, f2 = gate_up.shape
    assert gate_up.is_contiguous()
    y = _empty(m, f2 // 2)
    _c.silu_mul(GATED(gate_up.data_ptr(), y.data_ptr(), m, f2 // 2, _threads()))
    return y


MANY = (1, 2, 4, 8, 16)


def _measure(what: str, call: Callable[[int, int], object], copies: int, nbytes: float) -> None:
    """Prints one line: call(rows, copy) over enough copies to leave the caches, the best of 5 rounds."""
    times = []
    for m in MANY:
        rounds = []
        for _ in range(6):
            begin = time.perf_counter()
            for copy in range(copies):
                call(m, copy)
            rounds.append((time.perf_counter() - begin) / copies)
        times.append(min(rounds[1:]))
    ratios = "".join(f"{t / times[0]:7.2f}" for t in times)
    print(f"{what:34} {times[0] * 1e6:9.1f} us {nbytes / times[0] / 1e9:7.1f} GB/s {ratios}")


def _measure_linear(n: int, k: int, dtype: torch.dtype, copies: int) -> None:
    w, x = [torch.randn(n, k).to(dtype) for _ in range(copies)], torch.randn(16, k)
    name = f"linear {n} x {k} {str(dtype)[6:]}"
    _measure(name, lambda m, i: linear(x[:m], w[i]), copies, n * k * dtype.itemsize)


def _measure_moe(c: int, f: int, e: int, k: int, dtype: torch.dtype, copies: int) -> None:
    def weights(*shape: int) -> Tensor | Packed:
        if dtype != torch.uint8:
            return torch.randn(shape).to(dtype)
        blocks = torch.randint(256, (*shape[:-1], shape[-1] // 32, 16), dtype=dtype)
        return blocks, torch.full(blocks.shape[:-1], 120, dtype=dtype)

    x, gate = torch.randn(16, c), torch.rand(16, k)
    index = [torch.rand(16, e).topk(k).indices for _ in range(copies)]
    up, down = [weights(e, 2 * f, c) for _ in index], [weights(e, c, f) for _ in index]
    nbytes = 3 * k * c * f * (17 / 32 if dtype == torch.uint8 else dtype.itemsize)
    name = f"moe {c}, {f}, {k} of {e} " + ("mxfp4" if dtype == torch.uint8 else str(dtype)[6:])

    def call(m: int, i: int) -> Tensor:
        return moe(x[:m], index[i][:m], gate[:m], up[i], None, down[i], None, "gpt_oss")

    _measure(name, call, copies, nbytes)


def _measure_attend(h: int, kv: int, d: int, length: int, window: int, copies: int) -> None:
    q, start = torch.randn(1, 16, h, d), torch.tensor([length])
    k, v = torch.randn(2, copies, kv, length + 16, d)
    nbytes = 8 * kv * d * (window or length)
    name = f"attend {h}/{kv} x {d}, {length} keys" + (f", window {window}" if window else "")
    _measure(
        name,
        lambda m, i: attend(q[:, :m], k[i : i + 1], v[i : i + 1], start, window, None, 0.1),
        copies,
        nbytes,
    )


def _benchmark() -> None:
    print(f"{_threads()} threads; time of n rows over one row, n =" + "".join(f"{m:7}" for m in MANY))
    for dtype in (torch.float32, torch.bfloat16):
        _measure_linear(2880, 2880, dtype, 6)
        _measure_linear(1024, 512, dtype, 60)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        _measure_moe(512, 512, 16, 4, dtype, 8)
        _measure_moe(256, 128, 8, 2, dtype, 60)
    _measure_attend(16, 2, 64, 1000, 0, 60)
    _measure_attend(16, 2, 64, 1000, 128, 60)
    _measure_attend(16, 8, 128, 4000, 0, 4)
    x, w, up, angle = torch.randn(16, 512), torch.randn(512), torch.randn(16, 1024), torch.randn(16, 32)
    router, qkv = torch.randn(16, 512), torch.randn(16, 20 * 64)
    _measure("rms_norm 512", lambda m, i: rms_norm(x[:m], w, 1e-5), 200, 2048)
    _measure(
        "rope_ 16 + 2 heads of 64", lambda m, i: rope_(qkv[:m], angle[:m], angle[:m], 16, 2, 64), 200, 4608
    )
    _measure("silu_mul 512", lambda m, i: silu_mul(up[:m]), 200, 4096)
    _measure("route 512, 4 of 16", lambda m, i: route(x[:m], router, None, 4, False, False), 200, 32768)
    blocks, scales = torch.randint(256, (16, 64, 16, 16)).byte(), torch.full((16, 64, 16), 120).byte()
    _measure("unpack_mxfp4 64n x 512", lambda m, i: unpack_mxfp4(blocks[:m], scales[:m]), 50, 64 * 16 * 17)


if __name__ == "__main__":
    _benchmark()
