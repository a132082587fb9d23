"""Spliced rows: the passage follows the longest agreement, and only it is trained on."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.tiny_target.splice import LONGEST, UNTAUGHT, cut_pieces, fitting, splice
from outpace.ops.sampling import seeded


def agreement(known, place, text):
    back = 0
    while back < min(LONGEST, len(text)) and known[place - back - 1] == text[-back - 1]:
        back += 1
    return back


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=LONGEST + 5, max_size=90), st.lists(st.integers(0, 4), min_size=1)
)
def test_the_places_are_those_that_agree_longest(known, text):
    known, text = np.asarray(known), np.asarray(text)
    lengths = {p: agreement(known, p, text) for p in range(LONGEST, len(known))}
    longest = max(lengths.values())
    assert fitting(known, text).tolist() == [p for p, n in lengths.items() if n == longest]


KNOWN = np.arange(300, dtype=np.int32) % 11


def test_rows_teach_the_passage_alone():
    pieces = [np.arange(n, dtype=np.int32) % 7 for n in (1, 5, 31, 63)]
    inputs, labels = splice(pieces, KNOWN, 64)
    assert inputs.shape == labels.shape == (4, 64)
    for piece, row, label in zip(pieces, inputs.tolist(), labels.tolist(), strict=True):
        size = len(piece)
        assert row[:size] == piece.tolist()
        assert label[: size - 1] == [UNTAUGHT] * (size - 1)
        passage = [*row[size:], label[-1]]
        assert label[size - 1 :] == passage and UNTAUGHT not in passage
        borders = sum((b - a) % 11 != 1 for a, b in pairwise(passage))
        assert borders <= 1  # 300 is no multiple of 11: a passage may run past the end, to the beginning
        assert passage[0] == (piece[-1] + 1) % 11 or size == 1  # 0, 1, .. 6 are followed as in KNOWN


def test_pieces_are_cut_where_the_lot_falls():
    stream = np.arange(1000)
    pieces = cut_pieces(stream, 40, 3, 9, seeded(2))
    assert {len(p) for p in pieces} == set(range(3, 10))
    assert all(p.tolist() == list(range(p[0], p[0] + len(p))) for p in pieces)
    assert len({p[0] for p in pieces}) > 30
    again = cut_pieces(stream, 40, 3, 9, seeded(2))
    assert [p.tolist() for p in pieces] == [p.tolist() for p in again]


def test_what_fills_no_row_is_refused():
    rng = seeded(3)
    with pytest.raises(ValueError, match="the files in focus have 90 tokens"):
        splice([np.zeros(3)], np.zeros(90), 64)
    with pytest.raises(ValueError, match="a piece of 64 tokens leaves no room in a row of 64"):
        splice([np.zeros(64)], KNOWN, 64)
    with pytest.raises(ValueError, match="the corpus has 9 tokens"):
        cut_pieces(np.zeros(9), 1, 3, 9, rng)
