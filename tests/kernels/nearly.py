"""What the tests of the kernels share: how near a kernel must come to the truth."""

import torch

DTYPES = [torch.float32, torch.bfloat16]


def close(ours, truth, tolerance=1e-5):
    assert ours.dtype == torch.float32 and ours.shape == truth.shape
    assert (ours - truth).abs().max() <= tolerance * truth.abs().max().clamp(min=1)
