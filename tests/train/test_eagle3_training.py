"""Training an EAGLE-3: runs resume to the last digit, every step ahead is learnt, decoding accepts it."""

import json
from dataclasses import replace
from functools import partial

import pytest
import tiny
import torch
from taught import PROMPTS, TOKENIZER, TrainedSetup

from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.eagle3 import Eagle3
from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.formats.load import load_draft
from outpace.train.drafts import most_frequent, responses
from outpace.train.eagle3 import Eagle3Recipe, begin_eagle3, train_eagle3

LAYERS = (0, 1, 2, 3)
RECIPE = Eagle3Recipe(
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=56,
    draft_vocab=61,
    target_layer_ids=(0, 2, 3),
    steps_ahead=4,
    rows=2,
    steps=6,
    lr=3e-3,
    bfloat16=False,
    save_every=2,
    eval_every=4,
    eval_prompts=2,
    eval_new_tokens=12,
)
Cache = partial(TrainedSetup, held=LAYERS)


def answers(target, prompts, new_tokens=24):
    """Texts where the responses are the target's own, greedily."""
    request = Request(max_new_tokens=new_tokens, stop=frozenset())
    made = generate(target, prompts, request).tokens
    return [torch.tensor(p + t) for p, t in zip(prompts, made, strict=True)]


@pytest.fixture(scope="module")
def target():
    return tiny.target("gpt_oss")


@pytest.fixture(scope="module")
def cache(target):
    return Cache(target, [tiny.tokens(n, seed=n) for n in (31, 17, 24)])


def lines(folder):
    return [json.loads(x) for x in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    return [x["loss"] for x in lines(folder)]


@pytest.mark.parametrize("changes", [{}, {"muon_lr": 0.02}, {"parallel": True, "keep": 0.7, "num_layers": 2}])
def test_resumed_run_is_the_unbroken_run(target, cache, tmp_path, changes):
    recipe = replace(RECIPE, **changes)
    whole = train_eagle3(recipe, target, TOKENIZER, cache, PROMPTS, tmp_path / "a")
    train_eagle3(recipe, target, TOKENIZER, cache, PROMPTS, tmp_path / "b", stop_after=3)
    assert not (tmp_path / "b" / "draft").exists()
    resumed = train_eagle3(recipe, target, TOKENIZER, cache, PROMPTS, tmp_path / "b")
    assert len(losses(tmp_path / "a")) == 6
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    for (name, p), q in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(p, q), name


def test_killed_run_resumes_from_its_last_checkpoint(target, cache, tmp_path):
    """Broken inside step 5, one line past the checkpoint of step 4, as a kill would leave it."""
    train_eagle3(RECIPE, target, TOKENIZER, cache, [], tmp_path / "a")
    texts = [s.tokens for s in cache.samples]
    breaking = Cache(target, texts, breaks_at=1 + 2 * 5 + 1)  # one sample is read before the start
    with pytest.raises(KeyboardInterrupt):
        train_eagle3(RECIPE, target, TOKENIZER, breaking, [], tmp_path / "b")
    assert len(losses(tmp_path / "b")) == 5
    train_eagle3(RECIPE, target, TOKENIZER, breaking, [], tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_what_a_run_leaves(target, cache, tmp_path):
    recipe = replace(RECIPE, bfloat16=True)
    draft = train_eagle3(recipe, target, TOKENIZER, cache, PROMPTS, tmp_path)
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in draft.parameters())
    loaded = load_draft(tmp_path / "draft")
    assert isinstance(loaded, Eagle3) and torch.equal(loaded.target_ids(), draft.target_ids())
    ours, theirs = dict(draft.named_parameters()), dict(loaded.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, p in ours.items():
        assert torch.equal(p.bfloat16(), theirs[name].bfloat16()), name
    value = lines(tmp_path)
    assert {"step", "loss", "accept_len", "accuracy", "alpha", "lr", "tokens_per_s"} <= set(value[0])
    assert len(value[0]["accuracy"]) == len(value[0]["alpha"]) == 4
    assert [x["step"] for x in value if "tau" in x] == [3, 5]
    assert all(1 <= x["tau"] <= 5 for x in value if "tau" in x)
    data = json.loads((tmp_path / "draft" / "provenance.json").read_text())
    assert data["recipe"]["loss"] == "kl" and data["config"]["layer_ids"] == [0, 2, 3]
    assert data["losses"] == [x["loss"] for x in value]
    assert len(data["target_fingerprint"]) == len(data["cache_sha256"]) == 64


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": "ce"},
        {"loss": "lk", "muon_lr": 0.02},
        {"draft_vocab": 0, "norm_output": True, "fc_norm": True},
        {"parallel": True, "num_layers": 2},
    ],
)
def test_one_text_is_learnt_at_every_step_ahead(target, tmp_path, changes):
    cache = Cache(target, answers(target, [[7, 8, 9]], 24))
    recipe = replace(RECIPE, steps=60, rows=1, lr=1e-2, save_every=100, eval_every=100, **changes)
    train_eagle3(recipe, target, TOKENIZER, cache, [], tmp_path)
    value = lines(tmp_path)
    assert value[-1]["loss"] < 0.5 * value[0]["loss"]
    assert min(value[-1]["accuracy"]) > 0.7, value[-1]
    assert value[-1]["accept_len"] > value[0]["accept_len"] + 2


