"""Greedy steps in one native call: those of single ones to the bit, also in the cache and for a draft."""

import time
from dataclasses import replace

import pytest
import tiny
import torch
from test_lossless import random_dflash
from test_lossless_two_bytes import HEADS

from outpace.decode import ahead as running
from outpace.decode import controller
from outpace.decode.calibrate import calibrate
from outpace.decode.controller import Adaptive, Fixed
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.tree import cut
from outpace.kernels import bindings
from outpace.models.decoder import Decoder
from outpace.models.load import build, named_tensors
from outpace.ops.dispatch import Draws
from outpace.ops.sampling import Sampling

pytestmark = pytest.mark.skipif(not bindings.available(), reason=f"no CPU kernels: {bindings.why_not()}")
PROMPTS = [tiny.tokens(n, seed=n).tolist() for n in (9, 23, 4)]


def plain(family, dtype=torch.float32):
    model = build(tiny.config(family, head_dim=HEADS[family]))
    tiny.randomise(named_tensors(model), 3)
    return model.to(dtype).eval()


def both(family, dtype=torch.float32, kv=None):
    """A model, and two caches of the same prompts, of other lengths each."""
    model = plain(family, dtype)
    model.kv_cache_dtype = kv
    caches = [model.make_cache(3, 80, slack=9) for _ in range(2)]
    for cache in caches:
        model(tiny.tokens(3, 9), cache, counts=[9, 3, 6])
    return model, *caches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_many_steps_are_single_steps(family, dtype):
    model, mine, theirs = both(family, dtype, None if dtype == torch.float32 else torch.float16)
    last, aux = torch.tensor([5, 6, 7]), (0, 2)
    for most in (1, 8, 3, 20):  # past the windows of 7
        done = model.run_ahead(last, mine, most, (), aux)
        outs, token = [], last
        for _ in range(most):
            outs.append(model(token[:, None], theirs, aux=aux, logits=True))
            token = outs[-1].best[:, 0]
        assert torch.equal(done.tokens, torch.cat([out.best for out in outs], 1)) and done.finite
        assert torch.equal(done.aux, torch.cat([out.aux for out in outs], 2))
        assert mine.lengths == theirs.lengths
        last = token
    for a, b in zip(mine.layers, theirs.layers, strict=True):
        assert torch.equal(a.k[:, :, :-1], b.k[:, :, :-1]) and torch.equal(a.v[:, :, :-1], b.v[:, :, :-1])


@torch.inference_mode()
def test_they_end_where_every_row_has_met_a_stop_token():
    model, cache, other = both("gpt_oss")
    last = torch.tensor([5, 6, 7])
    tokens = model.run_ahead(last, other, 20).tokens.tolist()
    stops = {row[at] for row, at in zip(tokens, (4, 2, 7), strict=True)}
    ends = [min(row.index(t) for t in stops if t in row) for row in tokens]
    done = model.run_ahead(last, cache, 20, stops)
    assert done.tokens.tolist() == [row[: max(ends) + 1] for row in tokens] and max(ends) < 19
    assert cache.lengths == [n + max(ends) + 1 for n in (9, 3, 6)]


@torch.inference_mode()
def test_numbers_that_are_none_end_them_and_others_can_begin():
    model, cache, other = both("gpt_oss")
    last, head = torch.tensor([5, 6, 7]), model.lm_head.weight
    good = model.run_ahead(last, other, 6).tokens
    kept = head[good[1, 0]].clone()
    model.embed_tokens.weight[good[1, 2]] = float("nan")  # met by the step after
    done = model.run_ahead(last, cache, 6)
    assert not done.finite and torch.equal(done.tokens[:, :3], good[:, :3]) and done.tokens.shape[1] < 6
    model.embed_tokens.weight[good[1, 2]] = kept
    cache.rewind([9, 3, 6])
    assert model.run_ahead(last, cache, 2).tokens.shape[1] == 2


@torch.inference_mode()
def test_where_a_step_is_no_native_call_there_are_none():
    model, cache, _ = both("gpt_oss")
    model.native = False
    assert model.run_ahead(torch.tensor([5, 6, 7]), cache, 4) is None and cache.lengths == [9, 3, 6]


