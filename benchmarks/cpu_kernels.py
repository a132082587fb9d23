"""Rates of the CPU kernels on this machine: one row, and what 2 to 16 rows cost next to it."""

import time
from collections.abc import Callable

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from outpace.kernels import bindings, expert_bindings
from outpace.ops.quant import Quant

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
    _measure(name, lambda m, i: bindings.linear(x[:m], w[i]), copies, n * k * dtype.itemsize)


def _measure_blocks(n: int, k: int, format: str, copies: int) -> None:
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[format]]
    w = [Quant(torch.randint(0, 100, (n, k // values * size)).byte(), format) for _ in range(copies)]
    x = torch.randn(16, k)
    _measure(
        f"linear {n} x {k} {format}", lambda m, i: bindings.linear(x[:m], w[i]), copies, w[0].data.nbytes
    )


def _measure_moe(c: int, f: int, e: int, k: int, dtype: torch.dtype, copies: int) -> None:
    def weights(*shape: int) -> Tensor | bindings.Packed:
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
        return expert_bindings.moe(x[:m], index[i][:m], gate[:m], up[i], None, down[i], None, "gpt_oss")

    _measure(name, call, copies, nbytes)


def _measure_attend(h: int, kv: int, d: int, length: int, window: int, copies: int) -> None:
    q, start = torch.randn(1, 16, h, d), torch.tensor([length])
    k, v = torch.randn(2, copies, kv, length + 16, d)
    nbytes = 8 * kv * d * (window or length)
    name = f"attend {h}/{kv} x {d}, {length} keys" + (f", window {window}" if window else "")
    _measure(
        name,
        lambda m, i: bindings.attend(q[:, :m], k[i : i + 1], v[i : i + 1], start, window, None, 0.1),
        copies,
        nbytes,
    )


def main() -> None:
    print(
        f"{torch.get_num_threads()} threads; time of n rows over one row, n ="
        + "".join(f"{m:7}" for m in MANY)
    )
    for dtype in (torch.float32, torch.bfloat16):
        _measure_linear(2880, 2880, dtype, 6)
        _measure_linear(1024, 512, dtype, 60)
    _measure_linear(4096, 4096, torch.float16, 3)
    for format in bindings.BLOCKS_KIND:
        _measure_blocks(4096, 4096, format, 6)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        _measure_moe(512, 512, 16, 4, dtype, 8)
        _measure_moe(256, 128, 8, 2, dtype, 60)
    _measure_attend(16, 2, 64, 1000, 0, 60)
    _measure_attend(16, 2, 64, 1000, 128, 60)
    _measure_attend(16, 8, 128, 4000, 0, 4)
    x, w, up, angle = torch.randn(16, 512), torch.randn(512), torch.randn(16, 1024), torch.randn(16, 32)
    router, qkv = torch.randn(16, 512), torch.randn(16, 20 * 64)
    _measure("rms_norm 512", lambda m, i: bindings.rms_norm(x[:m], w, 1e-5), 200, 2048)
    _measure(
        "rope_ 16 + 2 heads of 64",
        lambda m, i: bindings.rope_(qkv[:m], angle[:m], angle[:m], 16, 2, 64),
        200,
        4608,
    )
    _measure("silu_mul 512", lambda m, i: bindings.gated(up[:m], None, 1.0), 200, 4096)
    _measure(
        "route 512, 4 of 16", lambda m, i: bindings.route(x[:m], router, None, 4, False, False), 200, 32768
    )
    blocks, scales = torch.randint(256, (16, 64, 16, 16)).byte(), torch.full((16, 64, 16), 120).byte()
    _measure(
        "unpack_mxfp4 64n x 512", lambda m, i: bindings.unpack_mxfp4(blocks[:m], scales[:m]), 50, 64 * 16 * 17
    )


if __name__ == "__main__":
    main()
