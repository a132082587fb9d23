"""Measuring a cost table: every width as it is run, rests and what follows them, refusals."""

import dataclasses
import time
import warnings

import pytest
import tiny
import torch
from eagle3_drafts import bound_eagle3
from test_lossless import random_dflash

from outpace.decode import calibrate as measuring
from outpace.decode.calibrate import (
    DRAFT,
    LONE,
    PLAIN,
    SETTLE,
    VERIFY,
    WAKE,
    Timings,
    calibrate,
    quick,
    widened,
    width_grid,
)
from outpace.decode.controller import Adaptive
from outpace.decode.costs import Costs, Point, fingerprint
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.decode.trace import Prediction, Trace
from outpace.drafts.base import Proposal
from outpace.drafts.eagle3_decode import TreeShape
from outpace.drafts.lookup import NGram
from outpace.drafts.sampler import Greedy, GumbelCoupled, Sampled
from outpace.drafts.tree import DDTree
from outpace.models.decoder import Decoder

TEXT = tiny.tokens(400, seed=4).tolist()
RESTING = measuring.RESTS * measuring.MOST  # steps without draft tokens in a row


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """The machine that runs these tests may be busy; test_a_busy_machine measures again."""
    monkeypatch.setattr(measuring, "ATTEMPTS", 1)
    monkeypatch.setattr(measuring, "MAX_REPEATS", 4)


def drafts(model):
    return {
        "chain": random_dflash(model, 3),
        "tree": DDTree(random_dflash(model, 3), nodes=5),
        "ngram": NGram(block_size=3),
        "walked": bound_eagle3(model, shape=TreeShape(depth=2)),
    }


