"""DFlash 2's and DSpark's parts against plain re-implementations; at their start they change nothing."""

import copy
import dataclasses

import pytest
import tiny
import torch
from test_dflash import CONFIG, random_draft

from outpace.drafts.dflash import DFlash
from outpace.drafts.dflash_decode import Head, survival
from outpace.drafts.quantize import quantised
from outpace.drafts.sampler import Greedy, GumbelCoupled, Sampled
from outpace.models.blocks import Linear
from outpace.models.config import FULL, WINDOW
from outpace.ops import block_conv as conv
from outpace.ops.candidates import reference_top_k, reference_walk, top_k, walk
from outpace.ops.quant import Quant
from outpace.ops.sampling import Sampling

CONV = {"conv_kernel_size": 2, "conv_group_size": 12}
SELECTOR = {"selector_rank": 7, "selector_top_k": 5}
MARKOV = {"markov_rank": 9}
GATED = {"markov_rank": 9, "markov_gated": True}
WORDS = {"draft_vocab_size": 31}
SURE = {"confidence": True}
PARTS = {
    "conv": CONV,
    "three taps": {"conv_kernel_size": 3, "conv_group_size": 16},
    "selector": SELECTOR,
    "DFlash 2": CONV | SELECTOR,
    "Markov": MARKOV,
    "gated": GATED,
    "words": WORDS,
    "confidence": SURE,
    "DSpark": GATED | SURE | WORDS,
    "lean": CONV | SELECTOR | SURE | WORDS,
}


def words_of(draft, seed=3):
    if draft.d2t is not None:
        rng = torch.Generator().manual_seed(seed)
        ids = torch.randperm(tiny.VOCAB, generator=rng)[: len(draft.d2t)].sort().values
        draft.d2t.copy_(ids - torch.arange(len(ids)))
    return draft


def drafted(**changes):
    return words_of(random_draft(**changes))


def session_of(draft, target, rows=2, tokens=9):
    text = tiny.tokens(rows, tokens)
    with torch.inference_mode():
        aux = target(text, aux=draft.target_layer_ids).aux
        session = draft.bind(target).begin(rows, 40)
        session.observe(text, aux, [tokens, tokens - 3][:rows])
    return session


# ---- twins: one block, one position at a time ------------------------------------------


