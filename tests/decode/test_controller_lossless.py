"""Whatever a controller decides, the text stays: random widths, cuts and rests, chains and trees."""

import random

import pytest
import tiny
import torch
from eagle3_drafts import bound_eagle3
from scripted import Scripted
from test_lossless import NEW, PROMPTS, answers, half, random_dflash
from test_rules import PROMPT, V, small, surprise
from test_rules_in_the_loop import ROWS, WAYS, Tables, exact

from outpace.decode.controller import Fixed
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts import deferred as deferring
from outpace.drafts.deferred import Deferred, States, joined
from outpace.drafts.eagle3_decode import TreeShape
from outpace.drafts.lookup import NGram
from outpace.drafts.tree import DDTree, cut
from outpace.ops.sampling import Sampling


class Dice:
    """Any width, any cut, plain steps in runs."""

    predicted = None

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.plain, self.widths, self.verified, self.rested = 0, set(), set(), set()

    def begin(self, block, tokens=None):
        self.block = block

    def width(self, lengths, running=0):
        assert all(n > 0 for n in lengths)
        if self.plain == 0 and self.dice.random() < 0.2:
            self.plain = self.dice.randint(1, 9)
        if self.plain:
            self.plain -= 1
            width = 1
        else:
            width = self.dice.randint(2, self.block)
        self.widths.add(width)
        return width

    def rest(self, most):
        steps = self.dice.randint(1, min(most, self.plain + 1))
        self.plain -= steps - 1
        self.rested.add(steps)
        return steps

    def joins(self, running):
        return self.dice.random() < 0.8

    def chain_cut(self):
        return None

    def was_cut(self, proposal, positions, again):
        self.verified.add(positions)

    def cut(self, proposal):
        return cut(proposal, self.dice.randint(1, proposal.tokens.shape[1]))

    def learn(self, proposal, path, seconds=None):
        assert len(path) == len(proposal.counts)
        assert all(c < n for columns, n in zip(path, proposal.counts, strict=True) for c in columns)
        self.verified.add(proposal.tokens.shape[1])


def draft(name, model, known):
    match name:
        case "chain":
            return random_dflash(model, 6)
        case "tree":
            return DDTree(random_dflash(model, 4), nodes=9)
        case "ngram":
            return NGram(block_size=6)
        case "walked chain":
            return bound_eagle3(model, shape=TreeShape(depth=4))
        case "walked tree":
            return bound_eagle3(model, shape=TreeShape(depth=3, branch=3, nodes=9))
        case "half":
            return Short(known, PROMPTS, half)
    raise AssertionError(name)


class Short(Scripted):
    """Knows the answers, and obeys the width that is asked for."""

    def begin(self, batch, length, offset=0, slack=0):
        session = super().begin(batch, length, offset)
        whole = session.propose

        def propose(last, width, sampler):
            return cut(whole(last, self.block_size, sampler), width)

        session.propose = propose
        return session


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("name", ["chain", "tree", "ngram", "half", "walked chain", "walked tree"])
def test_any_decision_says_the_same(family, name):
    model, known = tiny.target(family), answers(family, True, 3)
    for seed in range(2):
        dice = Dice(seed)
        got = generate(
            model, PROMPTS, Request(max_new_tokens=NEW), draft(name, model, known), controller=dice
        )
        assert got.tokens == known
        assert 1 in dice.widths and len(dice.widths) > 2
        if name != "ngram":
            assert len(dice.verified) > 2
    assert got.trace.predicted == []


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_the_coupled_rule_says_the_same_too(name):
    model = tiny.target("gpt_oss")
    request = Request(max_new_tokens=NEW, sampling=Sampling(temperature=1.0), rule="gumbel")
    wanted = generate(model, PROMPTS, request, rng=torch.Generator().manual_seed(5)).tokens
    for seed in range(4):
        got = generate(
            model,
            PROMPTS,
            request,
            draft(name, model, None),
            controller=Dice(seed),
            rng=torch.Generator().manual_seed(5),
        )
        assert got.tokens == wanted


@pytest.mark.parametrize(
    ("rule", "shape"), [("rejection", "chain"), ("block", "chain"), ("rejection", "tree"), ("match", "tree")]
)
def test_drawn_guesses_keep_the_targets_distribution(rule, shape):
    request = Request(max_new_tokens=4, sampling=WAYS["all"], rule=rule)
    dice, rng = Dice(1), torch.Generator().manual_seed(7)
    got = generate(small(), [PROMPT] * ROWS, request, Tables(shape), controller=dice, rng=rng)
    ids = torch.tensor(got.tokens)
    assert surprise(ids[:, 1:] @ torch.tensor([V * V, V, 1]), exact(WAYS["all"])) < 3.5
    assert len(dice.verified) > 1


