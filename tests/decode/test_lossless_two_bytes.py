"""Over keys and values of two bytes every loop states what the target generates that rounds them."""

import copy
import functools

import pytest
import tiny
import torch
from indexers import indexed_target
from latents import latent_target
from test_lossless import NEW, PROMPTS, by_whole_texts
from test_lossless_latent import NAMES, every_draft_says
from test_partial import drafts

import outpace
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.models import attention
from outpace.models.load import build, named_tensors

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
HEADS = {"gpt_oss": 8, "llama": 40, "qwen3": 24, "qwen3_moe": 16}  # dims that the kernels take


@functools.cache
def rounding(family, dtype, native):
    """A target whose heads the kernels take, or do not."""
    model = build(tiny.config(family, **({"head_dim": HEADS[family]} if native else {})))
    tiny.randomise(named_tensors(model), 4)
    model.kv_cache_dtype = DTYPES[dtype]
    return model.eval()


def rounded_texts(model):
    """Greedy texts by forwards over whole texts, without a cache, that round keys and values."""
    whole = attention.causal_attend

    def rounds(q, k, v, *rules):
        return whole(q, *(x.to(model.kv_cache_dtype).float() for x in (k, v)), *rules)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "causal_attend", rounds)
        return by_whole_texts(model)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_draft_says_the_same(family, dtype, native):
    model = rounding(family, dtype, native)
    every_draft_says(model, rounded_texts(model))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_no_more_than_rounding(dtype):
    """Logits move by about a half of the last bit, and not by nothing."""
    model = rounding("gpt_oss", dtype, True)
    exact = copy.copy(model)
    exact.kv_cache_dtype = None
    tokens = tiny.tokens(2, 60)
    with torch.inference_mode():
        a, b = (m(tokens, m.make_cache(2, 60), logits=True).logits for m in (exact, model))
    error = (a - b).abs().max() / a.abs().max()
    assert 0 < error < 8 * torch.finfo(DTYPES[dtype]).eps


@pytest.mark.parametrize("retrofit", [latent_target, indexed_target])
def test_other_memories_keep_their_numbers(retrofit):
    """Latents and an index's keys stay float32, the windows' keys and values are rounded."""
    model = retrofit("gpt_oss")[1]
    model.kv_cache_dtype = torch.float16
    known = generate(model, PROMPTS, Request(max_new_tokens=NEW)).tokens
    for name in NAMES:
        draft = drafts(name, model, known)
        assert generate(model, PROMPTS, Request(max_new_tokens=NEW), draft).tokens == known, name
    for i, memory in enumerate(model.make_cache(1, 40).layers):
        full = not model.config.window(i)
        latent = full and retrofit is latent_target
        assert memory.k.dtype == (torch.float32 if latent else torch.float16)
        assert memory.keys is None or memory.keys.dtype == torch.float32
        assert (memory.keys is not None) == (full and retrofit is indexed_target)


def test_a_cache_of_two_bytes_is_half_as_large():
    whole, half = (outpace.load(kv_cache_dtype=name) for name in ("auto", "float16"))
    sizes = [model.target.make_cache(2, 500).nbytes for model in (whole, half)]
    assert sizes[0] == 2 * sizes[1]


def test_a_dtype_that_is_none_is_refused_before_anything_is_read():
    with pytest.raises(ValueError, match="'fp8': it must be one of auto, float32, bfloat16, float16"):
        outpace.load("not-there", kv_cache_dtype="fp8")
