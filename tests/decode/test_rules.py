"""The exact-match rule: bit-exact against plain Python, the target's own distribution at T > 0."""

import dataclasses
import functools
import math

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import Forgetful

from outpace.decode import acceptance as rules
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.base import Proposal
from outpace.models.load import build, named_tensors
from outpace.ops.sampling import Sampling, probabilities


def formula(candidates, predict, counts):
    """The rule for a chain in tensors: as many draft tokens as match in a row from the first."""
    candidates, predict = torch.tensor(candidates), torch.tensor(predict)
    matches = candidates[:, 1:] == predict[:, :-1]
    matches &= torch.arange(1, candidates.shape[1]) < torch.tensor(counts)[:, None]
    return matches.long().cumprod(1).sum(1).tolist()


@st.composite
def rounds(draw):
    batch, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    row = st.lists(st.integers(0, 2), min_size=width, max_size=width)
    ids = st.lists(row, min_size=batch, max_size=batch)
    counts = draw(st.lists(st.integers(1, width), min_size=batch, max_size=batch))
    return draw(ids), draw(ids), counts


def chains(candidates):
    return [[max(i - 1, 0) for i in range(len(row))] for row in candidates]


@given(rounds())
def test_against_plain_python(case):
    candidates, predict, counts = case
    paths = rules.exact_match(candidates, chains(candidates), predict, counts)
    assert paths == [list(range(n + 1)) for n in formula(*case)]


def test_gold_guesses_are_all_taken():
    text = tiny.tokens(3, 9).tolist()
    guesses = [t[:8] for t in text]
    paths = rules.exact_match(guesses, chains(guesses), [t[1:] for t in text], [8, 8, 8])
    assert paths == [list(range(8))] * 3


# ---- distributions ---------------------------------------------------------------------------

V = 7
PROMPT = [1, 5, 2, 6, 3]


@functools.cache
def small():
    config = dataclasses.replace(tiny.config("llama"), vocab_size=V)
    model = build(config)
    tiny.randomise(named_tensors(model), seed=5)
    return model.eval()


@torch.inference_mode()
def exact(how):
    """p(x2, x3) after PROMPT, summed over x1, by running every text of three tokens."""
    model = small()
    texts = torch.cartesian_prod(*[torch.arange(V)] * 3)
    rows = torch.cat((torch.tensor(PROMPT).expand(len(texts), -1), texts), dim=1)
    p = probabilities(model.logits(model(rows).hidden), how)
    n = len(PROMPT)
    each = [p[:, n - 1 + i].gather(1, texts[:, i : i + 1])[:, 0] for i in range(3)]
    return math.prod(each).reshape(V, V, V).sum(0).flatten()


class Habit(Forgetful):
    """Always draft tokens the same follower of a token: right now and then, and blind to what is drawn."""

    block_size = 3

    def propose(self, last, width, sampler):
        follower = torch.tensor([4, 0, 5, 1, 6, 2, 3])
        first = follower[last]
        return Proposal(torch.stack((last, first, follower[first]), dim=1), [3] * len(last))


def surprise(draws, p):
    """Chi-square of the pairs drawn against p, as standard deviations (Wilson-Hilferty); rare cells
    are pooled."""
    n = len(draws)
    counts = torch.bincount(draws, minlength=len(p)).double()
    expected = p.double() * n
    rare = expected < 8
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    if expected[-1] < 1e-9:
        assert counts[-1] == 0, "a token was drawn that the target excludes"
        counts, expected = counts[:-1], expected[:-1]
    k = len(counts) - 1
    x = float(((counts - expected) ** 2 / expected).sum())
    return ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


def pairs(generate, how, rows=3000, seed=1):
    rng = torch.Generator().manual_seed(seed)
    request = Request(max_new_tokens=3, sampling=how)
    got = generate([PROMPT] * rows, request, rng)
    ids = torch.tensor(got.tokens)
    return ids[:, 1] * V + ids[:, 2], got.trace


def plainly(prompts, request, rng):
    return generate(small(), prompts, request, rng=rng)


def by_habit(prompts, request, rng):
    return generate(small(), prompts, request, Habit(), rng=rng)


WAYS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=4),
    Sampling(temperature=1.0, top_p=0.8),
]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_two_consecutive_tokens_follow_the_target(how):
    p = exact(how)
    assert abs(p.sum() - 1) < 1e-5 and (p > 0.01).sum() > 8
    assert surprise(pairs(plainly, how)[0], p) < 3.5
    draws, trace = pairs(by_habit, how)
    assert 0.05 < trace.accept_rate < 0.9
    assert surprise(draws, p) < 3.5


honest = rules.exact_match


def too_lenient(candidates, parents, predict, counts):
    """Takes a first draft token that was not what the target drew, in one row of four: the next token is then
    drawn after a text that was never emitted."""
    paths = honest(candidates, parents, predict, counts)
    return [[0, 1] if b % 4 == 0 and path == [0] else path for b, path in enumerate(paths)]


def biased_bonus(candidates, parents, predict, counts):
    """Rejects a draft token and then emits it all the same, in one row of eight."""
    paths = honest(candidates, parents, predict, counts)
    for value, row in list(zip(predict, candidates, strict=True))[::8]:
        value[0] = row[1]
    return paths


@pytest.mark.parametrize("rule", [too_lenient, biased_bonus])
def test_a_biased_rule_is_caught(rule, monkeypatch):
    how = Sampling(temperature=1.0)
    monkeypatch.setattr(rules, "exact_match", rule)
    assert surprise(pairs(by_habit, how)[0], exact(how)) > 5
