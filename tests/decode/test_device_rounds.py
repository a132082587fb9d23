"""Rounds that stay on the device: the loop's tokens, no wait for the host, its reading a round late."""

from collections import Counter

import pytest
import tiny
import torch
from eagle3_drafts import bound_eagle3
from no_host import GPU, NoHost, host_watched
from simulated import table
from test_lossless import NEW, PROMPTS, answers, random_dflash
from test_lossless_parts import PARTS

import outpace
from outpace.decode.acceptance import Match
from outpace.decode.controller import Adaptive, Fixed
from outpace.decode.device_rounds import GraphRounds, device_rounds
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.decode.round import Choice, Round
from outpace.drafts.eagle3_decode import TreeShape
from outpace.drafts.lookup import NGram
from outpace.models.cuda_graphs import GraphTarget, reruns
from outpace.models.load import build, named_tensors
from outpace.ops.sampling import Sampling
from outpace.tasks.prompts import problem_prompts
from outpace.text.harmony import HarmonyTokens

__all__ = ["host_watched"]  # a fixture

KINDS = {
    "plain": {},
    "window": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9},
    **{name: changes for name, changes in PARTS.items() if name != "lean"},
}


EAGLE3 = {
    "EAGLE-3": {"shape": TreeShape(depth=3)},
    "EAGLE-3, window": {"shape": TreeShape(depth=5), "sliding_window": 5, "norm_output": True},
    "EAGLE-3, two layers": {"num_layers": 2, "sliding_window": 6, "fc_norm": True, "own_embedding": True},
}


def lucky(model, family, block_size=4, **changes):
    """A draft that says the target's most frequent tokens alone: usually wrong, but not always."""
    if "selector_top_k" in changes:
        changes = changes | {"selector_top_k": 2}
    return of_frequent_words(random_dflash(model, block_size, draft_vocab_size=3, **changes), family)


