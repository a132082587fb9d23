"""Drafts in 8-bit blocks, of both kinds: predictions, refusals, and storage in GGUF."""

import copy

import draft_samples as samples
import pytest
import tiny
import torch
from eagle3_drafts import bound_eagle3, random_eagle3
from test_dflash_parts import CONFIG, MARKOV, drafted, session_of

from outpace.bench.machine import parameters
from outpace.decode.costs import fingerprint
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.dflash_decode import BigramBias
from outpace.drafts.eagle3_decode import BoundEagle3, TreeShape
from outpace.drafts.quantize import quantised
from outpace.formats.export import export_draft
from outpace.formats.load import build_draft, load_draft, read_draft, save_draft
from outpace.loading import open_weights
from outpace.models.blocks import Linear
from outpace.models.load import named_tensors
from outpace.ops.quant import Quant

PROMPTS = [tiny.tokens(n, seed=n).tolist() for n in (23, 5)]


def unpacked(draft, packed):
    """`draft` with the values that the blocks of `packed` mean."""
    twin = copy.deepcopy(draft)
    for name, module in packed.named_modules():
        if isinstance(module, Linear) and isinstance(module.weight, Quant):
            twin.get_submodule(name).weight.data.copy_(module.weight.dense())
    return twin


@pytest.mark.parametrize("shape", [TreeShape(depth=4), TreeShape(depth=3, branch=3, nodes=9)])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_a_packed_eagle3_says_what_plain_decoding_says(family, shape):
    model = tiny.target(family)
    asked = Request(max_new_tokens=20)
    bound = bound_eagle3(model, shape, hidden_size=64, own_embedding=True, sliding_window=6)
    packed = quantised(bound.draft)
    kinds = {n for n, m in packed.named_modules() if isinstance(m, Linear) and isinstance(m.weight, Quant)}
    assert kinds >= {"lm_head", "layers.0.qkv_proj", "layers.0.o_proj", "layers.0.mlp.gate_up_proj"}
    assert ("fc" in kinds) == (
        family == "gpt_oss"
    )  # it reads two states of 96, or of what 32 does not divide
    assert "layers.0.mlp.down_proj" not in kinds  # 28 positions
    items = [
        generate(model, PROMPTS, asked, BoundEagle3(draft, model, shape))
        for draft in (packed, unpacked(bound.draft, packed))
    ]
    assert items[0].tokens == generate(model, PROMPTS, asked).tokens
    assert items[0].trace.accept_lens == items[1].trace.accept_lens


def test_packed_is_another_draft_for_a_cost_table():
    model = tiny.target("gpt_oss")
    for draft in (drafted().bind(model), bound_eagle3(model)):
        packed = quantised(draft.draft)
        other = BoundEagle3(packed, model) if isinstance(draft, BoundEagle3) else packed.bind(model)
        assert fingerprint(model, draft) != fingerprint(model, other)
        assert parameters(packed) == parameters(draft.draft)


@torch.inference_mode()
@pytest.mark.parametrize("words", [{}, {"draft_vocab_size": 31}])
def test_a_tree_reads_a_packed_markov_head(words):
    target = tiny.target("gpt_oss")
    draft = drafted(**MARKOV | {"markov_rank": 32}, **words)
    packed = quantised(draft)
    assert isinstance(packed.markov_head.markov_w2.weight, Quant)
    twin, places = unpacked(draft, packed), CONFIG.block_size - 1
    session = session_of(packed, target)
    hidden = session.block_hidden(tiny.tokens(2, seed=4))[:, -places:]
    ids = tiny.tokens(2 * places * 5, seed=3).view(2, places, 5)
    items = [BigramBias(session.head, None, d.markov_head, hidden)(ids[..., :3], ids) for d in (packed, twin)]
    torch.testing.assert_close(*items)


def test_what_is_not_packed_says_so(tmp_path):
    odd = random_eagle3(tiny.target("gpt_oss"), hidden_size=40, num_heads=6, head_dim=10, own_embedding=True)
    odd.fc = Linear(20, 40)
    with pytest.raises(ValueError, match="divide the rows of none of its matrices"):
        quantised(odd)
    model = tiny.target("gpt_oss")
    for name in ("ngram", "none"):
        with pytest.raises(ValueError, match=f"draft weights 'q8_0': '{name}' has no weights"):
            open_weights(name, model, None, "q8_0")
    with pytest.raises(ValueError, match="draft weights 'int4': known are q8_0"):
        load_draft(tmp_path / "not even there", quantize="int4")


# ---- on disk ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "eagle3, own embedding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gguf_keeps_the_blocks_that_loading_would_make(kind, dtype, target, tmp_path):
    draft = samples.dflash(dtype) if kind == "dflash" else samples.eagle3(dtype, own_embedding="," in kind)
    plain, packed = tmp_path / "plain.gguf", tmp_path / "packed.gguf"
    export_draft(draft, "gguf", plain, target)
    export_draft(draft, "gguf", packed, target, packed=True)
    assert packed.stat().st_size < plain.stat().st_size
    wanted = quantised(build_draft(draft))
    result = load_draft(packed, target=target, quantize="q8_0")
    ours, theirs = dict(named_tensors(wanted)), dict(named_tensors(result))
    assert ours.keys() == theirs.keys() and any(name.endswith("weight.data") for name in ours)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    read = read_draft(packed, target)[1]
    assert read.config == draft.config
    for name, tensor in draft.tensors.items():
        if tensor.dim() < 2 or not tensor.is_floating_point():
            assert torch.equal(read.tensors[name], tensor) and read.tensors[name].dtype == tensor.dtype, name
        else:
            torch.testing.assert_close(read.tensors[name].float(), tensor.float(), atol=0.03, rtol=0.01)


def test_only_gguf_holds_blocks(target, tmp_path):
    with pytest.raises(ValueError, match="--dtype q8_0: only gguf holds packed blocks, not zlab"):
        export_draft(samples.dflash(), "zlab", tmp_path / "d", target, packed=True)
    assert not (tmp_path / "d").exists()


def test_a_packed_file_is_a_quarter_of_float32(tmp_path):
    """Of the matrices: 34 bytes for 32 values."""
    draft = drafted(num_heads=8, head_dim=8, intermediate_size=64)
    save_draft(draft, tmp_path, torch.float32)
    packed = load_draft(tmp_path, quantize="q8_0")
    sizes = {n: m.weight for n, m in packed.named_modules() if isinstance(m, Linear)}
    assert all(isinstance(weight, Quant) for weight in sizes.values())
    for name, weight in sizes.items():
        assert weight.data.nbytes == draft.get_submodule(name).weight.numel() * 34 // 32
