"""The controller on a simulated clock: the best width, rests that cost little, drafting that returns."""

import dataclasses
import itertools
import random

import pytest
import torch
from simulated import (
    best_fixed,
    chain,
    decode,
    decode_on_device,
    embedded,
    experts,
    moody,
    speed,
    steady,
    switching,
    table,
    walker,
)

from outpace.decode.controller import AcceptanceHistory, Adaptive, Fixed, Row, best_at, fastest
from outpace.drafts.base import Proposal
from outpace.kv.tree import depths


def rounds(controller, *message, width=8):
    """One round for each list of survival, all draft tokens wrong; -> positions verified."""
    items = []
    for survival in message:
        controller.width([256])
        proposal = controller.cut(chain([survival], width))
        controller.learn(proposal, [[0]])
        items.append(proposal.tokens.shape[1])
    return items


# ---- the choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(200))
def test_the_width_is_the_best_of_all(seed):
    dice = random.Random(seed)
    n = dice.randint(2, 12)
    gains = [1.0, *sorted((dice.random() for _ in range(n - 1)), reverse=True)]
    costs = list(itertools.accumulate(dice.choice([0.0, 0.01, 0.5, 2.0]) + 0.001 for _ in range(n)))
    seconds = [0.0, *(1.0 + c for c in costs)]
    rates = {k: sum(gains[:k]) / seconds[k] for k in range(1, n + 1)}
    assert rates[fastest(gains, seconds)] == max(rates.values())
    if n > 3:
        tail = {k: rates[k] for k in rates if k >= 3}
        assert tail[fastest(gains, seconds, least=3)] == max(tail.values())


def test_a_step_in_the_costs_does_not_hide_what_lies_behind_it():
    gains = [1.0, 0.9, 0.8, 0.7, 0.6]
    assert fastest(gains, [0, 1.0, 2.0, 2.0, 2.0, 2.0]) == 5
    assert fastest([1.0, 0.0], [0, 1.0, 1.0]) == 1  # nothing is verified for nothing


def test_a_proposal_is_verified_as_far_as_it_beats_the_tokens_that_come_anyway():
    """Also one that took long to draft: a little more than nothing is not worth the wait."""
    gains = [1.0, 0.9, 0.4, 0.2]
    assert best_at(1.0, gains, [0, 1.0, 1.5, 2.0, 2.5]) == 2
    assert best_at(1.0, gains, [0, 9.0, 9.5, 10.0, 10.5]) == 2
    assert fastest(gains, [0, 9.0, 9.5, 10.0, 10.5]) == 4
    assert best_at(2.0, gains, [0, 1.0, 1.5, 2.0, 2.5]) == 1
    assert best_at(0.3, gains, [0, 1.0, 1.5, 2.0, 2.5], least=3) == 4


@pytest.mark.parametrize(("tokens", "first"), [(64, 1), (2048, 8)])
def test_a_short_text_does_not_begin_with_a_probe(tokens, first):
    """Two probes of a text of 64 tokens would be a tenth of it."""
    controller = Adaptive(embedded(0.0))
    controller.begin(8, tokens)
    assert controller.width([256]) == first


@pytest.mark.parametrize("rows", [1, 3])
def test_a_cut_keeps_what_is_worth_its_time_at_the_rate_of_the_others(rows):
    """By arithmetic: nothing is known yet but the calibration's acceptance of a half."""
    costs = embedded()
    seconds = [costs.round_seconds(n, 288, rows) for n in range(1, 9)]
    rate = max(rows * sum(0.5**i for i in range(n)) / seconds[n - 1] for n in range(1, 9))
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        controller = Adaptive(costs)
        controller.begin(8)
        value = torch.rand(rows, 7, generator=generator).sort(dim=1, descending=True).values
        assert controller.width([256] * rows) == 8
        got = controller.cut(chain(value.tolist(), rows=rows))
        per_round = [costs.round_seconds(n, 288, rows, width=8) for n in range(1, 9)]
        tokens = [rows + float(value[:, : n - 1].sum()) for n in range(1, 9)]
        worth = [t - rate * s for t, s in zip(tokens, per_round, strict=True)]
        best = worth.index(max(worth))
        assert got.tokens.shape == (rows, best + 1) and got.counts == [best + 1] * rows
        assert controller.predicted == pytest.approx((tokens[best], per_round[best]), rel=1e-5)


