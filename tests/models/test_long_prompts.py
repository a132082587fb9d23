"""A prompt in any chunks has the bits of one that is read token by token, and is read by native steps."""

import pytest
import tiny
import torch
from indexers import indexed_target
from latents import latent_target

from outpace.kv.metadata import FEW
from outpace.models.load import build, named_tensors

TOKENS = 2 * FEW + 69  # one native step of 128, one of 64, and a rest
HEADS = {"gpt_oss": 8, "llama": 40, "qwen3": 24, "qwen3_moe": 16}
CHUNKS = 7, FEW, FEW + 36, TOKENS


@torch.inference_mode(False)
def plain(family, **more):
    model = build(tiny.config(family, head_dim=HEADS[family], **more)).eval()
    tiny.randomise(named_tensors(model), 3)
    return model


def read(model, tokens, counts, chunk, slack=4):
    """-> hidden, aux and logits of the real tokens, a tensor each, and the keys and values."""
    length, layers = tokens.shape[1] + 1, (2, 0)
    cache, parts = model.make_cache(len(tokens), length, slack=slack), [[] for _ in tokens]
    for begin in range(0, tokens.shape[1], chunk):
        some = tokens[:, begin : begin + chunk]
        real = [min(max(n - begin, 0), some.shape[1]) for n in counts]
        out = model(some, cache, counts=real, aux=layers, logits=True)
        for b, n in enumerate(real):
            parts[b].append([out.hidden[b, :n], *out.aux[:, b, :n], out.logits[b, :n]])
    assert cache.lengths == counts
    values = [torch.cat(x) for row in parts for x in zip(*row, strict=True)]
    return values, [part for memory in cache.layers for part in memory.parts], cache


def same(mine, theirs):
    assert len(mine[0]) == len(theirs[0]) and all(map(torch.equal, mine[0], theirs[0]))
    for a, b in zip(mine[1], theirs[1], strict=True):
        assert torch.equal(a[:, :, :-1], b[:, :, :-1])  # but for the trash slot


@pytest.mark.parametrize("slack", [1, 4, 90])
@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_any_chunks_give_the_bits_of_single_tokens(family, slack):
    """Windows of 7, whose rings take 4, 5 or all at once, and are passed many times."""
    model, tokens = plain(family), tiny.tokens(1, TOKENS, seed=5)
    model.native = False
    wanted = read(model, tokens, [TOKENS], 1, slack)
    for model.native in (True, False):
        for chunk in CHUNKS if model.native else (7, FEW):
            same(read(model, tokens, [TOKENS], chunk, slack), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_any_chunks_over_keys_of_two_bytes(dtype):
    """Its modules take chunks of up to FEW tokens as the kernels do, longer ones by torch's flash kernel."""
    model, tokens = plain("gpt_oss"), tiny.tokens(1, TOKENS, seed=5)
    model.kv_cache_dtype = dtype
    wanted = read(model, tokens, [TOKENS], 1)
    assert {part.dtype for part in wanted[1]} == {dtype}
    for model.native in (True, False):
        for chunk in CHUNKS if model.native else (7, FEW):
            same(read(model, tokens, [TOKENS], chunk), wanted)
    theirs = read(model, tokens, [TOKENS], TOKENS)  # through the flash kernel
    for a, b in zip(theirs[0], wanted[0], strict=True):
        assert (a - b).abs().max() < 1e-3 * b.abs().max()


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
@torch.inference_mode()
def test_rows_that_end_apart(family):
    model, tokens = plain(family), tiny.tokens(3, TOKENS, seed=6)
    counts = [TOKENS, FEW - 3, 2 * FEW + 1]
    wanted = read(model, tokens, counts, 1)
    for chunk in CHUNKS:
        same(read(model, tokens, counts, chunk), wanted)


@pytest.mark.parametrize("kind", ["latent", "index"])
@torch.inference_mode()
def test_attention_of_other_memories(kind):
    """Its module's, in steps of FEW tokens."""
    model = latent_target("gpt_oss", None)[1] if kind == "latent" else indexed_target("gpt_oss")[1]
    tokens = tiny.tokens(1, TOKENS, seed=7)
    wanted = read(model, tokens, [TOKENS], 1)
    for chunk in CHUNKS:
        same(read(model, tokens, [TOKENS], chunk), wanted)
    assert max(key[0][1] for key in model.native_steps) == FEW


@torch.inference_mode()
def test_rows_of_a_wide_batch_are_those_of_single_rows():
    """600 tokens at once: more than a native step takes."""
    model, tokens = plain("gpt_oss"), tiny.tokens(50, 12, seed=10)
    values, _, _ = read(model, tokens, [12] * 50, 12)
    assert sorted(key[0][0] for key in model.native_steps) == [8, 42]
    for row in (0, 31, 42, 43, 49):
        alone = read(model, tokens[row : row + 1], [12], 12)[0]
        assert all(map(torch.equal, alone, values[4 * row : 4 * row + 4]))


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
@torch.inference_mode()
def test_the_longest_native_step(family):
    model, tokens = plain(family), tiny.tokens(1, 700, seed=11)
    same(read(model, tokens, [700], 700), read(model, tokens, [700], 64))


@torch.inference_mode()
def test_a_long_prompt_is_read_in_few_native_steps_of_few_sizes():
    model = plain("gpt_oss")
    for tokens in (TOKENS, 700, 701, 583):
        read(model, tiny.tokens(1, tokens), [tokens], tokens)
    sizes = sorted(key[0][1] for key in model.native_steps)
    assert sizes == [5, 7, 60, 61, 64, 128, 512]


@torch.inference_mode()
def test_a_step_is_of_one_room():
    """Of two caches with rings of other sizes neither reads in the other's pieces."""
    model, tokens = plain("gpt_oss"), tiny.tokens(1, 40, seed=8)
    wanted = read(model, tokens, [40], 1)
    for slack in (30, 1, 12, 30):
        assert all(map(torch.equal, read(model, tokens, [40], 20, slack)[0], wanted[0]))


@torch.inference_mode()
def test_a_long_chain_is_taken_back_as_one():
    model, tokens = plain("qwen3"), tiny.tokens(1, TOKENS, seed=9)
    values, _, cache = read(model, tokens, [TOKENS], TOKENS, slack=TOKENS)
    cache.commit([[*range(9)]])
    assert cache.lengths == [9]
    again = model(tokens[:, 9:40], cache).hidden
    assert torch.equal(again[0], values[0][9:40])


@torch.inference_mode()
def test_a_prompt_that_does_not_fit_changes_nothing():
    model = plain("qwen3")
    cache = model.make_cache(1, 100)
    with pytest.raises(ValueError, match="101 more do not fit a cache made for 100"):
        model(tiny.tokens(1, 101), cache)
    assert cache.lengths == [0] and not model.native_steps
