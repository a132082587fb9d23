"""The tables of docs/doctor.md are what was measured, and what is measured now."""

import json

import every_two
import mistake_table
import pytest
import tiny
from mistake_table import BEGIN, END, MEASURED, MISTAKES, PAGE, PAIRS, ROWS, label

from outpace.doctor.prediction import known_mistakes
from outpace.models.load import load_target

FOUND = json.loads(MEASURED.read_text())


def test_the_page_shows_what_was_measured():
    page = PAGE.read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    assert mistake_table.update(page, mistake_table.render(FOUND)) == page, "run: make doctor-table"


def test_every_known_mistake_and_every_pair_has_a_row():
    models = [tiny.target(family) for family in tiny.FAMILIES]
    models += [every_two.model_of(family) for family in every_two.CHANGES]
    models.append(load_target(mistake_table.DEFAULT))
    known = {name for model in models for name in known_mistakes(model)}
    assert set(FOUND["known"]) == known | set(mistake_table.measure_heads())
    for name, row in FOUND["known"].items():
        assert row["against"], name
        assert all(names == [name] for names in row["against"].values()), name
    assert len(PAIRS) == 36
    every = [label(names) for names in ROWS]
    assert list(FOUND["tiny"]) == every
    assert list(FOUND["embedded"])[: len(MISTAKES)] == list(MISTAKES)
    assert list(FOUND["embedded"]) == [row for row in every if row in FOUND["embedded"]]
    names = {name for mistake in MISTAKES.values() for name in mistake[2]}
    assert names <= known


@pytest.mark.parametrize(
    "names",
    [*((name,) for name in list(MISTAKES)[3:9]), PAIRS[2], PAIRS[12], PAIRS[-1]],
    ids=label,
)
def test_rows_of_the_tiny_model_measured_again(names):
    assert mistake_table.measure_row("tiny", names) == FOUND["tiny"][label(names)]


def test_a_row_of_the_embedded_model_measured_again():
    names = ("window off by one",)
    assert mistake_table.measure_row("embedded", names) == FOUND["embedded"][label(names)]


def test_heads_measured_again():
    for name, row in mistake_table.measure_heads().items():
        assert row == FOUND["known"][name]


def test_a_cell_tells_what_is_missing_and_what_is_too_many():
    two = ("a", "b")
    for named, others, text in (
        (["a", "b"], [], "yes"),
        (["b"], [], "not a"),
        ([], ["c"], "no, and c"),
        (["a", "b"], ["c", "d"], "yes, and c, and d"),
    ):
        assert mistake_table.cell(two, {"named": named, "others": others}) == text
