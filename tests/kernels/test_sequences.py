"""The kernel of attention in training, and its gradients, against the plain reference."""

import shutil

import pytest
import torch

from outpace.kernels import bindings
from outpace.ops.attention import Packed, attend, causal_attend

pytestmark = [
    pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler"),
    pytest.mark.skipif(not bindings.bfloat16(), reason="a CPU without products of bfloat16"),
]
LENGTHS = 33, 1, 130, 64, 3  # around the kernel's 64 queries and 32 keys at once
K, GROUP = 3, 2
H = K * GROUP


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(11)


def leaves(N, D):
    heads = (N, H, D), (K, N, D), (K, N, D)
    tensors = [torch.randn(1, *size).bfloat16().requires_grad_() for size in heads]
    return *tensors, torch.randn(H, requires_grad=True)


def of_kernel(inputs, sinks, window, packed, dy):
    q, k, v = inputs
    out = causal_attend(q, k, v, window, sinks, 0.2, packed)
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    return [out.detach(), *torch.autograd.grad(out, leaves, dy)]


def of_reference(inputs, sinks, window, packed, dy):
    q, k, v = (x.detach().float().requires_grad_() for x in inputs)
    given = None if sinks is None else sinks.detach().requires_grad_()
    out = attend(q, k, v, packed.allowed(window), given, 0.2)
    leaves = [x for x in (q, k, v, given) if x is not None]
    return [out.detach(), *torch.autograd.grad(out, leaves, dy.float())]


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 2, 7, 32, 65, 100])
def test_sequences_and_their_gradients(window, with_sinks, D):
    packed = Packed.of(LENGTHS)
    *inputs, sinks = leaves(sum(LENGTHS), D)
    dy = torch.randn(1, sum(LENGTHS), H * D).bfloat16()
    known = inputs, sinks if with_sinks else None, window, packed, dy
    for ours, exact in zip(of_kernel(*known), of_reference(*known), strict=True):
        assert (ours.float() - exact).norm() < 0.006 * exact.norm()


@pytest.mark.parametrize("window", [0, 40])
def test_a_sequence_has_the_bits_it_has_alone(window, monkeypatch):
    """Whatever lies beside it, and however many threads there are."""
    packed = Packed.of(LENGTHS)
    *inputs, _ = leaves(sum(LENGTHS), 64)
    dy = torch.randn(1, sum(LENGTHS), H * 64).bfloat16()
    together = of_kernel(inputs, None, window, packed, dy)
    monkeypatch.setattr(bindings, "_threads", lambda: 3)
    for one, other in zip(together, of_kernel(inputs, None, window, packed, dy), strict=True):
        assert torch.equal(one, other)
    begin = 0
    for n in LENGTHS:
        own = slice(begin, begin + n)
        parts = [inputs[0][:, own], *(x[:, :, own] for x in inputs[1:])]
        alone = of_kernel(parts, None, window, Packed.of([n]), dy[:, own])
        mine = [x[:, own] for x in together[:2]] + [x[:, :, own] for x in together[2:]]
        for one, other in zip(mine, alone, strict=True):
            assert torch.equal(one, other)
        begin += n


def test_rows_of_a_batch_are_sequences():
    q, k, v, sinks = leaves(4 * 37, 64)
    q, (k, v) = q.view(4, 37, H, 64), (x.view(K, 4, 37, 64).transpose(0, 1) for x in (k, v))
    dy = torch.randn(4, 37, H * 64).bfloat16()
    together = of_kernel((q, k, v), sinks, 10, None, dy)[0]
    for b in range(4):
        alone = of_kernel([x[b : b + 1] for x in (q, k, v)], sinks, 10, None, dy[b : b + 1])[0]
        assert torch.equal(together[b : b + 1], alone)


def test_a_nan_is_seen_by_those_who_look_at_it():
    q, k, v, _ = leaves(70, 64)
    with torch.no_grad():
        k[0, 1, 5, 3] = torch.nan
    out = causal_attend(q, k, v, 0, None, 0.2, Packed.of([70])).view(70, H, 64)
    assert out[5:, GROUP : 2 * GROUP].isnan().all() and out[:, :GROUP].isfinite().all()
