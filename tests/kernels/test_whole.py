"""MXFP4 experts in whole numbers: as near to float64 as in floats, and a row's bits its own."""

import pytest
import torch

from outpace.kernels import build, expert_bindings
from outpace.ops import mxfp4
from outpace.ops.quant import Quant

pytestmark = pytest.mark.skipif(not build.whole(), reason="no AVX512-VNNI, or the kernels are not built")
SIZES = [("gpt_oss", 64, 96, 5, 3), ("silu", 320, 32, 4, 2)]  # style, C, F, experts, of a token


def packed(*shape, scales=(118, 124), seed=0):
    rng = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*shape[:-1], shape[-1] // 32, 16), dtype=torch.uint8, generator=rng)
    return blocks, torch.randint(*scales, blocks.shape[:-1], dtype=torch.uint8, generator=rng)


def as_gguf(matrix):
    """The same values with nibbles as GGUF files hold them: 0 to 15 in the low ones."""
    blocks, scales = matrix
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    rows = torch.cat([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], -1)
    return Quant(rows.flatten(-2), "MXFP4")


def inputs(rows, c, experts, k, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, c, generator=rng)
    return x, torch.rand(rows, experts, generator=rng).topk(k).indices, torch.rand(rows, k, generator=rng)


def run(given, up, down, style="silu", biases=(None, None), **more):
    x, index, weight = given
    return expert_bindings.moe(x, index, weight, up, biases[0], down, biases[1], style, **more)


def in_floats(monkeypatch, *given, **more):
    with monkeypatch.context() as patch:
        patch.setattr(expert_bindings, "MOST_INTERLEAVED", 0)
        return run(*given, **more)


def exactly(given, up, down, style):
    """In float64."""
    x, index, weight = given
    ups, downs = (mxfp4.unpack(*w).double() for w in (up, down))
    y = torch.zeros(x.shape, dtype=torch.float64)
    for m, (experts, shares) in enumerate(zip(index.tolist(), weight.double(), strict=True)):
        for e, share in zip(experts, shares, strict=True):
            h = ups[e] @ x[m].double()
            if style == "gpt_oss":
                gate, value = h[::2].clamp(max=7), h[1::2].clamp(-7, 7) + 1
                h = gate * torch.sigmoid(1.702 * gate) * value
            else:
                gate, value = h.chunk(2)
                h = torch.nn.functional.silu(gate) * value
            y[m] += share * (downs[e] @ h)
    return y


def error(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(("style", "c", "f", "experts", "k"), SIZES)
def test_it_is_as_near_to_float64_as_floats(style, c, f, experts, k, monkeypatch):
    up, down = packed(experts, 2 * f, c), packed(experts, c, f, seed=1)
    given = inputs(41, c, experts, k)
    bias = torch.randn(experts, 2 * f), torch.randn(experts, c)
    wanted = exactly(given, up, down, style)
    got = run(given, up, down, style)
    assert error(got, wanted) < 4 * error(in_floats(monkeypatch, given, up, down, style), wanted)
    assert error(got, wanted) < 5e-7
    with_bias = run(given, up, down, style, bias)
    assert error(with_bias, in_floats(monkeypatch, given, up, down, style, bias)) < 1e-6


@pytest.mark.parametrize(("style", "c", "f", "experts", "k"), SIZES)
def test_a_row_has_its_bits_in_any_company_and_from_either_format(style, c, f, experts, k):
    up, down = packed(experts, 2 * f, c), packed(experts, c, f, seed=1)
    x, index, weight = inputs(23, c, experts, k)
    alone = [
        expert_bindings.moe(x[m : m + 1], index[m : m + 1], weight[m : m + 1], up, None, down, None, style)
        for m in range(23)
    ]
    for some in (slice(0, 2), slice(3, 10), slice(0, 23)):
        got = expert_bindings.moe(x[some], index[some], weight[some], up, None, down, None, style)
        assert torch.equal(got, torch.cat(alone[some]))
    of_gguf = as_gguf(up), as_gguf(down)
    got = expert_bindings.moe(x, index, weight, of_gguf[0], None, of_gguf[1], None, style)
    assert torch.equal(got, torch.cat(alone))


def test_gates_that_lie_apart_are_those_of_one_matrix():
    c, f, experts = 64, 96, 3
    up, down = packed(experts, 2 * f, c), packed(experts, c, f, seed=1)
    gate, value = (tuple(part[:, half].contiguous() for part in up) for half in (slice(0, f), slice(f, None)))
    given = inputs(9, c, experts, 2)
    want = run(given, up, down)
    got = run(given, value, down, gate=gate)
    assert torch.equal(got, want)


def test_every_code_counts_under_every_scale_that_numbers_have():
    """One value of x at a time, so that each number of the hidden layer is one weight."""
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | codes.roll(5) << 4).expand(1, 32, 1, 16).contiguous()
    down = packed(1, 32, 32, scales=(127, 128))
    whole = mxfp4.unpack(*down)[0].double()
    index, weight = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    for scale in (0, 1, 2, 90, 127, 200):
        up = blocks, torch.full((1, 32, 1), scale, dtype=torch.uint8)
        values = mxfp4.unpack(*up)[0].double()
        for place in (0, 1, 15, 16, 31):
            x = torch.zeros(1, 32)
            x[0, place] = 2.0 ** (120 - scale)
            up_twice = tuple(torch.cat([part, part], 1) for part in up)
            got = expert_bindings.moe(x, index, weight, up_twice, None, down, None, "silu")
            h = values[:, place] * x[0, place].double()
            h = torch.nn.functional.silu(h) * h
            wanted = whole @ h
            torch.testing.assert_close(
                got[0].double(), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item()
            )


