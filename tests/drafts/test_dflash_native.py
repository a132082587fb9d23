"""A draft's rounds in few calls are its modules' to the bit: every part, ragged rows, any width."""

import copy
import shutil

import pytest
import tiny
import torch
from test_dflash import VARIANTS
from test_dflash_parts import CAUSAL, CONV, PARTS, SELECTOR, WORDS, drafted

from outpace.drafts.base import HostProposal
from outpace.drafts.dflash_native import NativeBlock, NativeChain, NativeContext, NativeTree
from outpace.drafts.quantize import quantised
from outpace.drafts.sampler import Greedy, GumbelCoupled, RowSamplers
from outpace.drafts.tree import best_first
from outpace.ops.sampling import Sampling

# by the compiler, not by available(): a kernel that no longer compiles must fail here
pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
MASKED = VARIANTS["mask embedding"]
CASES = VARIANTS | PARTS | {f"causal, {name}": how for name, how in CAUSAL.items()}


def sessions(draft, target, rows, offset=0):
    """In few calls, and module by module."""
    bound = draft.bind(target)
    result = bound.begin(rows, 80, offset), bound.begin(rows, 80, offset)
    result[1].in_one_piece = False
    assert result[0]._native(4) and not result[1]._native(4)
    return result


@torch.inference_mode()
@pytest.mark.parametrize("name", CASES)
def test_rounds_are_the_modules(name):
    target, draft = tiny.target("gpt_oss"), drafted(**{"head_dim": 8} | CASES[name])
    text = tiny.tokens(3, 60)
    aux = target(text, aux=draft.target_layer_ids).aux
    fast, plain = sessions(draft, target, 3, offset=70)
    at, rng = [0, 0, 0], torch.Generator().manual_seed(3)
    rows = [0, 1, 2]
    for i in range(9):
        if i == 5:
            rows, at = [2, 0], [at[2], at[0]]
            for session in (fast, plain):
                session.select([2, 0])
        most = 12 if i == 0 else 5
        counts = torch.randint(0 if i else 6, most, (len(rows),), generator=rng).tolist()
        columns = [torch.arange(n, n + max(counts)) for n in at]
        seen = torch.stack([aux[:, b, c] for b, c in zip(rows, columns, strict=True)], dim=1)
        for session in (fast, plain):
            session.observe(text[:, : max(counts)], seen, counts)
        at = [n + c for n, c in zip(at, counts, strict=True)]
        last = tiny.tokens(len(rows), seed=i)
        assert torch.equal(fast.block_hidden(last), plain.block_hidden(last))
        width = 2 + i % 3
        one, other = (session.propose(last, width, Greedy()) for session in (fast, plain))
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.survival, other.survival)
    in_one = draft.markov_head is None and draft.confidence_head is None
    kinds = {type(program) for program in draft.native_programs.values()}
    assert kinds == {NativeBlock, NativeContext} | ({NativeChain} if in_one else set())


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [(20, 33, 1), (100, 7), (64, 0, 65)], ids=str)
@pytest.mark.parametrize("name", ["plain", "window"])
def test_prompts_and_rests_are_observed_as_by_the_modules(name, lengths):
    target, draft = tiny.target("gpt_oss"), drafted(**{"head_dim": 8} | VARIANTS[name])
    bound, text = draft.bind(target), tiny.tokens(2, sum(lengths))
    fast, plain = (bound.begin(2, sum(lengths) + 20) for _ in range(2))
    plain.in_one_piece = False
    aux, at = target(text, aux=draft.target_layer_ids).aux, [0, 0]
    for length in lengths:
        counts = [length, length * 2 // 3]
        columns = [torch.arange(n, n + length) for n in at]
        seen = torch.stack([aux[:, b, c] for b, c in enumerate(columns)], dim=1)
        for session in (fast, plain):
            session.observe(text[:, :length], seen, counts)
        at = [n + c for n, c in zip(at, counts, strict=True)]
        last = tiny.tokens(2, seed=length)
        assert fast.cache.lengths == plain.cache.lengths == at
        assert torch.equal(fast.block_hidden(last), plain.block_hidden(last))


@torch.inference_mode()
def test_what_a_round_gave_outlives_the_next():
    target, draft = tiny.target("gpt_oss"), drafted(**CONV, **SELECTOR, head_dim=8)
    (session, _), last = sessions(draft, target, 2), tiny.tokens(2, seed=4)
    hidden, proposal = session.block_hidden(last), session.propose(last, 4, Greedy())
    kept = hidden.clone(), proposal.tokens.clone(), proposal.survival.clone()
    session.propose(tiny.tokens(2, seed=9), 4, Greedy())
    for now, then in zip((hidden, proposal.tokens, proposal.survival), kept, strict=True):
        assert torch.equal(now, then)


@torch.inference_mode()
@pytest.mark.parametrize("stored", ["bfloat16", "rounded", "q8_0"])
def test_stored_weights_of_other_kinds(stored):
    target, draft = tiny.target("gpt_oss"), drafted(**CONV, **SELECTOR, head_dim=8)
    draft = quantised(draft) if stored == "q8_0" else draft.to(torch.bfloat16)
    if stored == "rounded":  # the target's head is theirs, too
        target = copy.deepcopy(target).to(torch.bfloat16)
        draft.use_activation_dtype(torch.bfloat16)
    fast, plain = sessions(draft, target, 2)
    text, last = tiny.tokens(2, 4), tiny.tokens(2, seed=4)
    aux = target(text, aux=draft.target_layer_ids).aux
    for session in (fast, plain):
        session.observe(text, aux, [4, 2])
    assert torch.equal(fast.block_hidden(last), plain.block_hidden(last))
    one, other = (session.propose(last, 4, Greedy()) for session in (fast, plain))
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.survival, other.survival)
    kinds = {type(program) for program in draft.native_programs.values()}
    assert kinds == {NativeBlock, NativeContext, NativeChain}


