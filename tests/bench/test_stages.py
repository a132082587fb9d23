"""A draft taken apart: every stage is the reference's, and a mistake is found where it was made."""

import dataclasses
import io
import json

import draft_samples as samples
import pytest
import tiny
import torch
from rich.console import Console

from outpace.bench.stages import compare_stages, show_stages
from outpace.checkpoint.shipped import EMBEDDED
from outpace.cli.main import main
from outpace.formats.load import build_draft

TEXTS = [tiny.tokens(n, seed=n).tolist() for n in (19, 2, 11)]


def staged(described, tamper=None, offset=0, texts=TEXTS, target=None):
    copies = {name: tensor.clone() for name, tensor in described.tensors.items()}
    draft = build_draft(dataclasses.replace(described, tensors=copies))
    if tamper is not None:
        with torch.no_grad():
            tamper(draft)
    return compare_stages(draft, described, target or samples.target(), texts, offset)


@pytest.mark.parametrize("offset", [0, 65536])
@pytest.mark.parametrize("variant", samples.EAGLE3S)
def test_every_stage_of_an_eagle3(variant, offset):
    described = samples.eagle3(torch.bfloat16, **samples.EAGLE3S[variant])
    result = staged(described, offset=offset)
    assert result.passed and result.first_wrong is None and result.top == 1
    masks = 3 * len(TEXTS) if described.config.parallel else 0
    assert result.rows == sum(len(text) - 1 for text in TEXTS) + masks
    layers = [f"{part} {i}" for i in range(described.config.num_layers) for part in ("attention", "mlp")]
    ends = ["hidden", "fed back", "before the head", "logits"]
    assert [stage.name for stage in result.stages] == ["fc", *layers, *ends]
    assert all(stage.error < 1e-4 * stage.size for stage in result.stages)


@pytest.mark.parametrize("variant", samples.DFLASHES)
def test_every_stage_of_a_dflash(variant):
    described = samples.dflash(torch.bfloat16, **samples.DFLASHES[variant])
    result = staged(described)
    assert result.passed and result.top == 1 and result.rows == 5 * len(TEXTS)
    assert all(stage.error < 1e-4 * stage.size for stage in result.stages)


def test_convolutions_and_a_vocabulary_of_its_own():
    plain = samples.dflash().config
    config = dataclasses.replace(plain, conv_kernel_size=2, conv_group_size=16, causal_full=True)
    shapes = samples.dflash_shapes(config)
    assert any("conv" in name for name in shapes)
    result = staged(samples.DFlashDraft(config=config, tensors=samples.randoms(shapes, torch.float32)))
    assert result.passed and result.top == 1


def swap_gate_and_up(draft):
    weight = draft.layers[0].mlp.gate_up_proj.weight
    weight.copy_(weight.roll(len(weight) // 2, 0))


def scramble_heads(draft):
    weight = draft.layers[0].qkv_proj.weight
    D = draft.config.head_dim
    weight[:D], weight[D : 2 * D] = weight[D : 2 * D].clone(), weight[:D].clone()


def swap_states(draft):
    weight, C = draft.fc.weight, draft.config.hidden_size
    weight[:, :C], weight[:, C : 2 * C] = weight[:, C : 2 * C].clone(), weight[:, :C].clone()


def other_norm(draft):
    draft.norm.weight.copy_(draft.norm.weight.flip(0))


MISTAKES = {
    "fc": swap_states,
    "attention 0": scramble_heads,
    "mlp 0": swap_gate_and_up,
    "before the head": other_norm,
}


@pytest.mark.parametrize("stage", MISTAKES)
@pytest.mark.parametrize("make", [samples.eagle3, samples.dflash])
def test_a_mistake_is_detected_where_it_was_made(make, stage):
    result = staged(make(), MISTAKES[stage])
    assert not result.passed and result.first_wrong == stage
    assert result.as_json()["first_wrong"] == stage


def test_wrong_positions_and_a_window_too_wide_show_in_the_attention():
    def further(draft):
        draft.inv = draft.inv * 1.01

    assert staged(samples.eagle3(), further).first_wrong == "attention 0"
    assert staged(samples.dflash(), further).first_wrong == "attention 0"
    described = samples.eagle3(sliding_window=4)
    wide = build_draft(dataclasses.replace(described, config=samples.eagle3(sliding_window=5).config))
    assert compare_stages(wide, described, samples.target(), TEXTS).first_wrong == "attention 0"


def test_what_is_fed_back_is_looked_at():
    described = samples.eagle3(norm_output=True)
    raw = build_draft(dataclasses.replace(described, config=samples.eagle3().config))
    assert compare_stages(raw, described, samples.target(), TEXTS).first_wrong == "fed back"


def test_other_tokens_and_ties_are_distinguished():
    """A head where the two most probable rows are one: rounding may choose either, which is no mistake."""
    described = samples.eagle3()
    head = described.tensors["lm_head.weight"]
    doubled = {**described.tensors, "lm_head.weight": head.clone()}
    doubled["lm_head.weight"][20:] = head[:17]
    twins = dataclasses.replace(described, tensors=doubled)

    def nudge(draft):
        draft.lm_head.weight[20:] += 1e-7

    result = staged(twins, nudge)
    assert result.argmax == 1 and result.ties > 0 and result.passed

    def reorder(draft):
        draft.lm_head.weight.copy_(draft.lm_head.weight.roll(1, 0))

    result = staged(described, reorder)
    assert result.argmax < 0.5 and not result.passed and result.first_wrong == "logits"


def test_what_is_shown():
    page = io.StringIO()
    show_stages(staged(samples.eagle3()), Console(file=page, width=100))
    assert "every stage is the reference's" in page.getvalue() and "fed back" in page.getvalue()
    show_stages(staged(samples.eagle3(), swap_gate_and_up), Console(file=page, width=100))
    assert "first goes wrong at mlp 0" in page.getvalue()


def verify(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["outpace", "check", "--stages", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


def test_the_command(monkeypatch, capsys, tmp_path):
    """On the embedded draft."""
    block = json.loads((EMBEDDED / "dflash" / "config.json").read_text())["block_size"]
    code, out, _ = verify(monkeypatch, capsys, "--prompts", "1", "--json")
    data = json.loads(out)
    assert code == 0 and data["passed"] and data["kind"] == "DFlash" and data["rows"] == block
    code, _, err = verify(monkeypatch, capsys, "--draft", "ngram")
    assert code == 2 and "has no stages" in err
    code, _, err = verify(monkeypatch, capsys, "--cache", str(tmp_path))
    assert code == 2 and "leave --cache out" in err


@pytest.mark.parametrize("texts", [[], [[5]]])
def test_texts_that_are_refused(texts):
    with pytest.raises(ValueError, match="at least two tokens"):
        staged(samples.eagle3(), texts=texts)