class Watched:
    """A draft that keeps what its session was shown, row by row."""

    def __init__(self, inner):
        self.inner, self.shown, self.calls = inner, {}, []
        self.target_layer_ids, self.block_size = inner.target_layer_ids, inner.block_size

    def begin(self, batch, length, offset=0, slack=0):
        session = self.inner.begin(batch, length, offset)
        observe, keep = session.observe, session.select
        rows = self.rows = list(range(batch))
        self.shown = {b: ([], []) for b in rows}

        def watched(tokens, aux, counts):
            self.calls.append(list(counts))
            for i, count in enumerate(counts):
                self.shown[rows[i]][0].extend(tokens[i, :count].tolist())
                self.shown[rows[i]][1].append(aux[:, i, :count])
            observe(tokens, aux, counts)

        def kept(left):
            rows[:] = [rows[i] for i in left]
            keep(left)

        session.observe, session.select = watched, kept
        self.session = session
        return session


def test_after_a_rest_the_session_has_seen_everything():
    model, limits = tiny.target("gpt_oss"), (NEW, 9, NEW)
    request = Request(max_new_tokens=NEW, limits=limits)
    always, rested = Watched(random_dflash(model)), Watched(random_dflash(model))
    generate(model, PROMPTS, request, always)
    got = generate(model, PROMPTS, request, rested, controller=Resting(13))
    assert got.trace.tau < 1.5 and max(rested.calls[-1]) <= 4 < 13 <= max(map(max, rested.calls[1:]))
    for b in (0, 2):
        (tokens, states), (same, others) = always.shown[b], rested.shown[b]
        n = min(len(tokens), len(same))
        assert n > len(PROMPTS[b]) + 13 and tokens[:n] == same[:n]
        torch.testing.assert_close(torch.cat(states, 1)[:, :n], torch.cat(others, 1)[:, :n], rtol=0, atol=0)
    # and it makes the same of it: keys of one long stretch and of many short ones
    a, b = always.session.cache, rested.session.cache
    both = [(always.rows.index(row), rested.rows.index(row)) for row in always.rows if row in rested.rows]
    assert both
    for i, j in both:
        n = min(a.lengths[i], b.lengths[j])
        for ours, theirs in zip(a.layers, b.layers, strict=True):
            torch.testing.assert_close(ours.k[i, :, :n], theirs.k[j, :, :n], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours.v[i, :, :n], theirs.v[j, :, :n], rtol=1e-5, atol=1e-5)


class Resting(Fixed):
    """Plain steps, then draft tokens."""

    def __init__(self, steps):
        super().__init__(99)
        self.steps = steps

    def width(self, lengths, running=0):
        self.steps -= 1
        return 1 if self.steps >= 0 else super().width(lengths)


def test_nothing_is_shown_while_it_rests():
    model = tiny.target("qwen3")
    watched = Watched(random_dflash(model))
    got = generate(model, PROMPTS, Request(max_new_tokens=NEW), watched, controller=Fixed(1))
    assert got.tokens == answers("qwen3", True, 3) and got.trace.tau == 1
    assert sum(map(max, watched.calls)) == max(map(len, PROMPTS))  # the prompts alone
    assert got.trace.nodes == [[1] * 3] * (NEW - 1)


@pytest.mark.parametrize("seed", range(6))
def test_joined_parts_are_the_rows_without_noise(seed):
    rng = torch.Generator().manual_seed(seed)
    dice = random.Random(seed)
    B, n, C, parts, rows = 3, 2, 5, [], [[] for _ in range(3)]
    for _ in range(dice.randint(1, 6)):
        T = dice.randint(1, 4)
        counts = [1] * B if seed == 0 else [dice.randint(1, T) for _ in range(B)]
        tokens = torch.randint(99, (B, T), generator=rng)
        aux = torch.randn(n, B, T, C, generator=rng)
        parts.append(States(tokens, aux, counts))
        for b in range(B):
            rows[b] += [(tokens[b, t], aux[:, b, t]) for t in range(counts[b])]
    whole = joined(parts)
    assert whole.counts == [len(row) for row in rows]
    for b, row in enumerate(rows):
        assert whole.tokens[b, : len(row)].tolist() == [int(t) for t, _ in row]
        assert torch.equal(whole.aux[:, b, : len(row)], torch.stack([a for _, a in row], 1))


def test_a_long_rest_is_shown_in_stretches(monkeypatch):
    monkeypatch.setattr(deferring, "MAX_PENDING", 5)
    model = tiny.target("qwen3")
    watched = Watched(random_dflash(model))
    got = generate(model, PROMPTS, Request(max_new_tokens=NEW), watched, controller=Fixed(1))
    assert got.tokens == answers("qwen3", True, 3)
    assert max(map(max, watched.calls[1:])) == 5


def test_nothing_pending_observes_nothing():
    Deferred(None).flush()


def test_columns_below_one_are_refused():
    with pytest.raises(ValueError, match="0 positions per step"):
        Fixed(0)
