"""Heads that copy before anything is learnt."""

import dataclasses
import random

import pytest
import torch

from examples.tiny_target.copying import copying_heads
from examples.tiny_target.model import Learner, TargetShape, first_model

SHAPE = TargetShape(
    vocab_size=400, hidden_size=192, num_layers=2, num_heads=4, num_kv_heads=2, sliding_window=32
)


def right(model, text, known):
    """Share of the tokens after `known` of them that are the most probable ones."""
    with torch.inference_mode():
        best = model.logits(model(torch.tensor([text])).hidden).argmax(-1)[0]
    wanted = torch.tensor(text[known + 1 :])
    return (best[known:-1] == wanted).float().mean()


def text_and_again(seed):
    """150 tokens, each once, and all again: further back than the first layer's window."""
    tokens = random.Random(seed).sample(range(400), 150)
    return tokens + tokens


@pytest.mark.parametrize("seed", [1, 2])
def test_a_new_model_copies(seed):
    model = first_model(SHAPE, 0, None)
    copying_heads(model, seed)
    assert right(model, text_and_again(seed), 150) > 0.8


def test_without_such_heads_it_does_not():
    assert right(first_model(SHAPE, 0, None), text_and_again(1), 150) < 0.1


def test_two_tokens_decide_where_one_came_twice():
    """After a token that has come before two others, half of the groups look at which of both it is now."""
    model = first_model(SHAPE, 0, None)
    copying_heads(model, 1)
    rng, hits = random.Random(3), 0
    for _ in range(40):
        a, b, c, d, e, *rest = rng.sample(range(400), 45)
        text = [a, b, c, *rest[:20], d, b, e, *rest[20:], a, b]
        with torch.inference_mode():
            logits = model.logits(model(torch.tensor([text])).hidden)[0, -1]
        hits += bool(logits[c] > logits[e])
    assert hits > 30


def test_the_head_learns_at_its_own_rate():
    recipe = dataclasses.replace(SHAPE, head_lr=0.25, adam_lr=0.02, warmup=0, decay=0.0)
    model = first_model(recipe, 0, None)
    learner, before = Learner(model, recipe, 10), {n: p.detach().clone() for n, p in model.named_parameters()}
    learner.begin(0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    learner.adam.step()
    moved = {name: float((p.detach() - before[name]).abs().mean()) for name, p in model.named_parameters()}
    assert moved["embed_tokens.weight"] == pytest.approx(0.02, rel=1e-3)
    assert moved["lm_head.weight"] == pytest.approx(0.25 * 0.02, rel=1e-3)


def test_the_attention_that_copies_learns_at_its_own_rate():
    recipe = dataclasses.replace(SHAPE, copying=True, copying_lr=0.25, muon_lr=0.02)
    learner = Learner(first_model(recipe, 0, None), recipe, 10)
    learner.begin(9)
    rest, copying = learner.muon.param_groups
    assert copying["lr"] == 0.25 * rest["lr"] > 0 and len(copying["params"]) == 4
    assert len(rest["params"]) == 4 * recipe.num_layers - 4


def test_one_layer_cannot_copy():
    with pytest.raises(ValueError, match="copying: it takes two layers"):
        TargetShape(copying=True, num_layers=1)
