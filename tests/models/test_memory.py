"""Memory that is counted before anything is loaded: the bytes of what is made then, and what would fit."""

import pytest
import tiny
import torch
from gguf_blocks import blocks

from outpace.loading import open_on_device
from outpace.models.config import FULL
from outpace.models.cuda_graphs import GraphTarget
from outpace.models.load import build, empty_target, for_device, named_tensors
from outpace.models.memory import SPARE, check_memory, peak_bytes, plan_memory
from outpace.ops.quant import dense

BF16 = torch.bfloat16


def loaded(family, layout="dense"):
    """As `load_target` places it, with contents."""
    model = build(tiny.config(family), layout)
    for name, tensor in list(named_tensors(model)):
        module = model.get_submodule(name.rpartition(".")[0])
        placed = for_device(name, tensor.detach(), BF16)
        if name.rpartition(".")[2] in module._buffers:
            module._buffers[name.rpartition(".")[2]] = placed
        else:
            setattr(module, name.rpartition(".")[2], torch.nn.Parameter(placed, requires_grad=False))
    model.dtype = BF16
    return model.eval()


@pytest.mark.parametrize("layout", ["dense", "mxfp4"])
def test_the_plan_is_the_bytes_of_weights_and_cache(layout):
    model = loaded("gpt_oss", layout)
    plan = plan_memory(model.config, layout, 3, 100)
    assert plan.weights == sum(t.nbytes for _, t in named_tensors(model))
    assert plan.kv == GraphTarget(model).make_cache(3, 100, slack=64).nbytes
    assert plan.total == plan.weights + plan.kv + plan.step + SPARE


def test_keys_and_values_are_planned_in_their_dtype():
    config = tiny.config("gpt_oss")
    half, whole = (plan_memory(config, "dense", 3, 100, BF16, dtype).kv for dtype in (None, torch.float32))
    assert whole == 2 * half


@torch.no_grad()
def test_a_step_holds_what_is_counted_and_more_with_more_rows():
    """The scores of a prompt's 64 queries against 512 keys, in float32, are in it."""
    few, many = (plan_memory(tiny.config("llama"), "dense", n, 512).step for n in (1, 4))
    assert few > 6 * 64 * 512 * 4 and 2 * few < many < 8 * few


def test_what_is_held_at_once_is_counted_and_what_was_given_is_not():
    given = torch.zeros(1000, device="meta")

    def run():
        a = given + 1  # 4,000 bytes
        b = a.view(10, 100) * 2  # and 4,000
        del a
        return b[:, :3] + 1  # and 120, without the first

    assert peak_bytes(run) == 8000
    assert peak_bytes(lambda: given.view(10, 100)) == 0


def test_a_refusal_says_what_would_fit_and_that_fits():
    config = tiny.config("llama", num_layers=1, layer_types=(FULL,), moe_layers=())
    asked = 3, 600
    full, one = (plan_memory(config, "dense", n, 600) for n in (3, 1))
    assert check_memory(config, "dense", full.total, *asked) == full
    with pytest.raises(ValueError, match=r"3 x 600 tokens take .* GB are free: 2 of this length would fit"):
        check_memory(config, "dense", full.total - 1, *asked)
    with pytest.raises(ValueError, match=r"are free: one of 5\d\d tokens would fit"):
        check_memory(config, "dense", one.total - 1, *asked)
    with pytest.raises(ValueError, match="not even one token would fit"):
        check_memory(config, "dense", SPARE, *asked)


def test_a_target_is_refused_before_it_is_loaded(monkeypatch):
    """The embedded one, onto a device without contents."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**31, 2**40))
    monkeypatch.setattr("outpace.loading.why_inexact", lambda *_: None)
    target = open_on_device("default", torch.device("meta"), 2, 300, 3, False)[0].decoder
    assert target.dtype == BF16 and target.config.num_layers == 3 and target.inv.is_meta
    monkeypatch.setattr("outpace.loading.load_target", None)
    with pytest.raises(ValueError, match=r"2,000 x 30,000 tokens take .* and 2.15 GB are free: "):
        open_on_device("default", torch.device("meta"), 2000, 30_000, 3, False)


def test_weights_lie_on_a_gpu_as_no_step_converts_them():
    empty = empty_target(tiny.config("gpt_oss"), "mxfp4", BF16)
    dtypes = {name: tensor.dtype for name, tensor in named_tensors(empty)}
    assert dtypes["layers.0.self_attn.qkv_proj.weight"] == dtypes["embed_tokens.weight"] == BF16
    assert dtypes["layers.0.mlp.router.weight"] == dtypes["norm.weight"] == torch.float32
    assert dtypes["layers.0.mlp.up.blocks"] == torch.uint8
    quant = blocks("Q8_0", 6, 64)
    assert torch.equal(for_device("lm_head.weight", quant, BF16), dense(quant, BF16))
