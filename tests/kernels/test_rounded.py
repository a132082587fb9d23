"""Products of activations that are rounded to bfloat16: to which number, and for which weights."""

import pytest
import torch
from gguf_blocks import blocks
from test_cpu import choices, experts, moe_reference, packed, unpack

from outpace.kernels import bindings, expert_bindings
from outpace.ops import moe as ops_moe
from outpace.ops.linear import linear, reference_linear
from outpace.ops.moe import run_experts
from outpace.ops.quant import Joined, round_activations

pytestmark = pytest.mark.skipif(not bindings.available(), reason=f"kernels not built: {bindings.why_not()}")
SHAPES = [(1, 1), (29, 72), (6, 24), (7, 1031), (257, 544), (1037, 2080)]  # the last: read from memory


def rounded(x):
    return x.bfloat16().double()


def near(y, truth):
    assert (y - truth).abs().max() < 2e-6 * truth.abs().max().clamp(min=1) * max(truth.shape[-1], 16) ** 0.5


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(11)


@pytest.mark.parametrize("n, k", SHAPES)
@torch.inference_mode()
def test_x_is_rounded_before_it_meets_bfloat16(n, k):
    w, bias = torch.randn(n, k).bfloat16(), torch.randn(n)
    for m in (1, 2, 3, 4, 5, 8, 33, 70):
        x = torch.randn(m, k)
        truth = rounded(x) @ w.double().T + bias.double()
        y = bindings.linear(x, w, bias, rounded=True)
        near(y, truth)
        near(reference_linear(round_activations(x, w), w, bias), truth)
        if k > 24:
            assert not torch.equal(y, bindings.linear(x, w, bias))


@pytest.mark.parametrize("form", ["bfloat16", "MXFP4"])
@pytest.mark.parametrize("n, k", [(29, 96), (13, 1120), (301, 1056), (1037, 2080)])
@torch.inference_mode()
def test_a_row_does_not_depend_on_its_company(form, n, k):
    w = torch.randn(n, k).bfloat16() if form == "bfloat16" else blocks(form, n, k)
    x, bias = torch.randn(70, k), torch.randn(n).bfloat16()
    alone = torch.cat([linear(row, w, bias, rounded=True) for row in x.split(1)])
    for m in (*range(2, 20), 64, 70):
        assert torch.equal(linear(x[:m], w, bias, rounded=True), alone[:m])
    if form == "MXFP4":
        near(alone, rounded(x) @ w.dense().double().T + bias.double())


@pytest.mark.parametrize("form", [torch.float32, torch.float16, "Q8_0", "Q4_K"])
@torch.inference_mode()
def test_weights_of_more_digits_meet_x_as_it_is(form):
    w = blocks(form, 29, 512) if isinstance(form, str) else torch.randn(29, 512).to(form)
    x = torch.randn(5, 512)
    assert torch.equal(linear(x, w, rounded=True), linear(x, w))
    assert round_activations(x, w) is x


@torch.inference_mode()
def test_each_part_of_a_joined_matrix_by_its_own_format():
    parts = [blocks("Q8_0", 29, 512), blocks("MXFP4", 13, 512)]
    x = torch.randn(5, 512)
    y = linear(x, Joined(parts), rounded=True)
    assert torch.equal(y[:, :29], linear(x, parts[0]))
    near(y[:, 29:], rounded(x) @ parts[1].dense().double().T)


@pytest.mark.parametrize("style", ["gpt_oss", "silu"])
@pytest.mark.parametrize(
    "form, c, f", [(torch.bfloat16, 96, 41), (torch.bfloat16, 72, 104), ("mxfp4", 96, 160)]
)
@torch.inference_mode()
def test_experts_round_what_both_of_their_matrices_meet(form, c, f, style, monkeypatch):
    e, k = 11, 3
    up, down, plain_up, plain_down = experts(form, e, f, c)
    biases = (torch.randn(e, 2 * f), torch.randn(e, c).bfloat16())
    for m, x, index, weight in choices(c, e, k):
        given = index, weight, up, biases[0], down, biases[1], style
        ours = expert_bindings.moe(x, *given, rounded=True)
        dense = plain_up, biases[0], plain_down, biases[1]
        truth = moe_reference(x, index, weight, *dense, style, rounded)
        # a hidden value next to the middle of two numbers may be rounded the other way
        assert (ours - truth).abs().max() < 2e-3 * truth.abs().max()
        assert not torch.equal(ours, expert_bindings.moe(x, *given))
        for i in range(m):
            row = slice(i, i + 1)
            one = expert_bindings.moe(x[row], index[row], weight[row], *given[2:], rounded=True)
            assert torch.equal(one, ours[row])
    limit = 7.0 if style == "gpt_oss" else None
    matrices = up, biases[0], down, biases[1], limit
    monkeypatch.setattr(ops_moe, "use_kernel", lambda x: False)
    theirs = run_experts(x, index, weight, *matrices, rounded=True)
    assert (theirs - truth).abs().max() < 2e-3 * truth.abs().max()
    assert (run_experts(x, index, weight, *matrices) - theirs).abs().max() > 1e-5 * truth.abs().max()


@torch.inference_mode()
def test_experts_with_one_matrix_of_more_digits_meet_x_as_it_is():
    up, down = packed(5, 2 * 64, 96), torch.randn(5, 96, 64)
    x, index, weight = torch.randn(4, 96), torch.rand(4, 5).topk(2).indices, torch.rand(4, 2)
    given = x, index, weight, up, None, down, None
    plain = run_experts(*given, 7.0)
    assert torch.equal(run_experts(*given, 7.0, rounded=True), plain)
    dense = run_experts(x, index, weight, unpack(*up), None, down, None, 7.0)
    assert (plain - dense).abs().max() < 1e-4 * dense.abs().max()


@torch.inference_mode()
def test_a_number_that_is_none_is_none_in_the_product():
    w = torch.randn(29, 96).bfloat16()
    for wrong in (float("nan"), float("inf")):
        x = torch.randn(9, 96)
        x[4, 50] = wrong
        assert not linear(x, w, rounded=True)[4].isfinite().any()
        assert linear(x, w, rounded=True)[[*range(4), *range(5, 9)]].isfinite().all()


@torch.inference_mode()
def test_to_the_nearest_and_ties_to_even():
    between = torch.tensor([1 + 2.0**-9, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 2.0**-8])
    one = torch.tensor([[1.0, 0, 0]]).bfloat16()
    y = linear(between[:, None].repeat(1, 3), one, rounded=True).flatten()
    assert y.tolist() == between.bfloat16().float().tolist() == [1, 1, 1 + 2.0**-6, 1 + 2.0**-7, -1]