@pytest.mark.parametrize("changes", [{}, {"parallel": True, "num_layers": 2, "keep": 0.8}])
def test_a_trained_draft_is_accepted_when_decoding(target, tmp_path, changes):
    """Real decoding of prompts that it learnt the answers of: far above an untrained one."""
    prompts = [[7, 8, 9], [31, 5, 60]]
    cache = Cache(target, answers(target, prompts))
    recipe = replace(RECIPE, steps=70, rows=2, lr=1e-2, save_every=200, eval_every=200, **changes)
    start = begin_eagle3(recipe, target, TOKENIZER, cache, None)
    trained = train_eagle3(recipe, target, TOKENIZER, cache, [], tmp_path)
    request = Request(max_new_tokens=24, stop=frozenset())
    taus = {}
    wanted = generate(target, prompts, request).tokens
    chain, tree = TreeShape(depth=4), TreeShape(depth=4, branch=3, nodes=9)
    loaded = load_draft(tmp_path / "draft")
    for name, draft, shape in (
        ("start", start, chain),
        ("trained", trained, chain),
        ("loaded", loaded, tree),
    ):
        result = generate(target, prompts, request, BoundEagle3(draft.eval(), target, shape))
        assert result.tokens == wanted
        taus[name] = result.trace.tau
    assert taus["start"] < 1.5 and taus["trained"] > 2.5 and taus["loaded"] > 2, taus


def test_what_is_kept_from_training_is_validated_and_never_trained_on(target, tmp_path):
    texts = [torch.arange(5 + i, 35 + i) % 90 for i in range(6)]
    cache, asked = Cache(target, texts), []
    plainly = cache.sample
    cache.sample = lambda i: asked.append(i) or plainly(i)
    recipe = replace(RECIPE, held_out_share=0.34, steps=8, eval_every=4)
    train_eagle3(recipe, target, TOKENIZER, cache, [], tmp_path)
    assert [i for i in asked if i > 3] == [4, 5, 4, 5] and set(asked) == set(range(6))
    value = lines(tmp_path)
    assert [i for i, line in enumerate(value) if "unseen_accept_len" in line] == [3, 7]
    assert len(value[7]["unseen_accuracy"]) == RECIPE.steps_ahead


def test_the_draft_vocabulary_is_what_responses_say_most(target):
    texts = [torch.tensor([1, 1, 1, 5, 5, 9, 5, 2]), torch.tensor([1, 1, 1, 9, 90, 7, 9, 2])]
    cache = Cache(target, [*texts, torch.full((30,), 60)])
    for samples, kept, wanted in (
        (2, (), [2, 5, 9]),
        (2, (), [2, 5, 7, 9, 90]),
        (2, (), [0, 1, 2, 5, 7, 9, 90]),  # the lowest of those that nothing states
        (3, (), [60]),
        (3, (33,), [33, 60]),  # however rare
    ):
        d2t = most_frequent(responses(cache, samples), len(wanted), 97, kept)
        assert (d2t + torch.arange(len(wanted))).tolist() == wanted
    recipe = replace(RECIPE, draft_vocab=4, held_out_share=0.34)
    draft = begin_eagle3(recipe, target, TOKENIZER, cache, None)
    assert draft.target_ids().tolist() == [2, 3, 5, 9]  # 3 ends a text
    torch.testing.assert_close(draft.lm_head.weight, target.head[[2, 3, 5, 9]])


def test_layers_by_default_are_the_first_the_middle_and_the_last_held(target):
    assert replace(RECIPE, target_layer_ids=()).config(target, TOKENIZER, (1, 2, 3, 4, 5)).layer_ids == (
        1,
        3,
        5,
    )
    assert replace(RECIPE, target_layer_ids=()).config(target, TOKENIZER, (2,)).layer_ids == (2,)


