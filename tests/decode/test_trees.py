"""Trees in the decoding loop: lossless at temperature 0, the target's distribution above."""

from dataclasses import dataclass

import pytest
import tiny
import torch
import trees
from scripted import Forgetful, Scripted, ScriptedSession
from test_lossless import NEW, PROMPTS, answers, half, random_dflash
from test_rules import PROMPT, WAYS, V, biased_bonus, exact, honest, pairs, small, surprise

from outpace.decode import acceptance as rules
from outpace.decode.controller import Fixed
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.base import Proposal
from outpace.drafts.tree import DDTree


@dataclass(frozen=True)
class ScriptedTree(Scripted):
    """Proposes a fresh random tree for every row and round. One of its paths knows the answers, and is wrong
    where `wrong` reports it; all other nodes are wrong. `counts` (round, row) -> positions."""

    block_size: int = 9
    shape: str = "any"

    def begin(self, batch, length, offset=0, slack=0):
        return ScriptedTreeSession(self)

    def columns(self, step, row):
        return 1 + (step * 5 + row * 3) % self.block_size if self.ragged else self.block_size


class ScriptedTreeSession(ScriptedSession):
    aux = None

    def observe(self, tokens, aux, counts):
        """Keeps the states of every verified token, as a draft that reads them would."""
        if aux is not None:
            self.aux = self.aux or [[] for _ in self.draft.prompts]
            for i, (b, count) in enumerate(zip(self.rows, counts, strict=True)):
                self.aux[b] += aux[:, i, :count].unbind(1)
        super().observe(tokens, None, counts)

    def propose(self, last, most, sampler):
        draft, rows = self.draft, []
        self.round += 1
        assert draft.patient or most == draft.block_size
        for b, token in zip(self.rows, last.tolist(), strict=True):
            prompt = draft.prompts[b]
            items = [*self.seen[b][len(prompt) :], token]
            # what was observed is exactly the verified text, in order
            assert self.seen[b][: len(prompt)] == prompt
            assert draft.patient or all(x == y for x, y in zip(items, draft.answers[b], strict=False))
            count = min(draft.columns(self.round, b), most)
            parents = trees.parents_of(draft.shape, count, self.round * 7 + b)
            rows.append((parents, self.guesses(b, items, parents)))
        counts, N = [len(parents) for parents, _ in rows], max(len(parents) for parents, _ in rows)
        tokens = torch.tensor([guesses + [0] * (N - len(guesses)) for _, guesses in rows])
        return Proposal(tokens, counts, trees.padded([parents for parents, _ in rows], N))

    def guesses(self, b, message, parents):
        draft, paths = self.draft, trees.leaf_paths(parents, len(parents))
        known = max(paths, key=lambda path: (len(path), (path[-1] * 7 + self.round) % 5))
        ahead = draft.answers[b][len(message) :]
        items = [message[-1]]
        for column in range(1, len(parents)):
            depth = len(trees.ancestors(parents, column)) - 1
            right = ahead[depth - 1] if depth <= len(ahead) else 0
            sure = column in known and not draft.wrong(b, len(message) + depth - 1)
            items.append(right if sure else (right + column) % tiny.VOCAB)  # position < VOCAB: never right
        return items


def scripted(family, window, batch, shape="any", size=9, ragged=False, wrong=half, **more):
    known, prompts = answers(family, window, batch), PROMPTS[:batch]
    return ScriptedTree(known, prompts, wrong, size, ragged, shape=shape, **more), known, prompts


SHAPES = [("any", 9, False), ("wide", 14, True), ("deep", 11, True), ("deep", 30, False), ("any", 80, False)]


@pytest.mark.parametrize(("shape", "size", "ragged"), SHAPES)
@pytest.mark.parametrize(("family", "window"), [("gpt_oss", False), *((f, True) for f in tiny.FAMILIES)])
def test_trees_say_what_plain_decoding_says(family, window, shape, size, ragged):
    """Mostly wrong, of different sizes in one batch, deeper than the window of 7, wider than 64."""
    draft, known, prompts = scripted(family, window, 3, shape, size, ragged)
    got = generate(tiny.target(family, window), prompts, Request(max_new_tokens=NEW), draft)
    assert got.tokens == known
    trace = got.trace
    assert 0 < sum(trace.accept_lens) and 0 in trace.accept_lens
    if ragged:
        assert len({n for counts in trace.nodes for n in counts if n}) > 4


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_row_alone(family):
    draft, known, prompts = scripted(family, True, 1, "deep", 12)
    got = generate(tiny.target(family), prompts, Request(max_new_tokens=NEW), draft)
    assert got.tokens == known and len(set(got.trace.accept_lens)) > 2


def test_a_tree_that_knows_is_taken_to_its_deepest_leaf():
    draft, known, prompts = scripted("gpt_oss", True, 3, "deep", 12, wrong=lambda b, i: False)
    got = generate(tiny.target("gpt_oss"), prompts, Request(max_new_tokens=NEW), draft)
    assert got.tokens == known
    for proposed, accepted in zip(got.trace.proposed[:2], got.trace.accepted[:2], strict=True):
        assert proposed == accepted and min(accepted) > 4
    _, known, prompts = scripted("gpt_oss", True, 3)
    draft = ScriptedTree(known, prompts, lambda b, i: True)
    got = generate(tiny.target("gpt_oss"), prompts, Request(max_new_tokens=NEW), draft)
    assert got.tokens == known and got.trace.tau == 1


