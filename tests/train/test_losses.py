"""The chunked losses against the plain ones, in value, gradient and memory; each by hand; the weights too."""

import math

import pytest
import torch
import torch.nn.functional as F

from outpace.train.losses import (
    ETA,
    LOSSES,
    WEIGHTS,
    LossRows,
    auf_weights,
    block_losses,
    block_weights,
    chunked_nll,
    decay_weights,
    default_gamma,
    dpace_weights,
    needs_target,
    parse_loss,
    reference_losses,
    top_tokens,
)

N, C, D, V = 23, 10, 14, 97
SUM = "0.1*ce+0.9*tv"


OF = torch.tensor([0, 0, 0, 1, 3, 3, 4, 4, 5, 5, 5, 5, 9, 10, 10, 16, 16, 16, 17, 18, 20, 21, 22])  # gaps too


def case(seed=0):
    """Rows where the labels are now and then the draft's first choice, and now and then missing."""
    rng = torch.Generator().manual_seed(seed)
    states, head = torch.randn(N, C, generator=rng), torch.randn(V, C, generator=rng)
    target_states = torch.randn(N, D, generator=rng)
    target_head = torch.randn(V, D, generator=rng) * 0.6
    labels = torch.randint(V, (N,), generator=rng)
    labels[::3] = (states @ head.T).argmax(-1)[::3]
    labels[5::7] = -1
    return states, head, labels, target_states, target_head


@pytest.mark.parametrize("of", [None, OF])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kind", [*LOSSES, SUM])
def test_chunked_equals_reference(kind, learns, of):
    states, head, labels, *target = case()
    weights = torch.linspace(0, 2, N)
    fields = {}
    for name in ("reference", "weighted", 1, 7, 23, None):
        h, w = states.clone().requires_grad_(), head.clone().requires_grad_(learns)
        given = h, w, labels, *target
        if name == "weighted":
            rows = block_losses(kind, *given, weights=weights, of=of, chunk=7)
            assert not rows.loss.requires_grad
            (3 * rows.total).backward()
            h.grad /= 3
            w.grad = w.grad / 3 if learns else None
        else:
            rows = (
                reference_losses(kind, *given, of)  # type: ignore[call-arg]
                if name == "reference"
                else block_losses(kind, *given, of=of, chunk=name)
            )
            (rows.loss * weights).sum().backward()
        fields[name] = (rows, rows.loss, rows.nll, rows.accept, h.grad, *([w.grad] if learns else []))
    reference, *wanted = fields.pop("reference")
    for rows, *ours in fields.values():
        for a, b in zip(ours, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)
        assert torch.equal(rows.hits, reference.hits) and 0 < rows.hits.sum() < N
        assert not rows.nll.requires_grad and not rows.accept.requires_grad


@pytest.mark.parametrize("kind", [*LOSSES, SUM])
def test_gradients_are_those_of_finite_differences(kind):
    """Without autograd: the loss of each row, moved along a random direction."""
    states, head, labels, *target = case(1)
    direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
    h = states.clone().requires_grad_()
    block_losses(kind, h, head, labels, *target).loss.sum().backward()
    wide = [x.double() if x.is_floating_point() else x for x in (head, labels, *target)]

    def loss(shift):
        z = (states.double() + shift * direction.double()) @ wide[0].T
        q, p = z.softmax(-1), (wide[2] @ wide[3].T).softmax(-1)
        alpha, kl = torch.minimum(p, q).sum(-1), (p * (p / q).log()).sum(-1)
        nll = F.cross_entropy(z, labels, ignore_index=-1, reduction="none")
        w = torch.exp(-ETA * torch.minimum(p, (states.double() @ wide[0].T).softmax(-1)).sum(-1))
        lk = w * kl + (1 - w) * (1 - alpha)
        known = {"ce": nll, "kl": kl, "tv": 1 - alpha, "nla": -alpha.log(), "lk": lk}
        return sum(share * known[name] for name, share in parse_loss(kind).items())

    step = 1e-5
    wanted = (loss(step) - loss(-step)) / (2 * step)
    torch.testing.assert_close((h.grad * direction).sum(-1).double(), wanted, atol=2e-4, rtol=2e-4)