def test_a_tree_keeps_its_best_columns_and_a_short_row_its_own():
    costs = table([1e-3, 1.1e-3, 1.2e-3, 1.3e-3, 5e-3, 9e-3], [0.1e-3] * 6, batch=2)
    controller = Adaptive(costs)
    controller.begin(6)
    controller.width([9, 9])
    tree = Proposal(
        torch.arange(12).view(2, 6),
        [6, 2],
        torch.tensor([[0, 0, 0, 1, 1, 3], [0, 0, 2, 3, 4, 5]]),
        survival=torch.tensor([[1, 0.6, 0.4, 0.4, 0.1, 0.1], [1, 0.5, 0, 0, 0, 0]]),
    )
    got = controller.cut(tree)
    assert got.counts == [4, 2] and got.tokens.tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert got.parents.tolist() == [[0, 0, 0, 1], [0, 0, 2, 3]]
    controller.learn(got, [[0, 2], [0]])
    history = controller.history
    assert history.tried[1:4] == [2, 1, 0] and history.taken[1:4] == [0, 1, 0]
    assert history.observed[1] == 1 and history.stated[1] == pytest.approx(1.5)


@pytest.mark.parametrize("stated", [False, True])
def test_a_padded_first_row_says_nothing_of_parents(stated):
    """Padding follows itself, and is no node of the tree that the next proposal is predicted by."""
    controller = Adaptive(table([1e-3, 1.1e-3, 1.2e-3, 1.3e-3], [0.1e-3] * 4, batch=2))
    controller.begin(4)
    for _ in range(3):
        controller.width([9, 9])
        tree = Proposal(
            torch.arange(8).view(2, 4),
            [2, 4],
            torch.tensor([[0, 0, 2, 3], [0, 0, 1, 1]]),
            survival=torch.tensor([[1, 0.9, 0, 0], [1, 0.9, 0.8, 0.7]]) if stated else None,
        )
        controller.learn(controller.cut(tree), [[0, 1], [0, 1]])
        assert all(parent < i for i, parent in enumerate(controller.history.parents) if i)


def test_a_dear_probe_of_text_that_does_not_pay_waits_until_it_is_earned():
    plain, dear = 1e-3, 4e-3  # a probe costs five autoregressive steps
    controller = Adaptive(table([plain] * 4, [dear] * 4, acceptance=0.1))
    controller.begin(4)
    widths = []
    for n in range(400):
        widths.append(controller.width([n]))
        if widths[-1] > 1:
            offered = chain([[0.1] * (widths[-1] - 1)], width=widths[-1])
            controller.learn(controller.cut(offered), [[0]])
        else:
            controller.learn(chain([[]], width=1), [[0]])
    assert widths[0] == 1 and 0 < sum(w > 1 for w in widths) <= 2


def test_survival_of_drawn_guesses_is_not_read():
    """What is verified of them may not depend on which they are."""
    names = set()
    for item in ([0.99] * 7, [0.01] * 7):
        controller = Adaptive(embedded(0.8))
        controller.begin(8)
        controller.width([256])
        plain = chain([item])
        drawn = Proposal(plain.tokens, plain.counts, q=torch.full((1, 8, 5), 0.2), survival=plain.survival)
        got = controller.cut(drawn)
        names.add(got.tokens.shape[1])
        controller.learn(got, [[0]])
        assert controller.history.stated == [0.0] * 8 and got.q.shape[1] == got.tokens.shape[1]
    assert len(names) == 1


def test_a_draft_whose_steps_cost_is_asked_for_fewer():
    cheap, dear = table([1e-3] * 8, [1e-4] * 8), table([1e-3] * 8, [3e-4 * n for n in range(8)])
    widths = []
    for costs in (cheap, dear):
        controller = Adaptive(costs)
        controller.begin(8)
        widths.append(controller.width([256]))
    assert widths[0] == 8 and 2 <= widths[1] < 6


