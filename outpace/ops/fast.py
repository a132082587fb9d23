"""Kernel dispatch: where the C kernels replace the plain references, and bfloat16."""

import torch
from torch import Tensor

from outpace.kernels import cpu
from outpace.kernels.cpu_program import Program as Program

MOST_ROWS = 512  # above, a row of x leaves the cache before the next weights come, and oneDNN wins


def kernel(x: Tensor) -> bool:
    """True where the kernels can take `x` (no gradient is recorded, float32, CPU, and they were built)."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and cpu.available()
    )


def few(x: Tensor) -> bool:
    """`kernel`, and few enough rows ([..., C] -> product of the leading sizes) for the row kernels."""
    return x.numel() <= MOST_ROWS * x.shape[-1] and kernel(x)


def rows_kernel(x: Tensor) -> bool:
    """True where the kernels that know their gradients can take `x` (float32 or bfloat16, CPU, built)."""
    return x.dtype in (torch.float32, torch.bfloat16) and x.device.type == "cpu" and cpu.available()


def product_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where it is multiplied as such: on GPUs, and on CPUs that oneDNN has kernels for (AVX-512 and
    later). Elsewhere torch widens one element at a time, fifty times slower than float32: float32 there."""
    if device.type != "cpu":
        return torch.bfloat16
    supported = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if supported else torch.float32


def kernels() -> str:
    """Which build of the C kernels runs on the CPU: another source, compiler or flag, another name."""
    return cpu.built()