def texts(model, request, monkeypatch, most, **more):
    """The tokens, the pieces in which they came and the trace."""
    pieces, calls, run_ahead = [], [], Decoder.run_ahead

    def counted(self, *given):
        calls.append(given[2])
        return run_ahead(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(running, "MOST", most)
        patch.setattr(running, "SECONDS", 1e3)
        patch.setattr(Decoder, "run_ahead", counted)
        got = generate(
            model, PROMPTS, request, on_tokens=lambda b, new: pieces.append((b, new)) and None, **more
        )
    return got.tokens, pieces, got.trace, calls


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_the_loop_says_the_same_in_fewer_calls(family, monkeypatch):
    model = plain(family)
    request = Request(max_new_tokens=30, limits=(30, 11, 26))
    one, pieces, trace, _ = texts(model, request, monkeypatch, 1)
    many, same, theirs, calls = texts(model, request, monkeypatch, 8)
    assert many == one and max(calls) == 8 and len(calls) < len(pieces) / 10
    assert all(len(new) == 1 for _, new in same) and sorted(same) == sorted(pieces)  # each is a step's
    assert theirs.accepted == trace.accepted and theirs.nodes == trace.nodes and theirs.tau == 1
    assert len(theirs.step_seconds) == len(trace.step_seconds) == 29 and min(theirs.step_seconds) > 0
    stop = frozenset({one[0][12], one[2][5]})  # in the middle of a call
    ended, _, trace, _ = texts(model, Request(max_new_tokens=30, stop=stop), monkeypatch, 1)
    again, _, theirs, _ = texts(model, Request(max_new_tokens=30, stop=stop), monkeypatch, 8)
    assert again == ended and theirs.accepted == trace.accepted


def test_a_single_text_takes_more_steps_in_a_call_than_a_batch(monkeypatch):
    model, calls, run_ahead = plain("gpt_oss"), [], Decoder.run_ahead
    monkeypatch.setattr(running, "SECONDS", 1e3)
    monkeypatch.setattr(Decoder, "run_ahead", lambda *given: calls.append(given[3]) or run_ahead(*given))
    generate(model, PROMPTS[:1], Request(max_new_tokens=61))
    assert calls == [1, running.ALONE, 60 - 1 - running.ALONE]
    calls.clear()
    generate(model, PROMPTS[:2], Request(max_new_tokens=20))
    assert calls == [1, running.MOST, running.MOST, 2]


class Resting(Fixed):
    """Every third step proposes."""

    def width(self, lengths, running=0):
        self.turn = getattr(self, "turn", -1) + 1
        return 1 if self.turn % 3 else self.positions

    def rest(self, most):
        return min(most, 5)


def test_a_draft_hears_of_all_of_them(monkeypatch):
    model = plain("gpt_oss")

    request = Request(max_new_tokens=40)
    wanted = generate(model, PROMPTS, request).tokens
    got = texts(model, request, monkeypatch, 8, draft=random_dflash(model, 4), controller=Resting(4))
    assert got[0] == wanted and 5 in got[3]


def test_a_controller_decides_the_same(monkeypatch):
    """It rests as long, and probes as often."""
    model = plain("gpt_oss")
    draft, request = random_dflash(model, 4), Request(max_new_tokens=60)
    text = tiny.tokens(300, seed=5).tolist()
    costs = calibrate(model, draft, text, contexts=(20,), seconds=1e-6)
    n = len(costs.widths)
    cheap = {"verify": tuple(1 + i / 2 for i in range(n)), "draft": (0.0, *[0.5] * (n - 1)), "plain": 1.0}
    beside = dict.fromkeys(("rest", "idle", "show", "wake", "settle"), 0.05)
    points = tuple(replace(p, **cheap, **beside) for p in costs.points)
    monkeypatch.setattr(controller, "PROBE_SHARE", 0.1)

    class Watched(Adaptive):
        def cut(self, proposal):
            self.asked = [*getattr(self, "asked", []), self.account]
            return super().cut(proposal)

    mine, theirs = (Watched(replace(costs, points=points, acceptance=0.05)) for _ in range(2))
    one = texts(model, request, monkeypatch, 1, draft=draft, controller=mine)
    many = texts(model, request, monkeypatch, 8, draft=draft, controller=theirs)
    assert many[0] == one[0] and many[2].nodes == one[2].nodes
    assert theirs.asked == pytest.approx(mine.asked) and len(mine.asked) > 3
    assert max(many[3]) == 8 and len(many[3]) < len(one[3]) / 2


@torch.inference_mode()
def test_a_cache_without_place_is_left_as_it_is():
    model, cache, _ = both("gpt_oss")
    before = [memory.k.clone() for memory in cache.layers]
    with pytest.raises(ValueError, match="72 more do not fit a cache made for 80"):
        model.run_ahead(torch.tensor([5, 6, 7]), cache, 72)
    assert all(torch.equal(a, memory.k) for a, memory in zip(before, cache.layers, strict=True))


@pytest.mark.parametrize("rule", ["match", "rejection", "block", "gumbel"])
def test_drawn_tokens_come_in_fewer_calls_too(rule, monkeypatch):
    model, how = plain("gpt_oss"), Sampling(temperature=1.2)

    def drawn(most, seed=5, **asked):
        request = Request(max_new_tokens=30, sampling=how, rule=rule, **asked)
        return texts(model, request, monkeypatch, most, rng=torch.Generator().manual_seed(seed))

    one, _, trace, _ = drawn(1)
    many, _, theirs, calls = drawn(8)
    assert many == one and max(calls) == 8 and theirs.accepted == trace.accepted
    assert drawn(8, seed=6)[0] != one
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "run_ahead", lambda *given: None)
        assert drawn(8)[0] == one
    asked = {"limits": (30, 11, 26), "stop": frozenset({one[0][12], one[2][5]})}  # in the middle of calls
    ended = [row[:n] for row, n in zip(one, asked["limits"], strict=True)]
    ends = [next((i for i, token in enumerate(row) if token in asked["stop"]), 29) for row in ended]
    assert drawn(8, **asked)[0] == [row[: i + 1] for row, i in zip(ended, ends, strict=True)]


