"""A static step on a GPU never waits for the host: no number is read there, and nothing is copied from it."""

import pytest
import tiny
import torch
from no_host import GPU, NoHost, host_watched

from outpace.models.load import build
from outpace.models.static_step import StaticStep

__all__ = ["host_watched"]  # a fixture

DTYPES = (torch.float32, torch.bfloat16)


def model_of(family, dtype, layout="dense"):
    torch.set_default_dtype(dtype)
    with GPU:
        model = build(tiny.config(family), layout)
    torch.set_default_dtype(torch.float32)
    model.dtype = dtype
    return model.to(GPU).eval()


def run(model, tokens, tree, guard):
    """`tokens` of each of two rows, past the windows of 7."""
    step = StaticStep(model, model.make_cache(2, 60, slack=8), aux=(1, 0))
    inputs = [torch.zeros(2, tokens, dtype=torch.int64, device=GPU)]
    inputs += [torch.zeros(2, dtype=torch.int64, device=GPU) for _ in range(2)]
    inputs += [torch.zeros(2, tokens, dtype=torch.int64, device=GPU)] if tree else []
    guard()
    with NoHost():
        out = step(*inputs)
    assert out.logits.shape == (2, tokens, tiny.VOCAB) and out.best.device == GPU


@pytest.mark.parametrize(
    ("tree", "tokens"), [(False, 1), (False, 6), (False, 40), (True, 1), (True, 9)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_step_waits_for_nobody(host_watched, family, dtype, tree, tokens):
    run(model_of(family, dtype), tokens, tree, host_watched)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_in_mxfp4_stay_where_they_are(host_watched, dtype, tokens):
    run(model_of("gpt_oss", dtype, "mxfp4"), tokens, False, host_watched)
