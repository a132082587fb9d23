"""MXFP4: bytes worked out by hand, round trips, and the same values as transformers' own unpacking."""

import itertools

import pytest
import torch

from outpace.ops import mxfp4

GRID = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nearest(x, scale):
    """By search: the nearest grid value, a tie to the even code."""
    best = min(range(8), key=lambda i: (abs(abs(x) / scale - GRID[i]), i % 2))
    return GRID[best] * scale * (-1 if x < 0 else 1)


def test_golden_bytes():
    """Value 2j lies in the low nibble of byte j; 127 is a scale of 1, 130 of 8, 126 of a half."""
    blocks = torch.zeros(3, 16, dtype=torch.uint8)
    blocks[0, 0] = 0x21  # 1 -> 0.5, 2 -> 1
    blocks[0, 1] = 0xF7  # 7 -> 6, 15 -> -6
    blocks[0, 15] = 0x9A  # 10 -> -1, 9 -> -0.5
    blocks[1, 2] = 0x53  # 3 -> 1.5, 5 -> 3
    blocks[2, 2] = 0x46  # 6 -> 4, 4 -> 2
    values = mxfp4.unpack(blocks, torch.tensor([127, 130, 126], dtype=torch.uint8)).reshape(3, 32)
    wanted = torch.zeros(3, 32)
    wanted[0, [0, 1, 2, 3, 30, 31]] = torch.tensor([0.5, 1, 6, -6, -1, -0.5])
    wanted[1, [4, 5]] = torch.tensor([12.0, 24.0])
    wanted[2, [4, 5]] = torch.tensor([2.0, 1.0])
    assert torch.equal(values, wanted)


def test_packing_golden_bytes():
    x = torch.zeros(64)
    x[:6] = torch.tensor([0.5, 1.0, 6.0, -6.0, 1.3, -2.4])
    x[32:35] = torch.tensor([48.0, 8.0, -4.0])
    blocks, scales = mxfp4.pack(x)
    assert scales.tolist() == [127, 130]
    assert blocks[0, :4].tolist() == [0x21, 0xF7, 0xC3, 0x00]  # 1.3 -> 1.5 (3), -2.4 -> -2 (12)
    assert blocks[1, :3].tolist() == [0x27, 0x09, 0x00]  # 48/8 = 6, 8/8 = 1, -4/8 = -0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_and_scale_is_exact(dtype):
    codes = torch.tensor(list(itertools.product(range(16), repeat=2)), dtype=torch.uint8)
    blocks = (codes[:, 0] | (codes[:, 1] << 4)).reshape(16, 16)
    signed = GRID + [-g for g in GRID]
    for scale in (1, 100, 126, 127, 128, 200, 250):
        got = mxfp4.unpack(blocks, torch.full((16,), scale, dtype=torch.uint8), dtype)
        wanted = torch.tensor([[signed[c] * 2.0 ** (scale - 127) for c in pair] for pair in codes.tolist()])
        assert got.dtype == dtype and torch.equal(got.flatten().float(), wanted.flatten())


def test_packing_chooses_the_nearest_value():
    x = torch.randn(3, 5, 64) * torch.logspace(-3, 3, 3)[:, None, None]
    blocks, scales = mxfp4.pack(x)
    assert blocks.shape == (3, 5, 2, 16) and scales.shape == (3, 5, 2)
    got = mxfp4.unpack(blocks, scales)
    scale = 2.0 ** (scales.double() - 127)
    for index in itertools.product(range(3), range(5), range(64)):
        s = float(scale[index[0], index[1], index[2] // 32])
        assert float(got[index]) == nearest(float(x[index]), s)
    largest = x.unflatten(-1, (2, 32)).abs().amax(-1).double()
    assert (largest / scale <= 7.001).all() and (largest / scale > 3.499).all()


def test_packing_twice_changes_nothing():
    x = torch.randn(7, 96)
    once = mxfp4.unpack(*mxfp4.pack(x))
    assert torch.equal(mxfp4.unpack(*mxfp4.pack(once)), once)


def test_extremes():
    x = torch.zeros(4, 32)
    x[1, 3], x[2, 3], x[3] = 1e-38, 1e38, -6.0
    got = mxfp4.unpack(*mxfp4.pack(x))
    assert torch.equal(got[0], x[0]) and torch.equal(got[3], x[3])
    assert got.isfinite().all() and abs(float(got[2, 3]) / 1e38 - 1) < 0.2


def test_training_feels_the_rounding_and_passes_the_gradient():
    ties = torch.arange(-64, 64).view(-1, 32) / 8.0  # every midpoint of E2M1 and what lies around them
    x = torch.cat((ties, torch.randn(6, 32))).requires_grad_()
    rounded = mxfp4.fake_quantize(x)
    # x + (rounded - x) is rounded again, in float32
    assert torch.allclose(rounded, mxfp4.unpack(*mxfp4.pack(x.detach())), rtol=1e-6, atol=1e-7)
    weight = torch.randn(10, 32)
    (rounded * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_rows_that_do_not_divide():
    with pytest.raises(ValueError, match="multiple of 32 values, not 40"):
        mxfp4.pack(torch.zeros(2, 40))


def test_against_transformers():
    """Theirs transposes the last two axes, as dense gpt-oss experts are stored."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (5, 14, 3, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (5, 14, 3), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    assert torch.equal(mxfp4.unpack(blocks, scales), theirs.mT)
