"""Every loop and draft decodes losslessly: every family, past the window, ragged batches."""

import functools

import pytest
import tiny
import torch
from scripted import Scripted

from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.dflash import DFlash
from outpace.drafts.dflash_config import DFlashConfig
from outpace.drafts.lookup import NGram
from outpace.models.load import named_tensors
from outpace.ops.rope import RopeConfig
from outpace.ops.sampling import Sampling

PROMPTS = [tiny.tokens(n, seed=n).tolist() for n in (23, 5, 12)]
NEW = 24


def answers(family, window, batch):
    return every_answer(family, window)[:batch]


@functools.cache
def every_answer(family, window):
    """Greedy text one row at a time, each token by a forward over the whole text: no cache at all."""
    return by_whole_texts(tiny.target(family, window))


@torch.inference_mode()
def by_whole_texts(model):
    items = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(NEW):
            text.append(int(model.logits(model(torch.tensor([text])).hidden[:, -1]).argmax()))
        items.append(text[len(prompt) :])
    return items


def random_dflash(model, block_size=4, seed=0, **changes):
    c = model.config
    values = {
        "hidden_size": c.hidden_size, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
        "intermediate_size": 28, "vocab_size": c.vocab_size, "rope": RopeConfig(theta=1000.0),
        "rms_norm_eps": 1e-5, "block_size": block_size, "target_layer_ids": (0, 2),
        "num_target_layers": c.num_layers, "mask_token_id": 2,
    }  # fmt: skip
    draft = DFlash(DFlashConfig(**(values | changes)))
    tiny.randomise(named_tensors(draft), seed)
    return draft.eval().bind(model)


def half(row, position):
    return (position * 7 + row * 3) % 11 < 4 or position % 13 in (6, 7)


def drafts(name, model, known, prompts):
    match name:
        case "ngram":
            return NGram(block_size=6)
        case "dflash":
            return random_dflash(model)
        case "dflash, window":
            types = ("sliding_attention", "full_attention")
            return random_dflash(model, 6, layer_types=types, sliding_window=9)
        case "gold":
            return Scripted(known, prompts, lambda b, i: False)
        case "wrong":
            return Scripted(known, prompts, lambda b, i: True)
        case "half":
            return Scripted(known, prompts, half)
        case "half, ragged":
            return Scripted(known, prompts, half, ragged=True)
    raise AssertionError(name)


TARGETS = [(family, window) for family in tiny.FAMILIES for window in (False, True)]
DRAFTS = ["ngram", "dflash", "dflash, window", "gold", "wrong", "half", "half, ragged"]


@pytest.mark.parametrize(("family", "window", "batch"), [(*t, 3) for t in TARGETS] + [("gpt_oss", True, 1)])
def test_plain_is_what_the_whole_text_says(family, window, batch):
    model = tiny.target(family, window)
    got = generate(model, PROMPTS[:batch], Request(max_new_tokens=NEW, prefill_chunk=7))
    assert got.tokens == answers(family, window, batch)
    assert got.trace.tau == 1 and got.trace.rounds == batch * (NEW - 1)


