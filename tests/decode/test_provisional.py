"""Provisional tokens and what is proposed behind them, by hand; which of them the lossy mode takes unseen."""

import torch

from outpace.decode.acceptance import Match
from outpace.decode.partial import Trusting, appended
from outpace.drafts.base import Proposal
from outpace.ops.sampling import Sampling

CHAINS = [[9, 1, 2], [8, 3]]  # the last verified token, and provisional ones behind it
CPU = torch.device("cpu")


def test_a_tree_follows_the_last_provisional_token():
    tree = torch.tensor([[0, 0, 0, 1], [0, 0, 2, 3]])
    tail = Proposal(torch.tensor([[2, 5, 6, 7], [3, 4, 0, 0]]), [4, 2], tree)
    result = appended(CHAINS, tail, CPU)
    assert result.counts == [6, 3] and result.provisional == [2, 1]
    assert result.tokens.tolist() == [[9, 1, 2, 5, 6, 7], [8, 3, 4, 0, 0, 0]]
    assert result.parents.tolist() == [[0, 0, 1, 2, 2, 3], [0, 0, 1, 3, 4, 5]]


def test_behind_a_chain_a_chain_is_a_chain():
    tail = Proposal(torch.tensor([[2, 5], [3, 4]]), [2, 2])
    result = appended(CHAINS, tail, CPU)
    assert result.parents is None and result.counts == [4, 3] and result.provisional == [2, 1]
    assert result.tokens.tolist() == [[9, 1, 2, 5], [8, 3, 4, 0]]
    alone = appended(CHAINS, None, CPU)
    assert alone.parents is None and alone.counts == [3, 2]
    assert alone.tokens.tolist() == [[9, 1, 2], [8, 3, 0]]


def test_the_lossy_mode_takes_provisional_tokens_alone():
    """The target's token is 6 everywhere, which no row proposes."""
    proposal = Proposal(torch.tensor([[9, 1, 2, 5], [8, 3, 4, 5]]), [4, 4], provisional=[2, 0])
    logits = torch.zeros(2, 4, 10)
    logits[..., 6] = 1.0
    result = Trusting(Match(Sampling(), [[9], [8]], None)).verify(proposal, logits)
    assert result.path == [[0, 1, 2], [0]] and result.tokens == [[1, 2, 6], [6]]
