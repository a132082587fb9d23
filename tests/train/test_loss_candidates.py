"""The most probable tokens that a loss names next to its value: of the same logits, which are formed once."""

from dataclasses import replace

import pytest
import tiny
import torch
from test_dflash_parts_training import Cache, drafted, packed_of
from test_losses import OF, V, case

from outpace.ops.candidates import reference_top_k, top_k
from outpace.train import dflash as dflash_loss
from outpace.train.dflash import Objective, block_states
from outpace.train.losses import block_losses


@pytest.mark.parametrize("of", [None, OF])
@pytest.mark.parametrize("kind", ["ce", "lk"])
def test_the_most_probable_of_every_row_come_along(kind, of):
    states, head, labels, *target = case()
    ids, values, _ = reference_top_k(states @ head.T, V)
    assert (values[:, :-1] > values[:, 1:]).all()  # no ties: there is one order
    alone = block_losses(kind, states, head, labels, *target, of=of)
    assert alone.top is None
    for chunk, top, learns in ((1, 5, False), (7, 16, True), (None, 2 * V, False)):
        h, w = states.clone().requires_grad_(), head.clone().requires_grad_(learns)
        rows = block_losses(kind, h, w, labels, *target, of=of, chunk=chunk, top=top)
        assert rows.top.dtype == torch.int64 and torch.equal(rows.top, ids[:, :top])
        torch.testing.assert_close(rows.loss.detach(), alone.loss)
        rows.loss.sum().backward()
        assert h.grad.abs().sum() > 0


@pytest.mark.parametrize("parts", [{}, {"draft_vocab": 40}])
def test_a_selector_learns_from_the_losss_own_logits(monkeypatch, parts):
    """As from logits formed again, in value and gradients; and the head is multiplied once."""
    target = tiny.target("gpt_oss")
    cache = Cache(target, [tiny.tokens(n, seed=n) for n in (31, 17)])
    draft, recipe = drafted(target, conv=2, selector=7, **parts)

    def formed_anew(kind, states, head, *given, top):
        rows = block_losses(kind, states, head, *given)
        return replace(rows, top=top_k((states @ head.T).detach(), top)[0])

    for final in (False, True):
        packed, entries = packed_of(cache, recipe, final=final), []
        for loss in (block_losses, formed_anew):
            monkeypatch.setattr(dflash_loss, "block_losses", loss)
            draft.zero_grad()
            states = block_states(draft, target, packed, torch.float32)
            heads = Products(Objective.of(draft, target, recipe).vocabulary.head)
            with heads:
                validation = Objective.of(draft, target, recipe)(states, packed)
            validation.loss.backward()
            entries.append((validation, {name: p.grad for name, p in draft.named_parameters()}, heads.count))
        (ours, gradients, products), (former, wanted, more) = entries
        assert torch.equal(ours.loss, former.loss) and torch.equal(ours.hits, former.hits)
        assert ours.metrics == former.metrics and ours.metrics["recall"].value > 0
        assert all(torch.equal(gradients[name], grad) for name, grad in wanted.items())
        assert (products, more) == (1 + final, 2 + final)  # the target's own logits are one more


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the products of rows with a head [N, C]."""

    def __init__(self, head):
        super().__init__()
        self.shape, self.count = tuple(head.T.shape), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name == "aten::mm" and tuple(args[1].shape) == self.shape
        return func(*args, **(kwargs or {}))