@torch.inference_mode()
def test_rounded_activations_reach_the_block_the_context_and_the_head():
    target, draft = copy.deepcopy(tiny.target("gpt_oss")).to(torch.bfloat16), drafted(**SELECTOR, head_dim=8)
    draft.to(torch.bfloat16)
    text, last = tiny.tokens(2, 4), tiny.tokens(2, seed=4)
    aux = target(text, aux=draft.target_layer_ids).aux
    seen = []
    for dtype in (torch.float32, torch.bfloat16):
        draft.use_activation_dtype(dtype)
        session = sessions(draft, target, 2)[0]
        session.observe(text, aux, [4, 2])
        keys, hidden = session.cache.layers[0].k[:, :, :2].clone(), session.block_hidden(last)
        seen.append((keys, hidden, session.head.logits(hidden if not seen else seen[0][1])))
    for exact, rounded in zip(*seen, strict=True):
        assert not torch.equal(exact, rounded)
        torch.testing.assert_close(exact, rounded, atol=0.1, rtol=0.02)


@torch.inference_mode()
def test_sessions_share_programs_and_not_what_they_hold():
    target, draft = tiny.target("gpt_oss"), drafted(**CONV, **SELECTOR, head_dim=8)
    pairs = [sessions(draft, target, 2) for _ in range(2)]
    for turn in range(6):  # two texts at once, step by step, through one program each
        fast, plain = pairs[turn % 2]
        text, last = tiny.tokens(2, 3, seed=turn), tiny.tokens(2, seed=turn + 9)
        aux = target(text, aux=draft.target_layer_ids).aux
        for session in (fast, plain):
            session.observe(text, aux, [3, 1 + turn % 3])
        assert torch.equal(fast.block_hidden(last), plain.block_hidden(last))
    assert len(draft.native_programs) == 2
    assert not copy.deepcopy(draft).native_programs and not draft.double().native_programs


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["mask embedding", "draft vocabulary", "selector"])
def test_of_one_text_and_of_several(name, rows):
    how = {"mask embedding": MASKED, "draft vocabulary": SELECTOR | WORDS, "selector": SELECTOR}[name]
    target, draft = tiny.target("gpt_oss"), drafted(**how, head_dim=8)
    fast, plain = sessions(draft, target, rows)
    text = tiny.tokens(rows, 6)
    aux = target(text, aux=draft.target_layer_ids).aux
    for session in (fast, plain):
        session.observe(text, aux, [6, 4, 5][:rows])
    for width in (2, draft.block_size, 3):
        last = tiny.tokens(rows, seed=width)
        one, other = (session.propose(last, width, Greedy()) for session in (fast, plain))
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.survival, other.survival)
        assert torch.equal(one.tokens[:, 0], last)


@torch.inference_mode()
def test_a_draft_that_learns_goes_on_with_what_it_has_learnt():
    """Programs point at the weights, which an optimizer changes in place."""
    target, draft = tiny.target("gpt_oss"), drafted(**MASKED, **SELECTOR, head_dim=8)
    fast, plain = sessions(draft, target, 2)
    last, before = tiny.tokens(2, seed=4), []
    for _ in range(3):
        one, other = (session.propose(last, 4, Greedy()) for session in (fast, plain))
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.survival, other.survival)
        assert not any(torch.equal(one.survival, seen) for seen in before)
        before.append(one.survival)
        for weight in draft.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(before)))


