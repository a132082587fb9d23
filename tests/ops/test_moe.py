"""Routing and experts against a loop over single tokens, for both families, dense and packed."""

import pytest
import torch

from outpace.ops import mxfp4
from outpace.ops.moe import MOST_GATHERED, Matrices, _grouped, on_device, route, router_logits, run_experts

M, C, F, E, TOP = 11, 96, 64, 5, 3


def one_token(x, up, up_bias, down, down_bias, limit):
    h = up.double() @ x.double() + (0 if up_bias is None else up_bias.double())
    if limit is None:
        gate, value = h[:F], h[F:]
        h = gate * torch.sigmoid(gate) * value
    else:
        gate, value = h[0::2].clamp(max=limit), h[1::2].clamp(-limit, limit)
        h = gate * torch.sigmoid(1.702 * gate) * (value + 1)
    return down.double() @ h + (0 if down_bias is None else down_bias.double())


@pytest.mark.parametrize("softmax_first", [False, True])
@pytest.mark.parametrize("renormalise", [False, True])
def test_route(softmax_first, renormalise):
    x, weight, bias = torch.randn(M, C), torch.randn(E, C), torch.randn(E)
    how = {"softmax_first": softmax_first, "renormalise": renormalise}
    with torch.inference_mode():
        experts, weights = route(x, weight, bias, TOP, **how)
    assert (router_logits(x, weight, bias) - (x @ weight.T + bias)).abs().max() < 1e-4
    again, same = route(x, weight, bias, TOP, **how)  # outside inference mode: always the reference
    assert torch.equal(experts, again) and (weights - same).abs().max() < 1e-5
    for m in range(M):
        row = (weight.double() @ x[m].double() + bias.double()).tolist()
        best = sorted(range(E), key=lambda e: -row[e])[:TOP]
        assert experts[m].tolist() == best
        chosen = torch.tensor(row, dtype=torch.float64).softmax(0)[best]
        if not softmax_first or renormalise:
            chosen = chosen / chosen.sum()
        assert (weights[m] - chosen).abs().max() < 1e-5


@pytest.mark.parametrize("style", ["gpt-oss", "qwen3"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, M])
def test_run_experts(style, packed, rows):
    """Rows that share experts, an expert nobody wants, and a clamp that bites."""
    x = torch.randn(rows, C)
    limit = 1.5 if style == "gpt-oss" else None
    up, down = torch.randn(E, 2 * F, C) * 0.2, torch.randn(E, C, F) * 0.2
    up_bias, down_bias = (torch.randn(E, 2 * F), torch.randn(E, C)) if limit else (None, None)
    given_up, given_down = up, down
    if packed:
        given_up, given_down = mxfp4.pack(up), mxfp4.pack(down)
        up, down = mxfp4.unpack(*given_up), mxfp4.unpack(*given_down)
    experts = torch.stack([torch.randperm(E - 1)[:TOP] for _ in range(rows)])  # expert E-1 rests
    weights = torch.rand(rows, TOP)
    for inference in (False, True):
        with torch.inference_mode(inference):
            got = run_experts(x, experts, weights, given_up, up_bias, given_down, down_bias, limit)
        assert got.shape == (rows, C)
        for m in range(rows):
            wanted = sum(
                float(weights[m, j]) * one_token(
                    x[m], up[e], None if up_bias is None else up_bias[e],
                    down[e], None if down_bias is None else down_bias[e], limit)
                for j, e in enumerate(experts[m].tolist())
            )  # fmt: skip
            assert (got[m] - wanted).abs().max() < 1e-4 * (1 + wanted.abs().max())


def test_gradients_reach_everything():
    x, up, down = torch.randn(M, C), torch.randn(E, 2 * F, C) * 0.2, torch.randn(E, C, F) * 0.2
    biases = torch.randn(E, 2 * F), torch.randn(E, C)
    router = torch.randn(E, C)
    everything = [t.requires_grad_() for t in (x, up, down, *biases, router)]
    experts, weights = route(x, router, None, TOP)
    run_experts(x, experts, weights, up, biases[0], down, biases[1], 7.0).pow(2).sum().backward()
    assert all(t.grad is not None and t.grad.abs().sum() > 0 for t in everything)


