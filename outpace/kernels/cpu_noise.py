"""The ctypes wrapper of cpu_noise.c."""

import struct

import torch
from torch import Tensor

from outpace.kernels.cpu import _c, _threads

NOISE = struct.Struct("6q").pack


def perturb(x: Tensor, keys: Tensor) -> Tensor:
    """x [M, N] float32, keys [M] int64 -> x + noise, a function of key and place in the row."""
    assert x.is_contiguous() and keys.is_contiguous() and keys.dtype == torch.int64 and len(keys) == len(x)
    y = torch.empty_like(x)
    _c.perturb(NOISE(x.data_ptr(), keys.data_ptr(), y.data_ptr(), *x.shape, _threads()))
    return y
