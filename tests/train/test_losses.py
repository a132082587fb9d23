"""The chunked loss against the plain one, in value, gradient and memory; the weights by hand."""

import math

import pytest
import torch

from outpace.train.losses import (
    chunked_nll,
    chunked_nll_and_hits,
    decay_weights,
    default_gamma,
    dpace_weights,
    reference_hits,
    reference_nll,
)

N, C, V = 23, 10, 97


def case(seed=0):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, C, generator=rng)
    head = torch.randn(V, C, generator=rng)
    labels = torch.randint(V, (N,), generator=rng)
    labels[::3] = (hidden @ head.T).argmax(-1)[::3]
    return hidden, head, labels


@pytest.mark.parametrize("chunk", [1, 7, 23, None])
@pytest.mark.parametrize("learns", [False, True])
def test_chunked_equals_reference(chunk, learns):
    hidden, head, labels = case()
    weights = torch.linspace(0, 2, N)
    found = []
    for loss in (lambda *x: chunked_nll(*x, chunk), reference_nll):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_(learns)
        nll = loss(h, w, labels)
        (nll * weights).sum().backward()
        found.append((nll.detach(), h.grad, w.grad if learns else torch.zeros(())))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_hits_equal_reference():
    hidden, head, labels = case()
    _, hits = chunked_nll_and_hits(hidden, head, labels, 7)
    assert torch.equal(hits, reference_hits(hidden, head, labels))
    assert torch.equal(hits, (hidden @ head.T).argmax(-1) == labels)
    assert 0 < hits.sum() < N


def test_hopeless_rows_keep_their_loss_and_gradient():
    """A label whose probability underflows: exp(-200) is 0 in float32, its loss is still 200."""
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    head = torch.tensor([[200.0, 0.0], [0.0, 5.0], [0.0, 1.0]])
    nll = chunked_nll(hidden, head, torch.tensor([2]))
    nll.sum().backward()
    torch.testing.assert_close(nll, torch.tensor([200.0]))
    torch.testing.assert_close(hidden.grad, torch.tensor([[200.0, -1.0]]))


def test_bfloat16_stays_close():
    hidden, head, labels = case()
    exact = reference_nll(hidden, head, labels)
    nll = chunked_nll(hidden.bfloat16(), head, labels, 7)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, exact, atol=0.1, rtol=0.02)


def test_logits_never_exist_at_once():
    """The largest tensor that any operation makes, forward and backward, is one chunk of logits."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            for x in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(x, torch.Tensor):
                    self.size = max(self.size, x.numel())
            return found

    rows, vocab, width, chunk = 700, 1009, 8, 50
    hidden = torch.randn(rows, width, requires_grad=True)
    head, labels = torch.randn(vocab, width), torch.randint(vocab, (rows,))
    mode = Largest()
    mode.size = 0
    with mode:
        chunked_nll(hidden, head, labels, chunk).sum().backward()
    assert mode.size == chunk * vocab
    mode.size = 0
    with mode:
        reference_nll(hidden, head, labels).sum()
    assert mode.size == rows * vocab


def test_decay():
    valid = torch.tensor([[True, True, True], [True, False, False]])
    e = [1.0, math.exp(-1 / 4), math.exp(-2 / 4)]
    torch.testing.assert_close(decay_weights(valid, 4.0), torch.tensor([e, [1.0, 0.0, 0.0]]))
    assert [default_gamma(b) for b in (8, 10, 16)] == [4, 5, 7]
    assert 4 < default_gamma(9) < 5 < default_gamma(12) < 7
    assert default_gamma(2) >= 1


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
def test_dpace_by_hand(alpha):
    rng = torch.Generator().manual_seed(3)
    nll = torch.rand(4, 5, generator=rng).requires_grad_()
    valid = torch.ones(4, 5, dtype=torch.bool)
    valid[1, 3:] = False
    valid[2, 1] = False  # a hole: 1 in the product, absent from the sum
    found = dpace_weights(nll, valid, alpha)
    assert not found.requires_grad
    for a in range(4):
        for j in range(5):
            wanted = 0.0
            for m in range(j, 5):
                product = 1.0
                for i in range(m + 1):
                    if valid[a, i]:
                        product *= (1 - alpha) * math.exp(-nll[a, i].item()) + alpha
                wanted += product * bool(valid[a, m])
            assert found[a, j].item() == pytest.approx(wanted if valid[a, j] else 0.0, rel=1e-5)


def test_dpace_is_the_gradient_of_expected_accept_len():
    """alpha 0: d/d(log a_j) of sum_m prod_{i<=m} a_i."""
    log_a = -torch.rand(3, 4, generator=torch.Generator().manual_seed(4))
    log_a.requires_grad_()
    log_a.exp().cumprod(1).sum().backward()
    valid = torch.ones(3, 4, dtype=torch.bool)
    torch.testing.assert_close(dpace_weights(-log_a, valid, 0.0), log_a.grad)
