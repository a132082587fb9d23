"""Costs of many sequences at once, from a table of one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from simulated import chain, embedded

from outpace.decode import auto
from outpace.decode.controller import Adaptive
from outpace.decode.request import GREEDY
from outpace.decode.row_costs import shared
from outpace.drafts.lookup import NGram


def test_the_pass_is_shared_and_the_drafts_are_not():
    one = embedded(show=1e-5, wake=2e-5)
    many = shared(one, 8)
    assert many.batches == (1, 2, 4, 8, 16)
    for batch in (1, 4, 8):
        assert many.verify_seconds(2, 256, batch) == pytest.approx(one.verify_seconds(2 * batch, 256))
        assert many.draft_seconds(5, 256, batch) == pytest.approx(batch * one.draft_seconds(5, 256))
        assert many.rest_seconds(5, batch) == pytest.approx(batch * one.rest_seconds(5))
        assert many.show_seconds(batch) == pytest.approx(batch * 1e-5)
    assert many.plain_seconds(256, 1) == one.plain_seconds(256)
    assert many.plain_seconds(256, 8) == pytest.approx(one.verify_seconds(8, 256))


def test_a_draft_of_one_forward_grows_as_the_pass_does():
    one = embedded(show=1e-5, wake=2e-5)
    many = shared(one, 8, one_draft=True)
    for batch in (1, 4, 8):
        for n in (2, 5):
            grown = many.verify_seconds(n, 256, batch) / one.verify_seconds(n, 256)
            assert many.draft_seconds(n, 256, batch) == pytest.approx(grown * one.draft_seconds(n, 256))
        assert many.show_seconds(batch) == pytest.approx(
            1e-5 * many.verify_seconds(1, 256, batch) / one.verify_seconds(1, 256)
        )
        assert many.rest_seconds(5, batch) == pytest.approx(batch * one.rest_seconds(5))


@pytest.mark.parametrize("one_draft", (False, True))
def test_hundreds_of_positions_cost_no_less_than_those_of_a_prompt(one_draft):
    """What a few positions of one row seem to add is no slope to go by."""
    one, least = embedded(), 1e-3
    one = replace(one, points=tuple(replace(p, prompt=least) for p in one.points))
    many = shared(one, 8, one_draft=one_draft)
    assert 64 * least > one.verify_seconds(64, 256)
    assert many.verify_seconds(8, 256, 8) == pytest.approx(64 * least)
    assert many.verify_seconds(8, 256, 1) == one.verify_seconds(8, 256), "as it was measured"
    if one_draft:
        grown = many.verify_seconds(8, 256, 8) / one.verify_seconds(8, 256)
        assert many.draft_seconds(8, 256, 8) == pytest.approx(grown * one.draft_seconds(8, 256))


def test_what_pays_for_one_does_not_pay_for_many():
    """Three draft tokens of each step accepted, of a draft nearly as dear as the step."""
    widths = {}
    for rows in (1, 8):
        controller = Adaptive(shared(embedded(acceptance=0.9), 8))
        controller.begin(8)
        for _ in range(300):
            widths[rows] = controller.width([256] * rows)
            proposal = chain(None, widths[rows], rows)
            if widths[rows] > 1:
                proposal = controller.cut(proposal)
            controller.learn(proposal, [[*range(min(n, 4))] for n in proposal.counts])
    assert widths[1] >= 4 and widths[8] == 1


def test_steps_that_take_longer_than_predicted_are_probed_less():
    """No draft token is ever right; where the clock has a say, a probe costs what it took."""
    drafted = {}
    for times in (1.0, 3.0, 1000.0):
        controller = Adaptive(shared(embedded(acceptance=0.3), 4))
        controller.begin(8)
        drafted[times] = 0
        for _ in range(4000):
            n = controller.width([256] * 4)
            proposal = chain(None, n, 4)
            if n > 1:
                proposal, drafted[times] = controller.cut(proposal), drafted[times] + 1
            assert controller.predicted is not None
            seconds = controller.predicted[1] * (times if n > 1 else 1)
            controller.learn(proposal, [[0]] * 4, seconds)
    assert drafted[1] > 2 * drafted[3] > 0
    assert drafted[1000] > drafted[3] / 3, "a step that was held up does not end the draft"


@pytest.mark.parametrize("reads", [False, True])
def test_a_table_of_few_rows_is_scaled_for_who_decodes_many(reads, monkeypatch, tmp_path):
    """A pass of 8 rows was taken for one of one row with as many positions, and all else for one row's."""
    one = embedded(show=1e-5, wake=2e-5)
    monkeypatch.setattr(auto, "stored_costs", lambda *_: (one, None))
    target = SimpleNamespace(decoder=SimpleNamespace(group=None))
    draft = SimpleNamespace(target_layer_ids=(1,)) if reads else NGram()
    controller, _ = auto.auto_controller(target, None, draft, GREEDY, tmp_path)
    wanted = shared(one, 32, one_draft=reads)
    for batch in (1, 8, 32):
        assert controller.costs.draft_seconds(5, 256, batch) == wanted.draft_seconds(5, 256, batch)
        assert controller.costs.rest_seconds(5, batch) == pytest.approx(batch * one.rest_seconds(5))
    assert auto.auto_controller(target, None, draft, GREEDY, tmp_path, 5)[0].costs == shared(
        one, 5, one_draft=reads
    )


def test_what_was_measured_stays_and_the_largest_is_scaled():
    one, eight = embedded(), embedded(batch=8)
    slower = replace(eight.points[0], rest=3 * one.points[0].rest, draft=one.points[0].draft)
    costs = replace(one, points=(*one.points, slower))
    many = shared(costs, 20)
    assert many.batches == (1, 8, 16, 32) and many.points[:2] == costs.points
    assert shared(costs, 3) == costs
    for batch in (1, 8):
        assert many.rest_seconds(5, batch) == costs.rest_seconds(5, batch)
        assert many.verify_seconds(3, 256, batch) == costs.verify_seconds(3, 256, batch)
    assert many.rest_seconds(5, 16) == pytest.approx(6 * one.rest_seconds(5))
    assert many.draft_seconds(5, 256, 16) == pytest.approx(2 * one.draft_seconds(5, 256))
    assert many.verify_seconds(3, 256, 16) == costs.verify_seconds(3, 256, 16)
