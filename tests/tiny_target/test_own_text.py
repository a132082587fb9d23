"""Learning from the model's own text: what counts as a repeat, both losses, that it unlearns and settles."""

import math

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.tiny_target.own_text import SHARPEST, answers, cut_prompts, own_text_losses, repeats
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.ops.sampling import seeded


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5))
def test_repeats_by_definition(tokens, n):
    def again(end):
        gram = tokens[end - n : end]
        return end >= n and any(tokens[i : i + n] == gram for i in range(end - n))

    assert repeats(tokens, n) == [again(end) for end in range(1, len(tokens) + 1)]


def test_prompts_depend_on_the_step_alone():
    stream = torch.arange(500).numpy()
    first = cut_prompts(stream, 3, 7, seeded(1, 4))
    assert first == cut_prompts(stream, 3, 7, seeded(1, 4)) != cut_prompts(stream, 3, 7, seeded(1, 5))
    assert all(p == list(range(p[0], p[0] + 7)) for p in first)


@pytest.fixture
def looping():
    """A tiny target where the greedy text soon loops."""
    model = tiny.target("llama", seed=2).requires_grad_(True)
    return model, [[5, 6, 7], [9, 3, 4]]


def probabilities(model, prompts, message):
    """Of every token stated, per answer."""
    for prompt, answer in zip(prompts, message, strict=True):
        with torch.no_grad():
            p = model.logits(model(torch.tensor([prompt + answer])).hidden)[0].softmax(-1)
        yield [p[len(prompt) + i - 1, token].item() for i, token in enumerate(answer)]


def test_the_losses_are_their_definitions(looping):
    model, prompts = looping
    value = answers(model, prompts, 60)
    assert value == generate(model, prompts, Request(max_new_tokens=60)).tokens
    value[1] = value[1][:47]  # answers may end before the others
    with torch.no_grad():
        unlikely, likely, share = own_text_losses(model, prompts, value, 6)
    down = up = marked = 0.0
    for answer, p in zip(value, probabilities(model, prompts, value), strict=True):
        for chosen, looping_, known in zip(p, repeats(answer, 6), repeats(answer, 3), strict=True):
            marked += looping_
            down -= math.log(1 - chosen * math.exp(-SHARPEST)) if looping_ else 0
            up -= 0 if looping_ or known else math.log(chosen)
    assert 10 < marked < 100 and up > 0
    assert share == pytest.approx(marked / 107)
    assert unlikely.item() == pytest.approx(down / 107, rel=1e-3)
    assert likely.item() == pytest.approx(up / 107, rel=1e-3)


def learn(model, prompts, of):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(12):
        value = answers(model, prompts, 60)
        unlikely, likely, share = own_text_losses(model, prompts, value, 6)
        of(unlikely, likely).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield share, likely.item()


def test_loops_are_unlearnt(looping):
    shares = [share for share, _ in learn(*looping, lambda unlikely, likely: unlikely)]  # type: ignore[call-arg]
    assert min(shares) < shares[0] / 2


def test_it_settles_on_what_it_says(looping):
    model, prompts = looping
    before = answers(model, prompts, 20)
    first = sum(map(sum, probabilities(model, prompts, before)))
    for _ in learn(model, prompts, lambda unlikely, likely: likely + unlikely):
        pass
    after = answers(model, prompts, 20)
    assert sum(map(sum, probabilities(model, prompts, after))) > first