# ---- what is learnt --------------------------------------------------------------------------------


def row(parents, stated=None):
    return Row(list(parents), depths(parents), stated, [1.0] * len(parents))


def test_steps_are_acceptance_rates_given_the_parent():
    history = AcceptanceHistory(4, 0.5)
    for length in (0, 1, 1, 2, 3, 3, 3, 1) * 40:
        history.add(row([0, 0, 1, 2]), 4, 4, range(length + 1))
    assert history.steps()[1:] == pytest.approx([7 / 8, 4 / 7, 3 / 4], abs=0.02)
    assert history.survival([0, 0, 1, 2])[3] == pytest.approx(3 / 8, abs=0.02)
    history.fade(0.0)
    assert history.steps()[1] == pytest.approx(14 / 19, abs=0.05)  # the mean over all positions


def test_a_position_that_was_not_tried_has_its_parents_rate():
    history = AcceptanceHistory(4, 0.5)
    for _ in range(50):
        history.add(row([0, 0]), 2, 2, [0, 1])
    first, *others = history.steps()[1:]
    assert first > 0.95 and others == pytest.approx([first, first])


@pytest.mark.parametrize("rate", [0.2, 0.9])
def test_an_overconfident_or_underconfident_draft_is_corrected(rate):
    history, dice = AcceptanceHistory(4, 0.5), random.Random(1)
    stated = [1.0, 0.5, 0.25, 0.125]
    for _ in range(400):
        taken = [0]
        while len(taken) < 4 and dice.random() < rate:
            taken.append(len(taken))
        history.add(row([0, 0, 1, 2], stated), 4, 4, taken)
    corrected = history.corrected(stated, [0, 0, 1, 2], [0, 1, 2, 3])
    assert corrected[1] == pytest.approx(rate, abs=0.15)
    assert all(a >= b for a, b in itertools.pairwise(corrected))


def test_depths():
    assert depths([0, 0, 0, 1, 3, 2]) == [0, 1, 1, 2, 3, 2] and depths([0]) == [0]


# ---- resting and returning -------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("speaks", [False, True])
@pytest.mark.parametrize(("tokens", "least"), [(256, 0.975), (2048, 0.98)])
def test_text_that_cannot_be_guessed_costs_little(acceptance, speaks, tokens, least):
    costs = embedded(acceptance)
    for chance in (0.0, 0.15):
        got = speed(Adaptive(costs), costs, [steady(chance)], tokens, speaks=speaks)
        assert got > least, (chance, got)


@pytest.mark.parametrize("speaks", [False, True])
@pytest.mark.parametrize(
    ("wake", "settle", "gain"), [(0.0, 0.0, 1.1), (0.7e-3, 0.0, 1.05), (0.2e-3, 0.5e-3, 1.05)]
)
@pytest.mark.parametrize(("show", "least"), [(7e-6, 0.98), (15e-6, 0.98), (30e-6, 0.97)])
def test_showing_the_draft_what_it_missed_is_paid_from_the_same_account(
    speaks, wake, settle, gain, show, least
):
    """A half, one and two parts in a hundred of a plain step: the last is more than all that may be lost,
    and probes go on all the same, also where waking the draft takes half a plain step, or waking and
    settling together do."""
    costs = embedded(0.5, show=show, wake=wake, settle=settle)
    controller = Adaptive(costs)
    for text in range(4):
        assert speed(controller, costs, [steady(0.15)], 256, speaks=speaks, seed=text) > 0.97
    assert speed(controller, costs, [steady(0.0)], 2048, speaks=speaks) > least
    _, probes = decode(controller, costs, [steady(0.0)], 2048, speaks=speaks)
    assert 5 <= probes < decode(Adaptive(embedded(0.5)), costs, [steady(0.0)], 2048, speaks=speaks)[1]
    text = switching(steady(0.85), steady(0.05), 512)
    got = [speed(Adaptive(costs), costs, [text], 4096, speaks=speaks, seed=s) for s in range(4)]
    assert sum(got) / 4 > (1.2 if speaks else gain)


