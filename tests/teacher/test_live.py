"""What training reads of a cache is the target's output when it is asked again, states and loss alike."""

import dataclasses
from types import SimpleNamespace

import pytest
import tiny
import torch
from test_build import LAYERS, OFFSETS, RECIPE, make

from outpace.teacher.store import TeacherCache
from outpace.train.drafts import DraftRecipe
from outpace.train.eagle3 import Eagle3Recipe, Eagle3Trainer


class Live:
    """The same texts, run through the target at every question; its states in the cache's precision."""

    def __init__(self, cache, target):
        self.cache, self.target, self.meta = cache, target, cache.meta

    def __len__(self):
        return len(self.cache)

    def text(self, i):
        return self.cache.text(i)

    def sample(self, i):
        kept = self.cache.sample(i)
        with torch.no_grad():
            out = self.target(kept.tokens[None], aux=LAYERS, offset=kept.offset)
        return SimpleNamespace(
            tokens=kept.tokens,
            prompt_length=kept.prompt_length,
            offset=kept.offset,
            aux=out.aux[:, 0].bfloat16(),
            final=out.hidden[0].bfloat16(),
        )


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    target, folder = tiny.target("gpt_oss"), tmp_path_factory.mktemp("live")
    make(folder, dataclasses.replace(RECIPE, samples=5, final=True), target)
    cache = TeacherCache.open(folder, final=True)
    return target, cache, Live(cache, target)


@pytest.mark.parametrize("loss", ["ce", "kl", "lk"])
def test_a_cached_teacher_is_a_live_teacher(caches, loss):
    """Texts at positions 0, 4,096 and 131,072. States may differ in the last of 8 bits: a padded batch rounds
    otherwise than a text alone."""
    target, *teachers = caches
    recipe = Eagle3Recipe(
        num_heads=4, num_kv_heads=2, head_dim=10, intermediate_size=40, draft_vocab=50, steps_ahead=3,
        loss=loss, bfloat16=False, held_out_share=0.0,
    )  # fmt: skip
    items = []
    for teacher in teachers:
        trainer = Eagle3Trainer(recipe, target, None, teacher, None)
        tiny.randomise(trainer.draft.named_parameters(), 3)
        rows = [teacher.sample(i) for i in range(6)]
        assert {row.offset for row in rows} == set(OFFSETS)
        validation, tokens = trainer.evaluate(rows, 1.0, [torch.Generator()] * 6)
        (gradient,) = torch.autograd.grad(validation.loss, [trainer.draft.fc.weight])
        items.append((validation, tokens, gradient))
    (cached, n, ours), (live, m, wanted) = items
    assert n == m and torch.equal(cached.valid, live.valid)
    assert (cached.hits != live.hits).float().mean() < 0.02
    torch.testing.assert_close(cached.loss, live.loss, rtol=2e-3, atol=0)
    assert (ours - wanted).norm() < 0.02 * wanted.norm()


def test_held_out_samples_are_the_last(caches):
    _, cache, _ = caches
    assert DraftRecipe(held_out_share=0.4).training_count(cache) == 9
    assert DraftRecipe(held_out_share=0.0).training_count(cache) == len(cache) == 15
