"""GGUF's block formats: unpacked to the bit as gguf does it, and multiplied row by row the same."""

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf_blocks import blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.kernels import bindings
from outpace.ops import mxfp4
from outpace.ops.linear import linear, reference_linear
from outpace.ops.moe import run_experts
from outpace.ops.quant import Joined, Quant, dense, reference_dense, rows

pytestmark = pytest.mark.skipif(not bindings.available(), reason=f"kernels not built: {bindings.why_not()}")
FORMATS = tuple(bindings.BLOCKS_KIND)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("wild", [False, True])
def test_unpacked_to_the_bit(format, wild):
    weight = blocks(format, 3, 5, 768, wild=wild)
    assert weight.shape == (3, 5, 768)
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = reference_dense(weight.data, format)
    assert torch.equal(weight.dense(), theirs)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_float16_is_read_as_torch_reads_it(seed, count):
    bits = np.random.default_rng(seed).integers(0, 2**16, (2, count), dtype=np.uint16)
    halves = torch.from_numpy(bits.view(np.int16)).view(torch.float16)
    halves[~halves.isfinite()] = 0
    x = torch.zeros(count, count).fill_diagonal_(1.0)  # picks each weight out
    with torch.inference_mode():
        assert torch.equal(linear(x, halves).T, halves.float())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("columns", [256, 768, 1280])
@torch.inference_mode()
def test_product(format, columns):
    weight = blocks(format, 13, columns)
    bias = torch.randn(13)
    for m in (1, 2, 3, 5, 9, 64, 300):
        x = torch.randn(m, columns)
        y = linear(x, weight, bias)
        exact = torch.nn.functional.linear(x.double(), weight.dense().double(), bias.double())
        assert (y - exact).abs().max() < 1e-5 * exact.abs().max()
        alone = torch.cat([linear(row, weight, bias) for row in x.split(1)])
        assert torch.equal(y, alone)
        assert (reference_linear(x, weight, bias) - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize("format", ["Q8_0", "MXFP4", "Q4_K"])
@pytest.mark.parametrize("limit", [7.0, None])
@torch.inference_mode()
def test_experts_with_gates_apart(format, limit, force_kernels):
    """One matrix of gates and ups in turn (gpt-oss) or gates first (Qwen3), and the two halves of it."""
    E, F, C, M, k = 5, 256, 512, 9, 2
    gate, up, down = blocks(format, E, F, C), blocks(format, E, F, C, seed=1), blocks(format, E, C, F, seed=2)
    biases = [torch.randn(E, n) for n in (F, F, C)]
    x, index = torch.randn(M, C), torch.randint(0, E, (M, k))
    weights = torch.rand(M, k)

    def one(a, b):
        return torch.stack((a, b), 2).flatten(1, 2) if limit else torch.cat((a, b), 1)

    given = (up, biases[1], down, biases[2], limit, gate, biases[0])
    fused = (one(gate.dense(), up.dense()), one(biases[0], biases[1]), down.dense(), biases[2], limit)
    wanted = run_experts(x, index, weights, *fused)
    for times in (1, 20):  # one call of the kernel, and two
        got = run_experts(x.repeat(times, 1), index.repeat(times, 1), weights.repeat(times, 1), *given)
        assert (got - wanted.repeat(times, 1)).abs().max() < 1e-4 * wanted.abs().max()
    force_kernels(False)
    grouped = run_experts(x, index, weights, *given)
    assert (grouped - wanted).abs().max() < 1e-4 * wanted.abs().max()


@torch.inference_mode()
def test_joined_rows():
    parts = [blocks("Q8_0", 6, 256), torch.randn(4, 256), blocks("Q6_K", 3, 256)]
    weight, bias = Joined(parts), torch.randn(13)
    assert weight.shape == (13, 256)
    for m in (1, 70):
        x = torch.randn(m, 256)
        exact = x.double() @ dense(weight).double().T + bias
        assert (linear(x, weight, bias) - exact).abs().max() < 1e-4


def test_rows_of_an_embedding():
    weight = blocks("Q6_K", 11, 256)
    index = torch.tensor([[3, 0, 10], [3, 3, 1]])
    assert torch.equal(rows(weight, index, torch.float32), weight.dense()[index])


def test_large_weights_are_converted_in_pieces(monkeypatch):
    monkeypatch.setattr("outpace.ops.linear.PIECE", 1000)
    x, weight, bias = torch.randn(70, 32), torch.randn(101, 32).bfloat16(), torch.randn(101)
    whole = torch.nn.functional.linear(x, weight.float(), bias)
    assert (linear(x, weight, bias) - whole).abs().max() < 1e-5


GOLDEN = bytes.fromhex("7e1032547698badcfe0123456789abcdef")  # a scale of 2^-1, then 32 codes


def test_mxfp4_both_ways_on_golden_bytes():
    """Low nibbles are values 0..15 in GGUF; in safetensors low and high nibbles take turns."""
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = [b & 15 for b in GOLDEN[1:]] + [b >> 4 for b in GOLDEN[1:]]
    values = [0.5 * (-table[c & 7] if c & 8 else table[c]) for c in codes]
    ggml = torch.tensor(list(GOLDEN), dtype=torch.uint8)[None]
    assert Quant(ggml, "MXFP4").dense()[0].tolist() == values
    assert gguf.quants.dequantize(ggml.numpy(), GGMLQuantizationType.MXFP4)[0].tolist() == values
    theirs, scales = mxfp4.from_ggml(ggml)
    assert theirs[0, 0].tolist() == [codes[i] | codes[i + 1] << 4 for i in range(0, 32, 2)]
    assert scales.tolist() == [[0x7E]]
    assert mxfp4.unpack(theirs, scales)[0].tolist() == values
    assert torch.equal(mxfp4.to_ggml(theirs, scales), ggml)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_mxfp4_conversion_is_a_bijection(seed):
    data = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (2, 3, 34), dtype=np.uint8))
    assert torch.equal(mxfp4.to_ggml(*mxfp4.from_ggml(data)), data)