@pytest.mark.parametrize("style", ["gpt-oss", "qwen3"])
def test_gradients_are_those_of_single_tokens(style):
    limit = 1.5 if style == "gpt-oss" else None
    x, weights = torch.randn(M, C, requires_grad=True), torch.rand(M, TOP, requires_grad=True)
    up, down = (
        (torch.randn(E, 2 * F, C) * 0.2).requires_grad_(),
        (torch.randn(E, C, F) * 0.2).requires_grad_(),
    )
    experts = torch.stack([torch.randperm(E - 1)[:TOP] for _ in range(M)])
    leaves, dy = (x, weights, up, down), torch.randn(M, C)
    ours = torch.autograd.grad(run_experts(x, experts, weights, up, None, down, None, limit), leaves, dy)
    rows = [
        sum(
            weights[m, i].double() * one_token(x[m], up[e], None, down[e], None, limit)
            for i, e in enumerate(experts[m].tolist())
        )
        for m in range(M)
    ]
    wanted = torch.autograd.grad(torch.stack(rows), leaves, dy.double())
    for result, truth in zip(ours, wanted, strict=True):
        assert (result - truth).abs().max() < 1e-4 * truth.abs().max()


@pytest.mark.parametrize("style", ["gpt-oss", "qwen3"])
@pytest.mark.parametrize("layout", ["dense", "packed", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 40])
@torch.no_grad()
def test_what_a_gpu_runs_is_the_same_product(style, layout, dtype, rows):
    """Gathered matrices, in pieces, and for many rows of bfloat16 one grouped product."""
    assert 2 * TOP < MOST_GATHERED < 40 * TOP
    gpt = style == "gpt-oss"
    x, weights = torch.randn(rows, C, dtype=dtype), torch.rand(rows, TOP)
    chosen = torch.stack([torch.randperm(E)[:TOP] for _ in range(rows)])
    limit = 7.0 if gpt else None
    up, down = (0.3 * torch.randn(*shape) for shape in ((E, 2 * F, C), (E, C, F)))
    up_bias, down_bias = (torch.randn(E, 2 * F), torch.randn(E, C)) if gpt else (None, None)
    given, more = (up, up_bias, down, down_bias), ()
    if layout == "packed":
        packs = mxfp4.pack(up), mxfp4.pack(down)
        given = packs[0], up_bias, packs[1], down_bias
        up, down = (mxfp4.reference_unpack(*pack) for pack in packs)
    if layout == "split":
        halves = (slice(0, None, 2), slice(1, None, 2)) if gpt else (slice(F), slice(F, None))
        (gate, own), (gate_bias, bias) = (
            (None, None) if t is None else [t[:, half].contiguous() for half in halves] for t in (up, up_bias)
        )
        given, more = (own, bias, down, down_bias), (gate, gate_bias)
    got = on_device(x, chosen, weights, Matrices(*given, limit, *more))
    for m in range(rows):
        parts = [
            one_token(
                x[m],
                up[e],
                None if not gpt else up_bias[e],
                down[e],
                None if not gpt else down_bias[e],
                limit,
            )
            for e in chosen[m].tolist()
        ]
        wanted = sum(w * part for w, part in zip(weights[m].double(), parts, strict=True))
        error = (got[m].double() - wanted).abs().max() / wanted.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("biased", [False, True])
def test_one_product_of_all_experts_is_the_product_of_each(biased):
    """With an expert that nobody chose, and sums of the gradients of matrices and biases."""
    own = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3, 3, 4, 4])
    x, dy = torch.randn(len(own), C).bfloat16(), torch.randn(len(own), F).bfloat16()
    leaves = [x.requires_grad_(), torch.randn(E, F, C, requires_grad=True)]
    bias = torch.randn(E, F, requires_grad=True) if biased else None
    leaves += [] if bias is None else [bias]
    got = _grouped(leaves[0], own, leaves[1], bias)
    exact = torch.einsum("mc,mfc->mf", x.float(), leaves[1].bfloat16().float()[own])
    exact = exact if bias is None else exact + bias[own]
    assert (got.float() - exact).norm() < 0.01 * exact.norm()
    ways = (torch.autograd.grad(y, leaves, d) for y, d in ((got, dy), (exact, dy.float())))
    for way, reference in zip(*ways, strict=True):
        assert (way.float() - reference.float()).norm() < 0.01 * reference.float().norm()