def of_frequent_words(bound, family):
    counts = Counter(token for row in answers(family, True, 3) for token in row)
    words = sorted(token for token, _ in counts.most_common(3))
    n = len(bound.draft.d2t)
    bound.draft.d2t.copy_(torch.tensor([words[3 * i // n] for i in range(n)]) - torch.arange(n))
    return bound


def draft_of(kind, model, family):
    if kind == "none":
        return None
    if kind in EAGLE3:
        return of_frequent_words(bound_eagle3(model, **EAGLE3[kind]), family)
    return lucky(model, family, **KINDS[kind])


# nothing is cut; and all but three tokens or those below a share, at a lower temperature
HOT = Sampling(temperature=1.0), Sampling(temperature=0.6, top_k=3, top_p=0.9, min_p=0.02)
DRAWN = [
    (family, kind, how)
    for family, kind in (("gpt_oss", "DFlash 2"), ("llama", "plain"), ("qwen3", "EAGLE-3"), ("qwen3", "none"))
    for how in HOT
]


def request(**changes):
    return Request(max_new_tokens=NEW, limits=(NEW, NEW - 9, NEW - 4), prefill_chunk=7, **changes)


def alike(mine, theirs):
    assert mine.tokens == theirs.tokens
    assert mine.trace.accepted == theirs.trace.accepted
    assert mine.trace.proposed == theirs.trace.proposed


SHAPES = [(family, kind, False) for family in tiny.FAMILIES for kind in [*KINDS, "EAGLE-3", "none"]]
SHAPES += [("gpt_oss", kind, False) for kind in [*EAGLE3][1:]]
SHAPES += [("gpt_oss", "DFlash 2", True), ("gpt_oss", "none", True), ("llama", "window", True)]


@pytest.mark.parametrize(("family", "kind", "deterministic"), SHAPES)
def test_rounds_have_the_tokens_and_the_steps_of_the_loop(family, kind, deterministic):
    """Ragged rows past the windows of 7 that end one after the other, in two generations over one cache."""
    model = tiny.target(family, True)
    draft = draft_of(kind, model, family)
    target = GraphTarget(model, deterministic=deterministic)
    for _ in range(2):
        mine = generate(target, PROMPTS, request(), draft)
        alike(mine, generate(model, PROMPTS, request(), draft))
        known = zip(answers(family, True, 3), request().limits, strict=True)
        assert mine.tokens == [row[:n] for row, n in known]
        captured = target.captured
    assert len(target.free[0].rounds[draft].captured) == 1 and target.captured == captured


@pytest.mark.parametrize(("family", "kind", "how"), DRAWN)
def test_drawn_rounds_have_the_tokens_and_the_steps_of_the_loop(family, kind, how):
    """The noise is that of a token's place, wherever it is added."""
    model = tiny.target(family, True)
    draft, target, taken = draft_of(kind, model, family), GraphTarget(model), []
    for seed, streams in ((1, ()), (2, (5, 0, 9))):
        drawn = request(sampling=how, rule="gumbel", streams=streams)
        texts = [
            generate(some, PROMPTS, drawn, draft, rng=torch.Generator().manual_seed(seed))
            for some in (target, model)
        ]
        alike(*texts)
        alone = generate(model, PROMPTS, drawn, rng=torch.Generator().manual_seed(seed))
        assert texts[0].tokens == alone.tokens
        taken += texts[0].trace.accept_lens
    rounds = target.free[0].rounds[draft]
    assert [choice.target for _, choice in rounds.captured] == [how]
    generate(target, PROMPTS, request(), draft)
    assert [choice is None for _, choice in rounds.captured] == [False, True]
    assert draft is None or (0 in taken and max(taken) > 0)


def test_many_temperatures_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("outpace.decode.device_rounds.MOST_KEPT", 3)
    model = tiny.target("qwen3", True)
    target = GraphTarget(model)
    for temperature in (0.5, 0.6, 0.7, 0.8, 0.5):
        drawn = request(sampling=Sampling(temperature=temperature), rule="gumbel")
        texts = [
            generate(some, PROMPTS, drawn, rng=torch.Generator().manual_seed(3)) for some in (target, model)
        ]
        alike(*texts)
    kept = target.free[0].rounds[None].captured
    assert [choice.target.temperature for _, choice in kept] == [0.7, 0.8, 0.5]


def test_drafts_are_wrong_and_right():
    taken = Counter()
    for family in tiny.FAMILIES:
        model = tiny.target(family, True)
        for kind in [*KINDS, "EAGLE-3"]:
            draft = draft_of(kind, model, family)
            taken.update(generate(GraphTarget(model), PROMPTS, request(), draft).trace.accept_lens)
    assert taken[0] > taken[1] > 0 and sum(taken[n] for n in (2, 3)) > 0


class Alternating(Fixed):
    """Any length, and none: a draft that rests observes all the same."""

    def width(self, lengths, running=0):
        self.turn = getattr(self, "turn", -1) + 1
        return (4, 1, 2, 1, 1, 3)[self.turn % 6]


@pytest.mark.parametrize("kind", ["DFlash 2", "EAGLE-3"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_a_controller_may_choose_the_length_of_every_round(family, kind):
    model = tiny.target(family, True)
    draft, target = draft_of(kind, model, family), GraphTarget(model)
    mine = generate(target, PROMPTS, request(), draft, controller=Alternating(4))
    alike(mine, generate(model, PROMPTS, request(), draft, controller=Alternating(4)))
    assert {row[0] for row in mine.trace.proposed} == {0, 1, 2, 3}


def test_a_stop_token_ends_a_row():
    model = tiny.target("gpt_oss", True)
    draft, known = lucky(model, "gpt_oss"), answers("gpt_oss", True, 3)
    stop = frozenset({known[0][11], known[1][3]})
    target = GraphTarget(model)
    mine = generate(target, PROMPTS, request(stop=stop), draft)
    alike(mine, generate(model, PROMPTS, request(stop=stop), draft))
    assert [row[-1] in stop for row in mine.tokens].count(True) >= 2


def test_who_reads_may_end_a_row():
    model = tiny.target("llama", True)
    draft, seen = lucky(model, "llama"), []

    def on_tokens(row, tokens):
        seen.append(row)
        return row == 1 and seen.count(1) == 3

    mine = generate(GraphTarget(model), PROMPTS, request(), draft, on_tokens=on_tokens)
    known = answers("llama", True, 3)
    assert mine.tokens[0] == known[0] and mine.tokens[2] == known[2][: NEW - 4]
    assert seen.count(1) == 3 and mine.tokens[1] == known[1][: len(mine.tokens[1])]


def test_the_host_reads_a_round_while_the_next_one_runs():
    events = []

    def capture(run):
        out, replay = reruns(run)
        return out, lambda: (events.append("round"), replay())

    model = tiny.target("gpt_oss", True)
    draft = lucky(model, "gpt_oss")
    alone = Request(max_new_tokens=NEW)

    def on_tokens(row, tokens):
        events.append("read")

    generate(GraphTarget(model, capture=capture), PROMPTS[:1], alone, draft, on_tokens=on_tokens)
    assert events[:3] == ["round", "read", "round"], "the prompt in one step, its token, the first round"
    assert events[3:] == ["round", "read"] * (len(events) // 2 - 1) and len(events) > 20


@pytest.mark.parametrize("where", ["target", "draft"])
def test_damaged_logits_are_an_error_that_names_the_model(where):
    model = build(tiny.config("gpt_oss", window=True))
    tiny.randomise(named_tensors(model), 0)
    draft = random_dflash(model)
    target, seen = GraphTarget(model.eval()), []

    def on_tokens(row, tokens):
        seen.append(tokens)
        weights = model.norm.weight if where == "target" else draft.draft.norm.weight
        if len(seen) == 3:
            weights.data.fill_(torch.nan)

    with pytest.raises(ValueError, match=f"step [34]: the {where}'s logits are not finite"):
        generate(target, PROMPTS[:1], Request(max_new_tokens=NEW), draft, on_tokens=on_tokens)


def test_what_needs_the_host_is_decoded_by_the_loop():
    model = tiny.target("gpt_oss", True)
    target, draft = GraphTarget(model), random_dflash(model)
    drawn, tree = Sampling(temperature=1.0), TreeShape(depth=3, branch=2, nodes=6)
    at_once = bound_eagle3(model, TreeShape(depth=3), parallel=True)
    for some in (NGram(block_size=4), bound_eagle3(model, tree), at_once):
        assert device_rounds(target, target.make_cache(1, 40), some, request()) is None
    for some, how in (
        (NGram(block_size=4), Sampling()),
        (draft, drawn),
        (None, Sampling(presence_penalty=1)),
        (draft, Sampling(logit_bias=((3, 1.0),))),
    ):
        generate(target, PROMPTS, request(sampling=how), some, rng=torch.Generator().manual_seed(1))
        assert not target.free[0].rounds
    for how in (Sampling(temperature=1.0, repetition_penalty=1.1), Sampling(temperature=1.0)):
        rule = "gumbel" if how.penalises else "rejection"
        drawn = request(sampling=how, rule=rule)
        generate(target, PROMPTS, drawn, draft, rng=torch.Generator().manual_seed(1))
        assert not target.free[0].rounds
    generate(target, PROMPTS, request(), draft, on_logits=lambda row, logits: None)
    assert not target.free[0].rounds


class Listening(Alternating):
    """Writes down what it was asked and heard."""

    def __init__(self, positions):
        super().__init__(positions)
        self.events = []

    def width(self, lengths, running=0):
        n = super().width(lengths)
        self.events.append(("asked", n, list(lengths)))
        return n

    def learn_chain(self, n, kept):
        self.events.append(("heard", n, list(kept)))


def test_a_controller_hears_of_every_round_once_and_a_round_late():
    model = tiny.target("gpt_oss", True)
    target, listening = GraphTarget(model), Listening(4)
    done = generate(target, PROMPTS, request(), lucky(model, "gpt_oss"), controller=listening)
    asked = [n for kind, n, _ in listening.events if kind == "asked"]
    heard = [(n, kept) for kind, n, kept in listening.events if kind == "heard"]
    order = [kind for kind, *_ in listening.events]
    assert order == ["asked", *["asked", "heard"] * len(heard)]
    assert [n for n, _ in heard] == asked[:-1]
    assert [kept for _, kept in heard] == [[n + 1 for n in row if n >= 0] for row in done.trace.accepted]
    before = [lengths for kind, _, lengths in listening.events if kind == "asked"][1:]
    lengths = [len(prompt) for prompt in PROMPTS]
    for row, known in zip(done.trace.accepted, before, strict=True):
        assert known == lengths
        lengths = [size + n + 1 for size, n in zip(lengths, row, strict=True)]


FREE = table([1e-3] * 4, [0.0] * 4, batch=3)
DEAR = table([1e-3, 8e-3, 9e-3, 9e-3], [1e-3] * 4, acceptance=0.01, batch=3)


@pytest.mark.parametrize(("costs", "most"), [(FREE, 4), (DEAR, 1)])
def test_an_adaptive_controller_chooses_the_length_of_rounds(costs, most):
    model = tiny.target("gpt_oss", True)
    target, draft = GraphTarget(model), lucky(model, "gpt_oss")
    mine = generate(target, PROMPTS, request(), draft, controller=Adaptive(costs))
    known = zip(answers("gpt_oss", True, 3), request().limits, strict=True)
    assert mine.tokens == [row[:n] for row, n in known] and target.free[0].rounds
    chosen = Counter(max(row) + 1 for row in mine.trace.proposed)
    assert chosen.most_common(1)[0][0] == most, chosen


def of_parts(model, kind, batch=2, how=None):
    """A round of every position over buffers that no generation has filled."""
    target = GraphTarget(model)
    draft = bound_eagle3(model) if kind == "EAGLE-3" else None
    if kind in KINDS:
        draft = random_dflash(model, **KINDS[kind])
    if draft is not None:
        draft.draft.to(model.device)
        draft.draft.inv = draft.draft.inv.to(model.device)  # as `to` does it for a device with contents
    cache = target.make_cache(batch, 60, slack=4)
    rounds = GraphRounds(target, cache, draft)
    rounds.state.left.fill_(9)
    choice = None if how is None else Choice(how, how)
    return Round(rounds.step, rounds.draft, rounds.state, rounds.block, target.width(rounds.block), choice)


ANY = [(family, kind, None) for family in tiny.FAMILIES for kind in [*KINDS, "EAGLE-3", "none"]]


@pytest.mark.parametrize(("family", "kind", "how"), ANY + DRAWN)
def test_a_round_waits_for_nobody(host_watched, family, kind, how):
    with GPU:
        model = build(tiny.config(family, window=True))
    run = of_parts(model.to(GPU).eval(), kind, how=how)
    host_watched()
    with NoHost():
        out = run()
    assert out.numbers.device == GPU and out.numbers.shape == (2, 2 * run.n + 2)


@pytest.mark.parametrize(
    ("family", "kind", "how"),
    [
        ("gpt_oss", "DFlash 2", None),
        ("llama", "DSpark", None),
        ("qwen3", "EAGLE-3", HOT[1]),
        ("qwen3", "none", None),
    ],
)
@torch.no_grad()
def test_a_round_is_one_graph_for_a_compiler(family, kind, how):
    model = tiny.target(family, True)
    plain = [of_parts(model, kind, how=how) for _ in range(2)]
    compiled = torch.compile(plain[1], fullgraph=True, backend="aot_eager")
    for _ in range(3):
        assert torch.equal(plain[0]().numbers, compiled().numbers)
    for name, buffer in plain[0].state.named_buffers():
        torch.testing.assert_close(buffer, plain[1].state.get_buffer(name), rtol=0, atol=1e-3)


def test_the_embedded_model_writes_its_text_in_rounds():
    model = outpace.load()
    draft = outpace.load_draft("dflash", model)
    # the draft is seldom right behind the ends of these answers
    prompts = problem_prompts(HarmonyTokens(model.tokenizer), 2, 24, 128)
    wanted = Request(max_new_tokens=40)
    mine = generate(GraphTarget(model.target), prompts, wanted, draft)
    alike(mine, generate(model.target, prompts, wanted, draft))
    assert 0.05 < mine.trace.accept_rate < 0.95


@torch.no_grad()
def test_a_row_that_has_all_its_tokens_stays_as_it_is():
    run = of_parts(tiny.target("gpt_oss", True), "plain", batch=3)
    state = run.state
    state.begin(torch.tensor([7, 8, 9]), [0, 0, 0], [1, 0, 30], Match(Sampling(), PROMPTS, None))
    for written in range(3):
        before = state.starts.clone()
        run()
        assert state.left[:2].tolist() == [0, 0] and state.left[2] == 30 - state.starts[2]
        assert state.last[1] == 8 and not state.starts[1] and not state.kept[1]
        assert (state.starts > before).tolist() == [not written, False, True]