def test_by_hand():
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): alpha = 3/4."""
    eye = torch.eye(3)
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    label, kl = torch.tensor([2]), 0.5 * math.log(2) - 0.25 * math.log(2)
    w = math.exp(-3 * 0.75)
    wanted = {"ce": math.log(2), "kl": kl, "tv": 0.25, "nla": -math.log(0.75), "lk": w * kl + (1 - w) * 0.25}
    wanted[SUM] = 0.1 * wanted["ce"] + 0.9 * 0.25
    for kind, value in wanted.items():
        rows = block_losses(kind, q.log(), eye, label, p.log(), eye)
        assert rows.loss.item() == pytest.approx(value, rel=1e-5), kind
        assert rows.accept.item() == pytest.approx(0.75) and rows.nll.item() == pytest.approx(math.log(2))
        assert rows.hits.item()


@pytest.mark.parametrize("kind", ["kl", "tv", "nla", "lk"])
def test_a_draft_that_is_the_target_has_no_loss_and_no_gradient(kind):
    states, head, labels, *_ = case(3)
    h = states.clone().requires_grad_()
    rows = block_losses(kind, h, head, labels, states, head)
    rows.loss.sum().backward()
    torch.testing.assert_close(rows.accept, torch.ones(N), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.loss, torch.zeros(N), atol=2e-5, rtol=0)
    torch.testing.assert_close(h.grad, torch.zeros(N, C), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["kl", "tv", "nla", "lk"])
def test_each_loss_leads_to_the_target(kind):
    """Free logits follow the gradient until nearly every token would be accepted."""
    _, _, labels, *target = case(4)
    eye, z = torch.eye(V), torch.zeros(N, V, requires_grad=True)
    optimizer = torch.optim.Adam([z], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        rows = block_losses(kind, z, eye, labels, *target)
        rows.loss.sum().backward()
        optimizer.step()
    assert rows.accept.mean() > 0.97


def test_acceptance_is_that_of_drawing_from_q():
    """alpha = E_q[min(1, p/q)], the chance that rejection sampling keeps a drawn token."""
    states, head, labels, *target = case(5)
    rows = block_losses("ce", states, head, labels, *target)
    p, q = (target[0] @ target[1].T).softmax(-1), (states @ head.T).softmax(-1)
    torch.testing.assert_close(rows.accept, (q * (p / q).clamp(max=1)).sum(-1))
    assert block_losses("ce", states, head, labels).accept is None


def test_some_tokens_of_both_heads_are_the_restricted_target():
    """p of a draft vocabulary: the target's probabilities of those tokens, made to sum to 1."""
    states, head, _, *target = case(6)
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(7))[:31].sort().values
    labels = torch.randint(31, (N,))
    rows = block_losses("kl", states, head[ids], labels, target[0], target[1][ids])
    p = (target[0] @ target[1].T).softmax(-1)[:, ids]
    p = p / p.sum(-1, keepdim=True)
    log_q = (states @ head[ids].T).log_softmax(-1)
    torch.testing.assert_close(rows.loss, (p * (p.log() - log_q)).sum(-1), atol=1e-5, rtol=1e-5)


def test_a_row_without_a_label_has_no_cross_entropy():
    states, head, labels, *target = case()
    missing = labels < 0
    h = states.clone().requires_grad_()
    rows = block_losses("ce", h, head, labels, *target)
    rows.loss.sum().backward()
    assert missing.any() and not rows.loss[missing].any() and not h.grad[missing].any()
    assert not rows.hits[missing].any() and not rows.nll[missing].any()
    assert block_losses("kl", states, head, labels, *target).loss[missing].all()


def test_hopeless_rows_keep_their_loss_and_gradient():
    """A label where the probability underflows: exp(-200) is 0 in float32, its loss is still 200."""
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    head = torch.tensor([[200.0, 0.0], [0.0, 5.0], [0.0, 1.0]])
    nll = chunked_nll(hidden, head, torch.tensor([2]))
    nll.sum().backward()
    torch.testing.assert_close(nll, torch.tensor([200.0]))
    torch.testing.assert_close(hidden.grad, torch.tensor([[200.0, -1.0]]))


