"""The twin tests of graphs, experts and MXFP4 on a GPU; on a CPU too, so that they are in order."""

import copy

import pytest
import tiny
import torch
from dflash_drafts import random_dflash

from outpace.decode.exactness import BATCHES, check_rows
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.dflash import BoundDFlash
from outpace.drafts.lookup import NGram
from outpace.drafts.tree import DDTree
from outpace.models.cuda_graphs import GraphTarget
from outpace.models.load import build, named_tensors
from outpace.models.memory import plan_memory
from outpace.ops import mxfp4
from outpace.ops.moe import Matrices, on_device

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ("cpu", pytest.param("cuda", marks=GPU))
on_each = pytest.mark.parametrize("device", DEVICES)


PACKED = "gpt_oss, MXFP4"


def model_of(family, device, dtype=torch.float32):
    """With a head_dim that Triton's attention takes."""
    model = build(tiny.config(family.partition(",")[0], head_dim=16))
    tiny.randomise(named_tensors(model), 3)
    model = tiny.in_mxfp4(model) if family == PACKED else model
    model.dtype = dtype
    return model.to(device, dtype).eval()


@pytest.mark.parametrize("kind", ["none", "chain", "states", "tree"])
@pytest.mark.parametrize("family", [*tiny.FAMILIES, PACKED])
@on_each
def test_graphs_of_one_shape_write_the_same_with_every_draft(device, family, kind):
    """And the tokens of the modules on a CPU, which no tie decides here."""
    model = model_of(family, device)
    dflash = BoundDFlash(random_dflash(model).to(device), model)
    drafts = {"none": None, "chain": NGram(block_size=4), "states": dflash, "tree": DDTree(dflash, 7, 3)}
    prompts = [tiny.tokens(1, n, seed=n)[0].tolist() for n in (21, 9)]
    request = Request(max_new_tokens=16, stop=frozenset(), limits=(16, 7), prefill_chunk=9)
    wanted = generate(model_of(family, "cpu"), prompts, request).tokens
    target = GraphTarget(model, deterministic=True)
    for _ in range(2):
        assert generate(target, prompts, request, drafts[kind]).tokens == wanted


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=GPU),
        pytest.param("cuda", torch.bfloat16, marks=GPU),
    ],
)
def test_rows_are_exact_in_steps_of_one_shape(device, dtype):
    target = GraphTarget(model_of("llama", device, dtype), deterministic=True)
    assert check_rows(target, widths=(1, 2, 7, 8)) == []
    if device == "cuda":
        assert check_rows(target, widths=range(1, 33), batches=BATCHES) == []


@on_each
def test_states_of_graphs_are_the_modules(device):
    model = model_of("gpt_oss", device)
    target = GraphTarget(model)
    with torch.no_grad():
        caches = [x.make_cache(2, 40, slack=8) for x in (target, model)]
        for n, counts in ((5, [5, 2]), (1, [1, 1]), (8, [3, 8])):
            tokens = tiny.tokens(2, n, seed=n).to(device)
            mine, theirs = (
                x(tokens, cache, counts=counts, aux=(2, 0), logits=True)
                for x, cache in zip((target, model), caches, strict=True)
            )
            for b, count in enumerate(counts):
                for got, want in ((mine.hidden, theirs.hidden), (mine.logits, theirs.logits)):
                    torch.testing.assert_close(got[b, :count], want[b, :count], rtol=0, atol=1e-4)
                torch.testing.assert_close(
                    mine.aux[:, b, :count], theirs.aux[:, b, :count], rtol=0, atol=1e-4
                )


@pytest.mark.parametrize("rows", [2, 40])
@on_each
@torch.no_grad()
def test_experts_and_mxfp4_are_those_of_a_cpu(device, rows):
    up, down = torch.randn(5, 128, 96), torch.randn(5, 96, 64)
    packs = mxfp4.pack(up), mxfp4.pack(down)
    moved = [[part.to(device) for part in pack] for pack in packs]
    for pack, there in zip(packs, moved, strict=True):
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(
                mxfp4.reference_unpack(there[0], there[1], dtype).cpu(), mxfp4.unpack(pack[0], pack[1], dtype)
            )
    x, weights = torch.randn(rows, 96), torch.rand(rows, 3)
    chosen = torch.stack([torch.randperm(5)[:3] for _ in range(rows)])
    wanted = on_device(x, chosen, weights, Matrices(packs[0], None, packs[1], None, 7.0))
    inputs = x.to(device, torch.bfloat16), chosen.to(device), weights.to(device)
    got = on_device(*inputs, Matrices(tuple(moved[0]), None, tuple(moved[1]), None, 7.0)).cpu().float()
    assert (got - wanted).abs().max() < 0.05 * wanted.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_is_taken_is_within_the_plan():
    model = model_of("gpt_oss", "cuda", torch.bfloat16)
    plan = plan_memory(copy.copy(model.config), "dense", 4, 600)
    torch.cuda.reset_peak_memory_stats()
    prompts = [tiny.tokens(1, 500, seed=n)[0].tolist() for n in range(4)]
    generate(GraphTarget(model), prompts, Request(max_new_tokens=30, stop=frozenset()), NGram(block_size=8))
    assert torch.cuda.max_memory_allocated() <= plan.total
