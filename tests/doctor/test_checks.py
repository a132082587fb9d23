"""The small checks, each on something that is wrong in just its way."""

import dataclasses
import json
import math

import every_two
import planted
import pytest
import tiny
import torch
from mistake_table import MEASURED
from planted import each, plant

from outpace.checkpoint.open import open_checkpoint
from outpace.checkpoint.shipped import target_path
from outpace.checkpoint.tokenizer import open_tokenizer
from outpace.doctor.check import Check
from outpace.doctor.engine import check_engine, check_rope, check_router, check_rows, examine_layers, walk
from outpace.doctor.mistakes import AS_IS, apply, pairs
from outpace.doctor.prediction import check_greedy, check_growth, check_text, greedy_text, shortest_loop
from outpace.doctor.reference import relative, reordered, right_reading, visible
from outpace.doctor.sample import TEXT, Sample, sample
from outpace.doctor.search import EXACT
from outpace.doctor.weights import (
    asymmetry,
    check_codes,
    check_config_values,
    check_decoding,
    check_embedding,
    check_head,
    check_sinks,
    decode_mxfp4,
)
from outpace.models.decoder import Decoder
from outpace.models.load import build, load_target, named_tensors
from outpace.ops import mxfp4

DEFAULT = target_path("default")
IDS = tiny.tokens(1, 40)[0].tolist()


def fresh(family):
    """A target that a test may change."""
    model = build(tiny.config(family))
    tiny.randomise(named_tensors(model))
    return model.eval()


# -- blocks


def test_blocks_decoded_one_by_one_equal_the_reference():
    blocks = torch.randint(256, (3, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 2), dtype=torch.uint8)
    assert torch.equal(decode_mxfp4(blocks, scales), mxfp4.reference_unpack(blocks, scales))


def test_an_engine_that_decodes_wrongly_is_caught(monkeypatch):
    model = load_target(DEFAULT)
    assert check_decoding(model).status == "pass"
    monkeypatch.setattr("outpace.ops.mxfp4.unpack", lambda b, s: 2 * mxfp4.reference_unpack(b, s))
    assert check_decoding(model).status == "fail"