@pytest.mark.parametrize("largest", [1.0, 1.9921, 1.99219, 1.9999999, 3e-39, 1e-30, 1e15])
def test_no_size_of_numbers_breaks_the_digits(largest, monkeypatch):
    """Those just below a power of two would need a digit more."""
    c, f = 64, 32
    up, down = packed(2, 2 * f, c, scales=(120, 121)), packed(2, c, f, seed=1)
    x, index, weight = inputs(6, c, 2, 1)
    x = (x.clamp(-1, 1) * largest).contiguous()
    x[:, 7], x[:, 40] = largest, -largest
    x[5] = 0
    got = expert_bindings.moe(x, index, weight, up, None, down, None, "silu")
    want = in_floats(monkeypatch, (x, index, weight), up, down)
    scale = want.abs().max().clamp(min=1e-37).item()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * scale)
    assert not got[5].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none_and_in_its_row(bad):
    up, down = packed(3, 64, 64), packed(3, 64, 32, seed=1)
    x, index, weight = inputs(5, 64, 3, 2)
    clean = expert_bindings.moe(x, index, weight, up, None, down, None, "silu")
    x[2, 50] = bad
    got = expert_bindings.moe(x, index, weight, up, None, down, None, "silu")
    rest = [0, 1, 3, 4]
    assert got[2].isnan().all() and torch.equal(got[rest], clean[rest])


def test_activations_are_rounded_before_they_are_digits():
    """They have eight digits of the twenty-three."""
    up, down = packed(3, 64, 64), packed(3, 64, 32, seed=1)
    x, index, weight = inputs(5, 64, 3, 2)
    got = expert_bindings.moe(x, index, weight, up, None, down, None, "silu", rounded=True)
    again = expert_bindings.moe(
        x.bfloat16().float(), index, weight, up, None, down, None, "silu", rounded=True
    )
    assert torch.equal(got, again)


def test_copies_follow_their_matrix_and_are_made_of_what_fits(monkeypatch):
    up, down = packed(3, 64, 64), packed(3, 64, 32, seed=1)
    given = inputs(5, 64, 3, 2)
    first = expert_bindings.interleaved(up, down)
    addresses = [part.data_ptr() for part in first]
    assert [part.data_ptr() for part in expert_bindings.interleaved(up, down)] == addresses
    before = run(given, up, down)
    up[0].bitwise_xor_(8)  # every other value changes its sign
    after = run(given, up, down)
    want = in_floats(monkeypatch, given, up, down)
    assert not torch.equal(before, after) and error(after, want) < 1e-6
    down[1].sub_(1)  # half of all, by the scales alone
    halves = run(given, up, down)
    assert torch.equal(halves, after / 2)
    assert [part.data_ptr() for part in expert_bindings.interleaved(up, down)] == addresses, (
        "programs hold them"
    )
    odd = packed(3, 40, 64), packed(3, 64, 32)  # 40 rows are no multiple of 16
    dense = torch.randn(3, 64, 32)
    for matrices in (odd, (up, dense), (up, Quant(torch.zeros(3, 64, 34).byte(), "Q8_0"))):
        assert expert_bindings.interleaved(*matrices) == [None, None]
    monkeypatch.setattr(expert_bindings, "MOST_INTERLEAVED", up[0].nbytes - 1)
    assert expert_bindings.interleaved(up, down) == [None, None]
