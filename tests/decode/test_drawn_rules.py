"""Every rule against tables of probabilities, on chains and trees; and rules that are slightly wrong."""

import dataclasses

import pytest
import torch
from toy import PROMPT, SHAPES, Toy, V, cells, play, surprise

from outpace.decode import acceptance as rules_drawn
from outpace.decode.acceptance import SamplingState
from outpace.decode.request import Request, acceptance_rule
from outpace.drafts.base import Proposal
from outpace.drafts.sampler import Sampled
from outpace.ops import sampling as noise
from outpace.ops.sampling import Sampling, draw, probabilities

WAYS = {
    "as it is": Sampling(temperature=1.0),
    "temperature": Sampling(temperature=0.6),
    "top-k": Sampling(temperature=1.0, top_k=2),
    "top-p": Sampling(temperature=1.2, top_p=0.75),
    "min-p": Sampling(temperature=1.0, min_p=0.12),
    "penalty": Sampling(temperature=1.0, repetition_penalty=1.8),
    "output": Sampling(temperature=1.0, presence_penalty=0.8, frequency_penalty=0.5),
    "all": Sampling(temperature=1.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
}
ROWS = 3500


def judge(rule, how, rows=ROWS, seed=1, **asked):
    request = Request(max_new_tokens=3, rule=rule, sampling=how, **asked)
    return acceptance_rule(request, [PROMPT] * rows, torch.Generator().manual_seed(seed))


def opened(judge, toy):
    """A judge that has heard the prompt, as after a prefill, at the first place of the text."""
    if judge.state.listens:
        judge.state.seen(toy.target[0].expand(ROWS, V))
    return judge


def of(rule, shape, how, seed=0, toy=None, **asked):
    toy = toy or Toy(seed)
    texts, taken = play(toy, opened(judge(rule, how, **asked), toy), shape, ROWS)
    return surprise(cells(texts), toy.p(how)), taken


CASES = [(r, s, w) for r in ("match", "rejection", "gumbel") for s in ("chain", "woven") for w in WAYS]
CASES += [(r, "wide", w) for r in ("match", "rejection", "gumbel") for w in ("as it is", "all")]
CASES += [("block", "chain", w) for w in WAYS]


@pytest.mark.parametrize(("rule", "shape", "way"), CASES)
def test_three_tokens_follow_the_target(rule, shape, way):
    how = WAYS[way]
    assert (Toy().p(how) > 0.003).sum() >= 8
    result, taken = of(rule, shape, how)
    assert result < 3.5
    assert 0.1 < taken < 1.9


@pytest.mark.parametrize("rule", ["rejection", "block", "gumbel"])
def test_a_temperature_of_the_draft_alone_changes_no_distribution(rule):
    for own in (0.3, 2.5):
        result, taken = of(rule, "chain", WAYS["top-p"], draft_temperature=own)
        assert result < 3.5 and taken > 0.1


@pytest.mark.parametrize("rule", ["match", "rejection", "block", "gumbel"])
def test_rows_that_offer_less_follow_it_too(rule):
    toy, how = Toy(3), WAYS["top-p"]
    counts = [1 + b % 3 for b in range(ROWS)]
    texts, _ = play(toy, judge(rule, how), "chain", ROWS, counts)
    for offered in range(3):
        assert surprise(cells(texts[offered::3]), toy.p(how)) < 3.5


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("shape", SHAPES)
def test_guesses_that_nobody_drew_are_matched(rule, shape):
    toy, how = Toy(4), WAYS["top-k"]
    note = opened(judge(rule, how), toy)
    certain = judge("match", how).sampler

    class OnNote(type(note)):
        sampler = certain

    note.__class__ = OnNote
    texts, taken = play(toy, note, shape, ROWS)
    assert surprise(cells(texts), toy.p(how)) < 3.5 and taken > 0.1


def test_a_perfect_draft_is_always_believed():
    toy = Toy(5, apart=0.0)
    for rule, shape in (("rejection", "chain"), ("block", "chain"), ("gumbel", "chain"), ("gumbel", "woven")):
        for way in ("as it is", "top-p"):
            result, taken = of(rule, shape, WAYS[way], toy=toy)
            whole = 1.999 if shape == "chain" or way == "as it is" else 1.9  # a tree's ranks are not cut
            assert taken > whole and result < 3.5, (rule, shape)


def test_a_draft_that_says_what_cannot_be_is_never_believed():
    """Disjoint p and q: nothing accepted, the residual is p."""
    toy = Toy(6)
    for n in range(3):
        toy.target[n][..., 2:] = -1e9
        toy.draft[n][..., :2] = -1e9
    for rule, shape in (("rejection", "chain"), ("rejection", "wide"), ("block", "chain")):
        result, taken = of(rule, shape, WAYS["as it is"], toy=toy)
        assert taken == 0 and result < 3.5


def test_siblings_may_be_drawn_without_replacement():
    """The second child from what the first left of q, which is then its q."""
    toy, how, dice = Toy(9), WAYS["as it is"], torch.Generator().manual_seed(2)

    def redraw(result):
        tokens, q = result.tokens.clone(), result.q.clone()
        left = q[:, 2].scatter(1, tokens[:, 1:2], 0.0)
        q[:, 2] = left / left.sum(1, keepdim=True)
        tokens[:, 2] = draw(q[:, 2], dice)
        for c, up in enumerate(SHAPES["wide"]):
            if up == 2:
                q[:, c] = probabilities(toy.draft[1][tokens[:, 2]], how)
                tokens[:, c] = draw(q[:, c], dice)
        return Proposal(tokens, result.counts, result.parents, q)

    texts, taken = play(toy, judge("rejection", how), "wide", ROWS, change=redraw)
    assert surprise(cells(texts), toy.p(how)) < 3.5
    assert taken > of("rejection", "wide", how, toy=toy)[1]

    def silently(result):
        return dataclasses.replace(redraw(result), q=result.q)

    texts, _ = play(toy, judge("rejection", how), "wide", ROWS, change=silently)
    assert surprise(cells(texts), toy.p(how)) > 5


def shorter_behind_a_doubtful_guess(result):
    """Offers the second draft token where its q is large: a length that depends on what is then judged."""
    second = result.tokens[:, 2:]
    sure = (result.q[:, 2].gather(1, second)[:, 0] > 0.45) if result.q is not None else second[:, 0] < 2
    return dataclasses.replace(result, counts=[3 if s else 2 for s in sure.tolist()])


def test_a_length_may_not_depend_on_drawn_guesses():
    """Undrawn ones may decide it: the target's draws do not know of them."""
    toy, how = Toy(3), WAYS["as it is"]
    for rule, fair in (("match", True), ("gumbel", True), ("rejection", False), ("block", False)):
        note = judge(rule, how)
        texts, _ = play(toy, note, "chain", ROWS, change=shorter_behind_a_doubtful_guess)
        result = surprise(cells(texts), toy.p(how))
        assert result < 3.5 if fair else result > 5, (rule, result)


# ---- how often draft tokens live ------------------------------------------------------------------------


def first_guess(rule, toy, how, rows=20000):
    """Share of rounds in which the first draft token is accepted; overlap of p and q."""
    note = judge(rule, how, rows)
    proposal = toy.propose(note.sampler, "chain", rows, None)
    result = note.verify(proposal, toy.verify_logits(proposal))
    p, q = (probabilities(t[0], how) for t in (toy.target, toy.draft))
    return sum(len(path) > 1 for path in result.path) / rows, p, q


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way", ["as it is", "top-p"])
def test_acceptance_is_what_theory_says(seed, way):
    toy, how = Toy(seed), WAYS[way]
    rate, p, q = first_guess("match", toy, how)
    assert abs(rate - p[toy.draft[0].argmax()]) < 0.015
    same = float(torch.minimum(p, q).sum())  # 1 - TV
    rate, _, _ = first_guess("rejection", toy, how)
    assert abs(rate - same) < 0.015
    rate, _, _ = first_guess("gumbel", toy, how)
    assert same / (2 - same) - 0.015 < rate < same + 0.015


def test_block_verification_keeps_no_fewer_than_rejection():
    gains = []
    for seed in range(4):
        toy = Toy(seed)
        by_token, by_block = (of(r, "chain", WAYS["as it is"], toy=toy)[1] for r in ("rejection", "block"))
        gains.append(by_block - by_token)
        assert by_block > by_token - 0.03
    assert sum(gains) / 4 > 0.01


# ---- exhaustively: every pair of draft tokens, and a grid over the random numbers --------------------------


def every_draft(toy, how):
    """All chains of two draft tokens: p, q [V^2, 3, V], tokens [V^2, 3], and the chance of each, all
    float32."""
    pairs = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    tokens = torch.cat((torch.full((V * V, 1), PROMPT[-1]), pairs), dim=1)
    proposal = Proposal(tokens, [3] * V**2)
    p = probabilities(toy.verify_logits(proposal), how)
    q = torch.stack(
        (
            torch.zeros(V * V, V),
            probabilities(toy.draft[0], how).expand(V * V, V),
            probabilities(toy.draft[1], how)[pairs[:, 0]],
        ),
        dim=1,
    )
    chance = q[:, 1].gather(1, pairs[:, :1])[:, 0] * q[:, 2].gather(1, pairs[:, 1:])[:, 0]
    return p, q, tokens, chance


def joint(p, tokens, taken, left, weight, toy, how):
    """The distribution of three tokens, from what was accepted of each draft and what is left to draw."""
    total = torch.zeros(V, V, V, dtype=torch.float64)
    second = probabilities(toy.target[1], how).double()
    third = probabilities(toy.target[2], how).double()
    sums = left.double().sum(-1)
    assert (sums[weight > 0] > 0).all()
    left = left.double() * (weight.double() / sums.where(weight > 0, 1.0))[:, None]
    none, one, both = (taken.sum(1) == n for n in (1, 2, 3))
    total += left[none].sum(0)[:, None, None] * second[:, :, None] * third
    first = tokens[one, 1]
    total.index_put_((first,), left[one][:, :, None] * third[first], accumulate=True)
    total.index_put_((tokens[both, 1], tokens[both, 2]), left[both], accumulate=True)
    return total


EXHAUSTED = [rules_drawn.reject_chain, rules_drawn.verify_block]


@pytest.mark.parametrize("way", [w for w in WAYS if not WAYS[w].penalises])
@pytest.mark.parametrize("rule", EXHAUSTED, ids=lambda f: f.__name__)
def test_exhaustively(rule, way):
    toy, how = Toy(7), WAYS[way]
    p, q, tokens, chance = every_draft(toy, how)
    p, q, tokens, chance = (x[chance > 0] for x in (p, q, tokens, chance))
    G = 24
    u = (torch.cartesian_prod(torch.arange(G), torch.arange(G)) + 0.5) / G
    u = torch.cat((torch.full((G * G, 1), 0.5), u), dim=1)
    n, g = len(tokens), len(u)
    many = (x.repeat_interleave(g, 0) for x in (p, q, tokens))
    taken, left = rule(*many, torch.full((n * g,), 3), u.repeat(n, 1))
    result = joint(p, tokens.repeat_interleave(g, 0), taken, left, chance.repeat_interleave(g) / g, toy, how)
    assert (result.flatten() - toy.p(how)).abs().max() < 0.5 / G


@pytest.mark.parametrize("way", [w for w in WAYS if not WAYS[w].penalises])
@pytest.mark.parametrize("apart", [0.3, 1.0, 3.0])
def test_block_chances_to_the_last_digit(way, apart):
    """No random numbers: the chance of each length from h, and what is left, summed over all drafts."""
    toy, how = Toy(8, apart), WAYS[way]
    p, q, tokens, chance = every_draft(toy, how)
    p, q, tokens, chance = (x[chance > 0] for x in (p, q, tokens, chance))
    counts = torch.full((len(tokens),), 3)
    w, h = rules_drawn.block_chances(p, q, tokens, counts)
    total = torch.zeros(V, V, V, dtype=torch.float64)
    expected = 0.0
    for n in range(3):
        length = torch.full_like(counts, n)
        left = rules_drawn._after(p, q, length, counts, w[:, n].float())
        none_longer = torch.ones_like(w[:, 0]) if n == 2 else (1 - h[:, n + 1 :]).prod(1)
        weight = chance.double() * h[:, n] * none_longer
        taken = torch.arange(3) <= length[:, None]
        total += joint(p, tokens, taken, left, weight, toy, how)
        expected += float((weight * n).sum())
    assert (total.flatten() - toy.p(how)).abs().max() < 2e-6
    assert abs(expected - float((chance[:, None] * w[:, 1:]).sum())) < 2e-6  # the optimum: sum of E[w_i]


def test_what_is_left_when_nothing_is_left():
    p = torch.tensor([[0.25, 0.75, 0.0]])
    assert torch.equal(rules_drawn.residual(p, p), p)
    assert torch.equal(rules_drawn.residual(p, torch.tensor([[0.5, 0.5, 0.0]])), torch.tensor([[0, 0.25, 0]]))


def test_a_tree_of_drawn_guesses_is_refused_by_block_verification():
    note = judge("block", WAYS["top-k"])
    proposal = Toy().propose(note.sampler, "wide", ROWS, None)
    with pytest.raises(ValueError, match="block verification is for chains"):
        note.verify(proposal, Toy().verify_logits(proposal))


# ---- rules that are wrong ------------------------------------------------------------------------------

CUT = Sampling(temperature=1.0, top_k=2)
FREE = Sampling(temperature=1.0)
AFRAID = Sampling(temperature=1.0, repetition_penalty=4.0)
honest_chances, honest_after, honest_keys = rules_drawn.block_chances, rules_drawn._after, noise.keys


def no_residual(monkeypatch):
    monkeypatch.setattr(rules_drawn, "residual", lambda p, q: p)


def residual_of_the_draft(monkeypatch):
    monkeypatch.setattr(rules_drawn, "residual", lambda p, q: (p - q).abs())


def q_before_truncation(monkeypatch):
    def tokens(self, logits, depth):
        plain = dataclasses.replace(self.sampling, top_k=0)
        return draw(probabilities(logits, self.sampling), self.rng), probabilities(logits, plain)

    monkeypatch.setattr(Sampled, "tokens", tokens)


def bonus_of_another_row(monkeypatch):
    def after(p, q, length, counts, w=None):
        return honest_after(p, q, (length - 1).clamp(min=0), counts, w)

    monkeypatch.setattr(rules_drawn, "_after", after)


def weights_as_chances(monkeypatch):
    def chances(p, q, tokens, counts):
        w, h = honest_chances(p, q, tokens, counts)
        return w, torch.where(h > 0, w, h)

    monkeypatch.setattr(rules_drawn, "block_chances", chances)


def deaf_to_ancestors(monkeypatch):
    def seen_at(self, proposal, logits):
        return self.seen(logits[:, 0])[:, None].expand(logits.shape)

    monkeypatch.setattr(SamplingState, "seen_at", seen_at)


def the_same_noise_everywhere(monkeypatch):
    def keys(key, streams, places):
        return honest_keys(key, streams, torch.zeros_like(places))

    monkeypatch.setattr(noise, "keys", keys)


WRONG = [
    (no_residual, "rejection", "chain", FREE),
    (no_residual, "rejection", "woven", FREE),
    (no_residual, "block", "chain", FREE),
    (residual_of_the_draft, "rejection", "chain", FREE),
    (residual_of_the_draft, "rejection", "wide", FREE),
    (q_before_truncation, "rejection", "chain", CUT),
    (q_before_truncation, "rejection", "wide", CUT),
    (q_before_truncation, "block", "chain", CUT),
    (bonus_of_another_row, "rejection", "chain", FREE),
    (bonus_of_another_row, "block", "chain", FREE),
    (weights_as_chances, "block", "chain", FREE),
    (deaf_to_ancestors, "match", "chain", AFRAID),
    (deaf_to_ancestors, "rejection", "wide", AFRAID),
    (the_same_noise_everywhere, "gumbel", "chain", FREE),
    (the_same_noise_everywhere, "gumbel", "woven", FREE),
]


@pytest.mark.parametrize(("fault", "rule", "shape", "how"), WRONG)
def test_a_wrong_rule_is_caught(fault, rule, shape, how, monkeypatch):
    assert of(rule, shape, how)[0] < 3.5
    fault(monkeypatch)
    assert of(rule, shape, how)[0] > 5
