"""The unrolled draft: it equals a walk position by position, the served chain, and its loss written out."""

from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from eagle3_drafts import over_all

from outpace.drafts.eagle3 import Eagle3Config, init_eagle3
from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.train.drafts import DraftVocabulary
from outpace.train.eagle3 import gather, thinned, unroll, unrolled_loss
from outpace.train.losses import reference_losses

LAYERS, STEPS, IDS = (0, 1, 3), 4, torch.arange(2, 97, 3)
H, K, D = 4, 2, 10


def draft_of(target, mapped=True, **changes):
    theirs = target.config
    config = Eagle3Config(
        hidden_size=theirs.hidden_size,
        target_hidden_size=theirs.hidden_size,
        num_heads=H,
        num_kv_heads=K,
        head_dim=D,
        intermediate_size=56,
        vocab_size=theirs.vocab_size,
        draft_vocab_size=len(IDS) if mapped else theirs.vocab_size,
        rope=theirs.rope,
        rms_norm_eps=1e-5,
        layer_ids=LAYERS,
        **changes,
    )
    draft = init_eagle3(config, 1, ids=IDS if mapped else None, own_head=mapped)
    tiny.randomise(draft.named_parameters(), 5)
    return draft.requires_grad_(True)


def sample(target, length, prompt_length, offset=0, seed=0):
    text = tiny.tokens(length, seed=seed)
    with torch.no_grad():
        out = target(text[None], aux=LAYERS, offset=offset)
    return SimpleNamespace(
        tokens=text, prompt_length=prompt_length, aux=out.aux[:, 0], offset=offset, final=out.hidden[0]
    )


@pytest.fixture(scope="module")
def target():
    return tiny.target("gpt_oss")


@pytest.fixture(scope="module")
def samples(target):
    return [sample(target, 19, 5, 300, 1), sample(target, 5, 3, 0, 2), sample(target, 13, 1, 0, 3)]


def everything(texts, steps=STEPS):
    return [torch.arange(len(texts.at))] * steps