def twin_conv(x, base, delta):
    """x [B, C], base [taps, C], delta [B, taps, G], in float64."""
    (B, C), G = x.shape, delta.shape[-1]
    group = [c * G // C for c in range(C)]
    out = []
    for i in range(B):
        taken = [(base[t] + delta[i, t][group]) * x[i - t] for t in range(len(base)) if i >= t]
        out.append(torch.stack(taken).double().sum(0))
    return torch.stack(out)


@pytest.mark.parametrize(("C", "G", "taps"), [(96, 8, 2), (42, 3, 3), (35, 5, 2), (64, 4, 1)])
def test_convolution_and_its_gradients(C, G, taps):
    rng = torch.Generator().manual_seed(C)
    shapes = ((3, 5, C), (taps, C), (3, 5, 2, taps, G))
    x, base, delta = (torch.randn(s, generator=rng).requires_grad_() for s in shapes)
    dy = torch.randn(x.shape, generator=rng)
    for side in (0, 1):
        y = conv.block_conv(x, base, delta, side)
        wanted = torch.stack([twin_conv(*t) for t in zip(x, [base] * 3, delta[:, :, side], strict=True)])
        torch.testing.assert_close(y.double(), wanted, atol=1e-5, rtol=1e-5)
        plain = conv.reference_block_conv(x, base, delta, side)
        torch.testing.assert_close(y, plain, atol=1e-5, rtol=1e-5)
        result = torch.autograd.grad(y, (x, base, delta), dy)
        for ours, truth in zip(
            result, torch.autograd.grad(wanted, (x, base, delta), dy.double()), strict=True
        ):
            torch.testing.assert_close(ours, truth, atol=2e-5, rtol=1e-4)
        with torch.inference_mode():
            alone = [
                conv.block_conv(*t, side) for t in zip(x[:, None], [base] * 3, delta[:, None], strict=True)
            ]
            assert torch.equal(
                torch.cat(alone), conv.block_conv(x, base, delta, side)
            )  # no tap crosses blocks


def twin_walk(draft, head, hidden, last):
    """The greedy walk of one row from its definition, in float64: ids, and the chance of each."""
    c, f = draft.config, lambda t: t.detach().double()
    words = head.ids if head.ids is not None else torch.arange(c.vocab_size)
    logits = f(hidden) @ f(head.weight).T
    items, sure, previous = [], [], int(last)
    for h, row in zip(f(hidden), logits, strict=True):
        scores = row.clone()
        if c.selector_rank:
            s = draft.candidate_selector
            A, B = f(s.predecessor_codebook)[previous], f(s.successor_codebook)
            few = row.argsort(descending=True)[: c.selector_top_k]
            for i in few.tolist():
                scores[i] += (A * (f(s.hidden_projection.weight) @ h) * B[words[i]]).sum()
            best = max(few.tolist(), key=lambda i, scores=scores: scores[i])
        if c.markov_rank:
            m = draft.markov_head
            e = f(m.markov_w1)[previous]
            if m.gate is not None:
                e = torch.sigmoid(f(m.gate.weight) @ torch.cat((h, e))) * e
            scores = scores + f(m.markov_w2.weight) @ e
        best = best if c.selector_rank else int(scores.argmax())
        chance = scores.softmax(-1)[best]
        if c.confidence:
            table = [p.predecessor_codebook for p in [draft.candidate_selector] if p is not None]
            table += [p.markov_w1 for p in [draft.markov_head] if p is not None]
            given = torch.cat([h, *(f(t)[previous] for t in table)])
            proj = draft.confidence_head.proj
            chance = torch.sigmoid(f(proj.weight)[0] @ given + f(proj.bias)[0])
        previous = int(words[best])
        items.append(previous)
        sure.append(chance)
    return torch.tensor(items), torch.stack(sure)


@torch.inference_mode()
@pytest.mark.parametrize("name", PARTS)
def test_guesses_and_survival_against_the_twin(name):
    target, draft = tiny.target("gpt_oss"), drafted(**PARTS[name])
    session, last = session_of(draft, target), tiny.tokens(2, seed=4)
    proposal = session.propose(last, CONFIG.block_size, Greedy())
    hidden = session.block_hidden(last)[:, 1:]
    assert proposal.q is None and torch.equal(proposal.survival[:, 0], torch.ones(2))
    for b in range(2):
        tokens, sure = twin_walk(draft, session.head, hidden[b], last[b])
        assert torch.equal(proposal.tokens[b, 1:], tokens)
        torch.testing.assert_close(proposal.survival[b, 1:].double(), sure.cumprod(0), atol=1e-4, rtol=1e-3)
        if draft.d2t is not None:
            assert set(tokens.tolist()) <= set(session.head.ids.tolist())


@torch.inference_mode()
@pytest.mark.parametrize("k", [1, 5, 16, 70])
@pytest.mark.parametrize("n", [97, 300])
def test_the_most_probable_and_the_walk_without_kernels(k, n):
    """Kernel and plain form agree to the bit on who is chosen, ties included."""
    logits = torch.randn(3, 4, n, generator=torch.Generator().manual_seed(n))
    logits[0, 0, 11] = logits[0, 0, 60] = 5.0
    result, plain = top_k(logits, k), reference_top_k(logits, k)
    assert torch.equal(result[0], plain[0]) and torch.equal(result[1], plain[1])
    assert result[0][0, 0, 0] == 11
    torch.testing.assert_close(result[2], plain[2])
    h, last = torch.randn(3, 4, 6), torch.tensor([5, 0, 96])
    for dtype in (torch.float32, torch.bfloat16):
        books = [torch.randn(n, 6).to(dtype) for _ in range(2)]
        ours, truth = (f(last, *result, h, *books) for f in (walk, reference_walk))
        assert torch.equal(ours[0], truth[0])
        torch.testing.assert_close(ours[1], truth[1], atol=1e-5, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["conv", "selector", "Markov", "DSpark", "lean"])
def test_what_is_drawn_comes_from_the_q_that_is_reported(name):
    """Drawn step by step, each from the distribution given the drawn ones before it."""
    target, draft = tiny.target("gpt_oss"), drafted(**PARTS[name])
    session, last = session_of(draft, target, rows=1), tiny.tokens(1, seed=4)
    sampling = Sampling(temperature=0.7)
    proposal = session.propose(last, 4, Sampled(sampling, torch.Generator().manual_seed(2)))
    hidden, tokens = session.block_hidden(last)[0, 1:], proposal.tokens[0].tolist()
    assert proposal.q.shape == (1, 4, tiny.VOCAB)
    words = session.head.ids if session.head.ids is not None else torch.arange(tiny.VOCAB)
    for t in range(3):
        logits, previous = session.head.logits(hidden[t]), torch.tensor(tokens[t])
        scores = torch.full((tiny.VOCAB,), -torch.inf)
        if draft.candidate_selector is not None:
            s = draft.candidate_selector
            few = logits.topk(s.top_k).indices
            scores[words[few]] = s.scores(previous, words[few], logits[few], s.hidden_projection(hidden[t]))
        elif draft.markov_head is not None:
            scores[words] = logits + draft.markov_head.bias(previous, hidden[t])
        else:
            scores[words] = logits
        torch.testing.assert_close(proposal.q[0, t + 1], (scores / 0.7).softmax(-1), atol=1e-5, rtol=1e-4)
        assert proposal.q[0, t + 1, tokens[t + 1]] > 0
    first = session.propose(last, 4, Greedy()).survival[0, 1]  # what is drawn later does not change it
    torch.testing.assert_close(proposal.survival[0, 1], first)
    assert (proposal.survival.diff(dim=1) <= 0).all()


@torch.inference_mode()
@pytest.mark.parametrize("sampling", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}])
@pytest.mark.parametrize("name", ["selector", "lean"])
def test_coupled_walks_take_what_the_noise_favours(name, sampling):
    """Chosen among the candidates; here among all tokens, the others at -inf."""
    target, draft = tiny.target("gpt_oss"), drafted(**PARTS[name])
    (session, last), moved = (session_of(draft, target), tiny.tokens(2, seed=4)), 0
    for key in range(12):
        how = Sampling(temperature=0.8, **sampling)
        sampler = GumbelCoupled(how, key, streams=torch.tensor([3, 8]), places=torch.tensor([40, 7]))
        proposal, previous = session.propose(last, 4, sampler), last
        hidden, s = session.block_hidden(last)[:, 1:], draft.candidate_selector
        for t in range(3):
            rows, values, _ = top_k(session.head.logits(hidden[:, t]), s.top_k)
            ids = session.head.tokens(rows)
            scores = s.scores(previous, ids, values, s.hidden_projection(hidden[:, t]))
            everything = torch.full((2, tiny.VOCAB), -torch.inf).scatter(-1, ids, scores)
            previous = sampler.tokens(everything[:, None], t + 1)[0][:, 0]
            assert torch.equal(proposal.tokens[:, t + 1], previous)
        moved += int((proposal.tokens != session.propose(last, 4, Greedy()).tokens).any())
    assert moved > 3 and proposal.q is None


