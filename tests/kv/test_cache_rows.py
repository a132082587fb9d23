"""Sequences that come and go in the rows of one cache, against a cache for each alone, bit for bit."""

import pytest
import tiny
import torch
from latents import latent_target

from outpace.kernels import bindings
from outpace.kv.tree import Tree
from outpace.models.load import build, named_tensors

HEADS = {"qwen3": 16, "qwen3_moe": 24}  # dims that the kernels take: multiples of 8
PARENTS = [[0, 0, 0, 1, 2, 3], [0, 1, 0, 1, 1, 4]]


def target(family):
    model = build(tiny.config(family, head_dim=HEADS.get(family, 8)))
    tiny.randomise(named_tensors(model), 3)
    return model.eval()


def whole_cache(model, rows, length=64):
    """Of all keys and values: no ring, whatever the layers' windows."""
    return model.make_cache(rows, length, slack=length)


def alone(model, tokens):
    """One sequence in its own cache: a prompt, two tokens, a tree of which [0, 1, 3] is kept, a token."""
    prompt, chain, tree, after = tokens
    cache, out = whole_cache(model, 1), []
    out.append(model(prompt, cache).hidden[0])
    out.append(model(chain, cache).hidden[0])
    out.append(model(tree, cache, tree=Tree(torch.tensor(PARENTS[:1]))).hidden[0])
    cache.commit([[0, 1, 3]])
    out.append(model(after, cache).hidden[0])
    return out


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_a_sequence_in_a_row_is_one_alone(family, native):
    """Prompts of two lengths, into rows in any order; both step together; one leaves, and another is put
    into its row where the longer one's keys still lie."""
    if native and not bindings.available():
        pytest.skip(f"no CPU kernels: {bindings.why_not()}")
    model = target(family)
    model.native = native
    texts = [
        [tiny.tokens(1, n, seed=10 * i + k) for k, n in enumerate((prompt, 2, 6, 1))]
        for i, prompt in enumerate((17, 9, 4))
    ]
    pool, lengths, made = whole_cache(model, 5), {}, {}

    def run(rows, k, tree=None, paths=None):
        """Part k of the text in each of these rows."""
        cache = pool.of(list(rows), [lengths.get(row, 0) for row in rows])
        tokens = torch.cat([texts[i][k] for i in rows.values()])
        hidden = model(tokens, cache, tree=tree).hidden
        if paths:
            cache.commit(paths)
        lengths.update(zip(rows, cache.lengths, strict=True))
        for i, h in zip(rows.values(), hidden, strict=True):
            made.setdefault(i, []).append(h)

    for row, i in ((3, 0), (1, 1)):
        run({row: i}, 0)
    run({3: 0, 1: 1}, 1)
    run({1: 1, 3: 0}, 2, Tree(torch.tensor([PARENTS[0]] * 2)), [[0, 1, 3], [0, 1, 3]])
    run({3: 0}, 3)
    lengths[3] = 0
    run({3: 2}, 0)
    run({3: 2}, 1)
    run({3: 2}, 2, Tree(torch.tensor(PARENTS[:1])), [[0, 1, 3]])
    run({3: 2, 1: 1}, 3)
    for i, text in enumerate(texts):
        wanted = alone(model, text)
        assert len(made[i]) == len(wanted) == 4
        for ours, theirs in zip(made[i], wanted, strict=True):
            assert torch.equal(ours, theirs)
    assert model.native == native and (not native or model.native_steps)


@torch.inference_mode()
def test_rows_are_chosen_again_without_moving_what_they_hold():
    model = target("gpt_oss")
    pool = whole_cache(model, 4)
    some = pool.of([2, 0, 3], [0, 0, 0])
    tokens = tiny.tokens(3, 5)
    model(tokens, some)
    before = pool.layers[0].k
    some.select([2, 1])
    assert some.rows == (3, 0) and some.lengths == [5, 5] and pool.layers[0].k is before
    assert pool.lengths == [0] * 4  # who shares the memories keeps the lengths


def test_what_is_no_whole_keys_and_values_is_refused():
    ring = target("gpt_oss").make_cache(2, 64, slack=4)
    latent = latent_target("gpt_oss", window=False)[1].make_cache(2, 64, slack=64)
    for cache in (ring, latent):
        with pytest.raises(ValueError, match="only a cache of whole keys and values"):
            cache.of([0], [0])