def test_waking_is_charged_after_a_rest_and_not_to_the_next_text():
    costs = embedded(0.0, wake=1e-3)
    controller = Adaptive(costs)
    controller.begin(8)
    widths, charged = [], []
    for turn in range(400):
        if turn == 399:
            assert widths[-1] == 1
            controller.begin(8)
        width = controller.width([256])
        proposal = controller.cut(chain([[0.0] * (width - 1)], width)) if width > 1 else chain(width=1)
        if width > 1:
            n = proposal.tokens.shape[1]
            charged.append(controller.predicted[1] - costs.round_seconds(n, 288, width=width))
            rested = 0 < turn < 399 and widths[-1] == 1
            assert charged[-1] == pytest.approx(1e-3 if rested else 0.0)
        controller.learn(proposal, [[0]])
        widths.append(width)
    assert widths[0] > 1 and widths[-1] > 1 and max(charged) > 0 and 1 in widths


def test_settling_is_charged_where_the_step_before_verified_no_draft_token():
    """And a proposal that is worth its verify pass, but not what that disturbs, is only looked at."""
    costs = embedded(0.5, settle=1e-3)
    controller = Adaptive(costs)
    controller.begin(8)

    def step(survival):
        assert controller.width([256]) == 8
        proposal = controller.cut(chain([survival]))
        n = proposal.tokens.shape[1]
        charged = controller.predicted[1] - costs.round_seconds(n, 288, width=8)
        controller.learn(proposal, [list(range(n))])
        return n, charged

    controller.always = True
    good, fair = [0.9] * 7, [0.3, *[0.0] * 6]
    assert step(good) == (8, pytest.approx(1e-3))
    assert step(good) == (8, pytest.approx(0.0))
    assert step(fair) == (2, pytest.approx(0.0))
    assert step([0.0] * 7)[0] == 1
    assert step(fair)[0] == 1
    assert step(good) == (8, pytest.approx(1e-3))


@pytest.mark.parametrize("made", [experts, walker])
@pytest.mark.parametrize("speaks", [False, True])
def test_other_costs_too(made, speaks):
    for acceptance in (0.3, 0.8):
        costs = made(acceptance)
        assert speed(Adaptive(costs), costs, [steady(0.0)], 512, speaks=speaks) > 0.975
        got = [speed(Adaptive(costs), costs, [steady(0.85)], 1024, seed=s, speaks=speaks) for s in range(4)]
        assert sum(got) / 4 > 0.93 * best_fixed(costs, [0.85])


TEXTS = [steady(0.05), steady(0.65), steady(0.52, 0.38, 0.5), steady(0.9), moody(0.1, 0.9)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("speaks", "fade"), [(False, 1.0), (True, 1.0), (True, 0.5), (True, 1.5)])
def test_as_many_tokens_come_as_were_predicted(text, speaks, fade):
    """Also of a draft that is too sure (fade below 1), or not sure enough."""
    errors = []
    for seed in range(3):
        counting = Counting(embedded(0.5))
        decode(counting, counting.costs, [text], 1024, speaks=speaks, seed=seed, fade=fade)
        errors.append(counting.foretold / counting.committed - 1)
    assert max(map(abs, errors)) < 0.1 and abs(sum(errors)) / 3 < 0.06


class Counting(Adaptive):
    foretold = committed = 0.0

    def learn(self, proposal, path, seconds=None):
        self.foretold += self.predicted[0]
        self.committed += sum(map(len, path))
        super().learn(proposal, path, seconds)


