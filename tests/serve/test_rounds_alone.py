"""A request that runs alone makes several rounds in one native call, with the tokens of any company."""

import random
from dataclasses import replace

import pytest
import tiny
from dflash_drafts import random_dflash
from test_engine import HEADS, Client, alone, run
from test_engine import request as ending

from outpace.decode.controller import Fixed
from outpace.decode.native_rounds import NativeRounds
from outpace.drafts import native
from outpace.drafts.dflash import BoundDFlash
from outpace.kernels import bindings
from outpace.models.load import build, named_tensors
from outpace.serve.engine import Engine, EngineConfig

pytestmark = pytest.mark.skipif(not bindings.available(), reason=f"no CPU kernels: {bindings.why_not()}")
PROMPT = [6, 7, 8, 9, 10, 6, 11, 12, 13, 6]
WINDOW = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}
CONFIG = EngineConfig(max_num_seqs=3, max_model_len=150)


@pytest.fixture
def played(monkeypatch):
    """Rounds of each call."""
    calls, play = [], NativeRounds.play

    def watched(self, *given):
        self.seconds = 1e-9
        done = play(self, *given)
        calls.append(0 if done is None else len(done.rounds))
        return done

    monkeypatch.setattr(NativeRounds, "play", watched)
    return calls


def request(tokens, temperature=0.0):
    return replace(ending(tokens, temperature), stop=frozenset())


def engine_of(family, **how):
    model = build(tiny.config(family, head_dim=HEADS.get(family, 8), vocab_size=19))
    tiny.randomise(named_tensors(model), 3)
    draft = random_dflash(model.eval(), 5, head_dim=8, selector_rank=8, selector_top_k=5, **WINDOW)
    bound = BoundDFlash(draft, model)
    return model, bound, Engine(model, CONFIG, [bound], **how)


@pytest.mark.parametrize("programs", [64, 3])  # that a draft keeps
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_one_after_the_other_and_together(family, temperature, programs, played, monkeypatch):
    """Some go on where another's text ended; its last states are still to be observed."""
    monkeypatch.setattr(native, "MOST_PROGRAMS", programs)
    model, draft, engine = engine_of(family, controller=Fixed(5))
    rng, texts, accepted = random.Random(5), [PROMPT], 0
    for turn in range(12):
        clients = []
        for _ in range(1 if turn % 3 else 2):
            prompt = rng.choice(texts)[:90] + [rng.randrange(5, 19) for _ in range(rng.randint(1, 9))]
            clients.append((prompt, Client(prompt, request(rng.randint(3, 50), temperature), turn, draft)))
            engine.add(clients[-1][1].sequence)
        run(engine)
        for prompt, client in clients:
            wanted = client.sequence.request
            assert client.tokens == alone(model, prompt, wanted, turn) and client.ends == [None]
            accepted += client.sequence.accepted
            texts.append(prompt + client.tokens)
    assert max(played) > 3 and sum(played) > 50 and accepted > 10
    assert any(client.sequence.reused for _, client in clients) or len(texts) > 12


def test_a_client_who_has_seen_enough(played):
    model, draft, engine = engine_of("gpt_oss", controller=Fixed(5))
    client, pieces = Client(PROMPT, request(60), 0, draft), []
    client.sequence.on_tokens = lambda new: pieces.append(new) or len(pieces) == 3
    engine.add(client.sequence)
    run(engine)
    answer = alone(model, PROMPT, request(60), 0)
    got = [token for new in pieces for token in new]
    assert len(pieces) == 3 and got == answer[: len(got)] and max(played) > 3
    again = Client([*PROMPT, *got, 9], request(20), 0, draft)
    engine.add(again.sequence)
    run(engine)
    assert again.tokens == alone(model, [*PROMPT, *got, 9], request(20), 0)
    assert again.sequence.reused > 2


def test_logits_that_are_none_end_the_request_alone(played):
    model, draft, engine = engine_of("gpt_oss", controller=Fixed(5))
    wanted = alone(model, PROMPT, request(60), 0)
    token = next(t for i, t in enumerate(wanted) if i > 8 and t not in (*PROMPT, *wanted[:i]))
    kept = model.embed_tokens.weight[token].detach().clone()
    model.embed_tokens.weight.data[token] = float("nan")
    client = Client(PROMPT, request(60), 0, draft)
    engine.add(client.sequence)
    run(engine)
    assert "logits are not finite" in str(client.ends[0])
    assert client.tokens == wanted[: len(client.tokens)] and sum(played) > 0
    model.embed_tokens.weight.data[token] = kept
    other = Client(PROMPT, request(60), 0, draft)
    engine.add(other.sequence)
    run(engine)
    assert other.tokens == wanted
