"""ctypes wrappers of the CPU kernels in cpu.c, which a C compiler builds at first use into a per-user cache."""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("cpu.c")
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC"]
KIND = {torch.float32: 0, torch.bfloat16: 1}
MXFP4 = 2

P, N, I, X = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES = {
    "linear": [P, P, I, P, I, P, P, N, N, N, I],
    "rms_norm": [P, P, I, X, P, N, N, I],
    "rope": [P, P, P, P, P, I, I, X, N, N, N, N, I],
    "attend": [P, P, P, P, P, P, P, I, P, N, N, N, N, N, N, N, N, N, N, N, X, I],
    "route": [P, P, I, P, I, P, P, N, N, N, N, I, I, I],
    "moe": [P, P, P, P, P, P, I, I, P, P, P, I, I, P, N, N, N, N, N, I, X, X, I],
    "unpack_mxfp4": [P, P, P, N, I],
    "silu_mul": [P, P, N, N, I],
}


def _openmp() -> str | None:
    """The OpenMP runtime that torch has loaded: a second one would bring a second pool of threads."""
    try:
        mapped = re.findall(r"\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so[^/\s]*", Path("/proc/self/maps").read_text())
    except OSError:
        return None
    return min(mapped, key=lambda path: "torch" not in path, default=None)


def _flags_of_this_cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), platform.machine())


def _cache() -> Path:
    return Path(os.environ.get("OUTPACE_CACHE") or Path.home() / ".cache" / "outpace")


