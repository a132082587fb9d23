"""Drafting for many texts at once: each has the proposals that it has alone, whatever became of its row."""

import random
import sys
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from eagle3_drafts import VARIANTS, bound_eagle3

from outpace.drafts.deferred import Deferred, States
from outpace.drafts.eagle3_decode import TreeShape
from outpace.drafts.sampler import Greedy, GumbelCoupled
from outpace.drafts.tree import DDTree
from outpace.ops.sampling import Sampling
from outpace.serve.shared_draft import SharedDraft

sys.path.append(str(Path(__file__).parent.parent / "drafts"))
from test_dflash_parts import CONV, MARKOV, SELECTOR, drafted

WINDOWS = ("sliding_attention", "full_attention", "sliding_attention")
DFLASH = {"plain": {}, "window": {"sliding_window": 5, "layer_types": WINDOWS},
          "selector": SELECTOR, "markov": MARKOV, "conv": CONV}  # fmt: skip
ROWS, LENGTH = 4, 70


def draft_of(kind, name, target):
    if kind == "eagle3":
        shape = TreeShape.of(nodes=9, depth=3, branch=3) if name == "tree" else None
        return bound_eagle3(target, shape, **VARIANTS.get(name, {}))
    bound = drafted(**{"head_dim": 8} | DFLASH[name]).bind(target)
    return DDTree(bound, nodes=9, branch=4) if kind == "tree" else bound


class Text:
    """One text in a row, and a session that has it alone from its first token on."""

    def __init__(self, draft, text, aux, row, reused, sampler):
        self.text, self.aux, self.row, self.at, self.sampler = text, aux, row, reused, sampler
        self.alone = Deferred(draft.begin(1, LENGTH))
        if reused:
            self.alone.add(self.states(0, reused))

    def states(self, begin, end):
        return States(self.text[None, begin:end], self.aux[:, None, begin:end], [end - begin])

    def goes_on(self, shared, count):
        new = self.states(self.at, self.at + count)
        shared.add(self.row, count, lambda: new, new.aux)
        self.alone.add(new)
        self.at += count

    @property
    def last(self):
        return self.text[self.at : self.at + 1]


CASES = [("dflash", name) for name in DFLASH] + [("tree", "plain"), ("tree", "selector")]
CASES += [("eagle3", name) for name in ("plain", "two layers", "target's head", "tree")]


@pytest.mark.parametrize(("kind", "name"), CASES)
@torch.inference_mode()
def test_each_has_the_proposals_that_it_has_alone(kind, name):
    target, rng = tiny.target("gpt_oss"), random.Random(3)
    draft = draft_of(kind, name, target)
    shared, running, left = SharedDraft(draft, ROWS, LENGTH), {}, {}
    beginning, proposals, reuses = tiny.tokens(1, 30, seed=8)[0], 0, []
    for round_ in range(40):
        for row in set(range(ROWS)) - running.keys():
            text = tiny.tokens(1, LENGTH, seed=round_ * ROWS + row)[0]
            text[:30] = beginning
            source = rng.choice([row, *left]) if left else row
            reused = min(shared.known(source) - 1, 29) if source in left and rng.random() < 0.7 else 0
            shared.begin(source, row, reused, wanted=True)
            reuses.append(reused)
            aux = target(text[None], aux=draft.target_layer_ids).aux[:, 0]
            sampler = Greedy()
            if rng.random() < 0.4:
                sampler = GumbelCoupled(Sampling(temperature=rng.choice([0.6, 1.2])), round_,
                                        torch.tensor([0]), torch.tensor([row]))  # fmt: skip
            running[row] = Text(draft, text, aux, row, reused, sampler)
            running[row].goes_on(shared, rng.randint(1, 12))
            left.pop(row, None)
        some, width = (
            rng.sample(list(running.values()), rng.randint(1, ROWS)),
            min(rng.choice([2, 4, 5]), draft.block_size),
        )
        last, samplers = torch.cat([x.last for x in some]), [x.sampler for x in some]
        got = shared.propose([x.row for x in some], last, width, samplers)
        for b, text in enumerate(some):
            one = text.alone.propose(text.last, width, text.sampler)
            n = one.counts[0]
            assert got.counts[b] == n and got.above[b][:n] == one.above[0]
            assert got.host_tokens[b][:n] == one.host_tokens[0]
            # a tree for rows with noise is grown from the same logits in another way
            assert got.stated[b][:n] == pytest.approx(one.stated[0], rel=1e-6 if kind == "tree" else 0)
            proposals += 1
        for text in list(running.values()):
            if text.at + 8 > LENGTH or rng.random() < 0.1:
                shared.leave(text.row)
                left[text.row] = running.pop(text.row)
            elif text in some or rng.random() < 0.5:
                text.goes_on(shared, rng.randint(1, 5))
    assert proposals > 60 and sum(n > 5 for n in reuses) > 5
    for row in range(ROWS):
        shared.flush(row)
    assert not shared.uses and not shared.held and not any(shared.unobserved)


@torch.inference_mode()
def test_states_of_one_step_are_counted_once_and_observed_when_they_are_too_many(monkeypatch):
    target = tiny.target("gpt_oss")
    draft = draft_of("dflash", "plain", target)
    shared = SharedDraft(draft, 3, LENGTH)
    text = tiny.tokens(3, 20, seed=8)
    aux = target(text, aux=draft.target_layer_ids).aux
    for row in range(3):
        shared.begin(row, row, 0, wanted=True)
        own = States(text[row : row + 1], aux[:, row : row + 1], [20])
        shared.add(row, 20, partial(States, *own), aux)
    assert shared.held == aux.nbytes and [shared.known(row) for row in range(3)] == [20] * 3
    shared.leave(1)
    shared.leave(0)
    assert shared.session.lengths == [0, 0, 0]  # nobody has asked for it
    monkeypatch.setattr("outpace.serve.shared_draft.MOST_BYTES", aux.nbytes - 1)
    shared.leave(2)  # the memory is one step's: it is free when all of them are observed
    assert shared.session.lengths == [20, 20, 20] and not shared.held
    shared.begin(0, 2, 12, wanted=True)
    assert [shared.known(row) for row in range(3)] == [20, 20, 12]


@torch.inference_mode()
def test_a_text_of_another_draft_forgets_what_waits():
    target = tiny.target("gpt_oss")
    draft = draft_of("dflash", "plain", target)
    shared = SharedDraft(draft, 2, LENGTH)
    text = tiny.tokens(1, 20, seed=8)
    aux = target(text, aux=draft.target_layer_ids).aux
    for wanted, known in ((False, 0), (True, 12)):
        shared.begin(0, 0, 0, wanted=True)
        shared.add(0, 20, lambda: States(text, aux, [20]), aux)
        shared.begin(0, 1, 12, wanted=wanted)
        assert shared.known(1) == known and shared.known(0) == 20
        assert shared.session.lengths == [0, 0]  # what waits is not observed for it
