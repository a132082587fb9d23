"""Several rounds in one native call: the tokens, steps and memories of rounds that are made one by one."""

from dataclasses import replace

import pytest
import tiny
import torch
from questions import PROMPT
from test_lossless import random_dflash
from test_lossless_two_bytes import HEADS

from outpace.api import load, load_draft
from outpace.decode import ahead, native_rounds
from outpace.decode.calibrate import calibrate
from outpace.decode.controller import Adaptive, ChainCut, Fixed
from outpace.decode.generate import generate
from outpace.decode.native_rounds import NativeRounds
from outpace.decode.request import Request
from outpace.drafts.base import HostProposal
from outpace.drafts.dflash import DFlashSession
from outpace.drafts.dflash_native import NativeContext
from outpace.drafts.tree import cut
from outpace.kernels import bindings
from outpace.models.load import build, named_tensors
from outpace.ops.sampling import Sampling

pytestmark = pytest.mark.skipif(not bindings.available(), reason=f"no CPU kernels: {bindings.why_not()}")
TEXT = [t % 19 for t in tiny.tokens(300, seed=5).tolist()]
SELECTOR = {"selector_rank": 8, "selector_top_k": 5, "head_dim": 8}
LINEAR = [0.0, *(1 + 0.4 * n for n in range(12))]  # seconds
WINDOW = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}


@pytest.fixture(autouse=True)
def played(monkeypatch):
    """The rounds of every call; a call makes all that it may."""
    calls, play = [], NativeRounds.play

    def watched(self, *given):
        done = play(self, *given)
        calls.append(done)
        return done

    monkeypatch.setattr(NativeRounds, "play", watched)
    for module in (ahead, native_rounds):
        monkeypatch.setattr(module, "SECONDS", 1e3)
    return calls


def rounds_of(calls):
    return sum(len(done.rounds) for done in calls if done is not None)


def one_by_one(monkeypatch, *given, **more):
    with monkeypatch.context() as patch:
        patch.setattr(NativeRounds, "play", lambda *parts: None)
        return generate(*given, **more)


def alike(got, want):
    assert got.tokens == want.tokens
    for part in ("proposed", "accepted", "nodes"):
        assert getattr(got.trace, part) == getattr(want.trace, part), part
    assert len(got.trace.step_seconds) == got.trace.steps and min(got.trace.step_seconds) > 0


def target_of(family):
    model = build(tiny.config(family, head_dim=HEADS[family], vocab_size=19))  # so few that some are right
    tiny.randomise(named_tensors(model), 3)
    return model.eval()


RULES = [("match", 0.0), ("match", 0.9), ("gumbel", 0.9)]


