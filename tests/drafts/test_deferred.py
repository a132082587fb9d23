"""Verified tokens that wait for a proposal: joined without padding, and each row keeps its own."""

import torch

from outpace.drafts.deferred import Deferred, States, joined

COUNTS = [[2, 3], [0, 1], [1, 2], [3, 3]]  # the second row is the longest of every part, the first has gaps


def parts():
    """Tokens and states that tell part, row and position; padding is -1."""
    items = []
    for i, counts in enumerate(COUNTS):
        tokens = torch.full((2, 4), -1)
        for b, count in enumerate(counts):
            tokens[b, :count] = 100 * i + 10 * b + torch.arange(count)
        aux = torch.stack((tokens, -tokens)).float()[..., None]
        items.append(States(tokens, aux, counts))
    return items


def text(b):
    return [100 * i + 10 * b + t for i, counts in enumerate(COUNTS) for t in range(counts[b])]


class Listener:
    """A draft session that writes down what it is shown."""

    def __init__(self):
        self.shown = []

    def observe(self, tokens, aux, counts):
        self.shown.append(States(tokens, aux, counts))

    def propose(self, last, width, sampler):
        return len(self.shown)

    def select(self, batch_indices):
        pass


def assert_texts(states, rows):
    assert states.counts == [len(text(b)) for b in rows]
    for i, b in enumerate(rows):
        assert states.tokens[i, : states.counts[i]].tolist() == text(b)
        assert states.aux[:, i, : states.counts[i], 0].tolist() == [text(b), [-t for t in text(b)]]


def test_no_padding_is_left_between_the_parts_of_a_row():
    assert_texts(joined(parts()), [0, 1])
    alone = parts()[0]
    assert joined([alone]).tokens[:, :2].equal(alone.tokens[:, :2])


def test_what_waits_is_shown_once_and_before_the_proposal():
    session = Listener()
    deferred = Deferred(session)
    for part in parts():
        deferred.add(part)
    assert session.shown == []
    assert deferred.propose(torch.tensor([1, 2]), 2, None) == 1
    assert_texts(session.shown[0], [0, 1])
    assert deferred.propose(torch.tensor([1, 2]), 2, None) == 1


def test_rows_that_leave_take_what_waits_with_them():
    session = Listener()
    deferred = Deferred(session)
    for part in parts():
        deferred.add(part)
    deferred.select([1])
    deferred.flush()
    assert_texts(session.shown[0], [1])
