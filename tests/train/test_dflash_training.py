"""Training a draft: the packed forward equals the served one, runs resume to the last digit, and learn."""

import json
from dataclasses import replace
from functools import partial
from itertools import repeat

import pytest
import tiny
import torch
from taught import PROMPTS, TOKENIZER, TrainedSetup

from outpace.formats.load import load_dflash
from outpace.formats.spec import canonical
from outpace.models.config import FULL, WINDOW
from outpace.ops.sampling import shuffled
from outpace.train.data import pack
from outpace.train.dflash import DFlashRecipe, Objective, block_states, init_dflash, train_dflash
from outpace.train.drafts import accuracy
from outpace.train.trainer import numbers

LAYERS = (0, 2)
RECIPE = DFlashRecipe(
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=56,
    block_size=5,
    anchors=9,
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


@pytest.fixture(scope="module")
def target():
    return tiny.target("gpt_oss")


@pytest.fixture(scope="module")
def cache(target):
    return Cache(target, [tiny.tokens(n, seed=n) for n in (31, 17, 24)])


def draft_of(target, recipe=RECIPE, **changes):
    draft = init_dflash(replace(recipe.config(target, TOKENIZER, LAYERS), **changes), 1)
    tiny.randomise(draft.named_parameters(), 5)
    return draft


def losses(folder):
    return [json.loads(x)["loss"] for x in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("offset", [0, 65536])
@pytest.mark.parametrize("window", [0, 8])
def test_trained_forward_is_the_served_forward(target, offset, window):
    types = (WINDOW, FULL) if window else ()
    draft = draft_of(target, layer_types=types, sliding_window=window)
    text = tiny.tokens(31)
    sample = Cache(target, [text], offset=offset).samples[0]
    packed = pack([sample], 5, 9, None, repeat(torch.Generator().manual_seed(0)))
    with torch.no_grad():
        states = block_states(draft, target, packed, torch.float32)
    for b, anchor in enumerate(packed.layout.seen.tolist()):
        session = draft.bind(target).begin(1, 40, offset)
        with torch.inference_mode():
            session.observe(text[None, :anchor], sample.aux[:, None, :anchor], [anchor])
            served = session.block_hidden(text[None, anchor])[0]
        torch.testing.assert_close(states[b], served, atol=2e-4, rtol=1e-4)


def test_recomputing_layers_changes_nothing(target, cache):
    packed = pack(cache.samples, 5, 9, None, repeat(torch.Generator().manual_seed(0)))
    items = []
    for recompute in (False, True):
        draft = draft_of(target)
        hidden = block_states(draft, target, packed, torch.float32, recompute)
        Objective.of(draft, target, RECIPE)(hidden, packed).loss.backward()
        items.append([p.grad for p in draft.parameters()])
    for a, b in zip(*items, strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_past_the_row_or_in_the_anchor_slot_has_no_gradient(target, cache):
    packed = pack(cache.samples, 5, 30, None, repeat(torch.Generator().manual_seed(0)))
    hidden = torch.randn(len(packed.anchors), 5, target.config.hidden_size, requires_grad=True)
    for weights in ("dpace", "decay"):
        objective = Objective.of(draft_of(target), target, replace(RECIPE, weights=weights))
        result = objective(hidden, packed)
        (grad,) = torch.autograd.grad(result.loss, hidden)
        used = grad.abs().sum(-1) > 0
        assert not used[:, 0].any()
        assert torch.equal(used[:, 1:], packed.valid)
        assert not result.hits[~packed.valid].any()
        other = packed.labels.masked_fill(~packed.valid, 50)
        assert objective(hidden, replace(packed, labels=other)).loss == result.loss


def test_accept_len_counts_leading_hits():
    hits = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    valid = torch.ones_like(hits)
    valid[3, 2:] = False
    result = numbers(accuracy(hits, valid))
    assert result["accept_len"] == (2 + 0 + 4 + 1) / 4
    assert result["accuracy"] == [0.75, 0.75, 0.6667, 1.0]


def test_every_row_is_seen_once_an_epoch():
    recipe = replace(RECIPE, rows=2)
    seen = [i for step in range(14) for i in shuffled(step * recipe.rows, recipe.rows, 7, recipe.seed, 0)]
    assert [sorted(seen[n : n + 7]) for n in range(0, 28, 7)] == [list(range(7))] * 4
    assert seen[:7] != seen[7:14]


@pytest.mark.parametrize("changes", [{}, {"muon_lr": 0.02}, {"rounds": True}])
def test_resumed_run_is_the_unbroken_run(target, cache, tmp_path, changes):
    recipe = replace(RECIPE, **changes)
    whole = train_dflash(recipe, target, TOKENIZER, cache, PROMPTS, tmp_path / "a")
    train_dflash(recipe, target, TOKENIZER, cache, PROMPTS, tmp_path / "b", stop_after=3)
    assert not (tmp_path / "b" / "config.json").exists()
    resumed = train_dflash(recipe, target, TOKENIZER, cache, PROMPTS, tmp_path / "b")
    assert len(losses(tmp_path / "a")) == 6
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_killed_run_resumes_from_its_last_checkpoint(target, cache, tmp_path):
    """Broken inside step 5, one line past the checkpoint of step 4, as a kill would leave it."""
    train_dflash(RECIPE, target, TOKENIZER, cache, [], tmp_path / "a")
    breaking = Cache(target, [s.tokens for s in cache.samples], breaks_at=2 * 5 + 1)
    with pytest.raises(KeyboardInterrupt):
        train_dflash(RECIPE, target, TOKENIZER, breaking, [], tmp_path / "b")
    assert len(losses(tmp_path / "b")) == 5
    train_dflash(RECIPE, target, TOKENIZER, breaking, [], tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_what_a_run_leaves(target, cache, tmp_path):
    recipe = replace(RECIPE, bfloat16=True)
    draft = train_dflash(recipe, target, TOKENIZER, cache, PROMPTS, tmp_path)
    assert all(p.dtype == torch.float32 for p in draft.parameters())
    loaded = load_dflash(tmp_path / "draft")
    assert canonical(loaded.config) == canonical(draft.config)
    for p, q in zip(draft.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p.bfloat16(), q.bfloat16())
    lines = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {"step", "loss", "accept_len", "accuracy", "lr", "tokens_per_s"} <= set(lines[0])
    assert len(lines[0]["accuracy"]) == 4
    assert [x["step"] for x in lines if "tau" in x] == [3, 5]
    assert all(1 <= x["tau"] <= 5 for x in lines if "tau" in x)
    data = json.loads((tmp_path / "draft" / "provenance.json").read_text())
    assert data["recipe"]["weights"] == "dpace"
    assert data["losses"] == [x["loss"] for x in lines]
    assert len(data["target_fingerprint"]) == len(data["cache_sha256"]) == 64


@pytest.mark.parametrize("weights", ["dpace", "decay"])
@pytest.mark.parametrize("mask_token, muon_lr", [("<|MASK|>", 0.0), (None, 0.0), ("<|MASK|>", 0.02)])
def test_one_text_is_learnt(target, tmp_path, weights, mask_token, muon_lr):
    cache = Cache(target, [tiny.tokens(21, seed=8)])
    recipe = replace(RECIPE, steps=40, rows=1, anchors=17, lr=1e-2, weights=weights, mask_token=mask_token)
    recipe = replace(recipe, muon_lr=muon_lr)
    recipe = replace(recipe, save_every=100, eval_every=100)
    train_dflash(recipe, target, TOKENIZER, cache, [], tmp_path)
    lines = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["accept_len"] > lines[0]["accept_len"] + 1


def test_a_draft_is_trained_on(target, cache, tmp_path):
    init = draft_of(target)
    before = [p.clone() for p in init.parameters()]
    trained = train_dflash(RECIPE, target, TOKENIZER, cache, [], tmp_path, init=init, stop_after=1)
    assert trained.config == init.config
    assert not any(torch.equal(p, q) for p, q in zip(before, trained.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in zip(before, init.parameters(), strict=True))


def test_a_start_keeps_its_sizes_and_takes_block_and_window_of_the_recipe(target, cache, tmp_path):
    init, recipe = draft_of(target), replace(RECIPE, block_size=3, sliding_window=6, num_heads=2, steps=1)
    values = {"seed": 7}
    trained = train_dflash(recipe, target, TOKENIZER, cache, [], tmp_path, init=init, started_from=values)
    windows = {"layer_types": (WINDOW,) * RECIPE.num_layers, "sliding_window": 6}
    assert trained.config == replace(init.config, block_size=3, **windows)
    assert load_dflash(tmp_path / "draft").config == trained.config
    assert json.loads((tmp_path / "draft" / "provenance.json").read_text())["started_from"] == values


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token": "<|none|>"}, "mask_token"),
        ({"target_layer_ids": (0, 1)}, r"\[1\]"),
        ({"weights": "linear"}, "weights"),
        ({"alpha": 1.5}, "alpha"),
        ({"anchors": 0}, "anchors"),
        ({"sliding_window": -1}, "sliding_window"),
    ],
)
def test_what_does_not_fit_is_refused(target, cache, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train_dflash(replace(RECIPE, **changes), target, TOKENIZER, cache, [], tmp_path)


def test_what_is_kept_from_training_is_validated_and_never_trained_on(target, tmp_path):
    texts = [torch.arange(5 + i, 35 + i) % 90 for i in range(6)]
    cache, asked = Cache(target, texts), []
    plainly = cache.sample
    cache.sample = lambda i: asked.append(i) or plainly(i)
    recipe = replace(RECIPE, held_out_share=0.34, steps=8, eval_every=4)
    train_dflash(recipe, target, TOKENIZER, cache, [], tmp_path)
    assert [i for i in asked if i > 3] == [4, 5] * 3 and set(asked) == set(range(6))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [i for i, line in enumerate(lines) if "unseen_accept_len" in line] == [3, 7]
    assert len(lines[7]["unseen_accuracy"]) == RECIPE.block_size - 1


def test_another_targets_cache_is_refused(cache, tmp_path):
    with pytest.raises(ValueError, match="width 96"):
        train_dflash(RECIPE, tiny.target("llama"), TOKENIZER, cache, [], tmp_path)
