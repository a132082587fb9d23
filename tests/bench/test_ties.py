"""How near two logits must lie for a difference to count as a tie: 1e-4 in float32, and no more."""

import copy

import pytest
import tiny
import torch

from outpace.bench.metrics import compare, is_tie

PREFIX = [5, 17, 8, 33, 2]


@torch.inference_mode()
def with_second(gap):
    """A target of which, after PREFIX, token `b` has the largest logit less `gap`. -> target, a, b"""
    target = copy.deepcopy(tiny.target("gpt_oss"))
    hidden = target(torch.tensor([PREFIX])).hidden[0, -1].double()
    a = int(target.logits(hidden[None].float()).argmax())
    b = (a + 1) % target.config.vocab_size
    row = target.lm_head.weight[a].double()
    target.lm_head.weight[b] = (row - gap * hidden / (hidden @ hidden)).float()
    return target, a, b


@pytest.mark.parametrize(("gap", "tie"), [(2e-5, True), (5e-4, False), (5e-2, False)])
def test_only_what_rounding_may_exchange_is_a_tie(gap, tie):
    target, a, b = with_second(gap)
    assert is_tie(target, PREFIX, a, b) is tie
    result = compare(target, PREFIX, [b, 1, 2], [a, 1, 2])
    assert (result.ties, result.violations) == (int(tie), int(not tie))
