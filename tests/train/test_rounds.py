"""FollowedAnchors: the anchors converge to the positions where decoding begins its blocks."""

from itertools import repeat
from types import SimpleNamespace

import torch

from outpace.train.data import FollowedAnchors, pack

BLOCK, PROMPT = 5, 4


def row(T, seed):
    tokens = torch.randint(50, (T,), generator=torch.Generator().manual_seed(seed))
    return SimpleNamespace(tokens=tokens, prompt_length=PROMPT, aux=torch.zeros(2, T, 6), offset=0)


def drafted(packed, hard):
    """Hits of a draft that proposes every token right but those at the positions `hard`."""
    at = packed.layout.seen[:, None] + torch.arange(1, BLOCK)
    return ~torch.isin(at, hard) & packed.valid


def begins(T, hard):
    """The anchors of decoding itself, one step after the other."""
    items, at = [], PROMPT
    while at <= T - 2:
        items.append(at)
        at += 1
        while at not in hard and at < items[-1] + BLOCK:
            at += 1
    return items


def test_anchors_converge_to_the_steps_of_decoding():
    hard = torch.tensor([9, 10, 17, 23, 31, 32, 33, 40])
    samples, rows = [3, 1], [row(47, 1), row(38, 2)]
    anchors = FollowedAnchors(5, 12)
    for step in range(30):
        rng = torch.Generator().manual_seed(step)
        first = anchors.of(samples, rows)
        packed = pack(rows, BLOCK, 12, None, repeat(rng), first_anchors=first)
        anchors.update(samples, packed.layout, drafted(packed, hard))
    for sample, r in zip(samples, rows, strict=True):
        real = begins(len(r.tokens), hard.tolist())
        settled = set(anchors.of([sample], [r])[0].tolist()) & set(range(len(r.tokens) - 1))
        assert len(settled) >= 6 and len(settled & set(real)) >= 0.7 * len(settled)
    assert (anchors.begins[[0, 2, 4]] == -1).all()


def test_the_first_step_of_a_response_is_always_an_anchor():
    anchors = FollowedAnchors(1, 3)
    packed = pack(
        [row(30, 1)],
        BLOCK,
        3,
        None,
        repeat(torch.Generator().manual_seed(1)),
        first_anchors=anchors.of([0], [row(30, 1)]),
    )
    assert packed.layout.seen[0] == PROMPT


def test_the_next_anchor_after_a_fully_accepted_block_is_the_bonus():
    anchors = FollowedAnchors(1, 4)
    packed = pack(
        [row(90, 1)],
        BLOCK,
        1,
        None,
        repeat(torch.Generator().manual_seed(1)),
        first_anchors=anchors.of([0], [row(90, 1)]),
    )
    anchors.update([0], packed.layout, packed.valid)
    assert anchors.begins.tolist() == [[4 + BLOCK, -1, -1, -1]]