def _compile(compiler: str, target: Path, openmp: str | None) -> None:
    """Builds under a temporary name and renames, so that no other process loads half a library."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        thing, library = os.path.join(folder, "cpu.o"), os.path.join(folder, "cpu.so")
        steps = [
            [compiler, *FLAGS, *(["-fopenmp"] if openmp else []), "-c", str(SOURCE), "-o", thing],
            # not -fopenmp here: it would add the compiler's own runtime
            [compiler, "-shared", thing, *([openmp] if openmp else []), "-lm", "-o", library],
        ]
        for step in steps:
            subprocess.run(step, check=True, capture_output=True, text=True)
        ctypes.CDLL(library)
        os.replace(library, target)


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("OUTPACE_KERNELS") == "0":
        return None, "switched off by OUTPACE_KERNELS=0"
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None, "no C compiler (cc, gcc or clang) on the PATH"
    why = ""
    for openmp in dict.fromkeys([_openmp(), None]):  # a compiler with another runtime: one thread is better than none
        try:
            version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
            parts = [SOURCE.read_text(), version, _flags_of_this_cpu(), torch.__version__, str(openmp), " ".join(FLAGS)]
            target = _cache() / f"cpu-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:24]}.so"
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                _compile(compiler, target, openmp)
            library = ctypes.CDLL(str(target))
        except subprocess.CalledProcessError as error:
            why = f"{' '.join(error.cmd)} failed: {error.stderr[-500:]}"
        except OSError as error:
            why = str(error)
        else:
            for name, arguments in SIGNATURES.items():
                getattr(library, name).argtypes = arguments
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

    def __getattr__(self, name: str):
        library, why = _load()
        if library is None:
            raise RuntimeError(f"CPU kernels are not available: {why}")
        for each in SIGNATURES:
            setattr(self, each, getattr(library, each))
        return self.__dict__[name]


_c = _Library()
_threads = torch.get_num_threads
_empty = torch.empty


def _of(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Address and kind of a tensor that may be absent."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), KIND[tensor.dtype])


def linear(x, w, bias=None, residual=None):
    """x [M, K] @ w [N, K].T + bias [N] + residual [M, N] -> [M, N]."""
    m, k = x.shape
    n = w.shape[0]
    assert w.shape[1] == k and x.is_contiguous() and w.is_contiguous()
    y = _empty(m, n)
    b, b_kind = (0, 0) if bias is None else (bias.data_ptr(), KIND[bias.dtype])
    r = 0 if residual is None else residual.data_ptr()
    _c.linear(x.data_ptr(), w.data_ptr(), KIND[w.dtype], b, b_kind, r, y.data_ptr(), m, n, k, _threads())
    return y


def rms_norm(x, w, eps):
    """x * rsqrt(mean(x^2) + eps) * w over the last dimension of x [M, C]."""
    m, c = x.shape
    assert x.is_contiguous()
    y = _empty(m, c)
    _c.rms_norm(x.data_ptr(), w.data_ptr(), KIND[w.dtype], eps, y.data_ptr(), m, c, _threads())
    return y


def rope_(qkv, cos, sin, n_heads, n_kv, head_dim, q_norm=None, k_norm=None, eps=1e-6):
    """Rotates the query and key heads of qkv [M, (H + 2K) * D] in place, after a norm per head where weights are given."""
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    (q, q_kind), (k, k_kind) = _of(q_norm), _of(k_norm)
    _c.rope(qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), q, k, q_kind, k_kind, eps, qkv.shape[0], n_heads, n_kv, head_dim,
            _threads())
    return qkv


def attend(q, k, v, start, window, sinks, scale, tree=None, depth=None):
    """q [B, T, H, D] over rings k, v [B, K, S, D] that hold start [B] tokens and these T -> [B, T, H * D].

    New token t stands at p = start + t and sees storage indices max(0, p - window + 1)..p (window 0: all of them). With tree
    [B, T, T] and depth [B, T] it stands at start + depth and sees of the new tokens those that tree names.
    """
    b, t, h, d = q.shape
    kv, s = k.shape[1], k.shape[2]
    q_b, q_t, q_h, q_1 = q.stride()
    strides = k.stride()
    assert q_h == d and q_1 == 1 and strides[2:] == (d, 1) and strides == v.stride() and h // kv <= 64 and d % 8 == 0 and d <= 256
    y = _empty(b, t, h * d)
    sink, sink_kind = (0, 0) if sinks is None else (sinks.data_ptr(), KIND[sinks.dtype])
    tree, depth = (0, 0) if tree is None else (tree.data_ptr(), depth.data_ptr())
    _c.attend(q.data_ptr(), k.data_ptr(), v.data_ptr(), start.data_ptr(), tree, depth, sink, sink_kind, y.data_ptr(), q_b, q_t,
              strides[0], strides[1], b, t, h, kv, d, s, window, scale, _threads())
    return y


def route(x, w, b, k, softmax_first, renormalise):
    """The k largest of x [M, C] @ w [E, C].T + b [E] -> index int64 [M, k], weight [M, k]; the lowest index first among equals."""
    m, c = x.shape
    e = w.shape[0]
    assert x.is_contiguous() and w.is_contiguous() and k <= e
    index, weight = _empty(m, k, dtype=torch.int64), _empty(m, k)
    bias, kind = _of(b)
    _c.route(x.data_ptr(), w.data_ptr(), KIND[w.dtype], bias, kind, index.data_ptr(), weight.data_ptr(), m, e, c, k, softmax_first,
             renormalise, _threads())
    return index, weight


def _experts(w) -> tuple[int, int, int]:
    if isinstance(w, torch.Tensor):
        return w.data_ptr(), 0, KIND[w.dtype]
    return w[0].data_ptr(), w[1].data_ptr(), MXFP4


def moe(x, idx, weight, up, up_bias, down, down_bias, style, limit=7.0, alpha=1.702):
    """x [M, C] through its experts idx [M, k], weighed and summed -> [M, C].

    up [E, 2F, C] and down [E, C, F] are float32, bfloat16 or a pair (blocks, scales) of MXFP4. style "gpt_oss": rows of up are
    gate and up in turn, clamped; "silu": all gates, then all ups.
    """
    m, c = x.shape
    first = up if isinstance(up, torch.Tensor) else up[0]
    e, f = first.shape[0], first.shape[1] // 2
    assert x.is_contiguous() and idx.is_contiguous() and weight.is_contiguous() and style in ("gpt_oss", "silu")
    y = _empty(m, c)
    (a, a_s, a_kind), (b, b_s, b_kind) = _experts(up), _experts(down)
    (p, p_kind), (q, q_kind) = _of(up_bias), _of(down_bias)
    _c.moe(x.data_ptr(), idx.data_ptr(), weight.data_ptr(), a, a_s, p, a_kind, p_kind, b, b_s, q, b_kind, q_kind, y.data_ptr(),
           m, c, f, e, idx.shape[1], style == "gpt_oss", limit, alpha, _threads())
    return y


def unpack_mxfp4(blocks, scales):
    """blocks uint8 [..., G, 16], scales uint8 [..., G] -> float32 [..., G * 32]."""
    assert blocks.is_contiguous() and scales.is_contiguous() and blocks.shape[-1] == 16
    y = _empty(*scales.shape[:-1], scales.shape[-1] * 32)
    _c.unpack_mxfp4(blocks.data_ptr(), scales.data_ptr(), y.data_ptr(), scales.numel(), _threads())
    return y


def silu_mul(gate_up):
    """silu(first half) * second half of gate_up [M, 2F] -> [M, F]."""
    m, f = gate_up.shape
    assert gate_up.is_contiguous()
    y = _empty(m, f // 2)
    _c.silu_mul(gate_up.data_ptr(), y.data_ptr(), m, f // 2, _threads())
    return y


def _measure(what: str, call, copies: int, nbytes: float, rows) -> None:
    """One line: call(m, copy) over enough copies to leave the cache; the best of 5 rounds."""
    times = []
    for m in rows:
        rounds = []
        for _ in range(6):
            begin = time.perf_counter()
            for copy in range(copies):
                call(m, copy)
            rounds.append((time.perf_counter() - begin) / copies)
        times.append(min(rounds[1:]))
    ratios = "  ".join(f"{m}: {t / times[0]:.2f}" for m, t in zip(rows, times))
    print(f"{what:34} {times[0] * 1e6:9.1f} us {nbytes / times[0] / 1e9:7.1f} GB/s   {ratios}")


def _benchmark() -> None:
    print(f"{_threads()} threads\n{'function':34} {'one row':>12} {'of weights':>12}   time of n rows over one row")
    rows = (1, 2, 4, 8, 16)
    for n, k, copies in ((2880, 2880, 4), (1024, 512, 48)):
        for dtype in KIND:
            w, x = [torch.randn(n, k).to(dtype) for _ in range(copies)], torch.randn(16, k)
            _measure(f"linear {n}x{k} {dtype}"[:34], lambda m, i: linear(x[:m], w[i]), copies, n * k * w[0].element_size(), rows)
    for c, f, e, k, copies in ((512, 512, 16, 4, 8), (256, 128, 8, 2, 64)):
        x, draw = torch.randn(16, c), torch.Generator().manual_seed(1)
        index, weight = torch.stack([torch.randperm(e, generator=draw)[:k] for _ in range(16)]), torch.rand(16, k)
        for form in (torch.float32, torch.bfloat16, MXFP4):
            def weights(*shape, form=form):
                if form != MXFP4:
                    return torch.randn(shape).to(form)
                return torch.randint(256, (*shape[:-1], shape[-1] // 32, 16)).byte(), torch.full((*shape[:-1], shape[-1] // 32), 120).byte()

            up, down = [weights(e, 2 * f, c) for _ in range(copies)], [weights(e, c, f) for _ in range(copies)]
            nbytes = k * 3 * f * c * (17 / 32 if form == MXFP4 else form.itemsize)
            name = "mxfp4" if form == MXFP4 else str(form)[6:]
            _measure(f"moe C={c} F={f} E={e} k={k} {name}",
                     lambda m, i: moe(x[:m], index[:m], weight[:m], up[i], None, down[i], None, "gpt_oss"), copies, nbytes, rows)
    for h, kv, d, length, window in ((16, 2, 64, 1000, 0), (16, 2, 64, 1000, 128), (16, 8, 128, 4000, 0)):
        q, ring, start = torch.randn(1, 16, h, d), torch.randn(2, 1, kv, length + 16, d), torch.tensor([length])
        _measure(f"attend {h}/{kv}x{d} over {length} window {window}",
                 lambda m, i: attend(q[:, :m], ring[0], ring[1], start, window, None, 0.1), 20,
                 8 * kv * d * (window or length), rows)
    x, w, up = torch.randn(16, 512), torch.randn(512), torch.randn(16, 1024)
    router, qkv, angle = torch.randn(16, 512), torch.randn(16, 20 * 64), torch.randn(16, 32)
    _measure("rms_norm 512", lambda m, i: rms_norm(x[:m], w, 1e-5), 200, 2048, rows)
    _measure("rope_ 16+2 heads of 64", lambda m, i: rope_(qkv[:m], angle[:m], angle[:m], 16, 2, 64), 200, 4 * 18 * 64, rows)
    _measure("silu_mul 512", lambda m, i: silu_mul(up[:m]), 200, 4096, rows)
    _measure("route 512 to 4 of 16", lambda m, i: route(x[:m], router, None, 4, False, False), 200, 4 * 16 * 512, rows)
    blocks, scales = torch.randint(256, (1024, 16, 16)).byte(), torch.full((1024, 16), 120).byte()
    _measure("unpack_mxfp4 1024x512", lambda m, i: unpack_mxfp4(blocks, scales), 20, blocks.numel() + scales.numel(), (1,))
    _measure("call alone (linear 1x1)", lambda m, i: linear(w[:1, None], w[:1, None]), 1000, 4, (1,))


if __name__ == "__main__":
    _benchmark()
