"""Rows of generated problems: none is held out, and nothing is supervised but the model's own words."""

import random
from pathlib import Path

import pytest

import outpace
from examples.tiny_target.problem_rows import (
    DOCUMENT,
    SERIES,
    UNSUPERVISED,
    Lessons,
    Mix,
    batches,
    sample_pieces,
)
from outpace.tasks.families import FAMILIES
from outpace.tasks.problem import Problem
from outpace.text.harmony import HarmonyTokens, Mark
from outpace.text.harmony_parser import HarmonyParser
from outpace.text.tokenizer import read_tokenizer

TOKENS = HarmonyTokens(read_tokenizer(Path(outpace.__file__).parent / "embedded" / "target"))
PAD = TOKENS.tokenizer.token_to_id("<|endoftext|>")
EVERYTHING = Mix(low=0.2, turns=0.2, documents=0.05, longest=600, weights={"needles": 0.1})


def drawn(count=150, **mix):
    lessons, rng = Lessons(TOKENS, Mix(**vars(EVERYTHING) | mix)), random.Random(1)
    return [lessons.draw(rng) for _ in range(count)]


def messages(example):
    parser = HarmonyParser(TOKENS, role=None, strict=True)
    parser.feed_all(example.row.ids)
    return [parsed.message for parsed in parser.finish()]


def test_no_question_that_is_held_out_is_trained_on():
    asked = []
    for example in drawn():
        questions = [m.content for m in messages(example) if m.role == "user"]
        asked += questions[:1] if example.family == DOCUMENT else questions  # the others need the document
    assert len(asked) > 200
    assert not any(Problem(question=text, trace="", answer="").held_out for text in asked)


def test_every_family_is_drawn_as_often_as_its_weight_says():
    names = [example.family for example in drawn(1500, low=0.0, turns=0.0, documents=0.0, series=0.0)]
    assert set(names) == set(FAMILIES)
    assert names.count("needles") < names.count("addition") / 3


@pytest.mark.parametrize("mix", [{"series": 0.0}, {"series": 1.0}, {"turns": 1.0}, {"documents": 1.0}])
def test_what_is_supervised_is_what_the_model_says(mix):
    for example in drawn(25, **{"turns": 0.0} | mix):
        row = example.row
        supervised = TOKENS.tokenizer.decode([t for t, m in zip(row.ids, row.mask, strict=True) if m])
        whole = messages(example)
        own = [m for m in whole if m.role == "assistant"]
        last = own[-1:] if "turns" in mix else own  # of several turns only the last is supervised
        assert all(m.content in supervised for m in last)
        assert not any(m.content in supervised for m in whole if m.role == "user" and len(m.content) > 24)
        ends = [m for t, m in zip(row.ids, row.mask, strict=True) if t == TOKENS.ids[Mark.RETURN]]
        assert ends == [True] and row.ids[-1] == TOKENS.ids[Mark.RETURN]


def test_a_series_has_all_traces_and_one_set_of_settings():
    rows = [e for e in drawn(60, low=0.0, turns=0.0, documents=0.0, series=1.0) if e.family == "talk"]
    several = []
    for example in rows:
        whole = messages(example)
        assert [m.role for m in whole].count("system") == 1
        questions = [m for m in whole if m.role == "user"]
        several.append(len(questions) > 1)
        assert len(example.row.ids) <= SERIES
        assert len([m for m in whole if m.channel == "analysis"]) == len(questions)
    assert any(several)


def test_all_codes_of_a_document_are_asked_for_and_supervised():
    for example in drawn(5, documents=1.0):
        assert example.family == DOCUMENT
        whole = messages(example)
        codes = [m.content for m in whole if m.channel == "final"]
        quoted = [m.content for m in whole if m.channel == "analysis"]
        assert all(code in quote for code, quote in zip(codes, quoted, strict=True))
        spans = [TOKENS.tokenizer.decode(ids) for own, ids in example.row.spans() if own]
        assert len(codes) > 2 and [span.count(code) for span, code in zip(spans, codes, strict=True)]
        assert all(code in span for span, code in zip(spans, codes, strict=True))


def test_settings_of_many_kinds_and_the_functions_of_a_problem_among_them():
    heads = {messages(example)[0].content.split("\n")[0] for example in drawn(80, settings=0.5)}
    assert len(heads) == 2 and any("ChatGPT" in head for head in heads)
    calls = [e for e in drawn(400, settings=1.0) if e.family == "functions"]
    assert calls
    for example in calls:
        called = next(m.recipient for m in messages(example) if m.is_call)
        developer = next(m.content for m in messages(example) if m.role == "developer")
        assert f"type {called.removeprefix('functions.')} = " in developer


def test_batches_hold_every_row_once_and_shift_by_one():
    examples = drawn(40)
    some = list(batches(examples, 2000, PAD))
    assert sum(len(batch.families) for batch in some) == 40
    assert all(batch.inputs.numel() <= 2000 or len(batch.inputs) == 1 for batch in some)
    left = {tuple(e.row.ids): e.row for e in examples}
    for batch in some:
        for inputs, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
            length = len(inputs) - next((i for i, t in enumerate(reversed(inputs)) if t != PAD), 0)
            row = left[*inputs[:length], TOKENS.ids[Mark.RETURN]]
            wanted = [t if own else UNSUPERVISED for t, own in zip(row.ids[1:], row.mask[1:], strict=True)]
            assert labels == wanted + [UNSUPERVISED] * (len(inputs) - length)


def test_the_vocabulary_is_learnt_from_text_without_marks():
    pieces = list(sample_pieces(1, 3))
    assert "analysis" in pieces and not any("<|" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("mix", "message"),
    [({"weights": {"adition": 2.0}}, "'adition': the families are"), ({"turns": 1.5}, "turns 1.5")],
)
def test_a_mix_that_cannot_be_drawn(mix, message):
    with pytest.raises(ValueError, match=message):
        Mix(**mix)
