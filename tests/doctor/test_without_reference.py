"""The embedded model with a mistake planted, and no reference: its weights and its text tell."""

import json
import math

import planted
import pytest
import tiny
from planted import both, each, plant

from outpace.checkpoint.open import open_checkpoint
from outpace.checkpoint.shipped import target_path
from outpace.checkpoint.tokenizer import open_tokenizer
from outpace.doctor.mistakes import AS_IS, DOUBLED, HALVED, REVERSED_ALONE
from outpace.doctor.mistakes import REVERSED as REVERSED_NAME
from outpace.doctor.prediction import (
    check_mistakes,
    check_scale,
    known_mistakes,
    read_with,
    try_mistakes,
)
from outpace.doctor.sample import sample
from outpace.doctor.weights import DECIDED, check_orders, gather_marks
from outpace.models.load import load_target

DEFAULT = target_path("default")
ROPE = json.loads((DEFAULT / "config.json").read_text())["rope_parameters"]
SPLIT = each("_blocks", planted.split)
HALVES = both(*(each(f"gate_up_proj_{part}", planted.halves) for part in ("blocks", "scales", "bias")))
SWAPPED = both(*(each(f"gate_up_proj_{part}", planted.swapped_rows) for part in ("blocks", "scales", "bias")))
REVERSED = both(each("_blocks", planted.backwards), each("_scales", planted.backwards))
DOWN, GATE_UP, PAIRING = "column order of down", "column order of gate and up", "pairing of gate and up rows"


def scales(by):
    return each("_scales", lambda x, config: x + by)


def text(length):
    return sample(open_tokenizer(open_checkpoint(DEFAULT)), 4096, length, None)


def each_alone(model, length):
    known = known_mistakes(model)
    names = [AS_IS, *((name,) for name in known)]
    return check_mistakes(read_with(model, text(length), names), model.config.vocab_size, known)


@pytest.mark.parametrize(
    ("edit", "wrong", "mistake"),
    [
        (SPLIT, {DOWN, GATE_UP}, "split nibbles (GGML's order)"),
        (each("down_proj_blocks", planted.split), {DOWN}, "split nibbles (GGML's order)"),
        (each("_blocks", planted.joined), {DOWN, GATE_UP}, "split nibbles undone (interleaved order)"),
        (each("_blocks", planted.exchanged), {DOWN, GATE_UP}, "high nibble first"),
        (HALVES, {PAIRING}, "gate and up rows read as halves, not interleaved"),
        (SWAPPED, {GATE_UP}, "gate and up exchanged"),
        (REVERSED, {DOWN, GATE_UP}, "blocks of each row reversed"),
        (
            each("_blocks", planted.backwards),
            {DOWN, GATE_UP},
            "blocks of each row reversed under their scales",
        ),
    ],
    ids=["split", "split down", "undone", "high first", "halves", "swapped", "reversed", "reversed alone"],
)
def test_weights_alone_tell_their_order(edit, wrong, mistake, tmp_path):
    model = load_target(plant(DEFAULT, tmp_path / "wrong", edit))
    marks = gather_marks(model)
    values = {c.name: c for c in check_orders(marks)}
    assert {name for name, c in values.items() if c.status == "fail"} == wrong
    for name in wrong:
        assert mistake in values[name].mistakes
        if (name, mistake) != (DOWN, REVERSED_NAME):
            assert values[name].evidence["z"] > 8
    # The two forms of reversed blocks differ in the blocks' scales alone, and the norms of down's columns are
    # nearly the same with the scales of other blocks: they lie closer together than any two other orders.
    apart = {REVERSED_NAME: (REVERSED_ALONE, 11.5), REVERSED_ALONE: (REVERSED_NAME, 8.8)}
    if mistake in apart:
        other, lead = apart[mistake]
        ranked = marks["down"].ranked()
        assert [names for names, _ in ranked[:2]] == [(mistake,), (other,)]
        assert ranked[1][1] == pytest.approx(lead, abs=0.1) and ranked[2][1] > 10
        assert set(values[DOWN].mistakes) == ({mistake, other} if lead < DECIDED else {mistake})


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_random_weights_tell_nothing(family):
    for check in check_orders(gather_marks(tiny.target(family))):
        assert check.status == "skipped", check.message


