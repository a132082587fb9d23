"""A conversation with a remembered beginning has the tokens of one that is read afresh every time."""

import random

import pytest
import tiny
import torch
from dflash_drafts import random_dflash
from eagle3_drafts import bound_eagle3

from outpace.decode.generate import generate, steps
from outpace.decode.request import BatchRows, Request
from outpace.decode.reuse import PrefixCache, reusable
from outpace.decode.trace import Trace
from outpace.drafts.dflash import BoundDFlash
from outpace.drafts.eagle3_decode import TreeShape
from outpace.drafts.lookup import NGram
from outpace.models.load import build, named_tensors
from outpace.ops.sampling import Sampling, generator

HEADS = {"qwen3": 16, "qwen3_moe": 24}  # dims that the kernels take


def target(family):
    model = build(tiny.config(family, head_dim=HEADS.get(family, 8)))
    tiny.randomise(named_tensors(model), 3)
    return model.eval()


def draft_of(kind, model):
    match kind:
        case "none":
            return None
        case "ngram":
            return NGram(block_size=4, shortest=1)
        case "dflash":
            return BoundDFlash(random_dflash(model, block_size=5), model)
    return bound_eagle3(model, TreeShape(depth=3, branch=2, nodes=7) if kind == "tree" else None)


def answer(model, prompt, request, draft, prefix_cache, seed, until=None):
    """-> the tokens and the trace. `until`: the step after which nobody asks for more."""
    rows, trace = BatchRows(1, request, None), Trace()
    decoding = steps(
        model, [prompt], request, draft, rows, trace, rng=generator(seed), prefix_cache=prefix_cache
    )
    for i, _ in enumerate(decoding):
        if i == until:
            break
    return rows.emitted[0], trace


def interrupted(model, prompt, request, draft, prefix_cache, seed, forward):
    """Ctrl-C in this forward, or call of several steps, before anything is made of it."""
    left = [forward]

    def hook(*_):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    def steps(*given):
        done = type(model).run_ahead(model, *given)
        hook()
        return done

    handle, model.run_ahead = model.register_forward_hook(hook), steps
    try:
        answer(model, prompt, request, draft, prefix_cache, seed)
    except KeyboardInterrupt:
        return True
    finally:
        handle.remove()
        del model.run_ahead
    return False


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("gpt_oss", kind) for kind in ("none", "ngram", "dflash", "eagle3", "tree")),
        ("qwen3", "eagle3"),
        ("qwen3_moe", "dflash"),
    ],
)
def test_a_remembered_conversation_has_the_tokens_of_a_fresh_one(family, kind):
    model = target(family)
    draft = draft_of(kind, model)
    prefix_cache, rng = PrefixCache(model, draft), random.Random(f"{family} {kind}")
    text, cut, total = [], 0, 0
    for turn in range(12):
        if turn in (5, 9):
            text = []  # the conversation starts over
        prompt = text[: rng.randint(len(text) // 2, len(text))] + [
            rng.randrange(5, 20) for _ in range(rng.randint(1, 40))
        ]
        temperature = rng.choice([0.0, 0.9])
        request = Request(
            max_new_tokens=rng.randint(1, 30), sampling=Sampling(temperature=temperature),
            stop=frozenset({3}), rule="gumbel" if temperature else "match", prefill_chunk=64,
        )  # fmt: skip
        if turn % 3 == 2:
            cut += interrupted(model, prompt, request, draft, prefix_cache, turn, rng.randint(0, 6))
        until = rng.randint(0, 5) if turn % 4 == 3 else None
        tokens, trace = answer(model, prompt, request, draft, prefix_cache, turn, until)
        wanted = generate(model, [prompt], request, rng=generator(turn)).tokens[0]
        assert tokens == (wanted if until is None else wanted[: len(tokens)]), (turn, prompt)
        drafted = generate(model, [prompt], request, draft, rng=generator(turn)).trace
        made = len(trace.accepted)  # steps in which the draft has read the same
        assert trace.accepted == drafted.accepted[:made] and trace.proposed == drafted.proposed[:made]
        total += trace.reused
        text = prompt + tokens
    assert cut and total > 100


def test_what_is_reused_is_what_is_alike():
    model = target("gpt_oss")
    prefix_cache = PrefixCache(model)
    request = Request(max_new_tokens=10, prefill_chunk=64)
    tokens, trace = answer(model, [*range(5, 45)], request, None, prefix_cache, 0)
    assert trace.reused == 0
    held = [*range(5, 45), *tokens[:-1]]  # the last one was never in a forward
    assert answer(model, [*held, tokens[-1], 90], request, None, prefix_cache, 0)[1].reused == len(held)
    again = [*held[:44], 90, 91]
    assert answer(model, again, request, None, prefix_cache, 0)[1].reused == 44
    assert answer(model, again, request, None, prefix_cache, 0)[1].reused == len(again) - 1
    # a text that outgrows the cache is read afresh, and then there is place
    long = [random.Random(1).randrange(5, 97) for _ in range(150)]
    assert answer(model, again + long, request, None, prefix_cache, 0)[1].reused == 0
    assert answer(model, again + long + [7], request, None, prefix_cache, 0)[1].reused == len(again) + 150


@pytest.mark.parametrize("kind", ["none", "ngram", "dflash", "eagle3", "tree"])
@pytest.mark.parametrize("forward", [0, 1, 2])
def test_all_that_was_emitted_before_an_interruption_can_go_on(kind, forward):
    """Behind it the cache holds draft tokens, which nobody verified."""
    model = target("gpt_oss")
    prefix_cache = PrefixCache(model, draft_of(kind, model))
    request = Request(max_new_tokens=12, prefill_chunk=64)
    assert interrupted(model, [*range(5, 25)] * 2, request, prefix_cache.draft, prefix_cache, 0, forward)
    again = [*prefix_cache.prompt, *prefix_cache.output, 90]
    tokens, trace = answer(model, again, request, prefix_cache.draft, prefix_cache, 0)
    assert tokens == generate(model, [again], request).tokens[0]
    assert trace.reused or not forward


def test_how_much_is_reusable():
    assert reusable([1, 2, 3], [1, 2, 4, 5], None) == 2
    assert reusable([1, 2, 3], [1, 2, 3], None) == 2  # one is left
    assert reusable([1, 2, 3], [1, 2, 3, 4], 3) == 2 and reusable([1, 2, 3], [1, 2, 3, 4], 1) == 1
    assert reusable([], [1, 2], 0) == reusable([5], [1, 2], 7) == 0


def test_a_prefix_cache_is_of_the_cpu_and_of_keys_and_values():
    model = target("gpt_oss")
    model.to(torch.device("meta"))
    with pytest.raises(ValueError, match="only on the CPU"):
        PrefixCache(model)
