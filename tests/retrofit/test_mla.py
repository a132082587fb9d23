"""Factoring keys and values: full rank is the target; the cost of a rank is what it leaves out."""

import copy
import json

import pytest
import tiny
import torch

from outpace.loading import open_target
from outpace.models.load import fingerprint, load_target, named_tensors
from outpace.retrofit import mla
from outpace.retrofit.evaluate import evaluate
from outpace.retrofit.mla import MlaSettings, averaged, calibrate
from outpace.retrofit.pipeline import retrofit


def full_layers(model):
    return [i for i in range(model.config.num_layers) if not model.config.window(i)]


def texts(seed=0, rows=4, tokens=90):
    return [tiny.tokens(tokens - 7 * i, seed=seed + i).tolist() for i in range(rows)]


def retrofitted(family, method, rank=None, balance=1.0):
    model = copy.deepcopy(tiny.target(family))
    moments = calibrate(model, texts(), full_layers(model))
    bases = {i: mla.basis(method, model.attentions[i], m, balance) for i, m in moments.items()}
    n = len(next(iter(bases.values())).mean)
    return model, moments, bases, n if rank is None else rank


@pytest.mark.parametrize("method", mla.METHODS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_full_rank_is_the_target(family, method):
    model, moments, bases, rank = retrofitted(family, method)
    tokens = tiny.tokens(2, 50, seed=9)
    held = {name: t.clone() for name, t in named_tensors(model)}
    with torch.inference_mode():
        wanted = model.logits(model(tokens).hidden)
    mla.attach(model, bases, dict.fromkeys(bases, rank))
    with torch.inference_mode():
        got = model.logits(model(tokens).hidden)
    assert (got - wanted).abs().max() < 2e-4
    for i, result in bases.items():
        W, b = mla.projection(model.attentions[i])
        made = result.up @ result.down
        assert (made @ W - W).abs().max() < 1e-6 and (
            made @ (b - result.mean) + result.mean - b
        ).abs().max() < 1e-5
        assert result.residual(moments[i], rank).abs().max() < 1e-6
    for name, tensor in held.items():  # the original projections are untouched
        assert torch.equal(dict(named_tensors(model))[name], tensor)
    model.use_mla_kv(False)
    with torch.inference_mode():
        assert torch.equal(model.logits(model(tokens).hidden), wanted)


@torch.inference_mode()
def test_moments_by_hand():
    """One layer's, from the states of a forward of our own, token by token."""
    model, rows = tiny.target("qwen3"), texts(rows=2, tokens=20)
    layer = full_layers(model)[-1]
    attention, config = model.attentions[layer], model.config
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    ys, qs, inverses, streams = [], [], [], []
    for row in rows:
        aux = model(torch.tensor([row]), aux=(layer - 1, layer)).aux
        for t in range(len(row)):
            out = attention.qkv_proj(model.layers[layer].input_layernorm(aux[0, 0, t])).double()
            q, y = out[: H * D].view(H, D), out[H * D :]
            k = y[: K * D].view(K, D)
            ys.append(y)
            inverses.append(1 / (k.square().mean(-1) + config.rms_norm_eps))
            qs.append(
                q / (q.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * attention.q_norm.weight
            )
            streams.append(aux[1, 0, t].double().square().sum())
    value = calibrate(model, rows, [layer])[layer]
    y, q = torch.stack(ys), torch.stack(qs).unflatten(1, (K, -1))
    assert (value.mean - y.mean(0)).abs().max() < 1e-6
    assert (value.cov - torch.cov(y.T, correction=0)).abs().max() < 1e-5
    outer = torch.einsum("tkgd,tkge->kde", q, q) / len(q) * torch.stack(inverses).mean(0)[:, None, None]
    weight = attention.k_norm.weight.double()
    wanted = averaged(outer, model) * weight[:, None] * weight / D
    assert (value.q - wanted).abs().max() < 1e-4 * wanted.abs().max()
    heads = attention.o_proj.weight.double().view(-1, K, H // K, D)
    assert (value.o[1] - sum(heads[:, 1, g].T @ heads[:, 1, g] for g in range(H // K))).abs().max() < 1e-5
    assert value.stream == pytest.approx(float(torch.stack(streams).mean()), rel=1e-5)
    assert value.tokens == sum(map(len, rows))


def test_a_score_feels_an_error_at_every_distance():
    """E over distances of (q^T R e)^2, summed up one rotation after the other."""
    model = tiny.target("gpt_oss")
    D, rng = model.config.head_dim, torch.Generator().manual_seed(3)
    q, e = (torch.randn(D, dtype=torch.float64, generator=rng) for _ in "qe")
    metric = averaged((q[:, None] * q)[None], model)[0]
    total, c = 0.0, model.config.rope.concentration
    for distance in range(512):
        angle = distance * model.inv
        a, b = e[: D // 2], e[D // 2 :]
        turned = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()))
        total += float((q @ turned) ** 2) * c**4
    assert float(e @ metric @ e) == pytest.approx(total / 512, rel=1e-4)


def test_what_a_rank_costs_is_what_is_left_out():
    """pca: the squared error over the calibration text is the sum of the worths left out; no other basis of
    that rank does better, nor does svd."""
    model, moments, bases, _ = retrofitted("gpt_oss", mla.PCA)
    for i, result in bases.items():
        m = moments[i]
        for rank in (3, 9, 20):
            left = result.residual(m, rank).diagonal().sum()
            assert float(left) == pytest.approx(
                float(result.worth[rank:].sum() * m.stream), rel=1e-6, abs=1e-9
            )
            other = mla.basis(mla.SVD, model.attentions[i], m).residual(m, rank).diagonal().sum()
            assert left < other
    model, moments, bases, _ = retrofitted("gpt_oss", mla.LOSS, balance=0.2)
    for i, result in bases.items():
        M = mla.metric(model.attentions[i], moments[i], 0.2)
        cost = (M * result.residual(moments[i], 9)).sum()
        assert float(cost) == pytest.approx(float(result.worth[9:].sum() * moments[i].stream), rel=1e-3)
        blind = mla.basis(mla.PCA, model.attentions[i], moments[i])
        assert cost < (M * blind.residual(moments[i], 9)).sum()


def test_ranks_of_equal_marginal_loss():
    """The worthiest directions of all layers together, and at least one of each."""
    eye = torch.eye(4, dtype=torch.float64)
    worth = {3: [9.0, 8, 7, 0.5], 5: [6.0, 1, 0.9, 0.8], 8: [0.1, 0.1, 0.1, 0.1]}
    bases = {i: mla.Basis(eye, eye, eye[0], torch.tensor(w, dtype=torch.float64)) for i, w in worth.items()}
    assert mla.ranks_of(bases, 2) == {3: 3, 5: 3, 8: 1}
    assert mla.ranks_of(bases, 4) == {3: 4, 5: 4, 8: 4}


def test_calibration_needs_text():
    model = tiny.target("llama")
    for rows in ([], [[1, 2], []]):
        with pytest.raises(ValueError, match="calibration needs text"):
            calibrate(model, rows, [0])
    with pytest.raises(ValueError, match="method 'best'"):
        mla.basis("best", model.attentions[0], calibrate(model, texts(), [0])[0])


# ---- the whole way --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documents():
    from outpace.text.corpus import read_corpus

    return [d for d in read_corpus() if d.name.startswith(("asyncio/", "email/", "json/", "xml/", "http/"))]


def test_from_a_folder_to_a_folder(documents, tmp_path):
    settings = MlaSettings(rows=3, row_tokens=256)
    report = retrofit("default", settings, documents, tmp_path / "out")
    again, _ = open_target(str(tmp_path / "out"))
    whole, _ = open_target("default")
    assert report == json.loads((tmp_path / "out" / "mla.json").read_text())
    assert report["made_from"] == fingerprint(whole) != fingerprint(again)
    assert report["numbers_per_token"] == {"before": 1536, "after": 768}
    assert sum(report["ranks"].values()) == 768 == sum(again.config.mla_ranks)
    held = dict(named_tensors(whole))
    for name, tensor in named_tensors(again):
        assert ".latent." in name or torch.equal(tensor, held[name])
    before, after = report["held_out"]["before"], report["held_out"]["after"]
    assert 0 < after["kl"] < 1 and before["nats_per_token"] != after["nats_per_token"]
    assert set(report["balances_tried"]) == {"1", "0.3", "0.1", "0.03"}
    text = texts(rows=1, tokens=60)
    value = evaluate(again, text, evaluate(whole, text)["log_probabilities"])
    assert value["kl"] > 0 and value["same_likeliest"] < 1
    with pytest.raises(ValueError, match="is there already"):
        retrofit("default", settings, documents, tmp_path / "out")
    with pytest.raises(ValueError, match=r"mla.json is there already"):
        retrofit("default", settings, documents, tmp_path / "out" / "mla.json")
    with pytest.raises(ValueError, match="has latents already"):
        retrofit(str(tmp_path / "out"), settings, documents, tmp_path / "twice")
    assert isinstance(load_target(tmp_path / "out"), type(whole)) and not (tmp_path / "twice").exists()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"method": "best"}, "method 'best': it must be one of svd, pca, loss"),
        ({"method": "svd"}, "svd sees no data"),
        ({"allocate": "even"}, "allocate 'even'"),
        ({"rank": -1}, "rank -1: it must be at least 0"),
        ({"rows": 0}, "rows 0"),
        ({"rank": 600}, "rank 600: keys and values of a layer have 512"),
        ({"layers": (0,)}, r"layers \[0\]: each once, of those with full attention"),
        ({"layers": (1, 1)}, r"layers \[1, 1\]: each once"),
        ({"row_tokens": 10**6}, "files have 1000000 tokens"),
    ],
)
def test_settings_that_cannot_be(message, error, documents, tmp_path):
    with pytest.raises(ValueError, match=error):
        retrofit("default", MlaSettings(**message), documents, tmp_path / "out")
    assert not (tmp_path / "out").exists()
