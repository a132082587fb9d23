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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("cpu.c")
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC"]
# gcc for some CPUs leaves a lone chain of products and sums unfused: a row would then depend on its company
FLAGS += ["--param=avoid-fma-max-bits=0"]
KIND = {torch.float32: 0, torch.bfloat16: 1}
MXFP4 = 2
STYLES = ("gpt_oss", "silu")

# Each C function takes the address of one struct, packed here: ctypes would spend 0.1 us on every argument.
# The layouts are the structs of cpu.c in their order; q is an address or an int64, d a double.
LINEAR = struct.Struct("10q").pack
NORM = struct.Struct("5qd3q").pack
NORM_BACK = struct.Struct("6qd3q").pack
GATES = struct.Struct("7q2dq").pack
ROPE = struct.Struct("7qd5q").pack
ATTEND = struct.Struct("21qdq").pack
ROUTE = struct.Struct("14q").pack
MOE = struct.Struct("20q2dq").pack
ANGLES = struct.Struct("2qd4q").pack
ARGMAX = struct.Struct("5q").pack
PACKED = struct.Struct("5q").pack
BLOCKS = struct.Struct("23qdq").pack
FUNCTIONS = (
    *("linear", "rms_norm", "rms_norm_backward", "rope", "attend", "route", "moe", "unpack_mxfp4"),
    *("gated", "gated_backward", "angles", "argmax", "blocks"),
)


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
    flags = [*FLAGS, *os.environ.get("OUTPACE_CFLAGS", "").split()]
    parts = [*sources, version, _flags_of_this_cpu(), torch.__version__, str(openmp), *flags]
    target = _cache() / f"cpu-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:24]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # under a temporary name, then renamed: no other process may load half a library
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            thing, library = Path(folder, "cpu.o"), Path(folder, "cpu.so")
            _run(compiler, *flags, *(["-fopenmp"] if openmp else []), "-c", str(SOURCE), "-o", str(thing))
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


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] @ w [N, K].T + bias [N] -> [M, N]."""
    m, k = x.shape
    n = len(w)
    assert w.shape[1] == k and x.is_contiguous() and w.is_contiguous()
    y = _empty(m, n)
    b, b_kind = (0, 0) if bias is None else (bias.data_ptr(), KIND[bias.dtype])
    _c.linear(LINEAR(x.data_ptr(), w.data_ptr(), KIND[w.dtype], b, b_kind, y.data_ptr(), m, n, k, _threads()))
    return y


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * w over the last dimension of x [M, C], float32 or bfloat16."""
    m, c = x.shape
    assert x.is_contiguous() and w.is_contiguous()
    y = torch.empty_like(x)
    kinds = KIND[x.dtype], KIND[w.dtype]
    _c.rms_norm(NORM(x.data_ptr(), w.data_ptr(), y.data_ptr(), *kinds, eps, m, c, _threads()))
    return y


