"""Coupled texts compared: what is equal, what differs, and what a tie excuses."""

import tiny
import torch

from outpace.bench import metrics
from outpace.bench.metrics import LosslessCheck, compare_coupled
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.ops.sampling import Sampling

PROMPTS = [tiny.tokens(n, seed=n).tolist() for n in (9, 4)]
HOW = Sampling(temperature=0.7, top_k=30, repetition_penalty=1.2)


def rng():
    return torch.Generator().manual_seed(6)


def compared(tokens, answer, request, row):
    return compare_coupled(tiny.target("gpt_oss"), PROMPTS[row], tokens, answer, request, rng(), row)


def test_equal_texts_a_changed_token_and_a_lost_one():
    request = Request(max_new_tokens=12, sampling=HOW, rule="gumbel")
    answers = generate(tiny.target("gpt_oss"), PROMPTS, request, rng=rng()).tokens
    for row, answer in enumerate(answers):
        assert compared(answer, answer, request, row) == LosslessCheck(checked=12)
        assert compared(answer[:-1], answer, request, row) == LosslessCheck(checked=11, violations=1)
        wrong = [*answer[:5], (answer[5] + 1) % tiny.VOCAB, *answer[6:]]
        assert compared(wrong, answer, request, row) == LosslessCheck(checked=6, violations=1)


def test_only_scores_with_the_noise_of_that_very_place_can_tie(monkeypatch):
    """How large a gap would have to be allowed for each token to pass: none for the one that was emitted, so
    these are the scores that it had the largest of; and no gap is enough for what top-k cut."""
    model, row = tiny.target("gpt_oss"), 1
    request = Request(max_new_tokens=12, sampling=HOW, rule="gumbel", streams=(4, 9))
    answer = generate(model, PROMPTS, request, rng=rng()).tokens[row]
    gaps = {}
    for token in {*range(0, tiny.VOCAB, 6), answer[3]}:
        low, high = 0.0, 60.0
        for _ in range(16):
            middle = (low + high) / 2
            monkeypatch.setattr(metrics, "TIE", middle)
            result = compared([*answer[:3], token, *answer[4:]], answer, request, row)
            low, high = (low, middle) if result.ties or not result.violations else (middle, high)
        gaps[token] = high
    assert gaps.pop(answer[3]) < 0.002
    kept = [g for g in gaps.values() if g < 59]
    assert 0.01 < min(kept) and 2 <= len(kept) <= len(gaps) - 5
