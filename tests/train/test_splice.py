"""Spliced rows: the passage follows the longest agreement, and only it is taught."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.train.splice import LONGEST, UNTAUGHT, fitting, spliced_rows


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


def test_rows_begin_with_any_text_and_teach_the_passage_alone():
    stream = np.arange(1000, 1400, dtype=np.int32) % 7
    known = np.arange(300, dtype=np.int32) % 11
    inputs, labels = spliced_rows(stream, known, 64, 9, first=4, seed=1)
    assert inputs.shape == labels.shape == (9, 64)
    sizes = set()
    for row, label in zip(inputs.tolist(), labels.tolist(), strict=True):
        size = label.index(next(x for x in label if x != UNTAUGHT)) + 1
        sizes.add(size)
        assert 64 // 16 <= size < 64 // 2
        assert all((b - a) % 7 == 1 for a, b in pairwise(row[:size]))
        passage = [*row[size:], label[-1]]
        assert label[size - 1 :] == passage and UNTAUGHT not in label[size - 1 :]
        borders = sum((b - a) % 11 != 1 for a, b in pairwise(passage))
        assert borders <= 1  # 300 is no multiple of 11: a passage may run past the end, to the beginning
    assert len(sizes) > 3


def test_a_later_call_goes_on_where_the_first_ended():
    stream, known = (np.random.default_rng(n).integers(0, 9, 500) for n in (1, 2))
    whole = spliced_rows(stream, known, 32, 6, first=0, seed=5)
    parts = [spliced_rows(stream, known, 32, 3, first=n, seed=5) for n in (0, 3)]
    for x, halves in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(x, torch.cat(halves))


@pytest.mark.parametrize(("short", "said"), [(0, "the corpus has 30"), (1, "the files in focus have 30")])
def test_texts_that_fill_no_row_are_refused(short, said):
    texts = [np.zeros(500, dtype=np.int32)] * 2
    texts[short] = texts[short][:30]
    with pytest.raises(ValueError, match=said):
        spliced_rows(*texts, 32, 1, first=0, seed=1)
