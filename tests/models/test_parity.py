"""Our logits against transformers', from the same folder, float32, for every family and way of running."""

import pytest
import tiny
import torch

from outpace.kernels import bindings
from outpace.models.load import load_target
from outpace.models.save import save_target

LIMIT = 2e-4
LONG = 150  # past the window of 7 and the original length of 32
RAGGED = [[25, 3, 14], [1, 1, 1], [4, 0, 5], [0, 5, 1], [5, 2, 4], [3, 30, 0], [80, 0, 2], [1, 4, 1]]


@pytest.fixture(params=tiny.FAMILIES)
def both(request, twins):
    folder, twin = twins(request.param)
    return load_target(folder), twin


@torch.inference_mode()
def oracle(twin, tokens, offset=0):
    """tokens [B,T] -> logits [B,T,V], hidden states per layer."""
    positions = torch.arange(offset, offset + tokens.shape[1]).expand(tokens.shape)
    out = twin(tokens, position_ids=positions, output_hidden_states=True, use_cache=False)
    return out.logits, out.hidden_states


def assert_close(ours, theirs):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= LIMIT


@torch.inference_mode()
def cached(model, tokens, widths, offset=0):
    """Feed `tokens` through one cache in pieces of these widths; -> logits [B,T,V]."""
    cache = model.make_cache(len(tokens), tokens.shape[1], slack=8, offset=offset)
    pieces = tokens.split(widths, dim=1)
    return torch.cat([model.logits(model(piece, cache).hidden) for piece in pieces], dim=1)


def test_logits_can_tell_models_apart(both):
    """The bar below means nothing if the logits are all alike."""
    logits, _ = oracle(both[1], tiny.tokens(1, 20))
    assert logits.std() > 0.5 and (logits[0, 1:] - logits[0, :-1]).abs().max() > 1


@torch.inference_mode()
def test_whole_sequences(both):
    model, twin = both
    tokens = tiny.tokens(2, LONG)
    assert_close(model.logits(model(tokens).hidden), oracle(twin, tokens)[0])


@pytest.mark.parametrize("widths", [[60] + [1] * 6, [1] * 16, [11, 5, 5, 9, 1, 30, 2], [5] * 12])
def test_pieces_over_a_cache(both, widths):
    """Prefill then single tokens; single tokens from the start; blocks narrower and wider than the
    window and its slack."""
    model, twin = both
    tokens = tiny.tokens(2, sum(widths), seed=2)
    assert_close(cached(model, tokens, widths), oracle(twin, tokens)[0])


@torch.inference_mode()
def test_rows_of_different_lengths(both):
    """Ragged prefill, ragged blocks, and a row that is still, each row against its own run."""
    model, twin = both
    rows = [tiny.tokens(1, 140, seed=s) for s in (3, 4, 5)]
    cache = model.make_cache(3, 140, slack=5)
    done, got = [0, 0, 0], [[], [], []]
    for counts in RAGGED:
        width = max(counts)
        columns = [torch.nn.functional.pad(r[:, d : d + c], (0, width - c), value=96)
                   for r, d, c in zip(rows, done, counts, strict=True)]  # fmt: skip
        logits = model.logits(model(torch.cat(columns), cache, counts=counts).hidden)
        for b, c in enumerate(counts):
            got[b].append(logits[b, :c])
            done[b] += c
    for b in range(3):
        assert_close(torch.cat(got[b]), oracle(twin, rows[b][:, : done[b]])[0][0])


@torch.inference_mode()
@pytest.mark.parametrize("offset", [4093, 65536, 131000])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_far_positions(family, offset, twins):
    """The twin gets rotary tables from float64: its own are noisier than the bar out there."""
    folder, twin = twins(family)
    model, tokens = load_target(folder), tiny.tokens(2, 40, seed=6)
    table, twin.model.rotary_emb = twin.model.rotary_emb, tiny.ExactRotary(family)
    try:
        theirs, _ = oracle(twin, tokens, offset)
    finally:
        twin.model.rotary_emb = table
    assert_close(model.logits(model(tokens, offset=offset).hidden), theirs)
    assert_close(cached(model, tokens, [21, 8, 1, 1, 9], offset), theirs)


@torch.inference_mode()
def test_layer_l_is_hidden_state_l_plus_1(both):
    """Ids in any order, with repeats; the last layer before the final norm, which transformers hides."""
    model, twin = both
    tokens = tiny.tokens(2, 40, seed=7)
    _, states = oracle(twin, tokens)
    last = model.config.num_layers - 1
    wanted = (1, 0, last - 1, 1)
    out = model(tokens, aux=wanted)
    assert out.aux.shape == (4, 2, 40, model.config.hidden_size)
    for ours, layer in zip(out.aux, wanted, strict=True):
        assert_close(ours, states[layer + 1])
        assert (ours - states[layer]).abs().max() > 0.1  # off by one would show
    assert_close(model.norm(model(tokens, aux=(last,)).aux[0]), states[-1])
    cache = model.make_cache(2, 40)
    parts = [model(piece, cache, aux=wanted).aux for piece in tokens.split([30, 9, 1], dim=1)]
    assert_close(torch.cat(parts, dim=2), out.aux)


