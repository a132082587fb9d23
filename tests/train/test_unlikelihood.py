"""Unlikelihood on the model's own text: what counts as a repeat, the loss, and that it unlearns."""

import math

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.decode import plain
from outpace.decode.request import Request
from outpace.train.unlikelihood import SHARPEST, cut_prompts, repeats, unlikelihood_loss


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5))
def test_repeats_by_definition(tokens, n):
    def again(end):
        gram = tokens[end - n : end]
        return end >= n and any(tokens[i : i + n] == gram for i in range(end - n))

    assert repeats(tokens, n) == [again(end) for end in range(1, len(tokens) + 1)]


def test_prompts_depend_on_the_step_alone():
    stream = torch.arange(500).numpy()
    first = cut_prompts(stream, 3, 7, seed=1, step=4)
    assert first == cut_prompts(stream, 3, 7, seed=1, step=4) != cut_prompts(stream, 3, 7, seed=1, step=5)
    assert all(p == list(range(p[0], p[0] + 7)) for p in first)


@pytest.fixture
def looping():
    """A tiny target whose greedy text soon loops."""
    model = tiny.target("llama", seed=2).requires_grad_(True)
    return model, [[5, 6, 7], [9, 3, 4]]


def test_the_loss_is_its_definition(looping):
    model, prompts = looping
    with torch.no_grad():
        loss, share = unlikelihood_loss(model, prompts, 60, 2)
    said = plain.generate(model, prompts, Request(max_new_tokens=60)).tokens
    total, marked = 0.0, 0
    for prompt, answer in zip(prompts, said, strict=True):
        with torch.no_grad():
            p = model.logits(model(torch.tensor([prompt + answer])).hidden)[0].softmax(-1)
        for i, bad in enumerate(repeats(answer, 2)):
            if bad:
                marked += 1
                total -= math.log(1 - p[len(prompt) + i - 1, answer[i]].item() * math.exp(-SHARPEST))
    assert marked > 10
    assert share == pytest.approx(marked / 120)
    assert loss.item() == pytest.approx(total / 120, rel=1e-3)


def test_loops_are_unlearnt(looping):
    model, prompts = looping
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    shares = []
    for _ in range(12):
        loss, share = unlikelihood_loss(model, prompts, 60, 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shares.append(share)
    assert min(shares) < shares[0] / 2
