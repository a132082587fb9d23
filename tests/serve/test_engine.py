"""Continuous batching: a request has the tokens that autoregressive decoding gives it alone.

Whoever runs beside it, and whatever the drafts say."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from dflash_drafts import random_dflash
from eagle3_drafts import bound_eagle3

from outpace.decode import ahead
from outpace.decode.controller import Fixed
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.dflash import BoundDFlash
from outpace.drafts.lookup import NGram
from outpace.kernels import bindings
from outpace.models.cuda_graphs import GraphTarget
from outpace.models.decoder import Decoder
from outpace.models.load import build, named_tensors
from outpace.ops.sampling import Sampling, generator
from outpace.serve.engine import Engine, EngineConfig, QueueFull
from outpace.serve.metrics import Metrics
from outpace.serve.sequence import Sequence

sys.path.append(str(Path(__file__).parent.parent / "decode"))
from scripted import Scripted
from test_controller_lossless import Dice
from test_run_ahead import Resting
from test_trees import ScriptedTree

HEADS = {"qwen3": 16, "qwen3_moe": 24}  # dims that the kernels take
STOP = frozenset({3, 4})


def target(family="gpt_oss"):
    model = build(tiny.config(family, head_dim=HEADS.get(family, 8)))
    tiny.randomise(named_tensors(model), 3)
    return model.eval()


def request(tokens, temperature=0.0, **more):
    sampling = Sampling(temperature=temperature, **more)
    return Request(
        max_new_tokens=tokens, sampling=sampling, stop=STOP, rule="gumbel" if temperature else "match",
        prefill_chunk=64,
    )  # fmt: skip


def alone(model, prompt, wanted, seed):
    return generate(model, [prompt], wanted, rng=generator(seed)).tokens[0]


class Client:
    """One request as it is sent, and what came back."""

    def __init__(self, prompt, wanted, seed=0, draft=None, width=0):
        self.tokens, self.ends, self.logits = [], [], []
        self.sequence = Sequence(
            prompt=prompt, request=wanted, seed=seed, draft=draft, width=width,
            on_tokens=self.tokens.extend, on_end=self.ends.append,
        )  # fmt: skip


def run(engine, rounds=10_000):
    for _ in range(rounds):
        if not engine.wait(0):
            return
        engine.step()
    raise AssertionError("it does not end")


def wrong_at(share, seed):
    return lambda b, position: random.Random(f"{seed} {position}").random() < share


def drafted_by(kind, model, prompt, answer, number, drafts):
    share, script = (0.2, 0.5, 0.8)[number % 3], ([answer], [prompt])
    match kind:
        case "none":
            return None
        case "ngram":
            return NGram(block_size=4)
        case "dflash" | "eagle3":
            return drafts[kind]
        case "chain":
            return Scripted(*script, wrong_at(share, number), block_size=5, patient=True, ragged=number % 2)
    return ScriptedTree(*script, wrong_at(share, number), block_size=7, patient=True)


def crowd(model, count, seed, drafts):
    """Random requests, some of which begin like others -> clients, and the tokens that each must get."""
    rng, made = random.Random(seed), []
    beginnings = [[rng.randrange(5, 97) for _ in range(n)] for n in (12, 40, 75)]
    for i in range(count):
        prompt = [rng.randrange(5, 97) for _ in range(rng.randint(1, 90))]
        if rng.random() < 0.4:
            prompt = rng.choice(beginnings) + prompt[: rng.randint(1, 20)]
        wanted = request(rng.randint(1, 40), rng.choice([0.0, 0.0, 0.8, 1.3]))
        if rng.random() < 0.2:
            wanted = replace(wanted, sampling=replace(wanted.sampling, repetition_penalty=1.3, top_k=20))
        answer = alone(model, prompt, wanted, i)
        kind = rng.choice(["none", "ngram", "dflash", "eagle3", "chain", "tree"])
        draft = drafted_by(kind, model, prompt, answer, i, drafts)
        made.append((Client(prompt, wanted, i, draft, rng.choice([0, 0, 2, 3])), answer))
    return made


@pytest.mark.parametrize(
    ("family", "count", "dice", "runs"),
    [
        ("gpt_oss", 80, False, None),
        ("gpt_oss", 80, True, None),
        ("llama", 40, True, None),
        ("qwen3_moe", 40, False, None),
        ("gpt_oss", 40, False, GraphTarget),
    ],
)
def test_company_changes_no_token(family, count, dice, runs):
    """They arrive and are cancelled at random, share beginnings, and outnumber the rows."""
    model = target(family)
    neural = {"dflash": BoundDFlash(random_dflash(model), model), "eagle3": bound_eagle3(model)}
    made, rng = crowd(model, count, 7, neural), random.Random(1)
    drafts = [*neural.values(), NGram(block_size=7)]
    config = EngineConfig(max_num_seqs=6, max_model_len=160, prefill_rows=3)
    engine = Engine(runs(model) if runs else model, config, drafts, Dice(3) if dice else None)
    coming, cancelled = list(made), []
    while coming or engine.running or engine.waiting:
        for _ in range(min(rng.randint(0, 3), len(coming))):
            engine.add(coming.pop()[0].sequence)
        engine.step()
        if engine.running and rng.random() < 0.03:
            victim = rng.choice(engine.running)
            victim.cancelled = True
            cancelled.append(victim)
    assert len(cancelled) > 2
    for client, answer in made:
        assert client.ends == [None]
        if client.sequence in cancelled:
            assert client.tokens == answer[: len(client.tokens)]
        else:
            assert client.tokens == answer
    sequences = [client.sequence for client, _ in made]
    assert sum(s.reused for s in sequences) > 3 * count
    assert sum(s.accepted for s in sequences) > count / (3 if dice else 1)
    assert sum(s.drafted for s in sequences) > 1.5 * sum(s.accepted for s in sequences)
    if bindings.available():
        assert model.native_steps


def test_a_growing_chat_is_not_prefilled_again():
    model = target()
    engine = Engine(model, EngineConfig(max_num_seqs=3, max_model_len=200))
    text, before = [7, 8, 9, 10, 11, 12, 13, 14, 15], 0
    for _ in range(3):
        client = Client(text, request(12))
        engine.add(client.sequence)
        run(engine)
        assert client.tokens == alone(model, text, request(12), 0)
        assert client.sequence.reused == before
        before = len(text) + len(client.tokens) - 1
        text = [*text, *client.tokens, 20, 21, 22]
    assert len([held for held in engine.held if held]) == 1


def test_the_same_prompt_again_is_prefilled_at_its_last_token():
    model, prompt = target(), [7, 8, 9, 10, 11, 12, 13, 14, 15]
    engine = Engine(model, EngineConfig(max_num_seqs=2, max_model_len=200))
    for reused in (0, 8):
        client = Client(prompt, request(12))
        engine.add(client.sequence)
        run(engine)
        assert client.tokens == alone(model, prompt, request(12), 0) and client.sequence.reused == reused


def test_one_beginning_is_copied_for_many_while_its_first_still_runs():
    model = target()
    engine = Engine(model, EngineConfig(max_num_seqs=4, max_model_len=200))
    begin = [random.Random(3).randrange(5, 97) for _ in range(30)]
    clients = [Client([*begin, 40 + i, 50 + i], request(25)) for i in range(4)]
    engine.add(clients[0].sequence)
    engine.step()
    for client in clients[1:]:
        engine.add(client.sequence)
    run(engine)
    for client in clients:
        assert client.tokens == alone(model, client.sequence.prompt, request(25), 0)
    assert [client.sequence.reused for client in clients] == [0, 30, 30, 30]


def test_a_long_prompt_does_not_stop_the_others():
    model = target()
    engine = Engine(model, EngineConfig(max_num_seqs=2, max_model_len=800))
    short, long = Client([5, 6], request(60)), Client([7] * 640, request(3))
    engine.add(short.sequence)
    engine.step()
    engine.add(long.sequence)
    before = len(short.tokens)
    for _ in range(5):
        engine.step()
    assert long.sequence.prefilling and len(short.tokens) == before + 5
    run(engine)
    assert long.tokens == alone(model, [7] * 640, request(3), 0)


def test_a_prompt_is_reused_as_far_as_its_draft_has_read_it():
    model, prompt = target(), [*range(20, 60)]
    bound = BoundDFlash(random_dflash(model, head_dim=8), model)
    engine = Engine(model, EngineConfig(max_num_seqs=2, max_model_len=100), [bound])
    (shared,) = engine.shared.values()
    reused = []
    for draft in (None, bound, bound, None):
        client = Client(prompt, request(9), draft=draft)
        engine.add(client.sequence)
        run(engine)
        assert client.tokens == alone(model, prompt, request(9), 0)
        reused.append(client.sequence.reused)
        if draft is not None:
            assert shared.known(client.sequence.row) == client.sequence.cached
    assert reused == [0, 0, len(prompt) - 2, len(prompt) - 1]


class Choosing(Fixed):
    """Requests join with their draft, or without, as `answers` says."""

    def __init__(self, positions, answers):
        super().__init__(positions)
        self.answers, self.asked = answers, []

    def joins(self, running):
        self.asked.append(running)
        return self.answers.pop(0)


def test_requests_join_without_a_draft_that_is_not_used(monkeypatch):
    model, prompt, other = target(), [*range(20, 60)], [*range(30, 50)]
    bound = BoundDFlash(random_dflash(model, head_dim=8), model)
    controller = Choosing(4, [False, False, True])
    engine = Engine(model, EngineConfig(max_num_seqs=3, max_model_len=100), [bound], controller)
    (shared,) = engine.shared.values()

    def sent(*prompts, draft=bound):
        clients = [Client(each, request(9), draft=draft) for each in prompts]
        for client in clients:
            engine.add(client.sequence)
        run(engine)
        assert [c.tokens for c in clients] == [alone(model, each, request(9), 0) for each in prompts]
        return [client.sequence for client in clients]

    first, second = sent(prompt, other)
    assert controller.asked == [2, 2], "those that run then"
    assert first.draft is second.draft is None and not first.drafted + second.drafted
    assert not any(shared.pending) and not any(shared.session.lengths)
    (third,) = sent(prompt)
    assert third.draft is bound and third.drafted and not third.reused, "the draft has yet to see the prompt"
    (lookup,) = sent(prompt, draft=NGram(block_size=4))
    assert lookup.draft and lookup.reused and not controller.answers, "a lookup keeps nothing of the target"
    monkeypatch.setattr(Sequence, "constrained", property(lambda sequence: True))
    (formed,) = sent(other)
    assert formed.draft is bound and len(controller.asked) == 3, "what a grammar forces is proposed"


def test_an_error_ends_those_that_met_it():
    model = target()

    class Broken(NGram):
        def begin(self, batch, length, offset=0, slack=0):
            session = super().begin(batch, length, offset, slack)
            session.propose = lambda *_: 1 / 0
            return session

    engine = Engine(model, EngineConfig(max_num_seqs=3, max_model_len=100), [NGram()])
    bad, later = Client([5, 6, 7], request(9), draft=Broken()), Client([8, 9], request(9))

    class Unready(NGram):
        def begin(self, batch, length, offset=0, slack=0):
            raise MemoryError("no room")

    unready = Client([5, 6, 7], request(9), draft=Unready())
    deaf = Client([6, 7, 8], request(9))
    deaf.sequence.on_tokens = lambda tokens: {}["nobody"]
    for client in (unready, bad, deaf, later):
        engine.add(client.sequence)
    run(engine)
    assert isinstance(bad.ends[0], ZeroDivisionError) and 1 <= len(bad.tokens) <= 2
    assert isinstance(deaf.ends[0], KeyError) and isinstance(unready.ends[0], MemoryError)
    assert later.ends == [None] and later.tokens == alone(model, [8, 9], request(9), 0)


def test_an_error_of_the_target_ends_the_round_and_not_the_engine(monkeypatch):
    model = target()
    engine = Engine(model, EngineConfig(max_num_seqs=3, max_model_len=100))
    first, second = Client([5, 6, 7], request(50)), Client([8, 9], request(9))
    engine.add(first.sequence)
    engine.step()
    with monkeypatch.context() as patch:
        for name in ("forward", "run_ahead"):
            patch.setattr(type(model), name, lambda *_, **__: 1 / 0)
        engine.step()
    assert isinstance(first.ends[0], ZeroDivisionError)
    engine.add(second.sequence)
    run(engine)
    assert second.ends == [None] and second.tokens == alone(model, [8, 9], request(9), 0)


def test_what_is_left_of_sequences_that_were_ended_is_not_reused():
    """Their rows hold the half of what was running, over what an earlier one had left there."""
    model = target()
    engine = Engine(model, EngineConfig(max_num_seqs=1, max_model_len=100))
    first = [*range(20, 60)]
    engine.add(Client(first, request(3)).sequence)
    run(engine)
    other, waiting = Client([*range(60, 90)], request(30)), Client([5], request(3))
    engine.add(other.sequence)
    engine.add(waiting.sequence)
    engine.step()
    engine.end_all(ConnectionError("stop"))
    assert isinstance(other.ends[0], ConnectionError) and isinstance(waiting.ends[0], ConnectionError)
    again = Client(first, request(9))
    engine.add(again.sequence)
    run(engine)
    assert again.sequence.reused == 0 and again.tokens == alone(model, first, request(9), 0)


def test_what_is_too_long_or_too_much_is_refused_with_the_numbers():
    engine = Engine(target(), EngineConfig(max_num_seqs=1, max_model_len=50, max_waiting=2))
    with pytest.raises(ValueError, match=r"45 tokens and up to 6 may follow.* max_model_len is 50"):
        engine.add(Client([5] * 45, request(6)).sequence)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.add(Client([97], request(6)).sequence)
    for _ in range(2):
        engine.add(Client([5] * 44, request(6)).sequence)
    with pytest.raises(QueueFull, match="2 requests"):
        engine.add(Client([5] * 44, request(6)).sequence)
    with pytest.raises(ValueError, match="gumbel"):
        Client([5], replace(request(6, 0.8), rule="match"))
    with pytest.raises(ValueError, match="positions end at"):
        Engine(target(), EngineConfig(max_model_len=10**7))


def test_a_warm_up_builds_programs_and_leaves_no_trace():
    model = target()
    draft = BoundDFlash(random_dflash(model, 3, head_dim=8), model)
    controller = Dice(1)
    engine = Engine(model, EngineConfig(max_num_seqs=2, max_model_len=90), [draft], controller)
    taught = []
    controller.learn = lambda *some: taught.append(some)
    engine.warm_up(draft)
    built = set(draft.draft.native_programs)
    assert not engine.running and not engine.waiting and engine.controller is controller and not taught
    kinds = {getattr(kind, "__name__", None) for kind, *_ in built}
    assert kinds >= {"NativeBlock", "NativeChain", "NativeContext"}
    prompt, wanted = tiny.tokens(1, 12, seed=4)[0].tolist(), request(20)
    client = Client(prompt, wanted, draft=draft)
    engine.add(client.sequence)
    run(engine)
    assert client.tokens == alone(model, prompt, wanted, 0) and taught
    Engine(model, EngineConfig(max_num_seqs=1, max_model_len=1)).warm_up(None)  # no room: nothing to do


def test_who_takes_too_long_is_ended_running_or_waiting():
    model = target()
    engine = Engine(model, EngineConfig(max_num_seqs=1, max_model_len=60, max_seconds=30))
    late, waiting, in_time = (Client([5, 6, 7, i], request(9)) for i in (8, 9, 10))
    for client in (late, waiting, in_time):
        engine.add(client.sequence)
    engine.step()
    assert engine.running == [late.sequence]
    for client in (late, waiting):
        client.sequence.times["arrived"] -= 31
    run(engine)
    for client in (late, waiting):
        assert [str(e) for e in client.ends] == ["a request may take 30 seconds here"]
    assert len(late.tokens) < 9 and not waiting.tokens
    assert in_time.ends == [None] and in_time.tokens == alone(model, [5, 6, 7, 10], request(9), 0)


def test_who_waits_for_nobody_leaves_its_place_in_the_queue():
    """Though no row is free: clients that go away do not keep others out."""
    engine = Engine(target(), EngineConfig(max_num_seqs=1, max_model_len=60, max_waiting=2))
    running, first, second, third = (Client([5, 6, i], request(9)) for i in range(7, 11))
    engine.add(running.sequence)
    engine.step()
    for client in (first, second):
        engine.add(client.sequence)
    with pytest.raises(QueueFull):
        engine.add(third.sequence)
    first.sequence.cancelled = True
    engine.step()
    assert first.ends == [None] and not first.tokens and not running.ends
    engine.add(third.sequence)
    assert list(engine.waiting) == [second.sequence, third.sequence]
    run(engine)
    assert second.tokens and third.tokens


def test_a_sequence_is_counted_before_the_engine_has_seen_that_it_was_cancelled():
    engine = Engine(target(), EngineConfig(max_num_seqs=1, max_model_len=60))
    client, metrics = Client([5, 6, 7], request(9)), Metrics(engine)
    engine.add(client.sequence)
    while len(client.tokens) < 2:
        engine.step()
    assert "ended" not in client.sequence.times
    metrics.ended(client.sequence, "abort")
    assert b'outpace_request_success_total{finished_reason="abort"} 1.0' in metrics.page()


def test_logits_come_with_the_tokens_and_stop_tokens_end_it():
    model, seen = target(), []
    wanted = replace(request(30), stop=frozenset(range(5, 40)))
    engine = Engine(model, EngineConfig(max_num_seqs=2, max_model_len=100), [NGram()])
    client = Client([5, 6, 5, 6, 5], wanted, draft=NGram())
    client.sequence.on_logits = lambda logits: seen.extend(logits.argmax(-1).tolist())
    engine.add(client.sequence)
    run(engine)
    assert client.tokens == alone(model, [5, 6, 5, 6, 5], wanted, 0)
    assert seen[: len(client.tokens)] == client.tokens
    assert torch.is_inference_mode_enabled() is False


@pytest.mark.skipif(not bindings.available(), reason=f"no CPU kernels: {bindings.why_not()}")
@pytest.mark.parametrize("temperatures", [(0, 0, 0, 0), (0.9, 0, 1.2, 0.9)])
@pytest.mark.parametrize("kind", [None, "dflash"])
def test_requests_make_several_steps_in_a_call(kind, temperatures, monkeypatch):
    """Some end within one, by a stop token or their limit; what they leave is reused."""
    monkeypatch.setattr(ahead, "SECONDS", 1e3)
    model, calls, run_ahead = target(), [], Decoder.run_ahead
    draft = BoundDFlash(random_dflash(model), model) if kind else None
    prompts = [[5, 6, 7], [*range(20, 50)], [9] * 12, [8, 11]]
    long = [replace(request(40, temperature), stop=frozenset()) for temperature in temperatures]
    answers = [alone(model, prompt, wanted, 0) for prompt, wanted in zip(prompts, long, strict=True)]
    stop = frozenset({answers[1][13], answers[2][4]})
    wanted = [*long[:1], *(replace(each, stop=stop) for each in long[1:3]), request(3, temperatures[3])]
    answers = [alone(model, prompt, want, 0) for prompt, want in zip(prompts, wanted, strict=True)]

    def counted(self, last, *given):
        done = run_ahead(self, last, *given)
        calls.append(tuple(done.tokens.shape))
        return done

    monkeypatch.setattr(Decoder, "run_ahead", counted)
    engine = Engine(
        model, EngineConfig(max_num_seqs=4, max_model_len=100), [draft] if draft else [], Resting(4)
    )
    clients = [Client(p, want, draft=draft) for p, want in zip(prompts, wanted, strict=True)]
    for client in clients:
        engine.add(client.sequence)
    run(engine)
    assert [client.tokens for client in clients] == answers
    assert {len(answer) for answer in answers} > {3, 40} and max(n for _, n in calls) >= 5
    assert sum(client.sequence.rounds for client in clients) > 2 * len(calls)
    again = Client(prompts[1] + answers[1], request(9))
    engine.add(again.sequence)
    run(engine)
    assert again.sequence.reused == len(prompts[1] + answers[1]) - 1
    assert again.tokens == alone(model, prompts[1] + answers[1], request(9), 0)


@pytest.mark.skipif(not bindings.available(), reason=f"no CPU kernels: {bindings.why_not()}")
def test_a_prompt_or_a_cut_distribution_is_waited_for_one_step(monkeypatch):
    monkeypatch.setattr(ahead, "SECONDS", 1e3)
    model, calls, run_ahead = target(), [], Decoder.run_ahead
    monkeypatch.setattr(Decoder, "run_ahead", lambda *given: calls.append(given[3]) or run_ahead(*given))
    engine = Engine(model, EngineConfig(max_num_seqs=2, max_model_len=200))
    engine.add(Client([5, 6, 7], request(60)).sequence)
    for _ in range(3):  # of the first call it is not known how long a step takes
        engine.step()
    assert calls == [1, 8]
    calls.clear()
    engine.add(Client([*range(5, 90)] * 2, request(20, 0.8, top_k=9)).sequence)  # three chunks, then draws
    while len(engine.running) != 1 or engine.waiting:
        engine.step()
    assert not calls
