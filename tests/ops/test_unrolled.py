"""Attention of unrolled steps against a plain loop over explicit key lists, in value and gradient."""

import math

import pytest
import torch

from outpace.ops.unrolled import Unrolled, reference_unrolled_attend, unrolled_attend

H, K, D = 6, 2, 8
KEYS = [0, 17, 18, 31]  # rows of 17, 1 and 13 keys
SCALE = D**-0.5


def layout(kind):
    """Queries of all keys, of each row's answer, of a row without any, or of a few here and there."""
    at = {
        "all": [range(17), range(17, 18), range(18, 31)],
        "answers": [range(5, 16), range(17, 18), range(18, 29)],
        "one row": [range(0), range(0), range(20, 30)],
        "some": [(4, 5, 9, 10, 14), (17,), (18, 25, 30)],
    }[kind]
    ends = [0]
    for row in at:  # type: ignore[attr-defined]
        ends.append(ends[-1] + len(row))
    return Unrolled(KEYS, ends, torch.tensor([t for row in at for t in row]))  # type: ignore[attr-defined]


def case(kind, steps, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    result = layout(kind)
    n = len(result.at)
    shapes = [(n, H, D), (KEYS[-1], K, D), (KEYS[-1], K, D)] + [(n, K, D)] * (2 * steps)
    tensors = [torch.randn(s, generator=rng).to(dtype).requires_grad_() for s in shapes]
    own = list(zip(tensors[3::2], tensors[4::2], strict=True))
    return result, tensors, own


def by_lists(q, k, v, own, result, window):
    """Each query with the list of its keys, written out; query head h reads kv head h // (H / K)."""
    rows, ahead = [], len(own)
    for n, t in enumerate(result.at.tolist()):
        r = max(i for i in range(3) if result.queries[i] <= n)
        first = KEYS[r] if not window else max(KEYS[r], t + ahead - window + 1)
        keys = [k[s] for s in range(first, t + 1)] + [pair[0][n] for pair in own]
        values = [v[s] for s in range(first, t + 1)] + [pair[1][n] for pair in own]
        heads = []
        for h in range(H):
            scores = torch.stack([q[n, h] @ x[h // (H // K)] for x in keys]) * SCALE
            heads.append(scores.softmax(0) @ torch.stack([x[h // (H // K)] for x in values]))
        rows.append(torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("kind", ["all", "answers", "one row", "some"])
def test_steps_see_what_the_rule_says(kind, steps, window):
    values = {}
    for function in (unrolled_attend, reference_unrolled_attend, by_lists):
        where, tensors, own = case(kind, steps)
        args = (*tensors[:3], own, where, window)
        out = function(*args) if function is by_lists else function(*args, SCALE)  # type: ignore[call-arg]
        weights = torch.linspace(-1, 2, out.numel()).view(out.shape)
        (out * weights).sum().backward()
        values[function] = [out, *(t.grad for t in tensors)]
    for function in (unrolled_attend, reference_unrolled_attend):
        for ours, wanted in zip(values[function], values[by_lists], strict=True):
            torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("every", [1, 3])
def test_rows_longer_than_a_tile(every, window):
    """Many tiles of queries, gaps between them or none, in value and gradient."""
    items, n, before = [], 431, 57
    for function in (unrolled_attend, reference_unrolled_attend):
        rng = torch.Generator().manual_seed(3)
        at = torch.cat([torch.arange(before, n, every), torch.arange(n, n + 300, every)])
        first = len(range(before, n, every))
        where = Unrolled([0, n, n + 300], [0, first, len(at)], at)
        shapes = [(len(at), H, D), (n + 300, K, D), (n + 300, K, D)] + [(len(at), K, D)] * 4
        q, k, v, *own = (torch.randn(s, generator=rng).requires_grad_() for s in shapes)
        pairs = list(zip(own[::2], own[1::2], strict=True))
        out = function(q, k, v, pairs, where, window, SCALE)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        items.append([out, *(t.grad for t in (q, k, v, *own))])
    for ours, wanted in zip(*items, strict=True):
        torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["answers", "some"])
def test_bfloat16_stays_close(kind):
    where, tensors, own = case(kind, 3, torch.bfloat16)
    out = unrolled_attend(*tensors[:3], own, where, 0, SCALE)  # type: ignore[call-arg]
    out.float().square().sum().backward()
    wide = [t.detach().float().requires_grad_() for t in tensors]
    exact = by_lists(*wide[:3], list(zip(wide[3::2], wide[4::2], strict=True)), where, 0)  # type: ignore[call-arg]
    exact.square().sum().backward()
    assert out.dtype == tensors[0].grad.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, atol=0.03, rtol=0.03)
    for t, w in zip(tensors, wide, strict=True):
        assert (t.grad.float() - w.grad).norm() < 0.03 * w.grad.norm()


def test_long_rows_of_large_scores_are_stable():
    """Past the flash kernel's tiles, with scores where the exponentials overflow float32."""
    rng = torch.Generator().manual_seed(1)
    n = 700
    where = Unrolled([0, n], [0, n - 300], torch.arange(300, n))
    q, own_k, own_v = (torch.randn(n - 300, h, D, generator=rng) * 12 for h in (H, K, K))
    k, v = (torch.randn(n, K, D, generator=rng) * 12 for _ in range(2))
    ours = unrolled_attend(q, k, v, [(own_k, own_v)], where, 0, SCALE)
    plainly = reference_unrolled_attend(q, k, v, [(own_k, own_v)], where, 0, SCALE)
    assert math.isfinite(ours.abs().max()) and (q[0, 0] @ k[:300, 0].T * SCALE).max() > 89
    torch.testing.assert_close(ours, plainly, atol=2e-3, rtol=1e-4)


def test_no_grid_over_steps_and_no_scores_of_a_row():
    """The largest tensor that an operation makes is of the size of the inputs."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            for x in made if isinstance(made, tuple | list) else (made,):
                if isinstance(x, torch.Tensor):
                    self.size = max(self.size, x.numel())
            return made

    n, before = 600, 100
    where = Unrolled([0, n], [0, n - before], torch.arange(before, n))
    shapes = [(n - before, H, D), (n, K, D), (n, K, D)] + [(n - before, K, D)] * 6
    q, k, v, *own = (torch.randn(s, requires_grad=True) for s in shapes)
    with Largest() as mode:
        pairs = list(zip(own[::2], own[1::2], strict=True))
        unrolled_attend(q, k, v, pairs, where, 0, SCALE).sum().backward()
    assert mode.size <= n * H * D < n * (n - before) / 4