@pytest.mark.parametrize("made", [embedded, experts, walker])
@pytest.mark.parametrize("most", [128, 256, 512])
def test_a_draft_that_is_sure_and_wrong_costs_little(most, made):
    """It states 0.9 of every draft token, and none is right: the account stops it before its word is
    corrected, in a short text after fewer steps."""
    costs = made(0.8)
    controller, spent, tokens = Adaptive(costs), 0.0, 0
    controller.begin(8, most)
    while tokens < most:
        width = controller.width([256])
        proposal = chain(width=1)
        if width > 1:
            proposal = controller.cut(chain([[0.9**i for i in range(1, width)]], width))
        n = proposal.tokens.shape[1]
        spent += costs.round_seconds(n, 288, width=width)
        controller.learn(proposal, [[0]])
        tokens += 1
    assert most * costs.round_seconds(1, 288) / spent > 0.96


@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("chance", [0.75, 0.85, 0.95])
def test_easy_text_is_as_fast_as_by_the_best_fixed_width(acceptance, chance):
    costs = embedded(acceptance)
    for speaks, share in ((True, 0.95), (False, 0.93)):
        got = [speed(Adaptive(costs), costs, [steady(chance)], 1024, seed=s, speaks=speaks) for s in range(4)]
        assert sum(got) / 4 > share * best_fixed(costs, [chance])


def test_drafting_returns_when_the_text_becomes_easy_and_rests_when_it_is_hard():
    costs = embedded(0.5)
    text = switching(steady(0.85), steady(0.05), 256)
    for speaks in (False, True):
        got = speed(Adaptive(costs), costs, [text], 4096, speaks=speaks)
        fixed = best_fixed(costs, [0.85], [0.05])
        assert got > 1.1 and got > 1.05 * fixed, (got, fixed)


def test_what_the_draft_says_is_worth_more_than_any_fixed_width():
    costs, text = embedded(0.5), moody(0.1, 0.9)
    got = [speed(Adaptive(costs), costs, [text], 2048, seed=s, speaks=True) for s in range(4)]
    assert sum(got) / 4 > 1.03 * best_fixed(costs, [0.1, 0.9])


def test_rows_share_a_width():
    costs = embedded(0.6, batch=3)
    hard, easy = steady(0.05), steady(0.9)
    both = speed(Adaptive(costs), costs, [easy, easy, hard], 1024)
    none = speed(Adaptive(costs), costs, [hard] * 3, 1024)
    assert both > 1.1 and 0.97 < none <= 1.001


@pytest.mark.parametrize("made", [embedded, experts, walker])
def test_what_a_device_runs_loses_little_and_gains_as_much(made):
    """Proposals are verified whole, and the outcome is known a round late."""
    costs = made(0.5)
    for chance in (0.0, 0.9):
        plain = decode_on_device(Fixed(1), costs, [steady(chance)], 1024)
        got = [plain / decode_on_device(Adaptive(costs), costs, [steady(chance)], 1024, s) for s in range(3)]
        fixed = [plain / decode_on_device(Fixed(n), costs, [steady(chance)], 1024) for n in range(1, 9)]
        assert sum(got) / 3 > (0.95 if chance else 0.98) * max(fixed), (chance, got, fixed)


def test_the_next_text_begins_with_what_the_last_one_measured():
    costs = embedded(0.3)
    controller = Adaptive(costs)
    first = speed(controller, costs, [steady(0.9)], 128)
    again = speed(controller, costs, [steady(0.9)], 128, seed=1)
    assert again > first > 1
    controller.begin(5)  # another draft
    assert controller.history.steps() == [1.0] + [pytest.approx(0.3)] * 4


def test_a_plain_step_is_predicted_as_such():
    controller = Adaptive(embedded(0.0))
    controller.begin(8)
    widths = rounds(controller, *[[0.0] * 7] * 40)
    assert widths.count(1) > 30
    while controller.width([256]) > 1:
        controller.learn(chain(width=1), [[0]])
    assert controller.predicted == pytest.approx((1.0, embedded().round_seconds(1, 256)))
    controller = Adaptive(embedded(0.0, show=1e-4))
    controller.begin(8)
    while controller.width([256]) > 1:
        controller.cut(chain([[0.0] * 7]))
        controller.learn(chain(width=1), [[0]])
    assert controller.predicted == pytest.approx((1.0, 1e-4 + embedded().round_seconds(1, 256)))
    assert Fixed(3).predicted is None and Fixed(3).width([1]) == 3