@torch.inference_mode()
def test_a_coupled_walk_is_the_same_with_and_without_the_kernel(force_kernels):
    target, draft = tiny.target("gpt_oss"), drafted(**SELECTOR)
    values = []
    for kernels in (True, False):
        force_kernels(kernels)
        session, last = session_of(draft, target), tiny.tokens(2, seed=4)
        for key in range(20):
            places = torch.tensor([3, 8]), torch.tensor([40 + key, 7])
            values.append(session.propose(last, 4, GumbelCoupled(Sampling(temperature=1.3), key, *places)))
    for mine, theirs in zip(values[:20], values[20:], strict=True):
        assert torch.equal(mine.tokens, theirs.tokens)
        torch.testing.assert_close(mine.survival, theirs.survival, atol=1e-5, rtol=1e-4)


def test_survival_is_the_product_of_scaled_chances():
    sure = torch.tensor([[0.9, 0.5, 0.8]])
    assert torch.allclose(survival(sure), torch.tensor([[1, 0.9, 0.45, 0.36]]))
    odds = torch.logit(sure) / torch.tensor([2.0, 1.0, 0.5])
    wanted = torch.cat((torch.ones(1, 1), odds.sigmoid().cumprod(1)), dim=1)
    assert torch.allclose(survival(sure, (2.0, 1.0, 0.5, 9.0)), wanted, atol=1e-6)


