"""An EAGLE-3 in native calls is its modules to the bit: every variant, ragged rows, chains and trees."""

import copy
import shutil

import pytest
import tiny
import torch
from eagle3_drafts import VARIANTS, random_eagle3

from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.drafts.eagle3_native import NativeChain, NativeLayers
from outpace.drafts.sampler import Greedy

# by the compiler, not by available(): a kernel that no longer compiles must fail here
pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
SHAPES = {"chain": TreeShape(depth=4), "tree": TreeShape(depth=4, branch=3, nodes=9)}
PARALLEL = {"parallel": {"parallel": True, "draft_vocab_size": tiny.VOCAB}}
CASES = [(name, shape) for name in VARIANTS | PARALLEL for shape in SHAPES]


def sessions(draft, target, shape, rows, offset=0):
    """In one call, and module by module."""
    bound = BoundEagle3(draft, target, shape)
    result = bound.begin(rows, 80, offset), bound.begin(rows, 80, offset)
    result[1].in_one_piece = False
    return result


@torch.inference_mode()
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_proposals_are_the_modules(name, shape):
    target = tiny.target("gpt_oss")
    draft = random_eagle3(target, **(VARIANTS | PARALLEL)[name])
    text = tiny.tokens(3, 60)
    aux = target(text, aux=draft.target_layer_ids).aux
    pair = fast, plain = sessions(draft, target, SHAPES[shape], 3, offset=70)
    at, rows, rng = [0, 0, 0], [0, 1, 2], torch.Generator().manual_seed(3)
    for i in range(9):
        if i == 5:
            rows, at = [2, 0], [at[2], at[0]]
            for session in pair:
                session.select([2, 0])
        counts = torch.randint(1, 12 if i == 0 else 5, (len(rows),), generator=rng).tolist()
        columns = [torch.arange(n, n + max(counts)) for n in at]
        seen = torch.stack([aux[:, b, c] for b, c in zip(rows, columns, strict=True)], dim=1)
        tokens = torch.stack([text[b, c] for b, c in zip(rows, columns, strict=True)])
        for session in pair:
            session.observe(tokens, seen, counts)
        at = [n + c for n, c in zip(at, counts, strict=True)]
        last, width = tiny.tokens(len(rows), seed=i), 3 + i % 3
        one, other = (session.propose(last, width, Greedy()) for session in pair)
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.survival, other.survival)
        assert one.counts == other.counts and fast.cache.lengths == plain.cache.lengths == at
        for mine, theirs in zip(fast.cache.layers, plain.cache.layers, strict=True):
            held = mine.size if mine.window else min(at)
            for name in ("k", "v"):
                ours, others = getattr(mine, name)[:, :, :held], getattr(theirs, name)[:, :, :held]
                assert torch.equal(ours, others)
    assert {type(program) for program in draft.native_programs.values()} <= {NativeLayers, NativeChain}


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", [{}, {"own_head": False, "draft_vocab_size": tiny.VOCAB}])
def test_stored_weights_of_another_kind(shape, how):
    target = copy.deepcopy(tiny.target("gpt_oss")).to(torch.bfloat16)
    draft = random_eagle3(target, **how).to(torch.bfloat16)
    text, last = tiny.tokens(2, 5), tiny.tokens(2, seed=4)
    aux = target(text, aux=draft.target_layer_ids).aux
    proposals = []
    for dtype in (torch.float32, torch.bfloat16):
        draft.use_activation_dtype(dtype)
        for session in sessions(draft, target, SHAPES[shape], 2):
            session.observe(text, aux, [5, 3])
            proposals.append(session.propose(last, 5, Greedy()))
        assert torch.equal(proposals[-2].tokens, proposals[-1].tokens) and draft.native_programs
        assert torch.equal(proposals[-2].survival, proposals[-1].survival)
    assert not torch.equal(proposals[0].survival, proposals[-1].survival)


def ones(draft):
    return torch.ones(2, 1, draft.config.hidden_size)


@torch.inference_mode()
def test_what_a_call_gave_outlives_the_next():
    target = tiny.target("gpt_oss")
    draft = random_eagle3(target)
    session, _ = sessions(draft, target, SHAPES["chain"], 2)
    x, step = ones(draft), session.cache.begin(1)
    hidden = session._run(x, x, step)
    kept = hidden.clone()
    assert not torch.equal(session._run(x * 2, -x, step), kept)
    assert torch.equal(hidden, kept)


@torch.inference_mode()
def test_a_copy_has_programs_of_its_own_weights():
    target = tiny.target("gpt_oss")
    draft = random_eagle3(target)
    x = ones(draft)

    def run(draft):
        session, _ = sessions(draft, target, SHAPES["chain"], 2)
        return session._run(x, x, session.cache.begin(1))

    before = run(draft)
    other = copy.deepcopy(draft)
    assert draft.native_programs and not other.native_programs
    draft.layers[0].o_proj.weight.data.zero_()
    assert torch.equal(run(other), before) and not torch.equal(run(draft), before)