@torch.inference_mode()
def test_greedy_rows_beside_drawn_ones_take_the_argmax():
    model, cache, other = both("gpt_oss")
    last = torch.tensor([5, 6, 7])
    keys = torch.arange(24).view(8, 3) * 7919
    hot = torch.tensor([0.0, 1.5, 0.0])
    mixed = model.run_ahead(last, cache, 8, draws=Draws(keys, hot)).tokens
    greedy = model.run_ahead(last, other, 8).tokens
    assert torch.equal(mixed[[0, 2]], greedy[[0, 2]]) and not torch.equal(mixed[1], greedy[1])


def test_what_reads_the_text_or_is_cut_or_watched_comes_step_by_step(monkeypatch):
    model = plain("gpt_oss")
    for request in (
        Request(max_new_tokens=12, sampling=Sampling(temperature=1.0, top_k=9)),
        Request(max_new_tokens=12, sampling=Sampling(temperature=1.0, top_p=0.9)),
        Request(max_new_tokens=12, sampling=Sampling(temperature=1.0, min_p=0.1)),
        Request(max_new_tokens=12, sampling=Sampling(temperature=1.0, presence_penalty=0.3)),
        Request(max_new_tokens=12, sampling=Sampling(repetition_penalty=1.3)),
        Request(max_new_tokens=12, sampling=Sampling(logit_bias=((5, 2.0),))),
    ):
        assert texts(model, request, monkeypatch, 8)[3] == []
    seen = []
    request = Request(max_new_tokens=12)
    _, _, _, calls = texts(model, request, monkeypatch, 8, on_logits=lambda b, logits: seen.append(b))
    assert calls == [] and len(seen) == 36


def test_long_steps_are_made_one_by_one(monkeypatch):
    """What a user waits for is no longer than SECONDS."""
    model, calls, run_ahead = plain("gpt_oss"), [], Decoder.run_ahead
    monkeypatch.setattr(running, "SECONDS", 1e-7)
    monkeypatch.setattr(Decoder, "run_ahead", lambda *given: calls.append(given[3]) or run_ahead(*given))
    generate(model, PROMPTS[:1], Request(max_new_tokens=12))
    assert calls == [1] * 11


def test_one_slow_step_is_forgotten(monkeypatch):
    model, calls, run_ahead = plain("gpt_oss"), [], Decoder.run_ahead

    def slow(*given):
        calls.append(given[3])
        time.sleep(0.05 if len(calls) == 1 else 0.0)
        return run_ahead(*given)

    monkeypatch.setattr(running, "SECONDS", 0.02)
    monkeypatch.setattr(Decoder, "run_ahead", slow)
    generate(model, PROMPTS[:1], Request(max_new_tokens=30))
    assert calls[:2] == [1, 1] and max(calls) > running.MOST


def test_a_look_that_nothing_is_verified_of_is_one_of_them(monkeypatch):
    model = plain("gpt_oss")
    draft = random_dflash(model, 4)

    class Looking(Fixed):
        def cut(self, proposal):
            return cut(proposal, 1)

    request = Request(max_new_tokens=20)
    wanted = generate(model, PROMPTS, request).tokens
    got = texts(model, request, monkeypatch, 8, draft=draft, controller=Looking(4))
    assert got[0] == wanted and set(got[3]) == {1} and len(got[3]) == 19
    draft.draft.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="step 1: the draft's logits are not finite"):
        generate(model, PROMPTS, request, draft, controller=Looking(4))
