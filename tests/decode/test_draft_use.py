"""Which of a server's requests bring their draft: fewer and fewer of a load that does not draft."""

from simulated import chain, embedded

from outpace.decode.controller import Adaptive
from outpace.decode.draft_use import LEAST_WITHOUT, MOST_WITHOUT, REVIEWED, DraftUse
from outpace.decode.row_costs import shared


def without(use):
    """How many requests in a row join without their draft."""
    count = 0
    while not use.joins():
        count += 1
    return count


def test_all_bring_it_until_enough_steps_were_made():
    use = DraftUse()
    use.add(REVIEWED - 1, False)
    assert all(use.joins() for _ in range(100))
    use.add(1, False)
    assert without(use) == LEAST_WITHOUT
    assert use.joins(), "the next review is of as many steps"


def test_each_fruitless_review_doubles_them_and_one_of_use_begins_again():
    use, counts = DraftUse(), []
    for drafted in [0] * 6 + [REVIEWED // 16, 0]:
        use.add(drafted, True)
        use.add(REVIEWED - drafted, False)
        counts.append(without(use))
    assert counts == [64, 128, 256, 512, 1024, MOST_WITHOUT, 0, 64]


def clocked(controller, running, steps, kept):
    """Steps of so many rows, in each of which `kept` positions of every row are accepted."""
    for _ in range(steps):
        n = controller.width([256] * running, running)
        proposal = chain(None, n, running)
        if n > 1:
            proposal = controller.cut(proposal)
        taken = controller.costs.round_seconds(proposal.width, 256, running)
        controller.learn(proposal, [[*range(min(proposal.width, kept))]] * running, taken)


def test_a_controller_counts_each_load():
    controller = Adaptive(shared(embedded(0.9), 8))
    controller.begin(8, 1024)
    clocked(controller, 2, 600, kept=8)
    clocked(controller, 8, 600, kept=1)
    assert controller.joins(2), "drafting pays there"
    assert [controller.joins(n) for n in (8, 7, 5)] == [False] * 3
    assert controller.joins(9) and controller.joins(4), "nothing is known of these"


def test_a_request_that_is_alone_brings_its_draft():
    controller = Adaptive(shared(embedded(0.9), 8))
    controller.begin(8, 1024)
    clocked(controller, 1, 600, kept=1)
    assert all(controller.joins(1) for _ in range(100))


def test_steps_of_a_rest_that_were_made_in_one_call_count_each():
    controller = Adaptive(shared(embedded(0.9), 8))
    controller.begin(8, 1024)
    controller.width([256] * 8, 8)
    made = controller.rest(32)
    controller.learn(chain(width=1, rows=8), [[*range(made)]] * 8, made * 1e-3)
    assert controller.use[8].steps == made > 1 and not controller.use[8].drafted