@pytest.mark.parametrize("at", [0, 2, 5, 11])
def test_a_stop_token_ends_its_row_inside_a_path(at):
    draft, known, prompts = scripted("qwen3", True, 3, "deep", 10, wrong=lambda b, i: i % 5 == 4)
    stop = known[1][at]
    wanted = [k[: k.index(stop) + 1] if stop in k else k for k in known]
    request = Request(max_new_tokens=NEW, stop=frozenset({stop}))
    assert generate(tiny.target("qwen3"), prompts, request, draft).tokens == wanted


def test_rows_end_at_their_own_limits():
    draft, known, prompts = scripted("gpt_oss", True, 3, "deep", 10)
    request = Request(max_new_tokens=NEW, limits=(7, NEW, 1))
    got = generate(tiny.target("gpt_oss"), prompts, request, draft)
    assert got.tokens == [known[0][:7], known[1], known[2][:1]]


@torch.inference_mode()
def test_a_draft_is_shown_the_states_of_the_accepted_path():
    """Positions of a path lie apart: their hidden states must move together with their tokens."""
    draft, known, prompts = scripted("gpt_oss", True, 3, "any", 12, target_layer_ids=(0, 2))
    kept = []
    object.__setattr__(draft, "begin", lambda *a: kept.append(ScriptedTreeSession(draft)) or kept[0])
    model = tiny.target("gpt_oss")
    generate(model, prompts, Request(max_new_tokens=NEW), draft)
    session = kept[0]
    for b, prompt in enumerate(prompts):
        text, states = session.seen[b], torch.stack(session.aux[b], 1)
        assert len(text) > len(prompt) + 12 and text == [*prompt, *known[b]][: len(text)]
        wanted = model(torch.tensor([text]), aux=(0, 2)).aux[:, 0]
        assert (states - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("nodes", [2, 9, 70])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_trees_of_a_block_draft(family, nodes):
    """A random DFlash, through its session: caches, aux states and rows that leave the batch."""
    model, known = tiny.target(family), answers(family, True, 3)
    types = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}
    draft = DDTree(random_dflash(model, 5, **types), nodes)
    request = Request(max_new_tokens=NEW, limits=(NEW, 9, NEW))
    got = generate(model, PROMPTS, request, draft)
    assert got.tokens == [known[0], known[1][:9], known[2]]
    assert all(n == nodes for counts in got.trace.nodes for n in counts if n)
    if nodes > 9:
        chain = generate(model, PROMPTS, request, draft.draft)
        assert sum(got.trace.accept_lens) >= sum(chain.trace.accept_lens)


@pytest.mark.parametrize("columns", [2, 5, 40])
def test_a_controller_may_ask_for_fewer_columns(columns):
    model, known = tiny.target("gpt_oss"), answers("gpt_oss", True, 3)
    draft, request = DDTree(random_dflash(model, 6), 20), Request(max_new_tokens=NEW)
    got = generate(model, PROMPTS, request, draft, controller=Fixed(columns))
    assert got.tokens == known
    assert {n for counts in got.trace.nodes for n in counts if n} == {min(columns, 20)}


# ---- above temperature 0 ----------------------------------------------------------------------------


class Forked(Forgetful):
    """Draft tokens three followers of every token and two of each of those: often right somewhere, and blind
    to what is drawn. Some rows offer only a part."""

    block_size = 10
    parents = (0, 0, 0, 0, 1, 1, 2, 2, 3, 3)

    def propose(self, last, width, sampler):
        step, columns = [0, 1, 3, 5, 0, 2, 1, 4, 3, 6], [last]
        for column in range(1, width):
            columns.append((columns[self.parents[column]] + step[column]) % V)
        counts = [width - 3 * (b % 4 == 0) for b in range(len(last))]
        rows = [[*self.parents[:n], *range(n, width)] for n in counts]
        return Proposal(torch.stack(columns, 1), counts, torch.tensor(rows))


def by_tree(prompts, request, rng):
    return generate(small(), prompts, request, Forked(), rng=rng)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_two_consecutive_tokens_of_a_tree_follow_the_target(how):
    assert len(PROMPT) > 3
    draws, trace = pairs(by_tree, how)
    assert 0.15 < trace.accept_rate < 0.95 and set(trace.accept_lens) == {0, 1, 2}
    assert surprise(draws, exact(how)) < 3.5


@pytest.mark.parametrize("rule", rules.RULES)
@pytest.mark.parametrize("part", [{}, {"selector_rank": 9, "selector_top_k": 6}], ids=["blind", "selector"])
def test_every_rule_takes_a_block_drafts_tree(part, rule):
    """With coupled noise a tree, too, states what autoregressive decoding states with that seed."""
    model, request = small(), Request(max_new_tokens=3, sampling=WAYS[0], rule=rule)
    draft, prompts = DDTree(random_dflash(model, 4, **part), 12), [PROMPT] * 800
    got = generate(model, prompts, request, draft, rng=torch.Generator().manual_seed(5))
    ids = torch.tensor(got.tokens)
    assert surprise(ids[:, 1] * V + ids[:, 2], exact(WAYS[0])) < 3.5
    assert sum(got.trace.accept_lens) > 0
    if rule == "gumbel":
        plainly = generate(model, prompts, request, rng=torch.Generator().manual_seed(5))
        assert plainly.tokens == got.tokens


def first_child(candidates, parents, predict, counts):
    """Takes the first draft token, whatever was drawn, where none is right: in one row of four."""
    paths = honest(candidates, parents, predict, counts)
    return [[0, 1] if b % 4 == 0 and path == [0] else path for b, path in enumerate(paths)]


@pytest.mark.parametrize("rule", [first_child, biased_bonus])
def test_a_biased_walk_is_caught(rule, monkeypatch):
    monkeypatch.setattr(rules, "exact_match", rule)
    assert surprise(pairs(by_tree, WAYS[0])[0], exact(WAYS[0])) > 5
