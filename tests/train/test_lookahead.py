"""The auxiliary loss on tokens after the next."""

import torch
from torch.nn import functional as F

from outpace.ops.sampling import seeded
from outpace.train.lookahead import Lookahead
from outpace.train.splice import UNTAUGHT

B, T, C, V, AHEAD = 2, 11, 6, 7, 3


def batch():
    rng = seeded(3)
    x = torch.randn(B, T, C, generator=rng, requires_grad=True)
    head = torch.randn(V, C, generator=rng)
    labels = torch.randint(V, (B, T), generator=rng)
    labels[0, :4] = UNTAUGHT
    return x, head, labels


def heads():
    part = Lookahead(C, AHEAD)
    with torch.no_grad():
        part.matrices.copy_(torch.randn(AHEAD, C, C, generator=seeded(4)))
        part.norm.weight.copy_(torch.rand(C, generator=seeded(5)) + 0.5)
    return part


def test_each_matrix_predicts_its_own_token_from_where_the_next_is_taught():
    x, head, labels = batch()
    part = heads()
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * part.norm.weight
    for further, got in enumerate(part(x, head, labels), start=1):
        nll = []
        for b in range(B):
            for t in range(T - further):
                if labels[b, t] == UNTAUGHT:
                    continue
                logits = head @ (part.matrices[further - 1] @ normed[b, t])
                nll.append(F.cross_entropy(logits, labels[b, t + further]))
        assert len(nll) == B * (T - further) - 4
        torch.testing.assert_close(got, torch.stack(nll).mean())


def test_what_it_teaches_is_the_states_and_itself():
    x, head, labels = batch()
    part = heads()
    part(x, head, labels).mean().backward()
    assert x.grad is not None and x.grad[0, :4].abs().max() == 0 and x.grad[0, 4:8].abs().min() > 0
    assert x.grad[:, -1].abs().max() == 0  # nothing follows the last place's next token
    assert part.matrices.grad is not None and part.norm.weight.grad is not None


def test_it_begins_as_the_head_on_the_state_itself():
    x, head, labels = batch()
    part = Lookahead(C, 1)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    taught = labels[:, :-1] != UNTAUGHT
    expected = F.cross_entropy((normed[:, :-1][taught]) @ head.mT, labels[:, 1:][taught])
    torch.testing.assert_close(part(x, head, labels)[0], expected)
