"""Keys made of latents by the kernel: what the reference states, row by row."""

import pytest
import torch
from nearly import close

from outpace.kernels import bindings
from outpace.ops.latent import keys_, panels, reference_keys

pytestmark = pytest.mark.skipif(not bindings.available(), reason=f"no CPU kernels: {bindings.why_not()}")


def sample(B, n, R, K, D, normed, tables):
    rows = torch.randn(B, n + 2, R + (K if normed else 0) + 1)[:, :n]  # a part of a memory
    angle = torch.rand(tables, n, D // 2) * 6
    gain = torch.randn(D) if normed else None
    return rows, panels(torch.randn(K * D, R), D), torch.randn(K * D), angle.cos(), angle.sin(), gain


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("R", "K", "D"), [(1, 2, 8), (7, 3, 24), (28, 2, 32), (65, 1, 64), (33, 2, 128)])
def test_against_the_reference(R, K, D, normed):
    for B, n, tables in ((1, 1, 1), (2, 9, 1), (3, 6, 3), (2, 101, 2)):
        rows, *rest = sample(B, n, R, K, D, normed, tables)
        whole = torch.full((B, K, n + 3, D), float("nan"))
        keys_(whole[:, :, 1 : n + 1], rows, *rest)
        double = [None if x is None else x.double() for x in (rows, *rest)]
        close(whole[:, :, 1 : n + 1].contiguous(), reference_keys(*double, K).double(), 1e-5)  # type: ignore[call-arg]
        assert whole[:, :, 0].isnan().all() and whole[:, :, n + 1 :].isnan().all()


@pytest.mark.parametrize("normed", [False, True])
def test_a_key_does_not_depend_on_its_company(normed):
    rows, w, bias, cos, sin, gain = sample(1, 11, 28, 2, 32, normed, 1)
    together = torch.empty(1, 2, 11, 32)
    keys_(together, rows, w, bias, cos, sin, gain)
    for i in range(11):
        alone = torch.empty(1, 2, 1, 32)
        keys_(alone, rows[:, i : i + 1], w, bias, cos[:, i : i + 1], sin[:, i : i + 1], gain)
        assert torch.equal(alone[0, :, 0], together[0, :, i])


def test_no_tokens_at_all_and_panels():
    rows, *rest = sample(2, 0, 5, 2, 8, False, 1)
    keys_(torch.empty(2, 2, 0, 8), rows, *rest)
    weight = torch.randn(48, 5, dtype=torch.bfloat16)
    for head_dim, P in ((48, 16), (24, 8), (8, 8)):
        result = panels(weight, head_dim)
        assert result.shape == (48 // P, 5, P) and result.is_contiguous()
        assert all(
            torch.equal(result[i, :, p], weight[i * P + p].float()) for i in range(48 // P) for p in range(P)
        )
