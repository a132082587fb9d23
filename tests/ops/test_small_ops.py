"""Norms, gated activations, linear and sampling against their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.ops.linear import linear
from outpace.ops.norm import ALPHA, clamped_swiglu, rms_norm, silu_mul
from outpace.ops.sampling import Sampling, keys, probabilities, sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype):
    x, weight = (torch.randn(2, 5, 40) * 30).to(dtype), torch.randn(40)
    wanted = x.double() / ((x.double() ** 2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    with torch.inference_mode():
        got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    bar = 1e-5 if dtype == torch.float32 else 0.03
    assert (got.double() - wanted).abs().max() < bar * wanted.abs().max()


def test_rms_norm_of_zeros():
    assert torch.equal(rms_norm(torch.zeros(1, 40), torch.ones(40), 1e-6), torch.zeros(1, 40))


def test_gated_activations():
    x = torch.randn(2, 5, 2 * 24) * 8
    gate, up = x[..., :24].double(), x[..., 24:].double()
    with torch.inference_mode():
        assert (silu_mul(x) - gate * torch.sigmoid(gate) * up).abs().max() < 1e-4
    gate, up = x[..., 0::2].double().clamp(max=7), x[..., 1::2].double().clamp(-7, 7)
    assert (clamped_swiglu(x, 7.0) - gate * torch.sigmoid(1.702 * gate) * (up + 1)).abs().max() < 1e-4
    assert (x.abs() > 7).any()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_linear(stored, rows):
    x, weight, bias = torch.randn(3, rows, 40), torch.randn(29, 40).to(stored), torch.randn(29).to(stored)
    wanted = x.double() @ weight.double().T
    with torch.inference_mode():
        assert (linear(x, weight) - wanted).abs().max() < 1e-4
        got = linear(x, weight, bias)
    assert got.shape == (3, rows, 29) and got.dtype == torch.float32
    assert (got - (wanted + bias.double())).abs().max() < 1e-4


# ---- sampling ---------------------------------------------------------------------------------


def brute_force(logits, how):
    """By definition, one vocabulary at a time: temperature, then top-k, then top-p."""
    p = torch.tensor(logits, dtype=torch.float64).div(how.temperature).softmax(0).tolist()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if how.top_k:
        order = order[: how.top_k]
    total = sum(p[i] for i in order)
    p = [x / total for x in p]
    kept, mass = [], 0.0
    for i in order:
        if mass >= how.top_p:
            break
        kept.append(i)
        mass += p[i]
    total = sum(p[i] for i in kept)
    return [p[i] / total if i in kept else 0.0 for i in range(len(p))]


@settings(max_examples=40)
@given(
    st.permutations(range(9)),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.integers(0, 12),
    st.sampled_from([0.05, 0.31, 0.62, 0.9, 1.0]),
)
def test_probabilities_by_brute_force(ranks, temperature, top_k, top_p):
    logits = [0.37 * r for r in ranks]
    how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    rows = torch.tensor([[logits, logits[::-1]]])
    got = probabilities(rows, how)
    assert got.shape == rows.shape and got.dtype == torch.float32
    assert got[0, 0].tolist() == pytest.approx(brute_force(logits, how), abs=1e-5)
    assert got[0, 1].tolist() == pytest.approx(brute_force(logits[::-1], how), abs=1e-5)


def test_the_first_token_always_stays():
    p = probabilities(torch.tensor([[0.0, 9.0, 0.0]]), Sampling(temperature=1.0, top_p=1e-6))
    assert p.tolist() == [[0.0, 1.0, 0.0]]


def test_greedy_is_the_argmax_and_needs_no_generator():
    logits = torch.randn(2, 5, 97)
    assert torch.equal(sample(logits, Sampling(), None), logits.argmax(-1))
    assert sample(logits[0, 0], Sampling(), None).shape == ()


def test_draws_follow_the_probabilities():
    logits = torch.randn(3, 5)
    how = Sampling(temperature=0.8, top_k=4)
    draws = sample(logits.expand(3000, 3, 5), how, keys(2, torch.arange(3000)[:, None], torch.arange(3)))
    assert draws.shape == (3000, 3)
    share = torch.stack([(draws == v).double().mean(0) for v in range(5)], dim=-1)
    assert (share - probabilities(logits, how)).abs().max() < 0.04
    assert (share[probabilities(logits, how) == 0] == 0).all()


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_draws_take_any_shape_and_repeat_with_the_key(shape):
    logits, how = torch.randn(*shape, 97), Sampling(temperature=1.0)
    noise = keys(3, torch.zeros(shape, dtype=torch.int64), torch.zeros((), dtype=torch.int64))
    first, again = (sample(logits, how, noise) for _ in range(2))
    assert first.shape == shape and first.dtype == torch.int64 and torch.equal(first, again)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": -1}]
)
def test_settings_that_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.parametrize("kernels", [True, False])
@torch.inference_mode()
def test_the_clamped_gate_by_hand(kernels, force_kernels):
    """The gate is bounded above alone, up on both sides."""
    force_kernels(kernels)
    limit = 1.0
    for gate, up in ((-5.0, 0.5), (5.0, 0.5), (0.5, 5.0), (0.5, -5.0), (-2.0, -3.0)):
        low, both = min(gate, limit), max(-limit, min(up, limit))
        wanted = low / (1 + math.exp(-ALPHA * low)) * (both + 1)
        got = clamped_swiglu(torch.tensor([[gate, up]]), limit)
        assert got.item() == pytest.approx(wanted, abs=1e-6)
