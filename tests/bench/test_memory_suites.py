"""The suites memory and pareto: their rows by hand, what they call lossless, what they refuse."""

import copy
import json

import pytest
import torch
from rich.console import Console

from outpace.bench import methods
from outpace.bench.retrofits import (
    MEMORY_PAGE,
    PARETO_PAGE,
    MemorySettings,
    ParetoSettings,
    Quality,
    QualitySettings,
    Setting,
    agreeing,
    kv_memory,
    memory_table,
    pareto_table,
    run_memory,
    run_pareto,
    settings_for,
)
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.lookup import NGram
from outpace.kv.topk import TopKConfig
from outpace.loading import open_target
from outpace.models.load import fingerprint
from outpace.retrofit import dsa, mla
from outpace.retrofit.mla import calibrate
from outpace.text.corpus import read_corpus, split

QUIET = Console(quiet=True)
READ = {"texts": 1, "length": 300, "needles": 2, "distances": (40,), "prompts": 2, "prompt_tokens": 200}
SETTINGS = MemorySettings(**READ, new_tokens=24, repeats=1, partial=176)
LAYERS = [1, 3, 5]


@pytest.fixture(scope="module")
def documents():
    names = ("asyncio/", "email/", "http/", "xml/", "unittest/", "logging/", "json/")
    return split([d for d in read_corpus() if d.name.startswith(names)])


@pytest.fixture(scope="module")
def original():
    return open_target("default")


@pytest.fixture(scope="module")
def retrofitted(original, documents):
    """The embedded target with latents of 128 of 512 numbers, and an index that picks 48 tokens."""
    whole, tokenizer = original
    model = copy.deepcopy(whole)
    text = tokenizer.encode(documents[0][0].text).ids[:400]
    moments = calibrate(model, [text], LAYERS)
    seen = dsa.attention_inputs(model, torch.tensor(text), LAYERS)
    made = {i: dsa.first_weights(model.attentions[i], dsa.Phases.of(seen[i]), 4, 8) for i in LAYERS}
    bases = {i: mla.basis("pca", model.attentions[i], m) for i, m in moments.items()}
    mla.attach(model, bases, dict.fromkeys(LAYERS, 128))
    dsa.attach_index(model, made, TopKConfig(top_k=48, min_context=48, sinks=2, recent=24))
    return model


