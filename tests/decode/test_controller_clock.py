"""The controller of a server: times of its own steps outweigh a table of another hour."""

import dataclasses
import itertools

import pytest
from simulated import chain, embedded

from outpace.decode.controller import Adaptive
from outpace.decode.row_costs import shared


def controlled(costs):
    controller = Adaptive(costs)
    controller.begin(8, 1024)
    return controller


def clocked(controller, plain, drafting, steps=2000, rows=1, running=0, kept=4):
    """Steps that take `plain` and `drafting` times the table's seconds, with `kept` positions of each row
    accepted; -> the share of them that drafted, and seconds over those of autoregressive ones."""
    drafted = seconds = usual = tokens = 0
    costs = controller.costs
    for _ in range(steps):
        n = controller.width([256] * rows, running)
        proposal = chain(None, n, rows)
        if n > 1:
            proposal, drafted = controller.cut(proposal), drafted + 1
        n = proposal.width
        taken = costs.round_seconds(n, 256, rows) * (drafting if n > 1 else plain)
        path = [list(range(min(n, kept)))] * rows
        controller.learn(proposal, path, taken)
        seconds, tokens = seconds + taken, tokens + len(path[0])
        usual = tokens * plain * costs.round_seconds(1, 256, rows)
    return drafted / steps, seconds / usual


def test_what_the_clock_says_outweighs_the_table():
    """Drafting pays by this table: three tokens of a step are accepted."""
    cases = ((1, 1, 0.85, 1), (0.3, 1, 0, 0.02), (1, 3, 0, 0.02), (3, 3, 0.85, 1))
    for plain, drafting, least, most in cases:
        share, slower = clocked(controlled(embedded(0.9)), plain, drafting, steps=8000)
        assert least <= share <= most, (plain, drafting)
        assert slower < 1.015
    share, slower = clocked(controlled(embedded(0.9)), 3, 1)  # where it pays by the clock alone
    assert share > 0.85 and slower < 0.5


def test_autoregressive_steps_are_timed_first_and_then_now_and_again():
    controller, widths = Adaptive(embedded(0.9)), []
    controller.begin(8)
    for _ in range(1200):
        widths.append(controller.width([256]))
        proposal = chain([[0.9] * (widths[-1] - 1)], widths[-1])
        if widths[-1] > 1:
            proposal = controller.cut(proposal)
        controller.learn(proposal, [list(range(proposal.width))], controller.predicted[1])
    assert widths[0] > 1 and widths[1:25] == [1] * 24 and min(widths[25:80]) > 1
    begins = [i for i in range(25, 1200) if widths[i] == 1 < widths[i - 1]]
    assert len(begins) >= 4 and {b - a for a, b in itertools.pairwise(begins)} == {72}
    for begin in begins[:-1]:
        assert widths[begin : begin + 8] == [1] * 8 and widths[begin + 8] > 1


def test_the_first_step_of_a_kind_says_nothing():
    """It may have built its program."""
    controller = Adaptive(embedded(0.9))
    controller.begin(8)
    width = controller.width([256])
    proposal = controller.cut(chain([[0.9] * (width - 1)], width))
    controller.learn(proposal, [list(range(proposal.width))], 3 * controller.predicted[1])
    controller.width([256])
    assert controller._costs.ratios == (1, 1)
    controller.learn(chain(width=1), [[0]], 3 * controller.predicted[1])
    controller.width([256])
    controller.learn(chain(width=1), [[0]], 0.5 * controller.predicted[1])
    controller.wait = 0
    controller.width([256])
    plain, drafting = controller._costs.ratios
    assert 0.5 < plain < 1 and drafting == plain
    assert controller.predicted[1] == pytest.approx(plain * controller.costs.round_seconds(1, 256))


def test_tokens_that_come_cheaper_in_company_are_not_drafted_before():
    """Two rows decode while a prompt is read; once it is, a step of eight costs little more than theirs."""
    costs, eight = embedded(0.9), dataclasses.replace(embedded(0.9).points[0], batch=8)
    dear = dataclasses.replace(eight, verify=tuple(8 * x for x in eight.verify))
    for point, pays in ((eight, False), (dear, True)):
        controller = controlled(dataclasses.replace(costs, points=(*costs.points, point)))
        assert clocked(controller, 1, 1, rows=2, running=8)[0] == 0, "how fast eight are is not known yet"
        clocked(controller, 1, 1, steps=30, rows=8, kept=1)
        drafted = clocked(controller, 1, 1, rows=2, running=8)[0]
        assert drafted > 0.85 if pays else drafted < 0.05


def test_gains_are_counted_against_the_pace_of_autoregressive_steps():
    """A table is of another hour: at half of its seconds the same tokens are worth half."""
    gained = []
    for pace in (1.0, 0.5):
        controller = Adaptive(embedded(0.99))
        controller.begin(8)
        controller.width([256])
        controller.account = -1.0
        for _ in range(300):
            assert controller.width([256]) == 1
            controller.learn(chain(width=1), [[0]], pace * controller.costs.round_seconds(1, 256))
        controller.account, controller.wait = 0.0, 0
        width = controller.width([256])
        proposal = controller.cut(chain([[0.9] * (width - 1)], width))
        before = controller.account
        controller.learn(proposal, [list(range(proposal.width))], 1e-3)
        gained.append(controller.account - before)
        assert controller._costs.ratios == (pytest.approx(pace, abs=0.01),) * 2
    worth = controller.costs.round_seconds(1, 256) * proposal.width
    assert gained[0] - gained[1] == pytest.approx(worth / 2, rel=0.02)


def test_what_is_known_of_drafting_ages_while_it_rests():
    """A slow hour of the machine does not end it for good."""
    controller = controlled(embedded(0.9))
    assert clocked(controller, 1, 1)[0] > 0.85
    assert clocked(controller, 1, 4, steps=300)[0] < 0.2
    assert clocked(controller, 1, 1, steps=6000)[0] > 0.5


def test_each_number_of_rows_has_an_account():
    """The losses of one row do not keep two from drafting, and its gains do not pay for eight."""
    controller = controlled(shared(embedded(0.9), 8))
    assert clocked(controller, 1, 4)[0] < 0.05 and controller.account < 0
    assert clocked(controller, 1, 0.5, rows=2)[0] > 0.8 and controller.account > 0
    drafted, slower = clocked(controller, 1, 6, rows=8)
    assert drafted < 0.05 and slower < 1.03
    controller.width([256] * 2)
    assert controller.account > 0


def test_among_others_drafting_must_be_faster_by_a_margin():
    costs = shared(embedded(0.9), 2)
    for times, least, most in ((1.0, 1.3, 1.5), (1.2, 1.1, 1.25)):  # how fast two rows are with draft tokens
        drafted, slower = clocked(controlled(costs), 1, times, rows=2)
        assert drafted > 0.85 and least < 1 / slower < most
        among = clocked(controlled(costs), 1, times, rows=2, running=2)[0]
        assert among > 0.85 if least > 1.25 else among < 0.05