def with_noise(rows, temperature=3.0, **cuts):
    streams, places = torch.arange(rows) + 5, torch.arange(rows) * 7
    return GumbelCoupled(Sampling(temperature=temperature, **cuts), 2**40 + 9, streams, places)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["selector", "DFlash 2", "draft vocabulary"])
def test_tokens_with_noise_are_the_modules(name):
    how = SELECTOR | WORDS if name == "draft vocabulary" else PARTS[name]
    target, draft = tiny.target("gpt_oss"), drafted(**{"head_dim": 8} | how)
    fast, plain = sessions(draft, target, 3)
    text = tiny.tokens(3, 6)
    aux = target(text, aux=draft.target_layer_ids).aux
    for session in (fast, plain):
        session.observe(text, aux, [6, 4, 5])
    last, greedy = tiny.tokens(3, seed=1), fast.propose(tiny.tokens(3, seed=1), 4, Greedy()).tokens
    mixed = RowSamplers((with_noise(1), Greedy(), with_noise(1, 40.0)))
    seen = []
    for sampler in (with_noise(3), mixed, with_noise(3, 0.2), Greedy()):
        one, other = (session.propose(last, 4, sampler) for session in (fast, plain))
        assert isinstance(one, HostProposal) and not isinstance(other, HostProposal)
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.survival, other.survival)
        seen.append(one.tokens)
    assert not torch.equal(seen[0], greedy) and torch.equal(seen[3], greedy)  # none of it is left behind
    assert torch.equal(seen[1][1], greedy[1]) and not torch.equal(seen[1][2], greedy[2])
    # cuts look at the whole row
    assert not isinstance(fast.propose(last, 4, with_noise(3, top_k=2)), HostProposal)


@torch.inference_mode()
def test_without_a_selector_noise_is_added_by_the_modules():
    target, draft = tiny.target("gpt_oss"), drafted(**MASKED, head_dim=8)
    session = sessions(draft, target, 2)[0]
    assert not isinstance(session.propose(tiny.tokens(2, seed=1), 4, with_noise(2)), HostProposal)


def grown(session, last, width, nodes, branch):
    """From the scores that the modules give."""
    logits, pairs = session.block(last, width)
    scores = session.vocab.scores(Greedy(), logits, 1)
    return best_first(last, scores, nodes, branch, pairs, session.vocab)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_trees_are_those_of_the_scores(name, rows):
    target, draft = tiny.target("gpt_oss"), drafted(**{"head_dim": 8} | CASES[name])
    fast, plain = sessions(draft, target, rows)
    text = tiny.tokens(rows, 6)
    aux = target(text, aux=draft.target_layer_ids).aux
    for session in (fast, plain):
        session.observe(text, aux, [6, 4, 5][:rows])
    in_one = draft.markov_head is None and draft.confidence_head is None
    block = draft.block_size
    # of the last two: more positions than there are paths, and no followers but one
    for width, nodes, branch in ((block, 9, 4), (3, 17, 16), (2, 9, 3), (block, 7, 1)):
        last = tiny.tokens(rows, seed=nodes)
        one, other = fast.tree(last, width, nodes, branch), grown(plain, last, width, nodes, branch)
        assert plain.tree(last, width, nodes, branch) is None
        if not in_one:
            assert one is None
            continue
        assert one.counts == other.counts and one.host_tokens == other.host_tokens
        assert one.above == other.above
        torch.testing.assert_close(one.survival, other.survival, atol=1e-6, rtol=1e-5)
    kinds = {type(program) for program in draft.native_programs.values()}
    assert (NativeTree in kinds) == in_one


@torch.inference_mode()
@pytest.mark.parametrize("name", ["plain", "selector"])
def test_a_tree_from_scores_that_are_no_numbers_says_so(name):
    how = SELECTOR if name == "selector" else VARIANTS["plain"]
    target, draft = tiny.target("gpt_oss"), drafted(**{"head_dim": 8} | how)
    last = tiny.tokens(1, seed=2)
    assert sessions(draft, target, 1)[0].tree(last, 4, 9, 4).stated[0][0] == 1
    draft.norm.weight[3] = torch.nan
    assert torch.tensor(sessions(draft, target, 1)[0].tree(last, 4, 9, 4).stated[0][0]).isnan()
