"""Noise from keys: its distribution, its independence, and the kernel against the reference."""

import math

import pytest
import torch

from outpace.ops import sampling as noise
from outpace.ops.sampling import Sampling, greedy


def some_keys(*shape, seed=0):
    return torch.randint(-(2**62), 2**62, shape, generator=torch.Generator().manual_seed(seed))


def surprise(counts, expected):
    """Chi-square as standard deviations (Wilson-Hilferty)."""
    k = len(counts) - 1
    x = float(((counts.double() - expected) ** 2 / expected).sum())
    return ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


def uniforms(keys, V):
    """The noise through the distribution function exp(-exp(-g)): uniform if g is Gumbel's."""
    return (-(-noise.gumbel(keys, V).double()).exp()).exp()


def test_every_cell_is_equally_full():
    u = uniforms(some_keys(40), 5000)
    counts = torch.bincount((u * 997).long().flatten(), minlength=997)
    assert surprise(counts, u.numel() / 997) < 4


def test_the_far_tail_is_there():
    """P(g > x) = 1 - exp(-exp(-x)), where float32 uniforms near 1 would end at 16.6."""
    with torch.inference_mode():
        scores = torch.zeros(40, 100_000)
        g = torch.cat([noise.perturbed(scores, some_keys(40, seed=i)).flatten() for i in range(4)])
    for x in (8.0, 10.0, 12.0):
        expected = len(g) * -math.expm1(-math.exp(-x))
        assert abs(float((g > x).sum()) - expected) < 4 * math.sqrt(expected)
    assert torch.isfinite(g).all()


NEIGHBOURS = {
    "tokens": lambda u: (u[:, :-1], u[:, 1:]),
    "tokens 8 apart": lambda u: (u[:, :-8], u[:, 8:]),
    "places": lambda u: (u[:-1], u[1:]),
    "a place and a token on": lambda u: (u[:-1, :-1], u[1:, 1:]),
}


@pytest.mark.parametrize("kind", NEIGHBOURS)
@pytest.mark.parametrize("axis", ["streams", "places", "keys"])
def test_neighbours_know_nothing_of_each_other(kind, axis):
    n = torch.arange(60)
    zero = torch.zeros_like(n)
    keys = {
        "streams": lambda: noise.keys(11, n, zero),
        "places": lambda: noise.keys(11, zero, n),
        "keys": lambda: torch.stack([noise.keys(k, zero[0], zero[0]) for k in range(60)]),
    }[axis]()
    a, b = NEIGHBOURS[kind](uniforms(keys, 3000))
    cells = ((a * 23).long() * 23 + (b * 23).long()).flatten()
    assert surprise(torch.bincount(cells, minlength=23 * 23), len(cells) / 23**2) < 4


def test_no_place_of_any_stream_shares_its_key():
    every = noise.keys(5, torch.arange(100)[:, None], torch.arange(2000))
    assert every.shape == (100, 2000) and len(every.unique()) == every.numel()
    assert not torch.isin(noise.keys(6, torch.arange(100)[:, None], torch.arange(2000)), every).any()


def test_argmaxes_are_draws_from_p():
    logits = torch.tensor([0.0, -torch.inf, 1.0, -3.0, 2.0, 0.5])
    keys = noise.keys(3, torch.arange(20)[:, None], torch.arange(1000))
    draws = greedy(noise.perturbed(logits.expand(20, 1000, 6).contiguous(), keys)).flatten()
    p = logits.double().softmax(0)
    counts = torch.bincount(draws, minlength=6)
    assert counts[1] == 0
    assert surprise(counts[p > 0], p[p > 0] * len(draws)) < 3.5


def test_a_lone_token_is_drawn_whatever_its_noise():
    logits = torch.full((500, 9), -torch.inf)
    logits[:, 4] = -50.0
    assert (greedy(noise.perturbed(logits, some_keys(500))) == 4).all()


@pytest.mark.parametrize("V", [1, 7, 16, 97, 4099])
def test_the_kernel_is_the_reference(V):
    keys, scores = some_keys(3, 4), torch.randn(3, 4, V)
    wanted = scores + noise.gumbel(keys, V)
    with torch.inference_mode():
        got = noise.perturbed(scores, keys)
    assert (got - wanted).abs().max() < 4e-6
    with torch.inference_mode():  # a row depends on nothing but itself
        for b in range(3):
            assert torch.equal(noise.perturbed(scores[b, 1:2], keys[b, 1:2]), got[b, 1:2])


@pytest.mark.parametrize("V", [1, 7, 16, 97, 4099])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_a_draw_is_the_largest_of_scores_and_noise(V, temperature):
    keys, logits, how = some_keys(30, 4), torch.randn(30, 4, V), Sampling(temperature=temperature)
    logits[:, 1:, ::3] = -torch.inf
    wanted = greedy(logits / temperature + noise.gumbel(keys, V))
    with torch.inference_mode():
        assert torch.equal(noise.sample(logits, how, keys), wanted)
        for b in range(3):  # a row depends on nothing but itself
            assert torch.equal(noise.sample(logits[b, 1:2], how, keys[b, 1:2]), wanted[b, 1:2])


def test_the_low_end_of_the_noise_is_finite():
    """Bits of all ones: w would round to 1 and the noise to -inf."""
    w = (torch.tensor([2.0**32 - 1]).float() + 0.5) * 2.0**-32
    assert w.item() == 1.0
    keys = some_keys(400, seed=9)
    assert noise.gumbel(keys, 4096).min() > -math.log(17)


def by_hand(key, stream, place, token):
    """The definition in unbounded integers and float64 -> the key, the noise."""
    wide, narrow = 2**64 - 1, 2**32 - 1

    def mixed(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & wide
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & wide
        return x ^ (x >> 31)

    def scattered(x):
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & narrow
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & narrow
        return x ^ (x >> 16)

    for number in (stream, place):
        key = mixed((key + (number + 1) * 0x9E3779B97F4A7C15) & wide)
    low = (token * 0x9E3779B9 & narrow) ^ (key & narrow)
    w = (scattered(scattered(low) ^ key >> 32) + 0.5) / 2**32
    return key - 2**64 if key >= 2**63 else key, -math.log(-math.log1p(-w))


def test_noise_is_what_it_was():
    """A recorded text must come again from its seed: these figures may not move."""
    streams, places = (0, 3, 71), (0, 9, 131071)
    keys = noise.keys(1234567, torch.tensor(streams), torch.tensor(places))
    wanted = [[by_hand(1234567, s, n, t) for t in range(40)] for s, n in zip(streams, places, strict=True)]
    assert keys.tolist() == [row[0][0] for row in wanted]
    assert keys[:2].tolist() == [-8737229284132057911, -4277853550153575185]
    got = noise.gumbel(keys, 40)
    assert (got.double() - torch.tensor([[g for _, g in row] for row in wanted])).abs().max() < 2e-6
    first = [1.939468, 0.658289, 3.848729, 0.803961, 0.750973, 5.285838]
    assert got[:2, :3].flatten().tolist() == pytest.approx(first, abs=2e-6)
