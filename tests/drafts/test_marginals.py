"""Trees from a block's marginals: the block's own greedy chain and best-first are its two ends."""

import pytest
import torch

from outpace.drafts.choice import Likeliest
from outpace.drafts.marginals import TreeOf
from outpace.drafts.tree import best_first

BLOCK, V = 5, 11


class Block:
    """A block draft with fixed logits; remembers how it was used."""

    block_size, target_layer_ids = BLOCK, (1, 3)

    def __init__(self, batch=2, seed=0):
        self.said = torch.randn(batch, BLOCK - 1, V, generator=torch.Generator().manual_seed(seed)) * 2
        self.calls = []

    def begin(self, batch, length, offset=0):
        self.calls.append(("begin", batch, length, offset))
        return self

    def logits(self, last, width):
        self.calls.append(("logits", width))
        return self.said[:, : width - 1]

    def observe(self, tokens, aux, counts):
        self.calls.append(("observe", tokens, aux, counts))

    def keep(self, rows):
        self.said = self.said[rows]


def session(draft, nodes, branch=16):
    return TreeOf(draft, nodes, branch).begin(2, 40, 7)


@pytest.mark.parametrize(("nodes", "width", "depth"), [(12, 12, 4), (12, 3, 2), (3, 3, 2), (40, 25, 4)])
def test_a_tree_is_best_first_over_the_block(nodes, width, depth):
    draft, last = Block(), torch.tensor([4, 9])
    proposal = session(draft, nodes).propose(last, width, Likeliest())
    assert draft.calls == [("begin", 2, 40, 7), ("logits", depth + 1)]  # no deeper than there are columns
    wanted = best_first(last, draft.said[:, :depth].log_softmax(-1), width)
    for name in ("tokens", "parents", "survival"):
        assert torch.equal(getattr(proposal, name), getattr(wanted, name))
    assert proposal.counts == [width, width] and max(proposal.deepest) <= depth


def test_without_branches_it_is_the_block():
    draft, last = Block(), torch.tensor([4, 9])
    proposal = session(draft, 40, branch=1).propose(last, 40, Likeliest())
    assert proposal.tokens.tolist() == torch.cat((last[:, None], draft.said.argmax(-1)), 1).tolist()
    assert proposal.parents.tolist() == [[0, 0, 1, 2, 3]] * 2 and proposal.counts == [BLOCK, BLOCK]


def test_it_stands_where_its_draft_stood():
    draft = Block()
    tree = TreeOf(draft, 12)
    assert (tree.block_size, tree.target_layer_ids) == (12, (1, 3))
    begun = tree.begin(2, 40)
    begun.observe("tokens", "aux", [1, 2])
    assert draft.calls[-1] == ("observe", "tokens", "aux", [1, 2])
    begun.keep([1])
    proposal = begun.propose(torch.tensor([9]), 6, Likeliest())
    assert torch.equal(proposal.tokens, best_first(torch.tensor([9]), draft.said.log_softmax(-1), 6).tokens)


@pytest.mark.parametrize(
    ("sizes", "said"), [((1, 4), "at least 2"), ((0, 4), "at least 2"), ((8, 0), "branch 0")]
)
def test_sizes_that_make_no_tree(sizes, said):
    with pytest.raises(ValueError, match=said):
        TreeOf(Block(), *sizes)
