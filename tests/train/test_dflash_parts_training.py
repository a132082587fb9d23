"""Training a DFlash's parts: served as trained, warm starts that change nothing, and what each learns."""

import json
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from taught import TOKENIZER
from test_dflash_training import LAYERS, RECIPE, Cache, losses

from outpace.config import load_settings
from outpace.drafts.dflash_decode import Head
from outpace.drafts.sampler import Greedy
from outpace.formats.load import load_dflash
from outpace.models.config import FULL, WINDOW
from outpace.ops.blocks import block_attend, reference_block_attend
from outpace.train.data import pack
from outpace.train.dflash import (
    DFlashRecipe,
    Objective,
    block_states,
    continued,
    init_dflash,
    predecessors,
    served_proposals,
    train_dflash,
)
from outpace.train.drafts import most_frequent
from outpace.train.losses import GRID, expected_error, fit_temperatures

ROOT = Path(__file__).parent.parent.parent
PARTS = {
    "conv": {"conv": 2},
    "selector": {"selector": 7},
    "DFlash 2": {"conv": 2, "selector": 7},
    "Markov": {"markov": 9, "markov_gated": True},
    "DSpark": {"markov": 9, "confidence": True},
    "causal": {"causal": True},
    "causal window": {"causal": True, "sliding_window": 8},
    "words": {"draft_vocab": 40},
    "lean": {"conv": 2, "selector": 7, "draft_vocab": 40, "confidence": True, "causal": True},
}


@pytest.fixture(scope="module")
def target():
    return tiny.target("gpt_oss")


@pytest.fixture(scope="module")
def cache(target):
    return Cache(target, [tiny.tokens(n, seed=n) for n in (31, 17, 24)])


def drafted(target, random=True, **parts):
    recipe = replace(RECIPE, **parts)
    draft = init_dflash(recipe.config(target, TOKENIZER, LAYERS), 1)
    if random:
        tiny.randomise(draft.named_parameters(), 5)
    if draft.d2t is not None:
        rare = (tiny.tokens(200, seed=n) for n in range(2))
        draft.d2t.copy_(most_frequent(rare, len(draft.d2t), tiny.VOCAB, (3,)))
    return draft, recipe


