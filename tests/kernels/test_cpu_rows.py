"""The kernels of rows, and their gradients, against plain references in float64."""

import ctypes
import math
import shutil

import pytest
import torch
from nearly import DTYPES, close

from outpace.kernels import bindings
from outpace.kernels.program import Program

# by the compiler, not by available(): a kernel that no longer compiles must fail here
pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", [5, 72, 96, 2880])
def test_rms_norm(dtype, c):
    x, w = torch.randn(40, c), torch.randn(c).to(dtype)
    ours = bindings.rms_norm(x, w, 1e-5)
    close(ours, x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * w.double())
    assert torch.equal(ours, torch.cat([bindings.rms_norm(row[None], w, 1e-5) for row in x]))


STYLES = [(None, 1.0), (7.0, 1.702)]  # SiLU over halves; gpt-oss's clamped pairs


def gate(x, limit, alpha):
    if limit is None:
        g, u = x.chunk(2, -1)
        return g * torch.sigmoid(alpha * g) * u
    g, u = x[:, ::2].clamp(max=limit), x[:, 1::2].clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + 1)


@pytest.mark.parametrize("dtype, bar", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("limit, alpha", STYLES)
@pytest.mark.parametrize("f", [1, 5, 16, 40, 200])
def test_gated_and_its_gradient(dtype, bar, limit, alpha, f):
    x, dy = (torch.randn(133, 2 * f) * 6).to(dtype), torch.randn(133, f).to(dtype)
    exact = x.double().requires_grad_()
    truth = gate(exact, limit, alpha)
    (d_truth,) = torch.autograd.grad(truth, exact, dy.double())
    ours, d_ours = bindings.gated(x, limit, alpha), bindings.gated_backward(dy, x, limit, alpha)
    assert ours.dtype == d_ours.dtype == dtype
    for result, wanted in ((ours, truth.detach()), (d_ours, d_truth)):
        close(result.float(), wanted, bar)
    assert torch.equal(ours, torch.cat([bindings.gated(row[None], limit, alpha) for row in x]))
    assert bindings.gated(torch.tensor([[math.nan, 1.0]], dtype=dtype), limit, alpha).isnan().all()


@pytest.mark.parametrize("dtype, bar", [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("c", [5, 72, 96, 2880])
def test_rms_norm_backward(dtype, bar, c):
    x, dy, w = torch.randn(133, c).to(dtype), torch.randn(133, c).to(dtype), torch.randn(c)
    exact, weight = x.double().requires_grad_(), w.double().requires_grad_()
    truth = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * weight
    wanted = torch.autograd.grad(truth, (exact, weight), dy.double())
    dx, dw = bindings.rms_norm_backward(dy, x, w, 1e-5)
    assert dx.dtype == dtype
    close(dx.float(), wanted[0], bar)
    close(dw, wanted[1], 1e-5)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        again = bindings.rms_norm_backward(dy, x, w, 1e-5)
        assert torch.equal(dx, again[0]) and torch.equal(dw, again[1])


@pytest.mark.parametrize("n", [1, 7, 16, 300, 4099])
def test_argmax_takes_the_first_of_equals(n):
    x = torch.randint(-3, 3, (40, n)).float()
    assert bindings.argmax(x).tolist() == [row.index(max(row)) for row in x.tolist()]
    assert bindings.argmax(torch.full((2, n), -math.inf)).tolist() == [0, 0]


@pytest.mark.parametrize("n", [1, 16, 17, 100])
def test_rows_whose_argmax_means_nothing_are_counted(n):
    x = torch.randn(6, n)
    x[1, n // 2], x[3, n - 1], x[4] = math.nan, math.inf, -math.inf
    x[2, n // 3] = -math.inf if n > 1 else 0.0  # a token that is cut is no error
    odd, program = ctypes.c_int64(-1), Program()
    program.argmax(x, torch.empty(6, dtype=torch.int64), odd)
    for _ in range(2):  # not added up over calls
        program.run()
        assert odd.value == 3


def test_angles_far_out():
    positions = torch.tensor([0, 1, 4097, 131_072, 2**30])
    inv = torch.rand(24, dtype=torch.float64)
    cos, sin = bindings.angles(positions, inv, 1.3)
    exact = positions.double()[:, None] * inv
    close(cos, exact.cos() * 1.3, 1e-7)
    close(sin, exact.sin() * 1.3, 1e-7)