def rms_norm_backward(dy: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of rms_norm: dy and x [M, C], w [C] float32 -> dx like x, dw [C] float32."""
    m, c = x.shape
    assert x.is_contiguous() and dy.is_contiguous() and dy.dtype == x.dtype and w.dtype == torch.float32
    dx, dw = torch.empty_like(x), _empty(c)
    tensors = (x.data_ptr(), w.data_ptr(), dy.data_ptr(), dx.data_ptr(), dw.data_ptr())
    _c.rms_norm_backward(NORM_BACK(*tensors, KIND[x.dtype], eps, m, c, _threads()))
    return dx, dw


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
    both_ways: bool = False,
) -> Tensor:
    """q [B, T, H, D] over rings k, v [B, K, S, D] that hold start [B] tokens and these T -> [B, T, H * D].

    New token t stands at p = start + t and sees storage indices max(0, p - window + 1)..p (window 0: all of
    them). With tree [B, T, T] and depth [B, T] it stands at start + depth and sees of the new tokens those
    that tree names; with both_ways, all of them.
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
    sizes = q_b, q_t, k_b, k_h, b, t, h, kv, d, s, window, both_ways
    _c.attend(ATTEND(*first, y.data_ptr(), *sizes, scale, _threads()))
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


def gated(gate_up: Tensor, limit: float | None, alpha: float) -> Tensor:
    """gate_up [M, 2F], float32 or bfloat16 -> [M, F]: gate * sigmoid(alpha * gate) * up.

    With a limit, gate and up stand in turn, are clamped, and up + 1 takes the place of up; without one
    the gates are the first half.
    """
    y = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    _c.gated(_gates(gate_up, None, y, limit, alpha))
    return y


def gated_backward(dy: Tensor, gate_up: Tensor, limit: float | None, alpha: float) -> Tensor:
    """Gradient of gated: dy [M, F], gate_up [M, 2F] -> [M, 2F]."""
    assert dy.is_contiguous() and dy.dtype == gate_up.dtype
    out = torch.empty_like(gate_up)
    _c.gated_backward(_gates(gate_up, dy, out, limit, alpha))
    return out


def _gates(x: Tensor, dy: Tensor | None, out: Tensor, limit: float | None, alpha: float) -> bytes:
    assert x.is_contiguous()
    tensors = x.data_ptr(), 0 if dy is None else dy.data_ptr(), out.data_ptr(), KIND[x.dtype]
    sizes = len(x), x.shape[1] // 2, limit is not None
    return GATES(*tensors, *sizes, limit or 0.0, alpha, _threads())


def angles(positions: Tensor, inv: Tensor, concentration: float) -> tuple[Tensor, Tensor]:
    """positions [M] int64, inv [n] float64 -> cos and sin of their products [M, n], times concentration."""
    assert positions.is_contiguous() and positions.dtype == torch.int64
    assert inv.is_contiguous() and inv.dtype == torch.float64
    m, half = len(positions), len(inv)
    cos, sin = _empty(m, half), _empty(m, half)
    tables = cos.data_ptr(), sin.data_ptr()
    _c.angles(ANGLES(positions.data_ptr(), inv.data_ptr(), concentration, *tables, m, half))
    return cos, sin


def argmax(x: Tensor) -> Tensor:
    """x [M, N] -> the place of each row's largest value, the first among equals, [M] int64."""
    assert x.is_contiguous() and x.shape[1]
    y = _empty(len(x), dtype=torch.int64)
    _c.argmax(ARGMAX(x.data_ptr(), y.data_ptr(), *x.shape, _threads()))
    return y


Inputs = tuple[Tensor, ...]  # q [N, H, D], k and v [N, K, D], context_k and context_v [S, K, D], of one dtype
# first [R+1], context [R+1] and seen [A] of ops.blocks.Layout; the length of a block, the window, the scale
Blocks = tuple[tuple[Tensor, Tensor, Tensor], int, int, float]


def blocks(inputs: Inputs, how: Blocks) -> tuple[Tensor, Tensor]:
    """-> out [N, H * D] and the log-sum-exp of every query's scores [N, H], both float32; inputs float32 or
    bfloat16."""
    n, h, d = inputs[0].shape
    out, lse = _empty(n, h * d), _empty(n, h)
    _c.blocks(_blocks(inputs, how, out, lse, ()))
    return out, lse


def blocks_backward(inputs: Inputs, how: Blocks, out: Tensor, lse: Tensor, grad: Tensor) -> Inputs:
    """grad [N, H * D] of out -> the gradients of the inputs, each like its own."""
    found = tuple(map(torch.empty_like, inputs))
    _c.blocks(_blocks(inputs, how, out, lse, (grad, *found)))
    return found


def _blocks(inputs: Inputs, how: Blocks, out: Tensor, lse: Tensor, gradients: Inputs) -> bytes:
    q, k, _, context_k, _ = inputs
    ranges, block, window, scale = how
    first, context, seen = ranges
    assert all(x.is_contiguous() and x.dtype == q.dtype for x in (*inputs, *gradients))
    assert len(seen) * block == len(q) and int(first[-1]) == len(seen) and int(context[-1]) == len(context_k)
    given = *(x.data_ptr() for x in inputs), KIND[q.dtype], *(x.data_ptr() for x in ranges)
    made = [x.data_ptr() for x in (out, lse, *gradients)] + [0] * (0 if gradients else 6)
    sizes = len(first) - 1, block, q.shape[1], k.shape[1], q.shape[2], window
    return BLOCKS(*given, *made, *sizes, scale, _threads())
