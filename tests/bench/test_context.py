"""The context suite: what it times, what it counts, what it takes up again, what it refuses."""

import json

import pytest
import tiny
import torch
from indexers import indexed_target
from latents import latent_target
from rich.console import Console

from outpace.bench import context
from outpace.bench.context import (
    PAGE,
    ContextSettings,
    cost_table,
    experts_used,
    latent_table,
    run_context,
    with_rates,
)
from outpace.bench.machine import weight_bytes
from outpace.kv.topk import TopKConfig
from outpace.models.load import fingerprint, named_tensors

QUIET = Console(quiet=True)
SETTINGS = {
    "contexts": (24, 60), "columns": 3, "budget": 30, "block_size": 2, "n_spec_tokens_buf": 5, "tau": 2.0,
    "repeats": 2, "cell_s": 0.0, "top_k": 90, "index_dim": 8, "index_heads": 2,
}  # fmt: skip


def test_a_report_of_what_was_run(tmp_path):
    model = tiny.target("gpt_oss")
    report = run_context(model, ContextSettings(**SETTINGS), tmp_path, QUIET)
    near, far = report["cells"]
    latent = {"latent", "latent full"}
    assert set(near["methods"]) == {"plain", "full"} | latent
    assert set(far["methods"]) == {*context.METHODS[:5], *latent} and "sparse_speedup" not in far
    assert near["verification_speedup"] is None and near["partial_kv_bytes"] == 0
    seconds = {name: m["seconds"] for name, m in far["methods"].items()}
    assert far["verification_speedup"] == round(seconds["full"] / seconds["partial"], 3)
    config, row = model.config, 2 * model.config.num_kv_heads * model.config.head_dim * 4
    windows = [config.window(i) for i in range(config.num_layers)]
    assert far["kv_bytes"] == row * sum(min(w or 60, 60) for w in windows)
    for name, seen in (("plain", 60), ("full", 60), ("settle", 60), ("partial", 30)):
        kv = row * sum(min(w, 60) if w else seen for w in windows)
        touched = far["methods"][name]["experts_touched"]
        assert far["methods"][name]["bytes"] == weight_bytes(model, touched) + kv
    assert far["methods"]["refresh"]["bytes"] is None
    assert far["methods"]["plain"]["experts_touched"] == config.experts_per_token
    PAGE.write(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (tmp_path / "context.png").stat().st_size > 5000
    assert "| 60 |" in PAGE.markdown(report) and len(cost_table(report)) == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["context.png", "report.json", "report.md"]


@pytest.mark.parametrize("own", [True, False])
def test_sparse_attention_beside_it(own, tmp_path):
    """With the target's own index, or one of random weights that is gone afterwards."""
    keep = TopKConfig(top_k=80, min_context=80)
    model = indexed_target("gpt_oss", keep)[1] if own else tiny.target("gpt_oss")
    before = fingerprint(model)
    asked = ContextSettings(**SETTINGS | {"contexts": (24, 120), "top_k": 80})
    near, far = run_context(model, asked, tmp_path, QUIET)["cells"]
    assert set(near["methods"]) == {"plain", "full", "latent", "latent full"}
    assert set(far["methods"]) == {*context.METHODS, *context.LATENTS}
    seconds = {name: m["seconds"] for name, m in far["methods"].items()}
    assert far["sparse_speedup"] == round(seconds["plain"] / seconds["sparse"], 3)
    assert fingerprint(model) == before and model.config.use_dsa == own
    config, row = model.config, 2 * model.config.num_kv_heads * model.config.head_dim * 4
    windows = [config.window(i) for i in range(config.num_layers)]
    full = [i for i, w in enumerate(windows) if not w]
    learnt = sum((H * 8 + 8 + H) * (config.hidden_size + 1) + 4 for H in [3 if own else 2] * len(full))
    sparse, plain = (far["methods"][name] for name in ("sparse", "plain"))
    more = len(full) * 4 * 120 * 8 - len(full) * row * 40 + 4 * learnt  # keys of the index, 40 tokens unread
    assert sparse["bytes"] - plain["bytes"] == more


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_latents_beside_it(family, own, tmp_path):
    """With the target's own latents, or ones of random weights that are gone afterwards."""
    model = latent_target(family, rank=5)[1] if own else tiny.target(family)
    before = fingerprint(model)
    asked = ContextSettings(**SETTINGS | {"contexts": (24, 120), "top_k": 80, "latent": 0.25})
    far = run_context(model, asked, tmp_path, QUIET)["cells"][1]
    assert fingerprint(model) == before and model.config.use_mla_kv == own
    config = model.config
    whole = 2 * config.num_kv_heads * config.head_dim
    rank, full = 5 if own else round(whole / 4), config.full_layers
    left = whole - rank - config.num_kv_heads * config.qk_norm
    assert far["kv_bytes"] - far["latent_kv_bytes"] == 4 * 120 * left * len(full)
    latent, sparse, plain = (far["methods"][name]["bytes"] for name in ("latent", "latent, sparse", "plain"))
    maps = rank * (config.hidden_size + 1) + whole * (rank + 1)
    assert latent - plain == 4 * len(full) * (maps - 120 * left)
    index = (2 * 8 + 8 + 2) * (config.hidden_size + 1) + 4 + 120 * 8  # its weights and keys
    assert sparse - latent == 4 * len(full) * (index - 40 * (whole - left))  # 40 tokens unread
    assert "| 120 |" in "".join(latent_table({"cells": [far]}))


def test_what_a_token_takes():
    """Two rounds of tau 3 fill a buffer of five, and a third one ends it: nine tokens."""
    seconds = {"plain": 1.0, "full": 3.0, "partial": 2.0, "settle": 4.0, "refresh": 1.0}
    methods = {
        name: {"seconds": s, "bytes": None if name == "refresh" else 10} for name, s in seconds.items()
    }
    result = with_rates({"methods": methods}, 20.0, ContextSettings(**SETTINGS | {"tau": 3.0}))
    assert result["seconds_per_token"] == {"plain": 1.0, "full": 1.0, "partial": 1.0}
    assert result["methods"]["partial"]["share_of_floor"] == 0.25
    assert result["verification_speedup"] == 1.5


def test_bytes_of_the_weights_by_hand():
    model = tiny.target("gpt_oss")
    names = {n: t.nbytes for n, t in named_tensors(model) if n.startswith("layers.")}
    experts = sum(size for n, size in names.items() if ".mlp.up." in n or ".mlp.down." in n)
    rest = sum(names.values()) - experts
    for touched in (1, 2.5):
        assert weight_bytes(model, touched) == round(rest + experts * touched / model.config.num_experts)
    assert weight_bytes(model) == weight_bytes(model, model.config.experts_per_token)
    dense = tiny.target("qwen3")
    assert weight_bytes(dense) == sum(t.nbytes for n, t in named_tensors(dense) if n.startswith("layers."))
    logits = torch.tensor([[3.0, 2, 1, 0], [0, 2, 3, 1]])
    assert experts_used([logits, logits[:1]], 2) == 2.5 and experts_used([], 2) == 0


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    model, measured = tiny.target("qwen3"), []
    honest = context.measure

    def once(target, near, n, settings):
        if n in measured:
            raise KeyboardInterrupt
        measured.append(n)
        return honest(target, near, n, settings)

    monkeypatch.setattr(context, "measure", once)
    measured.append(60)
    with pytest.raises(KeyboardInterrupt):
        run_context(model, ContextSettings(**SETTINGS), tmp_path, QUIET)
    measured.remove(60)
    report = run_context(model, ContextSettings(**SETTINGS), tmp_path, QUIET)
    assert measured == [24, 60] and [c["context"] for c in report["cells"]] == [24, 60]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"contexts": (9, 3)}, "contexts .9, 3.: give counts of tokens, ascending"),
        ({"columns": 0}, "columns 0: it must be at least 1"),
        ({"tau": 4.0}, "tau 4.0: from 1 to the 3 positions"),
        ({"latent": 0.0}, "latent 0.0: a share of keys and values, above 0"),
        ({"budget": 10}, "partial KV of 10 tokens: sinks and window alone are 20"),
        ({"selector": "best"}, "selector 'best'"),
    ],
)
def test_settings_that_cannot_be(message, error):
    with pytest.raises(ValueError, match=error):
        ContextSettings(**SETTINGS | message)


def test_contexts_that_do_not_fit(tmp_path):
    model = tiny.target("qwen3")
    with pytest.raises(ValueError, match="positions end at"):
        run_context(model, ContextSettings(**SETTINGS | {"contexts": (tiny.LONGEST,)}), tmp_path, QUIET)
    with pytest.raises(ValueError, match="and memory_gib is 1e-06"):
        run_context(model, ContextSettings(**SETTINGS, memory_gib=1e-6), tmp_path, QUIET)
    assert not list(tmp_path.iterdir())
