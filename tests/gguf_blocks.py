"""Random weights in the blocks of GGUF's formats."""

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from outpace.ops.quant import Quant


def blocks(format, *shape, seed=0, wild=False):
    """Random codes under random scales; wild: any scale that is a number, subnormal halves too."""
    rng = np.random.default_rng(seed)
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[format]]
    *rest, columns = shape
    data = rng.integers(0, 256, (*rest, columns // values, size), dtype=np.uint8)
    scales = rng.uniform(-0.01, 0.01, (*data.shape[:-1], 2)).astype(np.float16)
    if wild:
        bits = rng.integers(0, 0x7C00, scales.shape, dtype=np.uint16) | rng.integers(0, 2, scales.shape) << 15
        scales = bits.astype(np.uint16).view(np.float16)
    if format == "MXFP4":
        data[..., 0] = rng.integers(0, 255 if wild else 124, data.shape[:-1]) if wild else 120
    elif format == "Q6_K":
        data[..., -2:] = np.ascontiguousarray(scales[..., :1]).view(np.uint8)
    else:
        count = 2 if format in ("Q4_K", "Q5_K") else 1
        data[..., : 2 * count] = np.ascontiguousarray(scales[..., :count]).view(np.uint8)
    return Quant(torch.from_numpy(data.reshape(*rest, -1)), format)
