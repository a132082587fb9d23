"""attend and causal_attend against a loop over single queries: groups, sinks, windows, gradients."""

import pytest
import torch

from outpace.ops.attention import Packed, attend, causal, causal_attend

B, T, S, H, K, D = 2, 5, 9, 6, 2, 8


def loop(q, k, v, allowed, sinks, scale):
    """One query and head at a time, in float64."""
    out = torch.zeros(*q.shape[:3], D, dtype=torch.float64)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(H):
                seen = allowed[b, t].nonzero()[:, 0]
                kv = h // (H // K)
                scores = [float(q[b, t, h].double() @ k[b, kv, s].double()) * scale for s in seen]
                if sinks is not None:
                    scores.append(float(sinks[h]))
                if not scores:
                    continue
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                for weight, s in zip(weights, seen, strict=False):
                    out[b, t, h] += weight * v[b, kv, s].double()
    return out.flatten(2)


def inputs(T=T, S=S):
    return torch.randn(B, T, H, D), torch.randn(B, K, S, D), torch.randn(B, K, S, D)


@pytest.mark.parametrize("sinks", [False, True])
def test_attend_against_the_loop(sinks):
    q, k, v = inputs()
    allowed = torch.rand(B, T, S) < 0.5
    allowed[..., 3] = True
    sink = torch.randn(H) if sinks else None
    got = attend(q, k, v, allowed, sink, 0.4)
    assert got.shape == (B, T, H * D)
    assert (got - loop(q, k, v, allowed, sink, 0.4)).abs().max() < 1e-5


@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_sees_nothing_is_finite(sinks):
    """Padding. A NaN there would reach real rows through 0 * NaN."""
    q, k, v = inputs()
    allowed = torch.ones(B, T, S, dtype=torch.bool)
    allowed[0, 2] = False
    got = attend(q, k, v, allowed, torch.randn(H) if sinks else None, 0.4)
    assert got.isfinite().all()


def test_large_scores_do_not_overflow():
    q, k, v = inputs()
    allowed = torch.ones(B, T, S, dtype=torch.bool)
    got = attend(q * 100, k * 100, v, allowed, torch.full((H,), 50.0), 1.0)
    assert got.isfinite().all()
    assert (got - loop(q * 100, k * 100, v, allowed, torch.full((H,), 50.0), 1.0)).abs().max() < 1e-3


def test_the_causal_mask_against_the_sentence():
    """Row t sees the last `window` columns up to t, itself included."""
    for window in (0, 1, 3, 50):
        mask = causal(7, window, torch.device("cpu"))
        for t in range(7):
            for s in range(7):
                assert mask[t, s] == (s <= t and (not window or t - s < window))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 4, 6, 11, 12, 13, 40])
def test_causal_attend_and_its_gradients(window, sinks):
    """Around every border of the tiled form: T below, at and past one and two windows, and no multiple."""
    for T in (1, 12, 13, 24, 25):
        values, grads = [], []
        torch.manual_seed(1)
        start = (*inputs(T, T), torch.randn(H))
        weights = torch.randn(B, T, H * D)
        for way in ("reference", "flash"):
            q, k, v, sink = (x.clone().requires_grad_() for x in start)
            given = sink if sinks else None
            if way == "reference":
                allowed = causal(T, window, q.device).expand(B, -1, -1)
                out = attend(q, k, v, allowed, given, 0.4)
            else:
                out = causal_attend(q, k, v, window, given, 0.4)
            (out * weights).sum().backward()
            values.append(out.detach())
            grads.append([x.grad for x in (q, k, v, sink)[: 4 if sinks else 3]])
        assert values[0].shape == values[1].shape
        assert (values[0] - values[1]).abs().max() < 1e-5
        for a, b in zip(*grads, strict=True):
            assert (a - b).abs().max() < 2e-4 * (1 + a.abs().max())


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("T", "window"), [(37, 0), (300, 0), (37, 11), (20, 11), (600, 0)])
def test_gradients_in_bfloat16_are_those_of_float32(T, window, sinks):
    """Of heads that the C kernel does not take."""
    leaves = [x.requires_grad_() for x in inputs(T, T)] + [torch.randn(H, requires_grad=True)]
    dy = torch.randn(B, T, H * D)

    def gradients(dtype):
        q, k, v, sink = (x if x is leaves[3] else x.to(dtype) for x in leaves)
        out = causal_attend(q, k, v, window, sink if sinks else None, 0.4)
        return torch.autograd.grad(out, leaves[: 3 + sinks], dy.to(dtype))

    for rounded, exact in zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True):
        assert (rounded - exact).norm() < 0.015 * exact.norm()


LENGTHS = 5, 1, 13, 2


@pytest.mark.parametrize("window", [0, 1, 4])
def test_sequences_end_to_end_do_not_see_each_other(window):
    packed, (q, k, v), sinks = Packed.of(LENGTHS), inputs(sum(LENGTHS), sum(LENGTHS)), torch.randn(H)
    q, k, v = q[:1], k[:1], v[:1]
    assert packed.positions[0].tolist() == [i for n in LENGTHS for i in range(n)]
    assert packed.cu_seqlens.tolist() == [0, 5, 6, 19, 21] and packed.longest == 13
    got = causal_attend(q, k, v, window, sinks, 0.4, packed)
    begin = 0
    for n in LENGTHS:
        own = slice(begin, begin + n)
        alone = causal_attend(q[:, own], k[:, :, own], v[:, :, own], window, sinks, 0.4)
        assert (got[:, own] - alone).abs().max() < 1e-5
        begin += n


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the flash kernel of CUDA needs a GPU")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [0, 1, 128])
@pytest.mark.parametrize("ends", [False, True])
def test_the_flash_kernel_of_cuda_and_its_gradients(ends, window, sinks):
    lengths = [301, 5, 700, 1, 94]
    packed = Packed.of(lengths).to(torch.device("cuda")) if ends else None
    T = sum(lengths)
    leaves = [torch.randn(1, n, T, 64, device="cuda").bfloat16().requires_grad_() for n in (H, K, K)]
    leaves.append(torch.randn(H, device="cuda", requires_grad=True))
    q, k, v, sink = leaves
    seen = causal(T, window, q.device)[None] if packed is None else packed.allowed(window)
    given, dy = sink if sinks else None, torch.randn(1, T, H * 64, device="cuda").bfloat16()
    exact = attend(q.transpose(1, 2), k, v, seen, given, 0.125)
    got = causal_attend(q.transpose(1, 2), k, v, window, given, 0.125, packed)
    assert (got.float() - exact.float()).norm() < 0.01 * exact.float().norm()
    for way, reference in zip(
        *(torch.autograd.grad(out, leaves[: 3 + sinks], dy) for out in (got, exact)), strict=True
    ):
        assert (way.float() - reference.float()).norm() < 0.01 * reference.float().norm()