# ---- at their start the parts change nothing ---------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", [n for n in PARTS if "words" not in n and n not in ("DSpark", "lean")])
def test_a_warm_start_continues_to_the_bit(name, kernels, force_kernels):
    force_kernels(kernels)
    target, plain = tiny.target("gpt_oss"), random_draft()
    draft = DFlash(dataclasses.replace(CONFIG, **PARTS[name])).eval()
    draft.reset_parts(torch.Generator().manual_seed(1))
    missing, left = draft.load_state_dict(plain.state_dict(), strict=False)
    assert missing and not left
    last = tiny.tokens(2, seed=4)
    one, other = session_of(plain, target), session_of(draft, target)
    assert torch.equal(one.block_hidden(last), other.block_hidden(last))
    ours, theirs = (s.propose(last, CONFIG.block_size, Greedy()) for s in (one, other))
    assert torch.equal(ours.tokens, theirs.tokens)


# ---- who sees whom ---------------------------------------------------------------------------------


def reach(draft, target, monkeypatch):
    """[B, B]: how far each slot's input moves each slot's state."""
    session, original = session_of(draft, target, rows=1), draft.embed_block
    still, items = session.block_hidden(torch.tensor([40])), []
    for source in range(CONFIG.block_size):

        def nudged(anchors, target, source=source):
            x = original(anchors, target).clone()
            x[:, source] += torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(1))
            return x

        monkeypatch.setattr(draft, "embed_block", nudged, raising=False)
        items.append((session.block_hidden(torch.tensor([40])) - still).abs().amax(-1)[0])
    return torch.stack(items)


CAUSAL = {
    "full": {"causal_full": True},
    "windows": {"layer_types": (WINDOW,) * 3, "sliding_window": 6, "causal": True},
    "mixed": {
        "layer_types": (WINDOW, FULL, WINDOW),
        "sliding_window": 6,
        "causal": True,
        "causal_full": True,
    },
    "DFlash 2": CONV | SELECTOR | {"causal_full": True},
}


@torch.inference_mode()
@pytest.mark.parametrize("name", CAUSAL)
def test_in_a_causal_block_nothing_depends_on_what_follows(name, monkeypatch):
    target, draft = tiny.target("gpt_oss"), drafted(**CAUSAL[name])
    assert draft.config.one_way
    moved = reach(draft, target, monkeypatch)
    assert (moved.tril(-1) == 0).all() and (moved.triu() > 0).sum() == 10
    monkeypatch.undo()
    session, last = session_of(draft, target), tiny.tokens(2, seed=4)
    whole = session.propose(last, 4, Greedy())
    for width in (2, 3):  # only so many rows are run, and they say the same
        narrow = session.propose(last, width, Greedy())
        assert torch.equal(narrow.tokens, whole.tokens[:, :width])
        torch.testing.assert_close(narrow.survival, whole.survival[:, :width])
        assert session.block_hidden(last, width).shape[1] == width