@pytest.fixture(scope="module")
def report(retrofitted, original, documents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    memory = run_memory(retrofitted, original[1], NGram(), "ngram", documents[1], SETTINGS, folder, QUIET)
    MEMORY_PAGE.write(memory, folder)
    return memory, folder


def test_every_row_is_lossless_against_its_own_target(report):
    result, _ = report
    assert [row["name"] for row in result["rows"]] == [row.name for row in settings_for_both()]
    assert result["violations"] == 0
    against = {row["name"]: row["lossless_against"] for row in result["rows"]}
    assert against["+ draft, partial KV"] == "plain" and against["all"] == "latent KV, sparse"
    assert all(row["lossless"]["checked"] == 2 * 24 for row in result["rows"])
    assert all((row["tau"] is None) != row["draft"] for row in result["rows"])
    assert all(row["confirmed"][1] > 0 for row in result["rows"] if row["partial"])


def settings_for_both():
    return [
        Setting("plain"),
        Setting("+ draft", draft=True),
        Setting("+ draft, partial KV", draft=True, partial=True),
        Setting("latent KV", mla=True),
        Setting("latent KV + draft", mla=True, draft=True),
        Setting("sparse", dsa=True),
        Setting("sparse + draft", dsa=True, draft=True),
        Setting("latent KV, sparse", mla=True, dsa=True),
        Setting("all", mla=True, dsa=True, draft=True, partial=True),
    ]


def test_bytes_by_hand(report):
    """512 numbers per layer and token, or 128 of latents; 8 of an index; 48 of 224 tokens are looked at."""
    rows = {row["name"]: row["memory"] for row in report[0]["rows"]}
    kept = {"plain": 512, "latent KV": 128, "sparse": 520, "latent KV, sparse": 136, "all": 136}
    read = {"plain": 512, "latent KV": 128, "sparse": 8 + 512 * 48 / 224, "all": 8 + 128 * 48 / 224}
    for name, numbers in kept.items():
        assert rows[name]["bytes_per_token"] == 3 * 4 * numbers
    for name, numbers in read.items():
        assert rows[name]["bytes_read"] == pytest.approx(3 * 4 * numbers)
    assert rows["plain"]["cache_bytes"] - rows["latent KV"]["cache_bytes"] == 225 * 3 * 4 * 384


def test_quality_is_of_the_state_and_the_first_is_the_original(report):
    rows = {row["name"]: row["quality"] for row in report[0]["rows"]}
    assert rows["plain"] == rows["+ draft"] and rows["plain"]["kl"] == 0 == 1 - rows["plain"]["agreement"]
    assert rows["all"] == rows["latent KV, sparse"] and rows["all"]["kl"] > rows["sparse"]["kl"] > 0
    assert len({row["nats"] for row in rows.values()}) == 4
    assert rows["all"]["needles"][0]["of"] == 2


def test_files_and_tables(report):
    result, folder = report
    assert json.loads((folder / "report.json").read_text()) == result
    assert (folder / "memory.png").stat().st_size > 5000
    assert sorted(p.name for p in folder.iterdir()) == ["memory.png", "report.json", "report.md"]
    assert len(memory_table(result)) == 12 and "| all |" in MEMORY_PAGE.markdown(result)


def test_a_wrong_draft_loop_would_show(retrofitted, original, documents, tmp_path, monkeypatch):
    """A row where the text is not its target's plain text is counted."""
    honest = methods.generate

    def wrong(target, prompts, request, draft=None, **more):
        result = honest(target, prompts, request, draft, **more)
        if draft is None:
            return result
        result.tokens[0][5] = (result.tokens[0][5] + 1) % 300
        return result

    monkeypatch.setattr(methods, "generate", wrong)
    memory = run_memory(retrofitted, original[1], NGram(), "ngram", documents[1], SETTINGS, tmp_path, QUIET)
    assert memory["violations"] == 2 * sum(row.draft for row in settings_for_both())
    assert retrofitted.config.use_mla_kv and retrofitted.config.use_dsa  # as it was


def test_agreement_by_hand(original, documents):
    target, tokenizer = original
    settings = QualitySettings(**READ | {"needles": 0}, new_tokens=12)
    quality = Quality(target, tokenizer, documents[1], settings)
    for prompt, answer in zip(quality.prompts, quality.answers, strict=True):
        assert generate(target, [prompt], Request(max_new_tokens=12)).tokens == [answer]
    quality.answers = [[*a[:6], -1, *a[7:]] for a in quality.answers]
    value = quality.measure()
    assert value["agreement"] == 0.5 and abs(value["kl"]) < 1e-5 and value["needles"] == []
    assert agreeing([1, 2, 3], [1, 2, 3]) == 3 and agreeing([1, 2, 3], [2, 2, 3]) == 0


def test_settings_of_targets_with_less(original, retrofitted):
    with pytest.raises(ValueError, match="this target has none"):
        settings_for(original[0])
    model = copy.deepcopy(retrofitted)
    dsa.detach_index(model)
    assert [w.name for w in settings_for(model)][3:] == ["latent KV", "latent KV + draft", "all"]
    assert settings_for(model)[-1] == Setting("all", mla=True, draft=True, partial=True)


SMALL = {"fractions": (0.5,), "methods": ("pca",), "shares": (0.25,), "rows": 2, "row_tokens": 256}


def test_pareto_points(original, retrofitted, documents, tmp_path):
    whole, tokenizer = original
    settings = ParetoSettings(**READ, **SMALL, new_tokens=24, trained=("x",))
    model, before = copy.deepcopy(whole), fingerprint(whole)
    trained = {"x": retrofitted}
    result = run_pareto(model, tokenizer, trained, *documents, settings, tmp_path, QUIET)  # type: ignore[call-arg]
    assert fingerprint(model) == before  # nothing stays attached
    names = ["original", "x", "latents, pca, 50%", "index, 25% of the context"]
    assert [p["name"] for p in result["points"]] == names
    first, x, latents, index = result["points"]
    assert first["memory"] == kv_memory(whole, 300) and first["quality"]["kl"] == 0
    assert latents["memory"]["bytes_per_token"] == first["memory"]["bytes_per_token"] / 2
    assert index["memory"]["bytes_read"] == pytest.approx(3 * 4 * (32 + 512 * 75 / 300))
    assert x["quality"]["kl"] > 0 and latents["quality"]["kl"] > 0 and index["quality"]["kl"] > 0
    PARETO_PAGE.write(result, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == result
    assert (tmp_path / "pareto.png").stat().st_size > 5000
    assert len(pareto_table(result)) == 7 and "+0.00%" in PARETO_PAGE.markdown(result)


def test_pareto_starts_from_an_original_and_its_own_retrofits(original, retrofitted, documents, tmp_path):
    whole, tokenizer = original
    settings = ParetoSettings(**READ, **SMALL)
    with pytest.raises(ValueError, match="name the original"):
        run_pareto(retrofitted, tokenizer, {}, *documents, settings, tmp_path, QUIET)  # type: ignore[call-arg]
    other = copy.deepcopy(whole)
    with torch.no_grad():
        other.norm.weight.add_(1)
    with pytest.raises(ValueError, match="its backbone is another"):
        run_pareto(other, tokenizer, {"mine": retrofitted}, *documents, settings, tmp_path, QUIET)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("kind", "message", "named"),
    [
        (MemorySettings, {"partial": 60}, "sinks and window alone"),
        (MemorySettings, {"prompts": 0}, "prompts 0"),
        (MemorySettings, {"needles": 9}, "needles 9"),
        (ParetoSettings, {"fractions": (1.5,)}, "fractions 1.5"),
        (ParetoSettings, {"shares": (0.0,)}, "shares 0.0"),
        (ParetoSettings, {"methods": ("best",)}, "method 'best'"),
        (ParetoSettings, {"index_dim": -1}, "index_dim -1"),
        (QualitySettings, {"texts": 0}, "texts 0"),
    ],
)
def test_settings_that_cannot_be(kind, message, named):
    with pytest.raises(ValueError, match=named):
        kind(**message)
