"""A compiler captures a step whole, and one captured step serves every length, count and tree."""

import pytest
import tiny
import torch
from indexers import indexed_target
from torch._dynamo.testing import CompileCounterWithBackend

from outpace.kv.tree import Tree
from outpace.models.load import build, named_tensors
from outpace.models.static_step import StaticStep

FAMILIES = ("gpt_oss", "llama", "qwen3", "qwen3_moe")
WIDTH = 6
TREES = torch.tensor([[[0, 0, 0, 1, 2, 3], [0, 1, 0, 1, 1, 4]], [[0, 0, 1, 2, 3, 5], [0, 0, 0, 0, 3, 4]]])
TOLERANCE = 1e-4  # between the C kernels and torch's operators, in float32


def model_of(family):
    model = build(tiny.config(family))
    tiny.randomise(named_tensors(model), 3)
    return model.eval()


@torch.no_grad()
def compare(model, tree, capture, tolerance=TOLERANCE):
    """Nine prompt tokens, then steps past the windows of 7 and their rings, against the modules: `capture`
    makes a function of the static step and of its first inputs."""
    mine, reference = (model.make_cache(2, 60, slack=8) for _ in range(2))
    for cache in (mine, reference):
        model(tiny.tokens(2, 9), cache)
    static, call = StaticStep(model, mine, aux=(1, 0)), None
    for i, counts in enumerate(([6, 6], [1, 4], [5, 6], [6, 2], [6, 6])):
        tokens, parents = tiny.tokens(2, WIDTH, seed=i), TREES[i % 2] if tree else None
        step = mine.begin(WIDTH, counts)
        inputs = tokens, step.starts, step.counts_tensor, *([parents] if tree else [])
        if call is None:
            call = capture(static, inputs)
        got = call(*inputs)
        mine.advance(step)
        want = model(
            tokens, reference, counts=counts, tree=Tree(parents) if tree else None, aux=(1, 0), logits=True
        )
        for b, n in enumerate(counts):
            torch.testing.assert_close(got.logits[b, :n], want.logits[b, :n], rtol=0, atol=tolerance)
            torch.testing.assert_close(got.aux[:, b, :n], want.aux[:, b, :n], rtol=0, atol=tolerance)
            assert torch.equal(got.best[b, :n], got.logits[b, :n].argmax(-1))
        for a, b in zip(mine.layers, reference.layers, strict=True):
            for x, y in ((a.k, b.k), (a.v, b.v)):
                torch.testing.assert_close(x[:, :, : a.size], y[:, :, : a.size], rtol=0, atol=tolerance)
    assert mine.lengths == reference.lengths


def exported(static, inputs):
    return torch.export.export(static, inputs).module()


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_export_captures_a_step(family, tree):
    compare(model_of(family), tree, exported)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_step_is_one_graph_that_is_never_made_again(family, tree):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compare(model_of(family), tree, lambda static, _: torch.compile(static, fullgraph=True, backend=counter))
    assert counter.frame_count == 1


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_captured_step_over_keys_of_two_bytes(tree):
    """A key's last bit may round the other way than with the kernels: of float16 at most 2^-10 of it."""
    model = model_of("gpt_oss")
    model.kv_cache_dtype = torch.float16
    compare(model, tree, exported, 4e-3)


def test_packed_experts_stay_packed_in_the_graph():
    model = tiny.in_mxfp4(model_of("gpt_oss"))
    compare(model, False, exported)


def test_without_a_compiler_it_is_the_modules_to_the_bit():
    model = model_of("gpt_oss")
    mine, reference = (model.make_cache(2, 60, slack=8) for _ in range(2))
    with torch.no_grad():
        for cache in (mine, reference):
            model(tiny.tokens(2, 9), cache)
        tokens, step = tiny.tokens(2, WIDTH, seed=1), mine.begin(WIDTH)
        got = StaticStep(model, mine)(tokens, step.starts, step.counts_tensor)
        assert torch.equal(got.logits, model(tokens, reference, logits=True).logits)
        assert torch.equal(got.best, got.logits.argmax(-1))


def test_what_it_cannot_hold_is_refused():
    _, model = indexed_target("gpt_oss")
    with pytest.raises(ValueError, match="layer 1 has an index or latent KV"):
        StaticStep(model, model.make_cache(1, 20))
