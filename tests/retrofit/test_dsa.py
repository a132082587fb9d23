"""First weights of an index, what it keeps of the attention's mass, and the way from a folder to a folder."""

import copy
import json

import pytest
import tiny
import torch

from outpace.kv.topk import QueryPositions, TopKConfig, choose
from outpace.loading import open_target
from outpace.models.attention import Attention
from outpace.models.load import fingerprint, named_tensors
from outpace.ops.rope import rotate
from outpace.retrofit import dsa
from outpace.retrofit.dsa import DsaSettings
from outpace.retrofit.pipeline import retrofit

KEEP = TopKConfig(top_k=16, min_context=0, sinks=2, recent=5)


def full_layers(model):
    return [i for i in range(model.config.num_layers) if not model.config.window(i)]


def indexed(family, heads, dim, rows=3):
    model = copy.deepcopy(tiny.target(family))
    sums = {}
    for n in range(rows):
        for layer, seen in dsa.attention_inputs(
            model, tiny.tokens(80 - n, seed=n), full_layers(model)
        ).items():
            phases = dsa.Phases.of(seen)
            sums[layer] = sums[layer] + phases if layer in sums else phases
    return model, {i: dsa.first_weights(model.attentions[i], p, heads, dim) for i, p in sums.items()}


def attention_scores(model, seen, positions):
    """q . k of every head, rotated: [H, T, T], unscaled."""
    cos, sin = model.rope(positions[None])
    q = rotate(seen.q[None].contiguous(), cos, sin)[0]
    k = rotate(seen.k[None].contiguous(), cos, sin)[0].repeat_interleave(q.shape[1] // seen.k.shape[1], 1)
    return torch.einsum("thd,shd->hts", q, k)


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
@pytest.mark.parametrize("first", [0, 70000])
@torch.inference_mode()
def test_with_all_directions_an_index_head_is_an_attention_head(family, first):
    model = tiny.target(family)
    sizes = model.config.num_heads, model.config.num_kv_heads * model.config.head_dim
    _, made = indexed(family, *sizes)
    tokens, positions = tiny.tokens(50, seed=9), torch.arange(first, first + 50)
    for layer, seen in dsa.attention_inputs(model, tokens, list(made)).items():
        index = made[layer](seen.x[None], *model.rope(positions[None]))
        result = torch.einsum("thd,sd->hts", index.q[0], index.k[0])
        wanted = attention_scores(model, seen, positions)
        assert (result - wanted).abs().max() < 1e-3 * wanted.abs().max()
        scale = seen.attention.scale
        assert torch.allclose(index.w, torch.full_like(index.w, scale), atol=1e-6)


@torch.inference_mode()
def test_a_head_is_the_mean_of_the_attention_s_heads():
    model = tiny.target("gpt_oss")
    _, made = indexed("gpt_oss", 3, 16)
    tokens, positions = tiny.tokens(50, seed=9), torch.arange(50)
    for layer, seen in dsa.attention_inputs(model, tokens, list(made)).items():
        index = made[layer](seen.x[None], *model.rope(positions[None]))
        result = torch.einsum("thd,sd->hts", index.q[0], index.k[0])
        wanted = attention_scores(model, seen, positions).unflatten(0, (3, 2)).mean(1)
        assert (result - wanted).abs().max() < 1e-3 * wanted.abs().max()


@torch.inference_mode()
def test_of_kv_heads_that_say_the_same_one_is_kept():
    """Then D dimensions hold all there is to know."""
    model = copy.deepcopy(tiny.target("gpt_oss"))
    D, H = model.config.head_dim, model.config.num_heads
    layer = full_layers(model)[0]
    for part in (model.attentions[layer].qkv_proj.weight, model.attentions[layer].qkv_proj.bias):
        part[(H + 1) * D : (H + 2) * D] = 2 * part[H * D : (H + 1) * D]
    seen = dsa.attention_inputs(model, tiny.tokens(80, seed=1), [layer])[layer]
    for dim, exact in ((D, True), (D - 2, False)):
        made = dsa.first_weights(model.attentions[layer], dsa.Phases.of(seen), H, dim)
        index = made(seen.x[None], *model.rope(torch.arange(80)[None]))
        result = torch.einsum("thd,sd->hts", index.q[0], index.k[0])
        wanted = attention_scores(model, seen, torch.arange(80))
        assert ((result - wanted).abs().max() < 1e-3 * wanted.abs().max()) == exact


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@torch.inference_mode()
def test_normed_heads_are_nearly_exact(family):
    """The norm is taken for its mean: the order of the scores is, not their sizes."""
    model = tiny.target(family)
    sizes = model.config.num_heads, model.config.num_kv_heads * model.config.head_dim
    _, made = indexed(family, *sizes)
    for layer, seen in dsa.attention_inputs(model, tiny.tokens(60, seed=9), list(made)).items():
        index = made[layer](seen.x[None], *model.rope(torch.arange(60)[None]))
        result = torch.einsum("thd,sd->hts", index.q[0], index.k[0]).flatten()
        wanted = attention_scores(model, seen, torch.arange(60)).flatten()
        assert torch.corrcoef(torch.stack((result, wanted)))[0, 1] > 0.8


@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.inference_mode()
def test_mass_is_what_the_attention_gives(family):
    """Against its own output: with values that name their token, attention states its weights."""
    model, made = indexed(family, 3, 6)
    tokens, positions = tiny.tokens(40, seed=9), torch.tensor([7, 20, 39])
    for layer, seen in dsa.attention_inputs(model, tokens, list(made)).items():
        result = dsa.mass(model, made[layer], seen, positions)
        attention = seen.attention
        scores = attention_scores(model, seen, torch.arange(40))[:, positions] * attention.scale
        for n, position in enumerate(positions.tolist()):
            rows = scores[:, n, : position + 1]
            if attention.sinks is not None:
                rows = torch.cat((rows, attention.sinks[:, None]), 1)
            weights = rows.softmax(-1)[:, : position + 1].sum(0)
            assert (result.p[n, : position + 1] - weights / weights.sum()).abs().max() < 1e-5
            assert not result.p[n, position + 1 :].any()
            assert abs(result.weight[n] - weights.sum() / attention.heads) < 1e-5


@torch.inference_mode()
def test_what_is_kept_is_the_mass_of_what_is_chosen():
    model, made = indexed("gpt_oss", 3, 8)
    tokens, positions = tiny.tokens(60, seed=9), torch.arange(10, 60, 7)
    layer = full_layers(model)[0]
    seen = dsa.attention_inputs(model, tokens, [layer])[layer]
    result = dsa.mass(model, made[layer], seen, positions)
    index = made[layer](seen.x[None], *model.rope(torch.arange(60)[None]))
    place = QueryPositions(torch.tensor([0]), torch.tensor([60]), 60, None, 60)
    lists, many = choose(index, index.k.contiguous(), place, KEEP)
    for n, position in enumerate(positions.tolist()):
        kept = lists[0, position, : many[0, position]]
        assert abs(result.kept(KEEP)[n] - result.p[n, kept].sum()) < 1e-5
    best = dsa.Mass(result.p, result.weight, result.p, positions).kept(KEEP)
    assert (best >= result.kept(KEEP) - 1e-6).all() and (best > result.kept(KEEP)).any()


def test_divergence_teaches_the_index_alone():
    model, made = indexed("llama", 3, 8)
    layer = full_layers(model)[0]
    seen = dsa.attention_inputs(model, tiny.tokens(60, seed=9), [layer])[layer]
    for chosen in (False, True):
        made[layer].zero_grad()
        # the first queries choose among nothing: they teach nothing, and no NaN
        result = dsa.mass(model, made[layer], seen, torch.arange(60))
        loss = result.divergence(KEEP, chosen).value
        loss.backward()
        assert loss > 0 and all(
            p.grad.isfinite().all() and p.grad.any() for p in made[layer].proj.parameters()
        )
    assert not any(p.grad is not None for p in model.parameters())
    exact = dsa.Mass(result.p, result.weight, result.p.clamp(min=1e-30).log(), result.positions)
    assert exact.divergence(KEEP).value.abs() < 1e-5


# ---- the whole way --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documents():
    from outpace.text.corpus import read_corpus

    return [d for d in read_corpus() if d.name.startswith(("asyncio/", "email/", "json/", "xml/", "http/"))]


SMALL = {"rows": 2, "row_tokens": 512, "top_k": 0.25, "min_context": 0, "recent": 16}


def test_from_a_folder_to_a_folder(documents, tmp_path):
    report = retrofit("default", DsaSettings(**SMALL), documents, tmp_path / "out")
    again, _ = open_target(str(tmp_path / "out"))
    whole, _ = open_target("default")
    assert report == json.loads((tmp_path / "out" / "dsa.json").read_text())
    assert report["made_from"] == fingerprint(whole) == fingerprint(again, retrofits=False)
    assert fingerprint(again) != fingerprint(whole)
    assert report["numbers_per_token"] == {"before": 1536, "after": 1536 + 3 * 32}
    held = dict(named_tensors(whole))
    for name, tensor in named_tensors(again):
        assert ".indexer." in name or torch.equal(tensor, held[name])
    before, after = report["held_out"]["before"], report["held_out"]["after"]
    assert 0 < after["kl"] < 2 and before["nats_per_token"] != after["nats_per_token"]
    assert {row["layer"] for row in report["mass"]} == set(again.config.dsa_layers)
    assert all(row["index"] <= row["best"] + 1e-6 for row in report["mass"])
    assert sum(row["index"] for row in report["mass"]) > sum(row["recent"] for row in report["mass"])
    with pytest.raises(ValueError, match="is there already"):
        retrofit("default", DsaSettings(**SMALL), documents, tmp_path / "out")
    with pytest.raises(ValueError, match="has an index already"):
        retrofit(str(tmp_path / "out"), DsaSettings(**SMALL), documents, tmp_path / "twice")
    assert isinstance(again.attentions[1], Attention) and not (tmp_path / "twice").exists()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"index_heads": 3}, "index_heads 3: it must divide the 8 heads"),
        ({"index_dim": 7}, "index_dim 7: an even number"),
        ({"index_dim": 258}, "index_dim 258: an even number of up to 256"),
        ({"index_dim": -2}, "index_dim -2: it must be at least 0"),
        ({"top_k": 10}, "top_k 10: a whole number above sinks and recent"),
        ({"layers": (0,)}, r"layers \[0\]: each once, of those with full attention"),
        ({"rows": 0}, "rows 0"),
        ({"row_tokens": 10**6}, "files have 1000000 tokens"),
    ],
)
def test_settings_that_cannot_be(message, error, documents, tmp_path):
    with pytest.raises(ValueError, match=error):
        retrofit("default", DsaSettings(**SMALL | message), documents, tmp_path / "out")
    assert not (tmp_path / "out").exists()