def test_what_a_look_costs_is_charged_though_nothing_is_verified():
    controller = Adaptive(embedded())
    controller.begin(8)
    controller.width([256])
    one = controller.cut(chain([[0.0] * 7]))
    predicted, before = controller.predicted, controller.account
    assert one.counts == [1] and controller.rest(8) == 1 and controller.predicted == predicted
    controller.learn(one, [[0]])
    assert controller.account < before


def looks(controller, rounds, most):
    """So many decisions that find nothing -> steps of each look, in calls of at most `most`."""
    lengths = []
    for _ in range(rounds):
        assert controller.width([256]) > 1
        steps = controller.rest(most) if controller.cut(chain([[0.0] * 7])).counts == [1] else 0
        controller.learn(chain(width=max(steps, 1)), [list(range(steps))])
        while controller.wait:
            assert controller.width([256]) == 1
            n = controller.rest(most)
            controller.learn(chain(width=n), [list(range(n))])
            steps += n
        lengths.append(steps)
    return lengths


@pytest.mark.parametrize("most", [1, 3, 32])
def test_a_look_that_finds_nothing_doubles_the_steps_to_the_next(most):
    def new():
        controller = Adaptive(embedded(0.95))
        controller.begin(8)
        controller.width([256])
        controller.account = 1.0  # seconds: nothing is too expensive
        return controller

    controller, whole = new(), new()
    assert looks(controller, 6, most) == [1, 2, 4, 8, 8, 8] == looks(whole, 6, 8)
    assert controller.account == pytest.approx(whole.account)
    controller.width([256])
    some = controller.cut(chain([[0.95] * 7]))
    assert some.counts[0] > 1
    controller.learn(some, [[0]])
    assert looks(controller, 2, most) == [1, 2], "a verified proposal begins anew"


def test_what_is_not_verified_is_not_learnt_from():
    """The steps of a look are the target's own, not draft tokens that it accepted."""
    controller = Adaptive(embedded(0.95))
    controller.begin(8)
    controller.width([256])
    controller.account = 1.0
    looks(controller, 4, 8)
    assert controller.history.mean_tried == 0 and sum(controller.history.observed) == 0


def test_a_long_rest_has_few_decisions():
    """Where drafting is not predicted to pay, a rest is twice as long as the one before, at most a quarter of
    what has rested; where it is, and too much was lost, as long as the account needs."""
    controller = Adaptive(embedded(0.0))
    controller.begin(8)
    controller.width([256])
    controller.learn(controller.cut(chain([[0.0] * 7])), [[0]])
    controller.account, controller.wait, rests = -1.0, 0, list[int]()
    while len(rests) < 10:
        assert controller.width([256]) == 1
        before, n = controller.account, controller.rest(64)
        assert controller.wait == 0
        controller.learn(chain(width=n), [list(range(n))])
        assert controller.account == pytest.approx(before + n * controller._costs.allowed)
        rests.append(n)
    assert rests == [8, 16, 16, 16, 16, 18, 22, 28, 32, 32]
    controller = Adaptive(embedded(0.99))
    controller.begin(8)
    controller.width([256])
    controller.account = -1.0
    assert controller.width([256]) == 1 and controller.wait + 1 == 32
    controller.learn(chain(width=controller.rest(64)), [list(range(32))])
    controller.account = (
        -5 * (controller._costs.step[8] - controller._costs.step[1]) - 12.5 * controller._costs.allowed
    )
    assert controller.width([256]) == 1 and controller.wait + 1 == 13


def test_a_look_costs_what_a_lone_step_takes():
    costs = embedded()
    dear = dataclasses.replace(costs, points=(dataclasses.replace(costs.points[0], lone=1.55e-3),))
    seconds = []
    for one in (costs, dear):
        controller = Adaptive(one)
        controller.begin(8)
        controller.width([256])
        controller.cut(chain([[0.0] * 7]))
        seconds.append(controller.predicted[1])
    assert seconds[1] - seconds[0] == pytest.approx(0.1e-3)