def walk(draft, target, row, t, window, parallel):
    """From index t of a text, one token at a time: every query is given its list of keys and values."""
    layers = draft.config.num_layers
    feature = draft.fuse(row.aux[:, None])
    items, lists = [], [[] for _ in range(layers)]

    def run(embed, g, position):
        def attend(layer, q, k, v):
            lists[layer].append((position, k[0, :, 0], v[0, :, 0]))
            seen = [x for x in lists[layer] if not window or x[0] > position - window]
            out = []
            for h in range(H):
                scores = torch.stack([q[0, 0, h] @ k[h // (H // K)] for _, k, _ in seen]) * D**-0.5
                out.append(scores.softmax(0) @ torch.stack([v[h // (H // K)] for _, _, v in seen]))
            return torch.cat(out)[None, None]

        cos, sin = draft.rope(torch.tensor([[position + row.offset]]))
        return draft(embed, g, cos, sin, attend)

    for s in range(t + 1):
        hidden = run(target.embed(row.tokens[None, s + 1, None]), feature[:, s : s + 1], s)
    items.append(hidden[0, 0])
    for j in range(1, STEPS):
        if t + 1 + j >= len(row.tokens):
            break
        embed, g = target.embed(row.tokens[None, t + 1 + j, None]), draft.feedback(hidden)
        if parallel:
            embed, g = draft.masks(target)
        hidden = run(embed, g, t + j)
        items.append(hidden[0, 0])
    return items


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 6},
    "eagle 3.1": {"norm_output": True, "fc_norm": True},
    "normed residual": {"norm_before_residual": True},
    "two layers": {"num_layers": 2},
    "one pass": {"parallel": True, "num_layers": 2},
    "one pass, a token as mask": {"parallel": True, "mask_token_id": 4},
}


@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_unrolled_is_a_walk_over_explicit_lists(target, samples, name, thin):
    draft, texts = draft_of(target, **CASES[name]), gather(samples, None)
    indices = everything(texts)
    if thin:
        indices = thinned([len(texts.at)], STEPS, 0.6, [torch.Generator().manual_seed(2)])
        assert 0 < len(indices[-1]) < len(indices[1]) < len(indices[0])
    with torch.no_grad():
        steps = unroll(draft, target, texts, indices, torch.float32)
        compared = 0
        for r, row in enumerate(samples):
            for n in range(texts.queries[r], texts.queries[r + 1]):
                t = int(texts.at[n]) - texts.keys[r]
                assert row.prompt_length - 1 <= t <= len(row.tokens) - 3
                changes = CASES[name]
                wanted = walk(
                    draft,
                    target,
                    row,
                    t,
                    changes.get("sliding_window", 0),
                    changes.get("parallel"),
                )
                for j, hidden in enumerate(wanted):
                    place = (steps[j].chosen == n).nonzero()
                    if len(place):
                        torch.testing.assert_close(steps[j].hidden[place[0, 0]], hidden, atol=2e-4, rtol=1e-4)
                        compared += 1
    assert compared > (1 if thin else 3) * len(texts.at)


class Forced:
    """A draft's choice that always states the true text, and keeps the logits it was asked with."""

    def __init__(self, truth):
        self.truth, self.logits = truth, []

    def tokens(self, logits, depth):
        first = len(self.logits)
        self.logits += list(logits[0])
        return self.truth[None, first : first + logits.shape[1]], None


@pytest.mark.parametrize("name", CASES)
def test_unrolled_is_the_served_chain(target, samples, name):
    """Verified up to a place and then drafting, when all draft tokens are the true text."""
    draft, texts = draft_of(target, **CASES[name]).eval(), gather(samples[:1], None)
    row = samples[0]
    bound = BoundEagle3(draft, target, TreeShape(depth=STEPS))
    with torch.no_grad():
        steps = unroll(draft, target, texts, everything(texts), torch.float32)
        for n in (0, 3, len(texts.at) - STEPS):
            t = int(texts.at[n])
            session = bound.begin(1, 40, row.offset)
            session.observe(row.tokens[None, : t + 1], row.aux[:, None, : t + 1], [t + 1])
            forced = Forced(row.tokens[t + 2 :])
            session.propose(row.tokens[None, t + 1], STEPS + 1, forced)
            ours = torch.stack([over_all(draft, draft.head(step.hidden[n])) for step in steps])
            torch.testing.assert_close(torch.stack(forced.logits), ours, atol=3e-4, rtol=1e-4)


def test_recomputing_layers_changes_nothing(target, samples):
    texts, items = gather(samples, None, final=True), []
    for recompute in (False, True):
        draft = draft_of(target, num_layers=2)
        steps = unroll(draft, target, texts, everything(texts), torch.float32, recompute)
        loss = unrolled_loss(
            draft, steps, texts, DraftVocabulary.of(draft.target_ids(), target, torch.float32), "kl", 0.8
        ).loss
        loss.backward()
        items.append([loss, *(p.grad for p in draft.parameters())])
    for a, b in zip(*items, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("kind", ["ce", "kl", "0.1*ce+0.9*tv"])
def test_the_loss_is_the_one_written_out(target, samples, kind, mapped, thin):
    """Index by index and step by step: label t + 2 + j, target state t + 1 + j, weight 0.8^j."""
    draft, texts = draft_of(target, mapped), gather(samples, None, final=True)
    indices = everything(texts)
    if thin:
        indices = thinned([len(texts.at)], STEPS, 0.6, [torch.Generator().manual_seed(2)])
    steps = unroll(draft, target, texts, indices, torch.float32)
    vocabulary = DraftVocabulary.of(draft.target_ids(), target, torch.float32)
    validation = unrolled_loss(draft, steps, texts, vocabulary, kind, 0.8)
    ids = draft.target_ids() if mapped else torch.arange(97)
    total = weights = torch.zeros(())
    for j, step in enumerate(steps):
        for place, n in enumerate(step.chosen.tolist()):
            r = max(i for i in range(3) if texts.queries[i] <= n)
            row, t = samples[r], int(texts.at[n]) - texts.keys[r]
            assert validation.valid[n, j] == (t + 2 + j < len(row.tokens))
            if not validation.valid[n, j]:
                assert not validation.hits[n, j]
                continue
            label = row.tokens[t + 2 + j]
            value = (ids == label).nonzero()
            says = target.logits(row.final[t + 1 + j]).argmax()
            known = (ids == (label if kind == "ce" else says)).any()
            logits = over_all(draft, draft.head(step.hidden[place], target))
            assert validation.hits[n, j] == (logits.argmax() == label)
            if not known:
                continue
            given = logits[ids][None], torch.eye(len(ids))
            mine = torch.tensor([int(value[0, 0]) if len(value) else -1])
            theirs = target.logits(row.final[t + 1 + j])[ids][None], torch.eye(len(ids))
            one = reference_losses(kind, *given, mine, *theirs)
            total, weights = total + 0.8**j * one.loss[0], weights + 0.8**j
            if validation.alpha is not None:
                torch.testing.assert_close(validation.alpha[n, j], one.accept[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(validation.loss, total / weights, atol=1e-5, rtol=1e-4)
    assert (validation.alpha is None) == (kind == "ce")
    ours = torch.autograd.grad(validation.loss, list(draft.parameters()), retain_graph=True)
    wanted = torch.autograd.grad(total / weights, list(draft.parameters()))
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)


def test_thinning_keeps_what_deeper_steps_attend_to():
    indices = thinned([3000, 2000], 9, 0.8, [torch.Generator().manual_seed(n) for n in (1, 5)])
    assert indices[0].tolist() == list(range(5000))
    for j in range(1, 9):
        assert set(indices[j].tolist()) <= set(indices[j - 1].tolist())
        assert len(indices[j]) / 5000 == pytest.approx(max(0.8**j, 0.2), abs=0.03)
        assert torch.equal(indices[j], indices[j].sort().values)
    few = thinned([2, 3], 9, 0.1, [torch.Generator().manual_seed(n) for n in (1, 5)])
    assert all(at.min() < 2 <= at.max() for at in few)


def test_what_a_row_gives(target, samples):
    """Prompts of 5, 3 and 1 tokens: token t + 1 is of the response, and t + 2 is there."""
    hopeless = sample(target, 4, 3)  # one token of response
    texts = gather([samples[0], hopeless, *samples[1:]], None, [2, 0], final=True)
    assert texts.keys == [0, 19, 24, 37] and texts.queries == [0, 13, 14, 25]
    assert texts.at.tolist() == [*range(4, 17), 19 + 2, *range(24, 35)]
    assert texts.end.tolist() == [13] * 13 + [14] + [25] * 11
    assert torch.equal(texts.labels, torch.cat([s.tokens[s.prompt_length + 1 :] for s in samples]))
    assert torch.equal(texts.final, torch.cat([s.final[s.prompt_length : -1] for s in samples]))
    assert torch.equal(texts.aux[:, :19], samples[0].aux[[2, 0]])
    assert texts.positions[:2].tolist() == [300, 301] and texts.positions[19] == 0
    cut = gather(samples, 8)
    assert cut.final is None and cut.keys == [0, 8, 13, 21]
    with pytest.raises(ValueError, match=r"none of 1 cached rows has a draft token.*within row_tokens 6"):
        gather(samples[:1], 6)