def test_a_draft_is_trained_on(target, cache, tmp_path):
    init = begin_eagle3(RECIPE, target, TOKENIZER, cache, None)
    recipe, values = replace(RECIPE, num_heads=2, draft_vocab=5, steps=1), {"seed": 7}
    before = [p.clone() for p in init.parameters()]
    trained = train_eagle3(recipe, target, TOKENIZER, cache, [], tmp_path, init=init, started_from=values)
    assert trained.config == init.config and torch.equal(trained.d2t, init.d2t)
    assert any(not torch.equal(p, q) for p, q in zip(before, trained.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in zip(before, init.parameters(), strict=True))
    assert json.loads((tmp_path / "draft" / "provenance.json").read_text())["started_from"] == values


def test_a_start_whose_window_is_too_short_is_refused(target, cache, tmp_path):
    init = begin_eagle3(replace(RECIPE, sliding_window=6), target, TOKENIZER, cache, None)
    with pytest.raises(ValueError, match="sliding_window 6 does not reach back over steps_ahead 6"):
        train_eagle3(replace(RECIPE, steps_ahead=6), target, TOKENIZER, cache, [], tmp_path, init=init)


def test_a_cache_without_final_states_takes_hard_labels_alone(target, cache, tmp_path):
    bare = Cache(target, [s.tokens for s in cache.samples])
    for sample in bare.samples:
        sample.final = None
    with pytest.raises(
        ValueError, match=r"loss 'kl'.*no final states.*`teacher build --final`, or take loss ce"
    ):
        train_eagle3(RECIPE, target, TOKENIZER, bare, [], tmp_path)
    train_eagle3(replace(RECIPE, loss="ce"), target, TOKENIZER, bare, [], tmp_path)
    assert "alpha" not in lines(tmp_path)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": True, "mask_token": "<|none|>"}, "mask_token"),
        ({"target_layer_ids": (0, 5)}, r"\[5\]"),
        ({"loss": "mse"}, "loss 'mse'"),
        ({"steps_ahead": 0}, "steps_ahead"),
        ({"sliding_window": 4}, "sliding_window 4 does not reach"),
        ({"draft_vocab": 98}, "draft_vocab_size 98 must lie in 1..97"),
        ({"draft_vocab": -1}, "draft_vocab -1"),
        ({"decay": 0.0}, "decay"),
        ({"keep": 1.5}, "keep"),
        ({"rows": 0}, "rows"),
        ({"row_tokens": 4}, "row_tokens 4"),
    ],
)
def test_what_does_not_fit_is_refused(target, cache, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train_eagle3(replace(RECIPE, **changes), target, TOKENIZER, cache, [], tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab": 60}, "other shapes"),
        ({"muon_lr": 0.02}, "other shapes"),
        ({"steps": 2}, "is at step 3, and this recipe has 2 steps"),
    ],
)
def test_another_runs_checkpoint_is_refused(target, cache, tmp_path, changes, message):
    train_eagle3(RECIPE, target, TOKENIZER, cache, [], tmp_path, stop_after=3)
    with pytest.raises(ValueError, match=f"checkpoint.pt is of another run .*{message}"):
        train_eagle3(replace(RECIPE, **changes), target, TOKENIZER, cache, [], tmp_path)


def test_rows_without_a_guess_are_left_out(target, tmp_path):
    """A step of such rows alone would end the run, and resuming would end it there again."""
    texts = [tiny.tokens(n, seed=n) for n in (4, 31, 4, 4, 17, 3, 3, 24)]  # a prompt has 3 of them
    recipe = replace(RECIPE, rows=1, held_out_share=0.38)
    train_eagle3(recipe, target, TOKENIZER, Cache(target, texts), [], tmp_path)
    assert {line["tokens"] for line in lines(tmp_path)} == {31, 17}
    with pytest.raises(ValueError, match=r"none of 5 cached rows has a draft token.* within row_tokens 4"):
        train_eagle3(
            replace(recipe, row_tokens=4), target, TOKENIZER, Cache(target, texts), [], tmp_path / "short"
        )


def test_another_targets_cache_is_refused(cache, tmp_path):
    with pytest.raises(ValueError, match="width 96"):
        train_eagle3(RECIPE, tiny.target("llama"), TOKENIZER, cache, [], tmp_path)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_other_families(family, tmp_path):
    target = tiny.target(family)
    cache = TrainedSetup(target, [tiny.tokens(20)], (0, 1, 2), prompt_length=2)
    recipe = replace(RECIPE, target_layer_ids=(), steps=12, rows=1, lr=1e-2)
    train_eagle3(recipe, target, TOKENIZER, cache, PROMPTS, tmp_path)
    assert losses(tmp_path)[-1] < 0.8 * losses(tmp_path)[0]