@torch.inference_mode()
def test_later_tokens_change_nothing_before(both):
    """Slot 0 of a block is the same whatever follows it: bit for bit with our kernels; without them
    experts run other numbers of rows at once, which rounds differently."""
    model, _ = both
    prefix, block = tiny.tokens(2, 30, seed=8), tiny.tokens(2, 5, seed=9)
    other = torch.cat((block[:, :1], tiny.tokens(2, 4, seed=10)), dim=1)
    seen = []
    for tokens in (block, other):
        cache = model.make_cache(2, 40, slack=5)
        model(prefix, cache)
        seen.append(model(tokens, cache).hidden[:, 0])
    assert torch.equal(*seen) if bindings.available() else (seen[0] - seen[1]).abs().max() < 1e-5


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_what_we_save_transformers_loads(family, twins, tmp_path):
    from transformers import AutoModelForCausalLM

    folder, twin = twins(family)
    save_target(load_target(folder), tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", attn_implementation="eager", dtype=torch.float32
    )
    tokens = tiny.tokens(2, 50, seed=11)
    assert torch.equal(oracle(again.eval(), tokens)[0], oracle(twin, tokens)[0])


def test_mxfp4_that_we_save_transformers_loads(twins, tmp_path):
    """Packed experts: ours computes from the blocks, transformers from what it unpacks itself."""
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, Mxfp4Config  # type: ignore[attr-defined]

    folder, twin = twins("gpt_oss")
    save_target(load_target(folder), tmp_path / "packed", pack=True)
    model = load_target(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed",
        attn_implementation="eager",
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
    ).eval()
    assert again.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.float32
    tokens = tiny.tokens(2, 60, seed=12)
    theirs = oracle(again, tokens)[0]
    with torch.inference_mode():
        assert_close(model.logits(model(tokens).hidden), theirs)
    assert_close(cached(model, tokens, [40, 1, 8, 1, 10]), theirs)
    assert (theirs - oracle(twin, tokens)[0]).abs().max() > 0.01  # the rounding was real


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ],
    ids=["biases", "linear rope"],
)
def test_other_llamas(changes, tmp_path):
    twin = tiny.save_twin("llama", tmp_path, **changes)
    check_whole(tmp_path, twin)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "max_window_layers": 2},
        {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2},
        {"attention_bias": True, "tie_word_embeddings": True},
    ],
    ids=["window", "every second layer sparse", "biases, tied"],
)
def test_other_qwen3_moes(changes, tmp_path):
    twin = tiny.save_twin("qwen3_moe", tmp_path, **changes)
    check_whole(tmp_path, twin)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": tiny.GPT_OSS["rope_parameters"] | {"truncate": True}},
        {"rope_parameters": tiny.GPT_OSS["rope_parameters"] | {"attention_factor": 1.25}},
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "swiglu_limit": 0.5},
    ],
    ids=["truncated yarn", "attention factor", "other layers, clamp that bites"],
)
def test_other_gpt_osses(changes, tmp_path):
    twin = tiny.save_twin("gpt_oss", tmp_path, **changes)
    check_whole(tmp_path, twin)


@torch.inference_mode()
def check_whole(folder, twin):
    model, tokens = load_target(folder), tiny.tokens(2, 60, seed=13)
    theirs = oracle(twin, tokens)[0]
    assert_close(model.logits(model(tokens).hidden), theirs)
    assert_close(cached(model, tokens, [33, 9, 1, 17]), theirs)
    save_target(model, folder / "again")
    assert load_target(folder / "again").config == model.config


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_every_precision_with_tied_and_untied_heads(family, dtype, tied, tmp_path):
    """Folders as transformers writes them. The twin is read back into float32, as our arithmetic is."""
    if family == "gpt_oss" and tied:
        pytest.skip("transformers' gpt-oss has no tied head")
    tiny.save_twin(family, tmp_path, tie_word_embeddings=tied, stored=dtype)
    twin = tiny.read_twin(tmp_path)
    ours = load_target(tmp_path)
    assert ours.embed_tokens.weight.dtype == dtype and (ours.lm_head is None) == tied
    for tokens in (tiny.tokens(1, 9), tiny.tokens(2, 70)):
        assert_close(ours.logits(ours(tokens).hidden), oracle(twin, tokens)[0])