@pytest.mark.parametrize("kind", LOSSES)
def test_distributions_that_do_not_meet_stay_finite(kind):
    """Each is sure of a token that is impossible for the other: alpha underflows."""
    eye, far = torch.eye(3), torch.tensor([[300.0, 0.0, 0.0]])
    z = torch.tensor([[0.0, 0.0, 300.0]], requires_grad=True)
    rows = block_losses(kind, z, eye, torch.tensor([0]), far, eye)
    rows.loss.sum().backward()
    assert rows.loss.isfinite().all() and z.grad.isfinite().all()
    assert rows.loss.item() == pytest.approx({"tv": 1, "nla": -math.log(1e-30)}.get(kind, 300), rel=1e-5)


def test_bfloat16_stays_close():
    states, head, labels, *target = case()
    for kind in LOSSES:
        exact = reference_losses(kind, states, head, labels, *target).loss
        rows = block_losses(kind, states.bfloat16(), head, labels, target[0].bfloat16(), target[1], chunk=7)
        assert rows.loss.dtype == rows.accept.dtype == torch.float32
        torch.testing.assert_close(rows.loss, exact, atol=0.1, rtol=0.03)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.numel())
        return result


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kind", ["ce", "lk"])
@pytest.mark.parametrize("weighted", [False, True])
def test_logits_never_exist_at_once(weighted, kind, learns):
    """The largest tensor that any operation makes, forward and backward, is one chunk of logits."""
    rows, vocab, width, chunk = 700, 1009, 8, 50
    states = torch.randn(rows, width, requires_grad=True)
    head, labels = torch.randn(vocab, width, requires_grad=learns), torch.randint(vocab, (rows,))
    target = (torch.randn(rows, width), torch.randn(vocab, width)) if kind != "ce" else ()
    of = torch.arange(rows) // 3  # a chunk meets 17 or 18 targets
    with Largest() as mode:
        if weighted:
            block_losses(
                kind, states, head, labels, *target, weights=torch.ones(rows), chunk=chunk
            ).total.backward()
        else:
            block_losses(kind, states, head, labels, *target, of=of, chunk=chunk).loss.sum().backward()
    assert mode.size == chunk * vocab
    with Largest() as mode:
        reference_losses(kind, states, head, labels, *target).loss.sum()
    assert mode.size == rows * vocab


def test_chunks_of_a_large_vocabulary_are_bounded():
    """201,088 tokens as in gpt-oss: 128 rows of float32 logits, 103 MB, however many rows there are."""
    states, head = torch.zeros(300, 1, requires_grad=True), torch.zeros(201_088, 1)
    with Largest() as mode:
        block_losses("ce", states, head, torch.zeros(300, dtype=torch.int64))
    assert mode.size <= 128 * 201_088


@pytest.mark.parametrize("kind", ["mse", "", "0.1*ce+", "ce+ce", "-1*ce", "0*kl", "x*kl", "inf*kl", "2*"])
def test_losses_that_are_none(kind):
    with pytest.raises(ValueError, match=r"loss .* give one of ce, kl, tv, nla, lk, or a sum"):
        parse_loss(kind)


def test_losses_that_need_the_target():
    states, head, labels, *_ = case()
    assert [needs_target(k) for k in ("ce", "2*ce", "kl", SUM)] == [False, False, True, True]
    with pytest.raises(ValueError, match="loss 'lk' compares with the target's distribution"):
        block_losses("lk", states, head, labels)


def test_cross_entropy_alone():
    states, head, labels, *_ = case()
    rows = block_losses("ce", states, head, labels.clamp(min=0), chunk=7)
    nll, hits = rows.loss, rows.hits
    torch.testing.assert_close(nll, F.cross_entropy(states @ head.T, labels.clamp(min=0), reduction="none"))
    assert torch.equal(hits, (states @ head.T).argmax(-1) == labels.clamp(min=0))
    assert torch.equal(nll, chunked_nll(states, head, labels.clamp(min=0), 7))


def test_the_first_choice_of_every_row():
    states, head, *_ = case()
    for chunk in (1, 7, None):
        assert torch.equal(top_tokens(states, head, chunk), (states @ head.T).argmax(-1))
    assert len(top_tokens(states[:0], head)) == 0