@pytest.mark.parametrize(("rule", "temperature"), RULES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_they_are_rounds_made_one_by_one(family, rule, temperature, monkeypatch, played):
    """Past the windows, of a target's and a draft's 7 and 9 tokens."""
    model = target_of(family)
    draft = random_dflash(model, 5, seed=4, **SELECTOR, **WINDOW)
    request = Request(max_new_tokens=60, rule=rule, sampling=Sampling(temperature=temperature))
    accepted = 0
    for seed in range(3):
        more = {"draft": draft, "controller": Fixed(4 + seed % 2)}
        given = model, [TEXT[seed : 9 + 5 * seed]], request
        want = one_by_one(monkeypatch, *given, **more, rng=torch.Generator().manual_seed(seed))
        got = generate(*given, **more, rng=torch.Generator().manual_seed(seed))
        alike(got, want)
        accepted += sum(map(sum, got.trace.accepted))
    assert rounds_of(played) > 60 and accepted > 0


@pytest.fixture(scope="module")
def embedded():
    model = load()
    return model.target, load_draft(None, model)


@pytest.mark.parametrize(("rule", "temperature"), RULES)
def test_a_draft_that_is_often_right(embedded, rule, temperature, monkeypatch, played):
    """Also where the text ends within a call, by its length or a stop token."""
    target, draft = embedded
    request = Request(max_new_tokens=70, rule=rule, sampling=Sampling(temperature=temperature))
    more = {"draft": draft, "controller": Fixed(12)}

    def both(request):
        want = one_by_one(
            monkeypatch, target, [PROMPT], request, **more, rng=torch.Generator().manual_seed(1)
        )
        got = generate(target, [PROMPT], request, **more, rng=torch.Generator().manual_seed(1))
        alike(got, want)
        return got

    whole = both(request)
    assert 2 < whole.trace.tau < 12 and rounds_of(played) >= whole.trace.steps - 1
    assert any(len(done.rounds) > 2 for done in played if done is not None)
    assert all(done.states is None for done in played[:-1] if done is not None)
    both(replace(request, max_new_tokens=23))
    stop = whole.tokens[0][31]
    ended = both(replace(request, stop=frozenset({stop})))
    assert ended.tokens[0] == whole.tokens[0][: whole.tokens[0].index(stop) + 1]


def test_a_call_ends_in_time(embedded, monkeypatch, played):
    """What a user waits for is no longer than SECONDS, or one round."""
    target, draft = embedded
    given = target, [PROMPT], Request(max_new_tokens=70), draft
    whole = generate(*given, controller=Fixed(12))
    most = max(len(done.rounds) for done in played if done is not None)
    played.clear()
    monkeypatch.setattr(native_rounds, "SECONDS", 1e-9)
    alike(generate(*given, controller=Fixed(12)), whole)
    assert most > 4 and {len(done.rounds) for done in played if done is not None} == {1}
    assert all(done.states is None for done in played[:-1] if done is not None)


def test_programs_are_pointed_to_a_text_by_who_may_run_them(embedded, monkeypatch, played):
    """Else a text of another thread could be read and written instead."""
    target, draft = embedded
    pointed, point_to, passes = [], DFlashSession.point_to, native_rounds.verify_passes

    def watched(self, chain, contexts):
        locks = chain.lock, chain.block.lock, *(context.lock for context in contexts)
        pointed.append(all(lock.locked() for lock in locks))
        point_to(self, chain, contexts)

    def watched_passes(*given):
        pointed.append(target.native_steps.lock.locked())
        return passes(*given)

    monkeypatch.setattr(DFlashSession, "point_to", watched)
    monkeypatch.setattr(native_rounds, "verify_passes", watched_passes)
    generate(target, [PROMPT], Request(max_new_tokens=20), draft, controller=Fixed(12))
    assert len(pointed) >= 2 and all(pointed)


def test_what_they_remember_serves_the_rounds_after(embedded, monkeypatch, played):
    """Calls of one round and of many, in turns with steps in Python."""
    target, draft = embedded
    request = Request(max_new_tokens=90)

    class Restless(Fixed):
        turn = 0

        def width(self, lengths, running=0):
            self.turn += 1
            return (1, 12, 12, 3)[self.turn % 4]

        def rest(self, most):
            return min(most, 2)

    got = generate(target, [PROMPT], request, draft, controller=Restless(12))
    assert got.tokens == generate(target, [PROMPT], request).tokens
    assert rounds_of(played) > 4 and got.trace.tau > 1.5


def costs_of(model, draft, rise):
    costs = calibrate(model, draft, TEXT, contexts=(20,), seconds=1e-6)
    n = len(costs.widths)
    cheap = {"verify": tuple(1 + rise * i for i in range(n)), "draft": (0.0, *[0.5] * (n - 1)), "plain": 1.0}
    beside = dict.fromkeys(("rest", "idle", "show", "wake", "settle"), 0.05)
    return replace(costs, points=tuple(replace(p, **cheap, **beside) for p in costs.points), acceptance=0.8)


@pytest.mark.parametrize("rise", [0.05, 0.2, 0.6])
def test_a_controller_cuts_the_same(embedded, rise, monkeypatch, played):
    """Where it learns of every round before the next, as in Python."""
    target, draft = embedded
    costs, request = costs_of(target, draft, rise), Request(max_new_tokens=150)
    want = one_by_one(monkeypatch, target, [PROMPT], request, draft, controller=Adaptive(costs))
    played.clear()
    monkeypatch.setattr(native_rounds, "MOST", 1)
    for _ in range(2):  # the second time all passes are there
        got = generate(target, [PROMPT], request, draft, controller=Adaptive(costs))
        alike(got, want)
        assert [p[:2] for p in got.trace.predicted] == [p[:2] for p in want.trace.predicted]
    lengths = {n for step in got.trace.nodes for n in step}
    assert rounds_of(played) > 5 and len(lengths) > 2
    assert any(done.offered is not None for done in played if done is not None) or rise < 0.6


@pytest.mark.parametrize("rise", [0.05, 0.6])
def test_a_controller_learns_of_each_round(embedded, rise, monkeypatch):
    target, draft = embedded
    costs, request = costs_of(target, draft, rise), Request(max_new_tokens=150)
    controller, learnt, learn = Adaptive(costs), [], Adaptive.learn

    def watched(self, proposal, path, seconds=None):
        learnt.append((proposal.width, self.verified, sum(map(len, path))))
        return learn(self, proposal, path, seconds)

    monkeypatch.setattr(Adaptive, "learn", watched)
    got = generate(target, [PROMPT], request, draft, controller=controller)
    assert got.tokens == generate(target, [PROMPT], request).tokens
    assert sum(tokens for _, _, tokens in learnt) >= len(got.tokens[0]) - 1
    assert all(tokens <= verified for _, verified, tokens in learnt if verified > 1)
    assert sum(verified > 1 for _, verified, _ in learnt) > 5
    assert len(got.trace.predicted) == len(learnt)


def test_a_controller_remembers_a_round_of_a_call_as_any_other(embedded):
    target, draft = embedded
    costs = costs_of(target, draft, 0.05)
    one, many = Adaptive(costs), Adaptive(costs)
    survival = [0.99**i for i in range(12)]
    offered = HostProposal([list(range(12))], [12], None, [survival], target.device)
    for controller in (one, many):
        controller.begin(12, 1000)
    for turn, kept in enumerate((12, 5, 9, 12, 2)):
        assert one.width([100]) == 12
        n = one.cut(offered).width
        if not turn:
            assert many.width([100]) == 12
        many.was_cut(offered, n, again=turn > 0)
        for controller in (one, many):
            controller.learn(cut(offered, n), [list(range(min(kept, n)))])
        assert many.predicted == one.predicted
        assert vars(many.history) == vars(one.history)


class Deciding(Fixed):
    """Cuts by given numbers."""

    def __init__(self, cut):
        super().__init__(12)
        self.given = cut

    def chain_cut(self):
        return self.given

    def cut(self, proposal):
        worth, cut_to = self.worth(proposal.stated[0]), 1
        for n in range(2, 13):
            if worth[n - 1] > worth[cut_to - 1]:
                cut_to = n
        return cut(proposal, cut_to)

    def worth(self, survival, first=False):
        """Of each number of positions."""
        given, reached, tokens, result = self.given, 1.0, 0.0, []
        for n in range(1, 13):
            reached = min(survival[n - 1] * given.trust[n - 1], reached)
            tokens += reached
            settle = given.settle if first and n > 1 else 0
            result.append(tokens - given.rate * (given.seconds[n] + settle))
        return result


def test_a_cut_has_the_most_worth(embedded, played):
    """At random costs and trust, of the chains that the draft really proposes; and where only the first round
    of a call has to settle."""
    target, draft = embedded
    random, lengths = torch.Generator().manual_seed(7), set()
    settling = [ChainCut(rate, LINEAR, 4.0, [1.0] * 12) for rate in (0.8, 1.2, 1.6)]
    for n in range(2, 13):  # all passes are there then
        generate(target, [PROMPT], Request(max_new_tokens=6), draft, controller=Fixed(n))
    for turn in range(23):
        spread = torch.rand(12, generator=random).double().sort().values
        seconds = [0.0, *(1 + 6 * spread).tolist()]
        trust = [1.0, *(0.2 + torch.rand(11, generator=random)).tolist()]
        given = ChainCut(0.05 + 2 * float(torch.rand((), generator=random)), seconds, 0.3, trust)
        given = given if turn < 20 else settling[turn - 20]
        played.clear()
        generate(target, [PROMPT], Request(max_new_tokens=100), draft, controller=Deciding(given))
        chosen = [
            (made.offered.stated[0], made.verified, i == 0)
            for done in played
            if done is not None
            for i, made in enumerate(done.rounds)
        ]
        for survival, verified, first in chosen:
            worth = Deciding(given).worth(survival, first)
            assert worth[verified - 1] == pytest.approx(max(worth), abs=1e-12), turn
            lengths.add(verified)
        for done in filter(None, played):
            if done.offered is not None:
                worth = Deciding(given).worth(done.offered[0].stated[0], first=not done.rounds)
                assert worth[0] == pytest.approx(max(worth), abs=1e-12), turn
    assert len(lengths) > 4


def test_rounds_that_are_cut_are_those_made_one_by_one(embedded, monkeypatch, played):
    """Many in a call, of other lengths each."""
    target, draft = embedded
    given = ChainCut(0.8, LINEAR, 0.0, [1.0] * 12)
    request = Request(max_new_tokens=120)
    want = one_by_one(monkeypatch, target, [PROMPT], request, draft, controller=Deciding(given))
    for _ in range(2):  # the second time all passes are there
        got = generate(target, [PROMPT], request, draft, controller=Deciding(given))
        alike(got, want)
    lengths = [[made.verified for made in done.rounds] for done in played if done is not None]
    assert any(len(set(of_call)) > 2 for of_call in lengths)


def test_a_draft_without_temperatures_says_how_sure_it_is_too(monkeypatch, played):
    model = target_of("gpt_oss")
    draft = random_dflash(model, 5, seed=4, **SELECTOR)
    costs = costs_of(model, draft, 0.01)
    request = Request(max_new_tokens=60)
    want = one_by_one(monkeypatch, model, [TEXT[:9]], request, draft, controller=Adaptive(costs))
    monkeypatch.setattr(native_rounds, "MOST", 1)
    got = generate(model, [TEXT[:9]], request, draft, controller=Adaptive(costs))
    alike(got, want)
    assert [p[:2] for p in got.trace.predicted] == [p[:2] for p in want.trace.predicted]
    assert rounds_of(played) > 5


def test_numbers_that_are_none_are_named(monkeypatch, played):
    model = target_of("gpt_oss")
    draft = random_dflash(model, 5, seed=4, **SELECTOR)
    request, given = Request(max_new_tokens=40), (model, [TEXT[:9]])
    more = {"draft": draft, "controller": Fixed(5)}
    text = generate(*given, request, **more).tokens[0]
    token = next(t for i, t in enumerate(text) if i > 20 and t not in text[:i] + TEXT[:9])
    kept = model.embed_tokens.weight[token].clone()
    with torch.inference_mode():
        model.embed_tokens.weight[token] = float("nan")
    errors = []
    for how in (generate, lambda *some, **named: one_by_one(monkeypatch, *some, **named)):
        with pytest.raises(
            ValueError, match=r"step \d+: the (target|draft)'s logits are not finite"
        ) as error:
            how(*given, request, **more)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    with torch.inference_mode():
        model.embed_tokens.weight[token] = kept
    assert generate(*given, request, **more).tokens[0] == text


def test_a_reader_who_has_seen_enough_ends_them(embedded, played):
    target, draft = embedded
    pieces = []
    got = generate(
        target,
        [PROMPT],
        Request(max_new_tokens=60),
        draft,
        controller=Fixed(12),
        on_tokens=lambda b, new: pieces.append(new) or len(pieces) == 4,
    )
    assert len(pieces) == 4 and got.tokens[0] == [token for new in pieces for token in new]


@pytest.mark.parametrize(
    "changes",
    [{"rule": "rejection"}, {"rule": "block"}, {"sampling": Sampling(temperature=0.9, top_k=5)}],
)
def test_other_rules_are_left_to_python(embedded, changes, played):
    target, draft = embedded
    request = replace(Request(max_new_tokens=12, sampling=Sampling(temperature=0.9)), **changes)
    generate(target, [PROMPT], request, draft, controller=Fixed(12), rng=torch.Generator().manual_seed(1))
    generate(target, [PROMPT, PROMPT[:40]], Request(max_new_tokens=12), draft, controller=Fixed(12))
    assert not any(played)


def test_programs_that_a_draft_has_dropped_are_run_no_more(embedded, monkeypatch, played):
    """It keeps few, and makes them again."""
    target, draft = embedded
    elsewhere, dropped = draft.begin(1, 400).cache, []

    def drop(b, new):
        programs = draft.draft.native_programs
        for key in [key for key in programs if key[0] is NativeContext]:
            dropped.append(programs.pop(key))
            dropped[-1].rings.point_to(elsewhere.rings)

    monkeypatch.setattr(native_rounds, "MOST", 3)
    given = target, [PROMPT], Request(max_new_tokens=90), draft
    want = one_by_one(monkeypatch, *given, controller=Fixed(12))
    for _ in range(2):
        alike(generate(*given, controller=Fixed(12), on_tokens=drop), want)
    assert len(dropped) > 20 and rounds_of(played) > 5
