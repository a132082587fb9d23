"""The drawn and coupled rules through a real target, its cache and the loop: the target's distribution."""

import functools

import pytest
import torch
from scripted import Forgetful
from test_rules import PROMPT, V, small, surprise

from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.base import Proposal
from outpace.ops.sampling import Sampling, probabilities

HOW = Sampling(temperature=0.9, top_p=0.97, min_p=0.02, repetition_penalty=1.4)
WAYS = {"as it is": Sampling(temperature=1.0), "all": HOW}
NEW, ROWS = 4, 1200


class Tables(Forgetful):
    """Draft tokens by a table of logits after each token: a chain, or a tree with two draft tokens after the
    last token and one and two behind those. Drawn one by one where the sampler draws, else the best by
    scores."""

    block_size = 6

    def __init__(self, shape):
        self.parents = {"chain": [0, 0, 1], "tree": [0, 0, 1, 0, 3, 3]}[shape]
        self.table = torch.randn(V, V, generator=torch.Generator().manual_seed(2)) * 1.5
        self.line = shape == "chain"

    def propose(self, last, width, sampler):
        N, rows = len(self.parents), len(last)
        tokens, depth, q = [last], [0], [torch.zeros(rows, V)]
        for c in range(1, N):
            up = self.parents[c]
            depth.append(depth[up] + 1)
            logits = self.table[tokens[up]][:, None]
            guess, drawn_from = sampler.tokens(logits, depth[c])
            if drawn_from is not None:
                q.append(drawn_from[:, 0])
            elif not self.line:
                rank = self.parents[1:c].count(up)
                guess = sampler.scores(logits, depth[c]).topk(rank + 1).indices[..., -1]
            tokens.append(guess[:, 0])
        parents = None if self.line else torch.tensor(self.parents).expand(rows, N)
        drawn = torch.stack(q, dim=1) if len(q) == N else None
        return Proposal(torch.stack(tokens, dim=1), [N] * rows, parents, drawn)


@functools.cache
@torch.inference_mode()
def exact(how):
    """p(x2, x3, x4) after PROMPT, summed over x1, by running every text of four tokens."""
    model = small()
    texts = torch.cartesian_prod(*[torch.arange(V)] * NEW)
    rows = torch.cat((torch.tensor(PROMPT).expand(len(texts), -1), texts), dim=1)
    logits, n = model.logits(model(rows).hidden), len(PROMPT)
    total = torch.ones(len(texts), dtype=torch.float64)
    for i in range(NEW):
        seen = torch.zeros(len(texts), V, dtype=torch.bool).scatter_(1, rows[:, : n + i], True)
        p = probabilities(logits[:, n - 1 + i], how, seen)
        total *= p.gather(1, texts[:, i : i + 1])[:, 0].double()
    return total.reshape([V] * NEW).sum(0).flatten()


CASES = [
    ("rejection", "chain"),
    ("rejection", "tree"),
    ("block", "chain"),
    ("gumbel", "tree"),
    ("match", "tree"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_three_consecutive_tokens_follow_the_target(rule, shape, way):
    request = Request(max_new_tokens=NEW, sampling=WAYS[way], rule=rule)
    rng = torch.Generator().manual_seed(7)
    got = generate(small(), [PROMPT] * ROWS, request, Tables(shape), rng=rng)
    ids = torch.tensor(got.tokens)
    assert surprise(ids[:, 1:] @ torch.tensor([V * V, V, 1]), exact(WAYS[way])) < 3.5
    lens = got.trace.accept_lens
    assert {0, 1, 2} <= set(lens) and 0.1 < sum(lens) / len(lens) < 1.5


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_q_that_was_not_drawn_from_is_caught(rule):
    """The q of the place before: right in shape and sum."""

    class Late(Tables):
        def propose(self, last, width, sampler):
            result = super().propose(last, width, sampler)
            return Proposal(result.tokens, result.counts, result.parents, result.q.roll(1, 1).roll(1, 2))

    request = Request(max_new_tokens=NEW, sampling=WAYS["as it is"], rule=rule)
    rng = torch.Generator().manual_seed(7)
    got = generate(small(), [PROMPT] * ROWS, request, Late("chain"), rng=rng)
    ids = torch.tensor(got.tokens)
    assert surprise(ids[:, 1:] @ torch.tensor([V * V, V, 1]), exact(WAYS["as it is"])) > 5