@pytest.mark.parametrize(
    ("edit", "text", "length", "named"),
    [
        (HALVES, {}, 128, "gate and up rows read as halves, not interleaved, the"),
        (planted.on_q_and_k(planted.to_neighbours), {}, 160, "interleaved RoPE pairs (2i, 2i + 1), the"),
        (planted.cyclic_heads, {}, 160, "cyclic GQA mapping (query head h reads kv head h % K), the"),
    ],
    ids=["halves", "pairs", "cyclic"],
)
def test_a_text_tells_how_the_weights_want_to_be_read(edit, text, length, named, tmp_path):
    check = each_alone(load_target(plant(DEFAULT, tmp_path / "wrong", edit, **text)), length)
    assert check.status == "fail"
    assert check.message.startswith("read with " + named)


def test_explanations_that_are_as_good_are_all_named(tmp_path):
    """A base of 10,000 is wrong; some hundred tokens do not say which larger one is right."""
    wrong = plant(DEFAULT, tmp_path / "wrong", rope_parameters=ROPE | {"rope_theta": 1e4})
    check = each_alone(load_target(wrong), 192)
    assert check.status == "fail" and "does not tell them apart" in check.message
    assert all(f"RoPE base {base}" in check.message for base in ("150,000", "500,000", "1,000,000"))


def test_two_mistakes_at_once(tmp_path):
    model = load_target(plant(DEFAULT, tmp_path / "wrong", both(SPLIT, scales(1))))
    values = {c.name: c for c in try_mistakes(model, text(160), math.inf)}
    named = "split nibbles (GGML's order) and scale exponent off by one: halved, the"
    assert values["known mistakes"].message.startswith("read with " + named)
    assert values["scale of the experts"].mistakes == (HALVED,)


def test_a_scale_is_not_blamed_where_another_mistake_explains_more(tmp_path):
    """Experts that read noise say less at half the scale."""
    model = load_target(plant(DEFAULT, tmp_path / "wrong", SPLIT))
    scale = check_scale(read_with(model, text(192), [AS_IS, (DOUBLED,), (HALVED,)]), model.config.vocab_size)
    values = {c.name: c for c in try_mistakes(model, text(192), math.inf)}
    assert scale.mistakes == (HALVED,) and values["scale of the experts"].status == "skipped"
    assert values["known mistakes"].mistakes == ("split nibbles (GGML's order)",)


@pytest.mark.parametrize(("by", "best"), [(0, None), (1, "halved"), (-1, "doubled")])
def test_scale_bias_127_or_128(by, best, tmp_path):
    model = load_target(plant(DEFAULT, tmp_path / "wrong", scales(by)))
    check = check_scale(read_with(model, text(160), [AS_IS, (DOUBLED,), (HALVED,)]), model.config.vocab_size)
    assert check.status == ("fail" if best else "pass")
    assert best is None or check.message.startswith(f"scale exponent off by one: {best}")


def test_what_cannot_be_decided_is_not_guessed(tmp_path):
    """Rows of the embedding in another order: nothing is predicted, under any reading."""
    rows = each("embed_tokens.weight", lambda x, config: x.flip(0))
    model = load_target(plant(DEFAULT, tmp_path / "wrong", rows))
    result = read_with(model, text(160), [AS_IS, (DOUBLED,), (HALVED,)])
    size = model.config.vocab_size
    for check in (check_scale(result, size), check_mistakes(result, size, {})):
        assert check.status == "skipped" and check.message.startswith("undecided")


def test_a_large_model_is_not_made_to_wait():
    model = load_target(DEFAULT)
    values = {c.name: c for c in try_mistakes(model, text(64), 1e-9)}
    assert values["known mistakes"].status == "skipped" and "--thorough" in values["known mistakes"].message
