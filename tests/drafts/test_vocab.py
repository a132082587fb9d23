"""Choosing among a draft's own words is choosing among the target's, where the draft can say no others."""

import dataclasses

import pytest
import tiny
import torch

from outpace.drafts.sampler import Greedy, GumbelCoupled, Sampled
from outpace.drafts.vocab import DraftVocabulary
from outpace.ops.sampling import Sampling

B, N = 3, 4
SAMPLING = Sampling(temperature=0.7, top_k=9, top_p=0.9)
IDS = torch.arange(4, tiny.VOCAB, 5)


@dataclasses.dataclass
class Odd:
    """A choice that nobody knows: it prefers odd tokens."""

    temperature: float = 1.0

    def tokens(self, logits, depth):
        assert logits.shape[-1] == tiny.VOCAB
        return self.scores(logits, depth).argmax(-1), None

    def scores(self, logits, depth, *, level=False):
        assert logits.shape[-1] == tiny.VOCAB
        return (logits + 100 * (torch.arange(tiny.VOCAB) % 2)).log_softmax(-1)


def choices():
    streams, places = torch.arange(B), torch.tensor([3, 8, 5])
    yield lambda: Greedy(0.5)
    yield lambda: Sampled(SAMPLING, torch.Generator().manual_seed(1))
    yield lambda: GumbelCoupled(SAMPLING, 11, streams, places)
    yield Odd


@pytest.mark.parametrize("make", list(choices()))
@pytest.mark.parametrize("ids", [IDS, IDS.flip(0), None])
def test_every_choice_is_the_one_among_all(make, ids):
    words = DraftVocabulary(ids, tiny.VOCAB)
    count = tiny.VOCAB if ids is None else len(ids)
    logits = torch.randn(B, N, count, generator=torch.Generator().manual_seed(5))
    chosen, q = words.choose(make(), logits, 2)
    wide = words.wide(logits, -torch.inf)
    if ids is not None:
        assert (wide > -torch.inf).sum() == logits.numel() and torch.equal(wide[..., ids], logits)
    wanted, wide_q = make().tokens(wide, 2)
    if q is None:
        assert torch.equal(chosen, wanted) and wide_q is None
    else:  # the draws lie elsewhere on the line, what they are drawn from is the same
        torch.testing.assert_close(q, wide_q)
        assert q.gather(-1, chosen[..., None]).min() > 0
    for level in (False, True):
        scores = words.scores(make(), logits, 2, level=level)
        theirs = make().scores(wide, 2, level=level)
        torch.testing.assert_close(scores, theirs if ids is None else theirs[..., ids])


def test_what_the_draft_cannot_say_has_no_chance():
    words = DraftVocabulary(IDS, tiny.VOCAB)
    logits = torch.randn(B, N, len(IDS), generator=torch.Generator().manual_seed(5))
    tokens = tiny.tokens(B, N)
    wanted = words.wide(logits, -torch.inf).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    assert 0 < wanted.isfinite().sum() < wanted.numel()
    torch.testing.assert_close(words.log_probabilities(logits, tokens), wanted)
    whole = DraftVocabulary(None, tiny.VOCAB).log_probabilities(words.wide(logits, -torch.inf), tokens)
    torch.testing.assert_close(whole, wanted)