@torch.inference_mode()
def test_some_causal_layers_are_not_one_way():
    mixed = {"layer_types": (WINDOW, FULL, WINDOW), "sliding_window": 6, "causal": True}
    target, draft = tiny.target("gpt_oss"), drafted(**mixed)
    assert not draft.config.one_way
    assert session_of(draft, target).block_hidden(tiny.tokens(2, seed=4), 2).shape[1] == CONFIG.block_size


@torch.inference_mode()
def test_a_reduced_vocabulary_says_what_the_whole_one_says_of_its_words():
    target, draft = tiny.target("gpt_oss"), drafted(**WORDS)
    whole = random_draft()
    whole.load_state_dict({k: v for k, v in draft.state_dict().items() if k != "d2t"})
    last = tiny.tokens(2, seed=4)
    head, everything = (Head.of(target, d.d2t) for d in (draft, whole))
    hidden = session_of(draft, target).block_hidden(last)
    few, all_of_them = (h.spread(h.logits(hidden)) for h in (head, everything))
    ids = head.ids
    assert len(ids) == 31 and torch.equal(few[..., ids], all_of_them[..., ids])
    others = torch.ones(tiny.VOCAB, dtype=torch.bool)
    others[ids] = False
    assert (few[..., others] == -torch.inf).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernel_size": 2}, "go together"),
        ({"conv_kernel_size": 2, "conv_group_size": 7}, "does not divide hidden_size 96"),
        ({"conv_kernel_size": 5, "conv_group_size": 12}, "taps reach back"),
        ({"selector_rank": 4}, "go together"),
        ({"selector_rank": 4, "selector_top_k": 98}, "selector_top_k 98"),
        (SELECTOR | MARKOV, "choose one"),
        ({"markov_gated": True}, "nothing to gate"),
        ({"draft_vocab_size": 98}, "draft_vocab_size 98"),
        ({"temperatures": (1.0, 2.0)}, "2 temperatures for 3 draft tokens"),
        ({"temperatures": (1.0, 0.0, 1.0)}, "above 0"),
        (WORDS | {"selector_rank": 4, "selector_top_k": 32}, "32 of 31 tokens"),
    ],
)
def test_parts_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


# ---- fewer bytes -----------------------------------------------------------------------------------


@torch.inference_mode()
def test_packed_weights_round_by_half_a_step_and_compute_the_same():
    target, draft = tiny.target("gpt_oss"), drafted(**CONV, **SELECTOR, **WORDS, num_heads=8, head_dim=8)
    packed, last = quantised(draft), tiny.tokens(2, seed=4)
    unpacked = copy.deepcopy(draft)
    for name, module in packed.named_modules():
        if isinstance(module, Linear) and isinstance(module.weight, Quant):
            unpacked.get_submodule(name).weight.copy_(module.weight.dense())
    one, other = session_of(unpacked, target), session_of(packed, target)
    torch.testing.assert_close(one.block_hidden(last), other.block_hidden(last), atol=1e-4, rtol=1e-4)
    assert not torch.equal(one.block_hidden(last), session_of(draft, target).block_hidden(last))
    kinds = {n: isinstance(m.weight, Quant) for n, m in packed.named_modules() if isinstance(m, Linear)}
    assert kinds["fc"] and kinds["layers.0.qkv_proj"] and kinds["layers.0.attention_conv.kernel_projection"]
    assert not kinds["layers.0.mlp.down_proj"]  # 28 positions: no block divides them
    weight, again = draft.fc.weight, packed.fc.weight.dense()
    step = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    assert ((weight - again).unflatten(1, (-1, 32)).abs() <= 0.51 * step + 1e-4).all()
    assert isinstance(other.head.weight, Quant) and not isinstance(one.head.weight, Quant)
    assert isinstance(draft.fc.weight, torch.nn.Parameter)  # the draft itself is untouched
    with pytest.raises(ValueError, match="q8_0"):
        quantised(draft, "int4")