def packed_of(cache, recipe, final=False, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return pack(cache.samples, recipe.block_size, 9, None, repeat(rng), final=final)


# ---- training is serving -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARTS)
def test_trained_forward_is_the_served_forward(target, name):
    draft, _ = drafted(target, **PARTS[name])
    text = tiny.tokens(31)
    sample = Cache(target, [text], offset=700).samples[0]
    packed = pack([sample], 5, 9, None, repeat(torch.Generator().manual_seed(0)))
    with torch.no_grad():
        states = block_states(draft, target, packed, torch.float32)
    for b, anchor in enumerate(packed.layout.seen.tolist()):
        session = draft.bind(target).begin(1, 40, 700)
        with torch.inference_mode():
            session.observe(text[None, :anchor], sample.aux[:, None, :anchor], [anchor])
            served = session.block_hidden(text[None, anchor])[0]
        torch.testing.assert_close(states[b], served, atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("name", [n for n in PARTS if n not in ("conv", "causal", "causal window")])
def test_what_the_loss_calls_right_is_what_serving_says(target, cache, name):
    """The vectorised training form against the code that serves, given the true predecessors."""
    draft, recipe = drafted(target, **PARTS[name])
    packed = packed_of(cache, recipe)
    with torch.no_grad():
        hidden = block_states(draft, target, packed, torch.float32)
        head = Head.of(target, draft.d2t)
        value = draft.guess(
            head, hidden[:, 1:].flatten(0, 1)[:, None], predecessors(packed).flatten(), Greedy()
        )
        # half of the labels become what the draft states, so that there is something to be right about
        flip = torch.rand(packed.labels.shape, generator=torch.Generator().manual_seed(1)) < 0.5
        flip[:, :-1] &= ~flip[:, 1:]  # a label is the next one's predecessor
        flip[:, 1:] &= ~flip[:, :-1]
        packed = replace(packed, labels=torch.where(flip, value.tokens.view(flip.shape), packed.labels))
        hits, sure = served_proposals(draft, head, hidden, packed)
        result = Objective.of(draft, target, recipe)(hidden, packed)
    assert torch.equal(result.hits, hits) and 5 < hits.sum() < hits.numel()
    assert ((sure > 0) & (sure < 1)).all()


def dense(q, k, v, context_k, context_v, layout, window, scale):
    """In float64, a query and its keys at a time."""
    (N, H, _), K, B, out = q.shape, k.shape[1], layout.block, []
    for n in range(N):
        block, slot = divmod(n, B)
        row = int((layout.first <= block).sum()) - 1
        start, seen = int(layout.context[row]), int(layout.seen[block])
        place = seen + slot
        far = [s for s in range(seen) if not window or s > place - window]
        near = [block * B + s for s in range(slot + 1) if not window or s > slot - window]
        keys = torch.cat((context_k[[start + s for s in far]], k[near])).double()
        values = torch.cat((context_v[[start + s for s in far]], v[near])).double()
        heads = []
        for h in range(H):
            p = (keys[:, h * K // H] @ q[n, h].double() * scale).softmax(0)
            heads.append(p @ values[:, h * K // H])
        out.append(torch.cat(heads))
    return torch.stack(out)


@pytest.mark.parametrize("window", [0, 3, 40])
@pytest.mark.parametrize("attend", [block_attend, reference_block_attend])
def test_causal_blocks_and_their_gradients(target, cache, attend, window):
    B, H, K, D = 5, 6, 2, 8
    packed = packed_of(cache, RECIPE)
    N, S = len(packed.anchors) * B, len(packed.context_positions)
    rng = torch.Generator().manual_seed(3)
    shapes = ((N, H, D), (N, K, D), (N, K, D), (S, K, D), (S, K, D))
    inputs = [torch.randn(s, generator=rng).requires_grad_() for s in shapes]
    grad = torch.randn(N, H * D, generator=rng)
    out = attend(*inputs, packed.layout, window, D**-0.5, True)
    truth = dense(*inputs, packed.layout, window, D**-0.5)  # type: ignore[call-arg]
    torch.testing.assert_close(out.double(), truth, atol=1e-5, rtol=1e-4)
    wanted = torch.autograd.grad(truth, inputs, grad.double())
    for ours, theirs in zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    own = packed.layout.own(window, True)
    assert torch.equal(packed.layout.grid(window, True)[:B, S : S + B], own) and not own.triu(1).any()


# ---- warm starts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["DFlash 2", "DSpark"])
def test_a_warm_start_begins_where_the_draft_was_and_learns(target, cache, tmp_path, name):
    plain, recipe = drafted(target)
    recipe = replace(recipe, selector_weight=0.0, confidence_weight=0.0, steps=25, eval_every=99, lr=3e-3)
    first = losses_of(plain, target, cache, recipe)
    more = replace(recipe, **PARTS[name])
    draft = continued(more.served(plain.config), plain, 4)
    assert losses_of(draft, target, cache, more) == first
    before = {k: v.clone() for k, v in draft.state_dict().items()}
    trained = train_dflash(
        replace(more, selector_weight=1.0, confidence_weight=1.0),
        *(target, TOKENIZER, cache, [], tmp_path),
        init=plain,
    )
    assert losses_of(trained, target, cache, more) < 0.8 * first
    for key, value in trained.state_dict().items():
        assert not torch.equal(value, before[key]), key


def losses_of(draft, target, cache, recipe):
    packed = packed_of(cache, recipe)
    with torch.no_grad():
        result = Objective.of(draft, target, recipe)(
            block_states(draft, target, packed, torch.float32), packed
        )
    return result.loss.item()


def test_a_start_with_parts_keeps_them(target, cache, tmp_path):
    init, _ = drafted(target, conv=2, selector=7, draft_vocab=40)
    recipe = replace(RECIPE, selector=3, markov=0, draft_vocab=20, steps=1)
    trained = train_dflash(recipe, target, TOKENIZER, cache, [], tmp_path, init=init)
    for field in ("conv_kernel_size", "selector_rank", "selector_top_k", "draft_vocab_size"):
        assert getattr(trained.config, field) == getattr(init.config, field)
    assert torch.equal(trained.d2t, init.d2t)


@pytest.mark.parametrize("name", ["DSpark", "lean"])
def test_resumed_run_is_the_unbroken_run(target, cache, tmp_path, name):
    recipe = replace(RECIPE, **PARTS[name], muon_lr=0.01)
    whole = train_dflash(recipe, target, TOKENIZER, cache, [], tmp_path / "a")
    train_dflash(recipe, target, TOKENIZER, cache, [], tmp_path / "b", stop_after=3)
    resumed = train_dflash(recipe, target, TOKENIZER, cache, [], tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    for (key, p), q in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(p, q), key
    loaded = load_dflash(tmp_path / "b" / "draft")
    assert loaded.config.draft_vocab_size == recipe.draft_vocab
    if loaded.d2t is not None:
        assert torch.equal(loaded.d2t, whole.d2t)


# ---- what is learnt ----------------------------------------------------------------------------------


def trained_on(target, tmp_path, text, **changes):
    cache = Cache(target, [text])
    recipe = replace(RECIPE, steps=60, rows=1, anchors=40, lr=1e-2, save_every=100, eval_every=100)
    draft = train_dflash(replace(recipe, **changes), target, TOKENIZER, cache, [], tmp_path)
    return draft, [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]


def test_the_selector_is_right_where_the_backbone_is_not(target, tmp_path):
    """What follows depends on the token before alone, and a frozen backbone cannot know it."""
    rng = torch.Generator().manual_seed(2)
    after = torch.randperm(12, generator=rng) + 20
    text = [20]
    for step in range(160):  # now and then the text jumps, so that a place has no fixed token
        text.append(int(after[text[-1] - 20]) if step % 5 else 20 + int(torch.randint(12, (), generator=rng)))
    how = {"selector": 16, "selector_weight": 3.0, "weights": "flat", "steps": 120, "lr": 2e-2}
    _, lines = trained_on(target, tmp_path, torch.tensor(text), **how)
    last = lines[-1]
    assert last["recall"] > 0.9
    assert last["accept_len"] > last["base_accept_len"] + 0.3
    assert lines[0]["accept_len"] == lines[0]["base_accept_len"]  # it began as nothing


@pytest.mark.parametrize("loss", ["kl", "0.1*ce+0.9*tv"])
def test_losses_on_the_targets_distribution(target, tmp_path, loss):
    _, lines = trained_on(target, tmp_path, tiny.tokens(30, seed=8), loss=loss, conv=2, markov=9)
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]


def test_what_needs_final_states_says_so(target, tmp_path):
    cache = Cache(target, [tiny.tokens(30)])
    cache.samples[0].final = None
    for changes in ({"loss": "kl"}, {"weights": "dpace-soft"}, {"confidence": True, "confident": "overlap"}):
        recipe = replace(RECIPE, **changes)
        assert recipe.final
        with pytest.raises(ValueError, match="teacher build --final"):
            train_dflash(recipe, target, TOKENIZER, cache, [], tmp_path / str(changes))
    assert not RECIPE.final


def test_final_states_are_of_the_token_before_each_label(target, cache):
    packed = packed_of(cache, RECIPE, final=True)
    for b, place in enumerate(packed.layout.seen.tolist()):
        row = int((packed.layout.first <= b).sum()) - 1
        sample = cache.samples[row]
        for k in range(4):
            if packed.valid[b, k]:
                assert torch.equal(packed.final[b, k], sample.final[place + k])


@pytest.mark.parametrize(
    ("confident", "parts"), [("match", {"selector": 7}), ("match", {}), ("overlap", {"markov": 9})]
)
def test_confidence_follows_what_is_right(target, tmp_path, confident, parts):
    text = torch.cat([tiny.tokens(40, seed=1)] * 2 + [tiny.tokens(60, seed=2)])
    how = {"confidence": True, "confident": confident, "confidence_weight": 5.0, **parts}
    draft, lines = trained_on(target, tmp_path, text, **how)
    assert lines[-1]["confidence_loss"] < 0.9 * lines[0]["confidence_loss"]
    assert abs(lines[0]["confidence_loss"] - 0.6931) < 1e-3  # it began knowing nothing
    assert draft.confidence_head.proj.weight.abs().max() > 0


def test_confidence_does_not_change_the_guesses(target, cache):
    draft, recipe = drafted(target, confidence=True)
    packed = packed_of(cache, recipe)
    grads = []
    for weight in (0.0, 7.0):
        hidden = block_states(draft, target, packed, torch.float32)
        loss = Objective.of(draft, target, replace(recipe, confidence_weight=weight))(hidden, packed).loss
        grads.append(torch.autograd.grad(loss, [draft.fc.weight, draft.confidence_head.proj.weight]))
    assert torch.equal(grads[0][0], grads[1][0]) and not torch.equal(grads[0][1], grads[1][1])


# ---- words and temperatures ---------------------------------------------------------------------------


def test_the_most_frequent_words():
    texts = [torch.tensor([5, 5, 9, 9, 9, 2]), torch.tensor([5, 7, 7, 5, 1])]
    d2t = most_frequent(texts, 4, 12, kept=(11,))
    assert (d2t + torch.arange(4)).tolist() == [5, 7, 9, 11]
    assert (most_frequent(texts, 6, 12, kept=()) + torch.arange(6)).tolist() == [0, 1, 2, 5, 7, 9]


def test_words_that_the_draft_lacks_teach_nothing_but_that_they_are_missed(target, cache):
    draft, recipe = drafted(target, draft_vocab=40)
    objective = Objective.of(draft, target, recipe)
    packed = packed_of(cache, recipe)
    lacking = (objective.vocabulary.row_of[packed.labels] < 0) & packed.valid
    assert 10 < lacking.sum() < packed.valid.sum() - 10
    hidden = block_states(draft, target, packed, torch.float32).detach().requires_grad_()
    result = objective(hidden, packed)
    (grad,) = torch.autograd.grad(result.loss, hidden)
    used = grad.abs().sum(-1)[:, 1:] > 0
    assert torch.equal(used, packed.valid & ~lacking) and not result.hits[lacking].any()


def test_temperatures_fix_what_is_too_sure():
    rng = torch.Generator().manual_seed(1)
    odds = torch.randn(20000, 3, generator=rng) * 1.5 + 1
    hits = torch.rand(odds.shape, generator=rng) < odds.sigmoid()
    valid = torch.ones_like(hits)
    valid[:5000, 2] = False
    too_sure = torch.stack([(odds[:, k] * t).sigmoid() for k, t in enumerate((2.0, 0.5, 1.0))], dim=1)
    result = fit_temperatures(too_sure, hits, valid)
    assert all(t in GRID for t in result)
    for t, wanted in zip(result, (2.0, 0.5, 1.0), strict=True):
        assert wanted / 1.3 < t < wanted * 1.3
    scaled = torch.sigmoid(torch.logit(too_sure) / torch.tensor(result)).cumprod(1)
    right = hits.long().cumprod(1).bool()
    for k in (0, 1):
        assert expected_error(scaled[:, k], right[:, k]) < 0.5 * expected_error(
            too_sure.cumprod(1)[:, k], right[:, k]
        )
    assert expected_error(torch.tensor([0.5, 0.5]), torch.tensor([True, False])) == 0


def test_a_finished_draft_knows_its_temperatures(target, tmp_path):
    cache = Cache(target, [tiny.tokens(30, seed=n) for n in range(6)])
    recipe = replace(RECIPE, held_out_share=0.34, markov=5)
    trained = train_dflash(recipe, target, TOKENIZER, cache, [], tmp_path)
    assert len(trained.config.temperatures) == RECIPE.block_size - 1
    assert load_dflash(tmp_path / "draft").config.temperatures == trained.config.temperatures


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "likely"}, "likely"),
        ({"confident": "yes"}, "confident"),
        ({"selector": -1}, "selector"),
        ({"selector": 4, "markov": 4}, "choose one"),
        ({"conv": 9}, "conv_kernel_size 9"),
        ({"markov_gated": True}, None),  # without a rank there is no head to gate
    ],
)
def test_recipes_that_are_refused(target, changes, message):
    if message is None:
        assert not replace(RECIPE, **changes).config(target, TOKENIZER, LAYERS).markov_gated
        return
    with pytest.raises(ValueError, match=message):
        replace(RECIPE, **changes).config(target, TOKENIZER, LAYERS)


def test_causality_is_of_the_layers_that_there_are(target):
    full = replace(RECIPE, causal=True).config(target, TOKENIZER, LAYERS)
    windows = replace(RECIPE, causal=True, sliding_window=9).config(target, TOKENIZER, LAYERS)
    assert (full.causal, full.causal_full, set(full.layer_types)) == (False, True, {FULL})
    assert (windows.causal, windows.causal_full, set(windows.layer_types)) == (True, False, {WINDOW})
    assert full.one_way and windows.one_way


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/d*.toml")), ids=lambda path: path.stem)
def test_recipes_that_ship_make_drafts(target, path):
    """Each is read, and its draft fits a target of the width they are made for."""
    recipe = load_settings(DFlashRecipe, path, {})
    big = SimpleNamespace(config=replace(target.config, hidden_size=256, vocab_size=4096))
    config = recipe.config(big, TOKENIZER, LAYERS)
    assert config.num_layers == recipe.num_layers and config.rows == (recipe.draft_vocab or 4096)
    assert bool(config.conv_kernel_size) == bool(recipe.conv) and config.selector_rank == recipe.selector