@pytest.mark.parametrize("kind", ["ce", "lk"])
def test_a_head_may_learn_alone(kind):
    states, head, labels, *target = case()
    items = []
    for function in (block_losses, reference_losses, None):
        w = head.clone().requires_grad_()
        if function is None:
            block_losses(kind, states, w, labels, *target, weights=torch.ones(N)).total.backward()
        else:
            function(kind, states, w, labels, *target).loss.sum().backward()
        items.append(w.grad)
    for ours in (items[0], items[2]):
        torch.testing.assert_close(ours, items[1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("learns", [False, True])
def test_validation_forms_no_gradients(learns):
    """Without grad mode there is one product a chunk for the draft and one for the target."""

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func._schema.name in ("aten::mm", "aten::matmul")
            return func(*args, **(kwargs or {}))

    states, head, labels, *target = case()
    given = (states.requires_grad_(), head.requires_grad_(learns), labels, *target)
    for at, graded in ((torch.no_grad, 0), (torch.enable_grad, 4 + 4 * learns)):
        with at(), Products() as mode:
            block_losses("lk", *given, weights=torch.ones(N), chunk=6)
        assert mode.count == 2 * 4 + graded


def test_no_rows_at_all():
    states, head, labels, *target = case()
    h = states[:0].clone().requires_grad_()
    rows = block_losses("lk", h, head, labels[:0], target[0][:0], target[1])
    rows.loss.sum().backward()
    assert len(rows.loss) == len(rows.hits) == len(rows.accept) == len(h.grad) == 0


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
    result = dpace_weights(nll, valid, alpha)
    assert not result.requires_grad
    for a in range(4):
        for j in range(5):
            wanted = 0.0
            for m in range(j, 5):
                product = 1.0
                for i in range(m + 1):
                    if valid[a, i]:
                        product *= (1 - alpha) * math.exp(-nll[a, i].item()) + alpha
                wanted += product * bool(valid[a, m])
            assert result[a, j].item() == pytest.approx(wanted if valid[a, j] else 0.0, rel=1e-5)


def test_dpace_is_the_gradient_of_expected_accept_len():
    """alpha 0: d/d(log a_j) of sum_m prod_{i<=m} a_i."""
    log_a = -torch.rand(3, 4, generator=torch.Generator().manual_seed(4))
    log_a.requires_grad_()
    log_a.exp().cumprod(1).sum().backward()
    valid = torch.ones(3, 4, dtype=torch.bool)
    torch.testing.assert_close(dpace_weights(-log_a, valid, 0.0), log_a.grad)


def test_auf_stops_behind_the_first_failure():
    hits = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 1, 1]]).bool()
    valid = torch.ones_like(hits)
    valid[2, 3:], valid[3, 1] = False, False  # past the end; a hole, which fails nobody
    wanted = [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 1, 0, 0]]
    assert auf_weights(hits & valid, valid).tolist() == wanted


def test_weights_by_name():
    states, head, labels, *target = case(8)
    rows = block_losses("ce", states[:20], head, labels[:20].clamp(min=0), target[0][:20], target[1])
    valid = torch.rand(4, 5, generator=torch.Generator().manual_seed(9)) < 0.8
    nll, alpha = rows.nll.view(4, 5), rows.accept.view(4, 5)
    wanted = {
        "dpace": dpace_weights(nll, valid, 0.3),
        "dpace-soft": dpace_weights(-alpha.log(), valid, 0.3),
        "decay": decay_weights(valid, 2.0),
        "auf": auf_weights(rows.hits.view(4, 5), valid),
        "flat": valid.float(),
    }
    assert set(wanted) == set(WEIGHTS)
    for kind, weights in wanted.items():
        result = block_weights(kind, rows, valid, alpha=0.3, gamma=2.0)
        assert torch.equal(result, weights) and not result[~valid].any()
        assert result.dtype == torch.float32 and not result.requires_grad
    assert len({tuple(w.flatten().tolist()) for w in wanted.values()}) == len(WEIGHTS)
    with pytest.raises(ValueError, match=r"weights 'linear': known are dpace, dpace-soft"):
        block_weights("linear", rows, valid)
    with pytest.raises(ValueError, match=r"dpace-soft are made of alpha"):
        block_weights("dpace-soft", LossRows(rows.loss, rows.nll, rows.hits, None), valid)
