"""transformers as the baseline: same tokens, and its own DFlash accepts what ours accepts, in float32."""

from dataclasses import replace

import pytest
import tiny
import torch
from dflash_drafts import random_dflash

from outpace.bench.baselines import open_baseline
from outpace.bench.methods import Case, run_case
from outpace.bench.metrics import compare
from outpace.drafts.dflash import DFlash
from outpace.models.config import WINDOW
from outpace.models.load import build, named_tensors

pytest.importorskip("transformers", reason="the baseline is transformers; it is not installed")
pytest.importorskip(
    "transformers.models.muse_glimmer_assistant", reason="transformers has DFlash from 5.23 on"
)

GREEDY = Case(method="ours", temperature=0.0)


@pytest.fixture(scope="module")
def opened():
    """A target fond of token 7, and a draft that leans towards it: right now and then."""
    target = build(tiny.config("gpt_oss"))
    tiny.randomise(named_tensors(target))
    draft = random_dflash(target)
    with torch.no_grad():
        target.lm_head.weight[7] *= 4
        target.embed_tokens.weight[draft.config.mask_token_id] = target.lm_head.weight[7]
        for layer in draft.layers:
            layer.mlp.down_proj.weight *= 0.1
    target, draft = target.eval(), draft.eval()
    return target, draft, open_baseline(target, draft, (1, 2))


def test_greedy_emits_our_plain_tokens_in_a_batch_past_the_window(opened):
    target, _, baseline = opened
    prompts = tiny.tokens(2, 11).tolist()
    run = baseline.methods()["transformers"](prompts, 23, 0)
    plain = run_case(GREEDY, target, None)(prompts, 23, 0)
    for prompt, tokens, answer in zip(prompts, run.tokens, plain.tokens, strict=True):
        assert len(tokens) == 23
        check = compare(target, prompt, tokens, answer)
        assert check.violations == 0
    assert run.trace.tau == 1.0
    assert run.trace.rounds == 2 * 22
    assert run.first_s > 0
    assert run.decode_s > 0
    assert run.decoded == 2 * 22


@pytest.mark.parametrize("seed", range(3))
def test_their_dflash_emits_the_same_tokens_and_accepts_the_same_lengths(opened, seed):
    target, draft, baseline = opened
    same_lengths(target, draft, baseline, seed)


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_with_a_window_accepts_the_same_lengths_too(opened, seed):
    target, draft, _ = opened
    config = replace(draft.config, layer_types=(WINDOW,) * draft.config.num_layers, sliding_window=7)
    windowed = DFlash(config).eval()
    windowed.load_state_dict(draft.state_dict())
    same_lengths(target, windowed, open_baseline(target, windowed, (1,)), seed)


def same_lengths(target, draft, baseline, seed):
    prompts = tiny.tokens(1, 13, seed=seed).tolist()
    theirs = baseline.methods()["transformers-dflash"](prompts, 41, 0)
    ours = run_case(GREEDY, target, draft.bind(target))(prompts, 41, 0)
    assert theirs.tokens == ours.tokens
    lens = theirs.trace.accept_lens
    assert len(lens) > 8
    assert lens.count(0) > 3
    assert len(set(lens)) > 1
    # ours counts the last round whole, theirs leaves it out where the end of the text cut it
    assert ours.trace.accept_lens[: theirs.trace.rounds] == theirs.trace.accept_lens
    assert ours.trace.rounds - theirs.trace.rounds <= 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_bias": True}, "attention biases"),
        ({"mask_token_id": None}, "learned mask embedding"),
        ({"layer_types": (WINDOW,) * 2, "sliding_window": 7, "causal": True}, "causal windows"),
    ],
)
def test_what_their_class_cannot_hold_is_left_out_with_the_reason(changes, reason):
    target = tiny.target("gpt_oss")
    baseline = open_baseline(target, random_dflash(target, **changes), ())
    assert list(baseline.methods()) == ["transformers"]
    assert any(reason in line for line in baseline.remarks)


def test_the_fastest_implementation_is_named(opened):
    _, _, baseline = opened
    assert set(baseline.chosen) == {
        ("transformers", 1),
        ("transformers", 2),
        ("transformers-dflash", 1),
    }
    assert sum("experts (the fastest of:" in line for line in baseline.remarks) == 3
    assert torch.is_inference_mode_enabled() is False