def test_four_bit_integers_are_no_mxfp4(tmp_path):
    """The same values, rounded to steps of one: as two's complement, and around 8."""
    signed = torch.randn(2**16).mul(2).round().clamp(-8, 7).long()
    for code, name in ((signed % 16, "two's complement"), (signed + 8, "an offset of 8")):
        result = asymmetry(torch.bincount(code, minlength=16))
        assert min(result, key=result.get) == name and result["sign and magnitude"] > 0.2
    values = signed[: 16 * 8].view(-1, 2) % 16

    def integers(x, config):
        n = x.numel()
        pair = values.repeat(-(-n // len(values)), 1)[:n]
        return (pair[:, 0] | (pair[:, 1] << 4)).to(torch.uint8).view_as(x)

    result = check_codes(load_target(plant(DEFAULT, tmp_path / "wrong", each("_blocks", integers))))
    assert result.status == "fail" and "two's complement" in result.message  # type: ignore[attr-defined]


def test_damaged_and_misfit_scales(tmp_path):
    nan = plant(
        DEFAULT, tmp_path / "nan", each("_scales", lambda x, config: x.index_fill(0, torch.tensor(0), 255))
    )
    assert "means NaN" in check_codes(load_target(nan, finite=False)).message
    small = plant(DEFAULT, tmp_path / "small", each("_blocks", lambda x, config: x & 0x99))  # 0 and 0.5 alone
    assert "scaled for another format" in check_codes(load_target(small)).message
    assert check_codes(tiny.target("gpt_oss")).status == "skipped"


def test_orders_undo_each_other():
    x = torch.arange(64.0)
    assert torch.equal(reordered(reordered(x, "from split"), "to split"), x)
    assert reordered(x, "from split")[:3].tolist() == [0, 2, 4]


# -- embedding and head


def test_embedding_rows(twins, tmp_path):
    folder, _ = twins("llama")
    model, checkpoint = load_target(folder), open_checkpoint(folder)
    assert check_embedding(model, checkpoint, IDS).status == "pass"
    model.embed_tokens.weight.data = model.embed_tokens.weight.data.roll(1, 0)
    assert "differ from the file's rows" in check_embedding(model, checkpoint, IDS).message
    dead = plant(folder, tmp_path / "dead", each("embed_tokens.weight", _without_row(IDS[3])))
    result = check_embedding(load_target(dead), open_checkpoint(dead), IDS)
    assert result.status == "warn" and result.evidence["odd"] == [IDS[3]]
    nan = plant(folder, tmp_path / "nan", each("embed_tokens.weight", lambda x, config: x * math.nan))
    assert "NaN" in check_embedding(load_target(nan, finite=False), open_checkpoint(nan), IDS).message


def _without_row(row):
    def change(x, config):
        x[row] = 0
        return x

    return change


def test_heads(twins, tmp_path):
    folder, _ = twins("llama")
    tied = plant(folder, tmp_path / "tied", tie_word_embeddings=True)
    result = check_head(load_target(tied), open_checkpoint(tied))
    assert result.status == "fail" and "another head, which is not read" in result.message
    copied = plant(folder, tmp_path / "copied", planted.copy_head)
    assert check_head(load_target(copied), open_checkpoint(copied)).status == "warn"
    right = plant(folder, tmp_path / "right", planted.copy_head, tie_word_embeddings=True)
    assert check_head(load_target(right), open_checkpoint(right)).status == "pass"


def test_sinks_that_were_lost(twins, tmp_path):
    folder, _ = twins("gpt_oss")
    assert check_sinks(load_target(folder)).status == "pass"
    for change, name in ((planted.lost, "sinks dropped"), (planted.zeros, "sinks of zero")):
        result = check_sinks(load_target(plant(folder, tmp_path / name, each("sinks", change))))
        assert result.status == "fail" and result.mistakes == (name,) and "Fix: copy" in result.message
    assert check_sinks(tiny.target("llama")).status == "skipped"


def test_config_values_that_are_known_slips():
    """A window of a power of two, and YaRN's own factor in any form, pass."""
    right = tiny.config("gpt_oss", sliding_window=128)
    assert check_config_values(right).status == "pass"
    for window, name in ((127, "one key longer"), (129, "one key shorter")):
        result = check_config_values(dataclasses.replace(right, sliding_window=window))
        assert result.status == "warn" and result.mistakes == (f"window off by one: {name}",)
        assert "set it to 128" in result.message
    own = 0.1 * math.log(right.rope.factor) + 1
    for factor, mistakes in ((own, ()), (1.0, ("YaRN's attention factor missing",))):
        rope = dataclasses.replace(right.rope, attention_factor=factor)
        assert check_config_values(dataclasses.replace(right, rope=rope)).mistakes == mistakes


# -- what must hold in any model


def test_an_engine_without_sinks_is_caught(monkeypatch):
    """Both by the layer's output, which a known mistake explains, and by the rows' sums."""
    from outpace.models import attention

    model, causal = fresh("gpt_oss"), attention.causal_attend

    def without(q, k, v, window, sinks, scale, packed=None):
        return causal(q, k, v, window, None, scale, packed)

    monkeypatch.setattr(attention, "causal_attend", without)
    monkeypatch.setattr("outpace.doctor.engine.causal_attend", without)
    exams = examine_layers(model, walk(model, IDS))
    result = check_engine(exams)
    assert result.status == "fail" and "as if by: sinks dropped" in result.message
    assert check_rows(exams).status == "fail"
    assert check_router(exams, 5).status == "pass"


def test_an_engine_that_routes_elsewhere_is_caught(monkeypatch):
    from outpace.models import blocks

    model, route = fresh("gpt_oss"), blocks.route
    monkeypatch.setattr(blocks, "router_logits", lambda x, w, b: -(x @ w.mT + b))
    monkeypatch.setattr(blocks, "route", lambda x, w, b, k, **how: route(x, -w, -b, k, **how))
    exams = examine_layers(model, walk(model, IDS))
    assert check_router(exams, 5).status == check_engine(exams).status == "fail"
    assert "no known mistake" in check_engine(exams).message


@pytest.mark.parametrize(("wrong", "text"), [
    (lambda inv: inv.bfloat16().double(), "cos and sin are off"),
    (lambda inv: inv.roll(1), "cos and sin are off"),
])  # fmt: skip
def test_angles_that_do_not_hold_are_caught(wrong, text):
    model = fresh("llama")
    assert check_rope(model).status == "pass"
    model.inv = wrong(model.inv)
    assert text in check_rope(model).message


def test_positions_that_begin_elsewhere_are_caught(monkeypatch):
    model, rope = fresh("qwen3"), Decoder.rope
    monkeypatch.setattr(Decoder, "rope", lambda self, positions: rope(self, positions + 1))
    assert "position 0 changes a head" in check_rope(model).message


def test_windows_and_masks():
    assert visible(4, 2).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible(2, 0, causal=False).all()


@pytest.mark.parametrize(("family", "half"), every_two.SIDES)
def test_every_mistake_changes_a_layer_and_is_named(family, half):
    side = every_two.side_of(family, half)
    assert len(side.singles) >= 5
    outs = side.under([AS_IS, *side.singles])
    for names in side.singles:
        assert relative(outs[names], outs[AS_IS]) > 3 * EXACT, names
        assert every_two.explained(side, names) == (names,)


@pytest.mark.parametrize(("family", "half"), every_two.IN_PAIRS)
def test_every_two_mistakes_are_named(family, half):
    """A sample of them: all are in mistake_table.json."""
    side = every_two.side_of(family, half)
    known = json.loads(MEASURED.read_text())["every two"][f"{family} {half}"]
    every = [" + ".join(two) for two in pairs(side.known)]
    assert len(set(every)) == len(every) == known["pairs"] > 5 * len(side.known)
    expected = dict.fromkeys(every, every_two.BOTH) | known["not both alone"]
    measured = every_two.verdicts(side, every=len(every) // 25)
    assert measured == {two: expected[two] for two in measured}
    assert set(known["not both alone"].values()) <= {every_two.ONE, every_two.OTHERS}


def test_a_mistake_that_a_layer_cannot_have_changes_nothing():
    reading = right_reading(tiny.target("llama"), 0)
    assert apply(("no such mistake",), {}, reading) == reading


# -- what it states


def test_growth_and_nan():
    ours = walk(tiny.target("llama"), IDS)
    assert check_growth(ours).status == "pass"
    layers = list(ours.layers)
    layers[1] = dataclasses.replace(layers[1], out=layers[1].out * 1e6)
    assert "it grows" in check_growth(dataclasses.replace(ours, layers=layers)).message
    layers[1] = dataclasses.replace(layers[1], out=layers[1].out * math.nan)
    result = check_growth(dataclasses.replace(ours, layers=layers))
    assert result.status == "fail" and "first out of layer 1" in result.message
    json.loads(json.dumps(result.as_json(), allow_nan=False))
    layers[1] = dataclasses.replace(layers[1], mlp=torch.zeros_like(layers[1].mlp))
    still = dataclasses.replace(
        ours, layers=[ours.layers[0], dataclasses.replace(layers[1], out=layers[0].out)]
    )
    assert "layer 1 adds nothing" in check_growth(still).message


def test_chance_is_a_failure():
    logits = torch.zeros(20, 50)
    text = Sample.whole(list(range(20)))
    assert check_text(logits, text).status == "fail"
    logits[torch.arange(19), torch.arange(1, 20)] = 9.0
    result = check_text(logits, text)
    assert result.status == "pass" and result.evidence["top_1"] == 1
    assert check_text(logits * math.nan, text).status == "fail"
    logits[:10] = 0  # of these tokens none counts
    part = Sample(text.tokens, torch.arange(19) >= 10)
    assert check_text(logits, part).evidence == pytest.approx(result.evidence | {"tokens": 9})
    assert part.prompt == [*range(11)]


@pytest.mark.parametrize(("tokens", "period"), [
    ([1, 2, 3, 4, 5, 6, 7, 8], 0), ([9] + [4] * 8, 1), ([3, 5] * 4, 2), ([1, 2, 3] * 3, 3),
    ([4] * 7 + [5], 0),
])  # fmt: skip
def test_loops(tokens, period):
    assert shortest_loop(tokens) == period


def test_a_cache_that_forgets_is_caught(monkeypatch):
    model = fresh("llama")
    result = greedy_text(model, Sample.whole(IDS))
    assert len(result.tokens) == 32 and check_greedy(result, "text", 97).status != "fail"
    forward = Decoder.forward

    def forgetful(self, tokens, cache=None, **how):
        return forward(self, tokens, None if cache is not None and tokens.shape[1] == 1 else cache, **how)

    monkeypatch.setattr(Decoder, "forward", forgetful)
    result = check_greedy(greedy_text(model, Sample.whole(IDS)), "text", 97)
    assert result.status == "fail" and "through the cache" in result.message  # type: ignore[attr-defined]


def test_the_text(tmp_path):
    assert compile(TEXT, "sample", "exec") and len(TEXT) > 1400
    assert len(sample(None, 97, 12, None).tokens) == 12
    tokenizer = open_tokenizer(open_checkpoint(DEFAULT))
    (tmp_path / "short.txt").write_text("")
    with pytest.raises(ValueError, match="less than two tokens"):
        sample(tokenizer, 4096, 12, tmp_path / "short.txt")
    assert sample(tokenizer, 4096, 12, None).judged.all()  # no answer begins so early: a plain text
    few = sample(tokenizer, 300, 192, None)  # another model's tokenizer: what it has rows for
    assert few.judged.all() and max(few.tokens) < 300
    chat = sample(tokenizer, 4096, 192, None)
    pieces = [tokenizer.decode([token], skip_special_tokens=False) for token in chat.tokens]
    answers = "".join(p for p, counts in zip(pieces[1:], chat.judged, strict=True) if counts)
    assert answers.startswith("<|channel|>analysis<|message|>") and "user" not in answers
    assert "".join(pieces[: len(chat.prompt)]).endswith("<|start|>assistant") and 80 < chat.judged.sum() < 120


def test_checks_are_plain_json():
    check = Check(name="a", status="pass", message="b", evidence={"x": [float("inf"), (1.0, math.nan)]})
    assert json.loads(json.dumps(check.as_json(), allow_nan=False))["evidence"] == {
        "x": ["inf", [1.0, "nan"]]
    }
