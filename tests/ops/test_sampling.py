"""Sampling against transformers' processors, ties included; draws against the probabilities."""

import itertools

import pytest
import torch

from outpace.ops import sampling
from outpace.ops.sampling import Sampling, draw, penalised, probabilities, sample, shaped


def theirs(x, ids, how):
    """What transformers makes of logits x [M, V] after the text ids [M, T], processor by processor."""
    from transformers.generation import logits_process as known

    steps = [known.TemperatureLogitsWarper(how.temperature)]
    if how.repetition_penalty != 1:
        steps.insert(0, known.RepetitionPenaltyLogitsProcessor(how.repetition_penalty))
    if how.logit_bias:
        steps.insert(0, known.SequenceBiasLogitsProcessor({(token,): bias for token, bias in how.logit_bias}))
    if how.top_k:
        steps.append(known.TopKLogitsWarper(how.top_k))
    if how.top_p < 1:
        steps.append(known.TopPLogitsWarper(how.top_p))
    if how.min_p:
        steps.append(known.MinPLogitsWarper(how.min_p))
    for step in steps:
        x = step(ids, x)
    return x


def seen(ids, V):
    return torch.zeros(len(ids), V, dtype=torch.bool).scatter_(1, ids, True)


WAYS = [
    Sampling(temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
    for t, k, p, m, r in itertools.product((0.6, 1.7), (0, 3), (1.0, 0.8), (0.0, 0.07), (1.0, 1.3, 0.8))
]
WAYS += [
    Sampling(temperature=1.7, repetition_penalty=r, logit_bias=((0, 1.5), (5, -100.0), (6, -0.25)))
    for r in (1.0, 1.3)
]


@pytest.mark.parametrize("V", [7, 97, 1500])
def test_every_combination_is_what_transformers_says(V):
    for i, how in enumerate(WAYS):
        rng = torch.Generator().manual_seed(i)
        x, ids = torch.randn(5, V, generator=rng) * 2.5, torch.randint(V, (5, 6), generator=rng)
        got, wanted = shaped(x, how, seen(ids, V)), theirs(x, ids, how)
        assert torch.equal(got, wanted), how
        p = probabilities(x, how, seen(ids, V))
        assert torch.equal(p, wanted.softmax(-1)) and p.dtype == torch.float32


@pytest.mark.parametrize("V", [7, 97, 1500])
def test_among_equal_logits_as_many_stay_as_in_transformers(V):
    """Which of them is left open there, by a sort that is not stable; here the later ones stay."""
    cut = 0
    for i, how in enumerate(WAYS):
        rng = torch.Generator().manual_seed(i)
        x = torch.randn(5, V, generator=rng).mul(2.5).round()
        ids = torch.randint(V, (5, 6), generator=rng)
        got, wanted = shaped(x, how, seen(ids, V)), theirs(x, ids, how)
        assert torch.equal(got.sort(-1).values, wanted.sort(-1).values), how
        if how.top_p < 1 and not how.min_p:
            warped = penalised(x, how, seen(ids, V)) / how.temperature
            for row, before in zip(got, warped, strict=True):
                same = (before == row[row > -torch.inf].min()).nonzero()[:, 0]
                stays = (row[same] > -torch.inf).tolist()
                assert stays == sorted(stays)
                cut += not all(stays)
    assert cut > 5


@pytest.mark.parametrize("top_p", [1e-300, 0.05, 0.5, 0.9, 0.999])
def test_a_nucleus_without_a_sort_is_the_nucleus(top_p):
    """Rows that need the sort and rows that do not, in one call and alone: the same to the bit."""
    torch.manual_seed(3)
    V = 3 * sampling.FEW
    x = torch.cat((torch.randn(3, V) * 4, torch.randn(2, V) * 0.1, (torch.randn(3, V) * 4).round()))
    together = sampling._nucleus(x, top_p)
    assert torch.equal(together, sampling._nucleus_by_sort(x, top_p))
    for row, alone in zip(together, x, strict=True):
        assert torch.equal(sampling._nucleus(alone[None], top_p)[0], row)


def test_the_penalty_acts_on_greedy_too():
    logits = torch.tensor([[3.0, 2.9, -1.0], [-0.1, -0.11, -0.3]])
    held = torch.tensor([[True, False, False], [True, False, False]])
    assert sample(logits, Sampling(repetition_penalty=1.2), None, held).tolist() == [1, 1]
    assert sample(logits, Sampling(repetition_penalty=0.5), None, held).tolist() == [0, 0]
    with pytest.raises(AssertionError, match="reads the text"):
        sample(logits, Sampling(repetition_penalty=1.2), None)


def test_draws_follow_p_of_any_sum_and_never_take_what_has_none():
    p = torch.tensor([0.0, 3e-9, 0.0, 2.0, 1.0, 0.0, 0.5, 0.0])
    draws = draw(p.expand(40000, 8), torch.Generator().manual_seed(4))
    share = torch.bincount(draws, minlength=8) / 40000
    assert (share - p / 3.5).abs().max() < 0.01
    assert share[[0, 2, 5, 7]].sum() == 0
    certain = torch.zeros(3, 5, 9)
    certain[..., 8] = 1e-30
    assert (draw(certain, None) == 8).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_bias": ((3, 100.5),)},
        {"logit_bias": ((3, float("nan")),)},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
    ]
    + [{name: x} for name in ("presence_penalty", "frequency_penalty") for x in (2.1, -2.1, float("nan"))]
    + [{name: float("nan")} for name in ("temperature", "top_p", "min_p", "repetition_penalty")]
    + [{name: float("inf")} for name in ("temperature", "repetition_penalty")],
)
def test_settings_that_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_a_draft_samples_without_the_penalty():
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": -0.3}
    how = Sampling(temperature=0.8, top_p=0.9, logit_bias=((3, 1.0),), **penalties)
    assert how.for_draft() == Sampling(temperature=0.8, top_p=0.9)
    assert how.for_draft(0.3) == Sampling(temperature=0.3, top_p=0.9)