@pytest.mark.parametrize("name", ["chain", "tree", "ngram", "walked"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_every_width_is_measured_as_it_is_run(name, family, monkeypatch):
    model, ran, decoding = tiny.target(family), [], []
    draft, forward = drafts(model)[name], type(model).forward

    def decoded(*given, **more):
        decoding.append(True)
        generation = generate(*given, **more)
        decoding.clear()
        return generation

    def watched(self, tokens, cache=None, *, counts=None, tree=None, **more):
        if cache is not None and tokens.shape[1] <= 5 and not decoding:
            assert counts is None or counts == [tokens.shape[1]] * len(tokens)
            ran.append((len(tokens), tokens.shape[1], tree is not None) if counts else "plain")
        return forward(self, tokens, cache, counts=counts, tree=tree, **more)

    monkeypatch.setattr(type(model), "forward", watched)
    monkeypatch.setattr(Decoder, "run_ahead", lambda *given: None)  # as without kernels
    monkeypatch.setattr(measuring, "generate", decoded)
    monkeypatch.setattr(measuring, "STEADY", 4)
    shares = []
    got = calibrate(
        model, draft, TEXT, contexts=(120, 24), batches=(1, 2), seconds=1e-6, on_progress=shares.append
    )
    widths = width_grid(draft.block_size)
    assert got.widths == widths and got.fingerprint == fingerprint(model, draft)
    assert sorted((p.batch, p.context > 120) for p in got.points) == [(b, c) for b in (1, 2) for c in (0, 1)]
    for p in got.points:
        assert list(p.verify) == sorted(p.verify) and p.draft[0] == 0 and p.rest > 0
        assert min(p.draft[1:]) > 0 and p.plain > 0
    turns = 2 * (measuring.MIN_REPEATS + 1)  # of each batch, in two contexts; the first warms up
    assert ran.count("plain") == 2 * turns * RESTING
    rounds = [run for run in ran if run != "plain"]
    for batch in (1, 2):
        for n in widths:
            of_it = [tree for b, width, tree in rounds if (b, width) == (batch, n)]
            assert len(of_it) >= turns * (measuring.ROUNDS if n > 1 else RESTING)
            if name == "tree" and n > 1 and batch == 2:
                assert all(of_it)
    assert shares == sorted(shares) and 0 < shares[0] and shares[-1] <= 1
    assert (got.touched is None) == (family == "qwen3")


def test_a_rest_is_measured_as_it_is_made(monkeypatch):
    """Some steps in one call, after which the draft hears of all of them."""
    model, made = tiny.target("gpt_oss"), []
    draft, run_ahead = random_dflash(model, 3), Decoder.run_ahead

    def watched(self, last, cache, most, stop=(), aux=(), draws=None):
        done = run_ahead(self, last, cache, most, stop, aux, draws)
        made.append((tuple(aux), done.tokens.shape[1]))
        return done

    monkeypatch.setattr(Decoder, "run_ahead", watched)
    costs = calibrate(model, draft, TEXT, contexts=(24,), seconds=1e-6)
    turns = measuring.MIN_REPEATS + 1
    assert made.count(((), measuring.MOST)) >= turns * measuring.RESTS
    assert made.count(((0, 2), measuring.MOST)) >= turns * (measuring.RESTS + 1)
    assert costs.round_seconds(1, 24) > 0 and costs.plain_seconds(24) > 0


@pytest.mark.parametrize("name", ["chain", "tree", "ngram", "walked"])
@pytest.mark.parametrize(
    ("validation", "sampler"),
    [
        ("greedy", Greedy),
        ("match", Greedy),
        ("rejection", Sampled),
        ("block", Sampled),
        ("gumbel", GumbelCoupled),
    ],
)
def test_a_table_is_measured_as_its_rule_decodes(name, validation, sampler, monkeypatch):
    model = tiny.target("qwen3")
    draft, chosen, temperatures = drafts(model)[name], set(), set()
    session, rule_of = type(draft.begin(1, 8)), measuring.acceptance_rule
    propose = session.propose

    def watched(self, last, width, sampler):
        chosen.add(type(sampler))
        return propose(self, last, width, sampler)

    def recorded(request, *more):
        temperatures.add(request.sampling.temperature)
        return rule_of(request, *more)

    monkeypatch.setattr(session, "propose", watched)
    monkeypatch.setattr(measuring, "acceptance_rule", recorded)
    got = calibrate(model, draft, TEXT, contexts=(11,), seconds=1e-6, rule=validation)
    assert chosen == {sampler} and temperatures == {0.0 if validation == "greedy" else 1.0}
    assert got.described["rule"] == validation and got.fingerprint == fingerprint(model, draft, validation)


def test_what_a_controller_takes_is_in_the_rest_of_a_round(monkeypatch):
    """Of each batch by itself: what is done for each row takes longer for more."""

    class Slow(Adaptive):
        def width(self, lengths, running=0):
            time.sleep(0.02 * len(lengths))
            return super().width(lengths)

    monkeypatch.setattr(measuring, "Adaptive", Slow)
    how = {"contexts": (11,), "batches": (1, 4), "seconds": 1e-6}
    got = calibrate(tiny.target("qwen3"), NGram(block_size=3), TEXT, **how)
    assert [p.batch for p in got.points] == [1, 4]
    assert got.rest_seconds(2, 1) > 0.02 and got.rest_seconds(2, 4) > 0.04


def test_what_showing_a_token_takes_is_measured_where_the_draft_is_shown_a_prompt(monkeypatch):
    model, shown = tiny.target("qwen3"), []
    draft = bound_eagle3(model, shape=TreeShape(depth=2))
    session = type(draft.begin(1, 8))

    def slow(self, tokens, aux, counts):
        shown.append(tokens.shape[1])
        time.sleep(0.005 * tokens.shape[1])
        observe(self, tokens, aux, counts)

    observe = session.observe
    monkeypatch.setattr(session, "observe", slow)
    got = calibrate(model, draft, TEXT, contexts=(24,), seconds=1e-6)
    assert 0.005 < got.show_seconds() < 0.025 and max(got.points[0].verify) < 0.06
    assert RESTING in shown  # what rounds of one position left


def test_what_waking_the_draft_takes_is_measured_after_steps_in_which_it_rested(monkeypatch):
    model, draft = tiny.target("qwen3"), NGram(block_size=3)
    session = type(draft.begin(1, 8))
    observe, propose = session.observe, session.propose

    def shown(self, tokens, aux, counts):
        self.missed += tokens.shape[1] == 1  # a step without the draft
        observe(self, tokens, aux, counts)

    def slow(self, *asked):
        missed, self.missed = self.missed, 0
        time.sleep(0.09 if missed >= RESTING else 0.0)
        return propose(self, *asked)

    monkeypatch.setattr(session, "missed", 0, raising=False)
    monkeypatch.setattr(session, "observe", shown)
    monkeypatch.setattr(session, "propose", slow)
    got = calibrate(model, draft, TEXT, contexts=(24,), seconds=1e-6)
    assert 0.06 < got.wake_seconds() < 0.18 and max(got.points[0].draft) < 0.06


def test_what_a_lone_verify_pass_disturbs_is_measured(monkeypatch):
    """A forward takes longer where the one before had another number of positions: once for the pass, once
    for the step after it."""
    model, forward, before = tiny.target("qwen3"), Decoder.forward, [0]

    def slow(self, tokens, *rest, **more):
        other, before[0] = before[0] != tokens.shape[1], tokens.shape[1]
        time.sleep(0.05 if other and "logits" in more else 0.005)
        return forward(self, tokens, *rest, **more)

    monkeypatch.setattr(Decoder, "forward", slow)
    got = calibrate(model, NGram(block_size=3), TEXT, contexts=(24,), seconds=1e-6)
    assert 0.06 < got.settle_seconds() < 0.18 and max(got.points[0].verify) < 0.05


CALM = {1: (2.0, 0.0), 2: (2.4, 1.0), 4: (3.0, 1.2)}  # width: verify and draft


def measured(*, delay=lambda repeat, n: 0.0, scale=lambda repeat: 1.0, repeats=20, cpu=1.0):
    timings = Timings(tuple(CALM), show=[0.25], wall=1.0, cpu=cpu)
    for repeat in range(repeats):
        times = {(PLAIN, 1): [1.5], (WAKE, 2): [7.0], (SETTLE, 2): [2.4 + measuring.MOST * 2.0 + 0.7]}
        for n, (verify, draft) in CALM.items():
            times |= {(VERIFY, n): [verify + delay(repeat, n)], (DRAFT, n): [draft]}
        timings.repeats.append({kind: [scale(repeat) * s for s in v] for kind, v in times.items()})
    return timings, timings.point(batch=1, context=64, rest=0.5)


def test_slow_moments_move_the_level_of_a_table_and_not_its_shape():
    """Each turn has one slow width, another one in the next."""
    timings, result = measured(delay=lambda repeat, n: 9.0 if (repeat + n.bit_length()) % 3 == 0 else 0.0)
    slow = result.verify[0] / 2.0
    assert slow > 1
    assert result.verify == pytest.approx([slow * verify for verify, _ in CALM.values()])
    assert result.draft == pytest.approx([0.0, slow * 1.0, slow * 1.2])
    assert result.plain == pytest.approx(slow * 1.5) and result.show == 0.25
    took = sum(sum(s) for times in timings.repeats for (kind, _), s in times.items() if kind not in LONE)
    assert 20 * (sum(result.verify) + sum(result.draft) + result.plain) == pytest.approx(took)


def test_minutes_of_which_some_are_slow_leave_the_shape_to_the_digit():
    """However much they differ, and in few turns: a turn has all widths."""
    paces = [1.0, 2.7, 1.3, 0.8, 4.0]
    _, result = measured(scale=lambda repeat: paces[repeat], repeats=5)
    mean = sum(paces) / 5
    assert result.verify == pytest.approx([mean * verify for verify, _ in CALM.values()])
    assert result.draft == pytest.approx([0.0, mean * 1.0, mean * 1.2])
    assert result.plain == pytest.approx(mean * 1.5) and result.spread == pytest.approx(0)
    assert result.wake == pytest.approx(mean * (7.0 - 1.0) - RESTING * 0.25)
    assert result.settle == pytest.approx(mean * 0.7)


def test_timed_steps_are_scaled_to_those_of_a_text():
    """Drafting ones take a quarter more there, plain ones a tenth less, and a lone one twice as much."""
    point = Point(
        batch=1, context=64, verify=(1.0, 1.5, 1.75), draft=(0.0, 0.5, 0.5), rest=0.3, plain=0.8, show=0.1
    )
    costs = Costs(fingerprint="", widths=(1, 2, 3), points=(point,), acceptance=0.5, described={})
    turns = []
    for slow in (1.0, 1.0, 9.0):  # the last text met something else
        drafting, resting = Trace(), Trace()
        drafting.nodes = [[3], [3], [2], [1]]
        drafting.accepted, drafting.proposed = [[0]] * 4, [[2], [2], [1], [0]]
        drafting.seconds["rest"] = 4 * 0.4  # longer than was known
        drafting.predicted = [
            Prediction(1, 2.55, 1, 99.0),  # the first one warms up
            Prediction(1, 2.55, 1, slow * (1.25 * 2.25 + 0.4)),
            Prediction(1, 2.3, 1, slow * (1.25 * 2.0 + 0.4)),
            Prediction(1, 1.8, 1, slow * (2.0 + 0.5 + 0.4)),
        ]
        resting.step_seconds = [50.0, *[slow * (0.9 + 0.05)] * 5]
        resting.accepted, resting.proposed = [[0]] * 6, [[0]] * 6
        resting.seconds["draft"] = 6 * 0.05
        turns.append((drafting, resting))
    far = dataclasses.replace(point, context=640, verify=(2.0, 3.0, 3.5), plain=1.6)
    costs = dataclasses.replace(costs, points=(point, far))
    longer = measuring._as_decoded(far, costs, turns)
    assert longer.verify == pytest.approx((1.8, 3.75, 4.375)) and longer.plain == pytest.approx(1.44)
    got = measuring._as_decoded(point, costs, turns)
    assert (got.rest, got.idle, got.plain) == pytest.approx((0.4, 0.05, 0.9 * 0.8))
    assert got.verify == pytest.approx((0.9, 1.25 * 1.5, 1.25 * 1.75))
    assert got.draft == pytest.approx((0.0, 1.25 * 0.5, 1.25 * 0.5)) and got.lone == pytest.approx(2.0)
    assert got.show == 0.1
    scaled = dataclasses.replace(costs, points=(got, longer))
    assert scaled.lone_seconds(64) == pytest.approx(2.0) and costs.lone_seconds(64) == 1.0
    assert costs.lone_seconds(640) == 2.0


def test_a_measurement_beside_other_processes_is_busy():
    """Either the timings spread, or the process waited for the processor all the time."""
    assert not measured()[1].busy and not measured(cpu=0.9)[1].busy
    assert measured(cpu=0.7)[1].busy
    assert measured(delay=lambda repeat, n: 9.0 * ((repeat + n.bit_length()) % 2))[1].busy
    timings, _ = measured(cpu=0.0)
    assert not timings.point(
        batch=1, context=64, rest=0.5, on_cpu=False
    ).busy  # the processor waits for a GPU


@pytest.mark.parametrize(("busy", "attempts"), [(0, 1), (1, 2), (2, 3), (3, 3)])
def test_a_busy_machine_is_measured_again_and_reported(busy, attempts, monkeypatch):
    """`busy` measurements during which another process has the processor."""
    points, point = [], Timings.point

    def counted(self, *args, **options):
        self.cpu = 0.3 * self.wall if len(points) < busy else self.wall
        points.append(dataclasses.replace(point(self, *args, **options), spread=0.0))
        return points[-1]

    monkeypatch.setattr(Timings, "point", counted)
    monkeypatch.setattr(measuring, "ATTEMPTS", 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        costs = calibrate(tiny.target("qwen3"), NGram(block_size=3), TEXT, contexts=(11,), seconds=1e-6)
    assert len(points) == attempts
    assert costs.busy == (busy == 3) == bool(caught)
    if caught:
        assert issubclass(caught[0].category, RuntimeWarning) and caught[0].filename == __file__
        assert "ran 30% of the time" in str(caught[0].message)


def test_the_processor_time_of_a_measurement_is_its_own(monkeypatch):
    """A process that sleeps half of the time looks like one that others displace."""
    model, forward = tiny.target("qwen3"), type(tiny.target("qwen3")).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, *a, **k: time.sleep(0.01) or forward(self, *a, **k)
    )
    with pytest.warns(RuntimeWarning, match="measure again on an idle machine"):
        costs = calibrate(model, NGram(block_size=3), TEXT, contexts=(11,), seconds=1e-6)
    assert costs.busy and costs.points[0].cpu < 0.7


def test_a_proposal_is_filled_up_with_text():
    ahead = torch.tensor([[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]])
    short = Proposal(torch.tensor([[5, 1, 2], [15, 3, 0]]), [3, 2])
    got = widened(short, ahead, 4)
    assert got.tokens.tolist() == [[5, 1, 2, 8], [15, 3, 17, 18]] and got.counts == [4, 4]
    tree = Proposal(short.tokens, [3, 2], torch.tensor([[0, 0, 0], [0, 0, 2]]))
    assert widened(tree, ahead, 4).parents.tolist() == [[0, 0, 0, 2], [0, 0, 1, 2]]
    assert widened(short, ahead, 4).parents is None


def test_a_controller_with_a_measured_table_says_what_plain_says():
    model = tiny.target("gpt_oss")
    draft = random_dflash(model, 4)
    controller = Adaptive(calibrate(model, draft, TEXT, contexts=(20,), seconds=0.01))
    prompts, request = [TEXT[:9], TEXT[40:60]], Request(max_new_tokens=40)
    got = generate(model, prompts, request, draft, controller=controller)
    assert got.tokens == generate(model, prompts, request, draft).tokens
    trace = got.trace
    assert len(trace.predicted) <= len(trace.accepted)
    assert sum(f.tokens_measured for f in trace.predicted) == sum(a + 1 for a in trace.accept_lens)
    assert all(f.tokens > 0 and f.seconds > 0 and f.seconds_taken > 0 for f in trace.predicted)
    measured = sum(f.tokens_measured for f in trace.predicted) / sum(f.seconds_taken for f in trace.predicted)
    assert trace.prediction_error == pytest.approx(trace.predicted_tokens_per_s / measured - 1)


def share_accepted(model, draft, prompts, stop):
    accepted = rejected = 0
    for prompt in prompts:
        trace = generate(model, [prompt], Request(max_new_tokens=48, stop=stop), draft).trace
        for (a,), (p,) in zip(trace.accepted, trace.proposed, strict=True):
            accepted, rejected = accepted + a, rejected + (a < p)
    return accepted / (accepted + rejected) if accepted + rejected else 0.0


def test_the_acceptance_rate_is_of_several_places_or_of_the_prompts():
    model, draft = tiny.target("gpt_oss"), NGram(block_size=3)
    stop = frozenset(model.config.eos_token_ids)
    places = [[*TEXT, *TEXT][begin : begin + 20] for begin in range(0, 400, 25)]
    prompts = [TEXT[7 * i : 7 * i + 9] for i in range(5)]
    given = {"contexts": (20,), "seconds": 8.0}
    of_text = calibrate(model, draft, TEXT, **given).acceptance
    # the first place is decoded to measure time, too: beyond a stop token
    assert of_text == pytest.approx(share_accepted(model, draft, places, stop), abs=0.05)
    of_prompts = calibrate(model, draft, TEXT, **given, prompts=prompts).acceptance
    assert of_prompts == share_accepted(model, draft, prompts, stop)
    assert abs(of_text - of_prompts) > 0.01


def test_acceptance_is_measured_no_longer_than_there_is_time(monkeypatch):
    model, draft, asked = tiny.target("gpt_oss"), NGram(block_size=3), []

    def counted(target, prompts, *rest, **more):
        asked.append(prompts[0])
        return generate(target, prompts, *rest, **more)

    monkeypatch.setattr(measuring, "generate", counted)
    calibrate(model, draft, TEXT, contexts=(20,), seconds=1e-9, prompts=[TEXT[i : i + 9] for i in range(50)])
    assert asked.count(TEXT[:9]) == 1 and TEXT[1:10] not in asked


def test_quick_is_a_time():
    model = tiny.target("qwen3")
    assert 0 < quick(model, NGram(block_size=3)) < 60


def test_quick_stops_where_it_knows_enough(monkeypatch):
    model, ran = tiny.target("qwen3"), []
    forward = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, t, *a, **k: ran.append(t.shape[1]) or forward(self, t, *a, **k)
    )
    assert quick(model, NGram(block_size=16), enough=1e-9) > 1e-9 and ran == [1, 1]
    quick(model, NGram(block_size=16))
    assert ran == [1, 1, 1, 1, 32, 32]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contexts": ()}, "at least 1 of each"),
        ({"contexts": (0,)}, "at least 1 of each"),
        ({"batches": (0, 2)}, "at least 1 of each"),
        ({"contexts": (1000,)}, "too few for a context of 1000"),
        ({"contexts": (135_150,)}, "positions end at"),
        ({"rule": "typical"}, "no rule 'typical' to measure; known: greedy, match"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, message):
    model = tiny.target("llama")
    with pytest.raises(ValueError, match=message):
        calibrate(model, NGram(block_size=3), TEXT, **({"contexts": (8,)} | changes))