@pytest.mark.parametrize(
    ("family", "window", "batch", "name"),
    [(*t, 3, name) for t in TARGETS for name in DRAFTS]
    + [(family, True, 1, name) for family in tiny.FAMILIES for name in ("dflash, window", "gold", "half")],
)
def test_speculative_says_the_same(family, window, batch, name):
    model, known, prompts = tiny.target(family, window), answers(family, window, batch), PROMPTS[:batch]
    streamed = [[] for _ in prompts]
    draft = drafts(name, model, known, prompts)
    got = generate(
        model, prompts, Request(max_new_tokens=NEW), draft, on_tokens=lambda b, ids: streamed[b].extend(ids)
    )
    assert got.tokens == known and streamed == known
    trace, block = got.trace, draft.block_size
    assert trace.rounds <= batch * (NEW - 1)
    if name == "wrong":
        assert trace.tau == 1 and trace.accept_rate == 0
    if name == "gold":  # every round but the row's last takes all there is
        assert all(a == block - 1 for a in trace.accept_lens[: -2 * batch])
        assert trace.rounds == batch * -(-(NEW - 1) // block)
    if name.startswith("half"):
        assert 0.1 < trace.accept_rate < 0.9 and len(set(trace.accept_lens)) > 2
    if name.startswith("dflash"):
        assert trace.accept_rate < 0.5  # usually wrong: rewinds happen all the time


@pytest.mark.parametrize("chunk", [7, 50, 512])
def test_chunks_of_the_prefill_change_nothing(chunk):
    model = tiny.target("gpt_oss")
    prompts = [tiny.tokens(n, seed=n).tolist() for n in (61, 8)]
    request = Request(max_new_tokens=12, prefill_chunk=chunk)
    whole = generate(model, prompts, Request(max_new_tokens=12, prefill_chunk=64)).tokens
    assert generate(model, prompts, request).tokens == whole
    draft = random_dflash(model)
    wanted = generate(model, prompts, Request(max_new_tokens=12, prefill_chunk=64), draft)
    got = generate(model, prompts, request, draft)
    assert got.tokens == whole and got.trace.accepted == wanted.trace.accepted


def loops(model, prompts, known, request):
    yield generate(model, prompts, request).tokens
    for name in ("gold", "half", "dflash", "ngram"):
        yield generate(model, prompts, request, drafts(name, model, known, prompts)).tokens


@pytest.mark.parametrize("new", [1, 2, 17])
def test_max_new_tokens_is_exact(new):
    model, known = tiny.target("qwen3"), answers("qwen3", True, 3)
    for got in loops(model, PROMPTS, known, Request(max_new_tokens=new)):
        assert got == [k[:new] for k in known]


@pytest.mark.parametrize("at", [0, 1, 3, 4, 9])
def test_a_stop_token_ends_its_row_wherever_it_stands_in_a_block(at):
    model, known = tiny.target("qwen3"), answers("qwen3", True, 3)
    stop = known[1][at]
    wanted = [k[: k.index(stop) + 1] if stop in k else k for k in known]
    assert len({len(w) for w in wanted}) > 1
    for got in loops(model, PROMPTS, known, Request(max_new_tokens=NEW, stop=frozenset({stop, 96}))):
        assert got == [w[: w.index(96) + 1] if 96 in w else w for w in wanted]


def test_rows_end_at_their_own_limits():
    model, limits = tiny.target("gpt_oss", True), (NEW, 1, 7)
    wanted = [row[:n] for row, n in zip(answers("gpt_oss", True, 3), limits, strict=True)]
    request = Request(max_new_tokens=NEW, limits=limits)
    assert generate(model, PROMPTS, request).tokens == wanted
    assert generate(model, PROMPTS, request, NGram(block_size=6)).tokens == wanted
    with pytest.raises(ValueError, match="3 limits for 2 prompts"):
        generate(model, PROMPTS[:2], request)


def test_positions_may_begin_far_out():
    model = tiny.target("gpt_oss")
    near, far = (
        generate(model, PROMPTS, Request(max_new_tokens=NEW, offset=offset)).tokens for offset in (0, 131072)
    )
    assert near == far  # rotary positions are relative; float64 angles make it so out there
    got = generate(model, PROMPTS, Request(max_new_tokens=NEW, offset=131072), random_dflash(model))
    assert got.tokens == far


def test_rows_do_not_know_of_each_other():
    model, known = tiny.target("qwen3"), answers("qwen3", True, 3)
    draft = random_dflash(model)
    alone = [generate(model, [p], Request(max_new_tokens=NEW), draft) for p in PROMPTS]
    together = generate(model, PROMPTS, Request(max_new_tokens=NEW), draft)
    assert [g.tokens[0] for g in alone] == together.tokens == known
    for b, one in enumerate(alone):
        assert one.trace.accept_lens == [r[b] for r in together.trace.accepted if r[b] >= 0]


def test_the_same_seed_draws_the_same_text():
    model = tiny.target("gpt_oss")
    request = Request(max_new_tokens=20, sampling=Sampling(temperature=1.0))

    def draw(seed):
        return generate(model, PROMPTS, request, rng=torch.Generator().manual_seed(seed)).tokens

    assert draw(1) == draw(1) != draw(2)


BAD = [
    ([], "at least one token"),
    ([[5], []], "at least one token"),
    ([[5, 97]], "token id 97 "),
    ([[5, -1]], "token id -1 "),
    ([[5] * 200], "positions end at"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD)
def test_prompts_that_are_refused(prompts, message):
    model = tiny.target("llama")
    request = Request(max_new_tokens=4, offset=model.config.max_position_embeddings - 100)
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, request)
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, request, NGram())


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 0}, {"max_new_tokens": 3, "prefill_chunk": 0}])
def test_requests_that_are_refused(wrong):
    with pytest.raises(ValueError, match="must be at least 1"):
        Request(**wrong)
