"""The suite memory-answers on the model that solves problems: every state is measured, and taken back."""

from dataclasses import replace

import pytest
from latents import latent_target
from rich.console import Console

import outpace
from outpace.bench import memory_answers
from outpace.bench.memory_answers import (
    PAGE,
    MemoryAnswersSettings,
    memory_answers_by_family,
    memory_answers_table,
    needles_by_depth,
    run_memory_answers,
)
from outpace.models.load import fingerprint

QUIET = Console(quiet=True)
SETTINGS = MemoryAnswersSettings(
    families=("units", "talk"),
    problems=3,
    max_new_tokens=60,
    fractions=(0.5, 0.05),
    shares=(0.25,),
    tokens=(64,),
    rows=3,
    row_tokens=256,
    needles=2,
    depths=(0.2, 0.9),
    sentences=40,
)


@pytest.fixture(scope="module")
def model():
    return outpace.load("default")


def test_every_state_is_measured_and_taken_back(model, tmp_path):
    before = fingerprint(model.target)
    whole = run_memory_answers(model.target, model.tokenizer, SETTINGS, tmp_path / "whole", QUIET)
    rows = {row["name"]: row for row in whole["rows"]}
    assert len(rows) == SETTINGS.states and fingerprint(model.target) == before
    assert not model.target.config.mla_ranks and not model.target.config.dsa_layers
    assert model.target.kv_cache_dtype is None
    original = rows.pop("original")
    assert original["right"] >= 4 and original["unchanged"] == original["of"] == 6
    assert original["families"] == {"units": original["right"] - 3, "talk": 3}
    kv = original["memory"]["bytes_per_token"]
    assert kv == 3 * 2 * 4 * 64 * 4 == original["memory"]["bytes_read"]
    assert rows["float16"]["memory"]["bytes_per_token"] == kv / 2
    lossless, lossy = (rows[f"partial KV of 64 tokens, {mode}"] for mode in ("lossless", "lossy"))
    assert lossless["unchanged"] == 6 and lossless["right"] == original["right"]
    assert lossy["memory"]["bytes_per_token"] == kv and lossy["memory"]["bytes_read"] < kv
    half, little = rows["latents, loss, 50%"], rows["latents, loss, 5%"]
    assert half["memory"]["bytes_per_token"] == kv / 2 and little["memory"]["bytes_per_token"] < kv / 15
    assert half["right"] > little["right"] and half["unchanged"] > little["unchanged"]
    assert original["quality"]["kl"] == 0 and rows["float16"].get("quality") is None
    assert 0 < half["lost"]["k"] < little["lost"]["k"] < 1 and 0 < half["lost"]["v"] < little["lost"]["v"] < 1
    assert 0 <= half["quality"]["kl"] < 1e-4 and 0.1 < little["quality"]["kl"] < 1
    assert original["quality"]["nats"] < 1  # of answers alone: those of a question are beyond guessing
    assert half["quality"]["nats"] < little["quality"]["nats"] - 0.1
    index, both = rows["index, 25% of the context"], rows["latents, loss, 50%; index, 25% of the context"]
    assert index["memory"]["bytes_read"] < kv < index["memory"]["bytes_per_token"]
    assert both["lost"] == half["lost"] and index["lost"] is None
    assert both["quality"] != half["quality"] != index["quality"] != original["quality"]
    assert both["memory"]["bytes_read"] < index["memory"]["bytes_read"]
    assert all(set(row["needles"]) == {"0.2", "0.9"} for row in whole["rows"])
    codes = {name: sum(row["needles"].values()) for name, row in rows.items()}
    assert codes["float16"] == sum(original["needles"].values()) >= 3 and not codes["latents, loss, 5%"]
    assert 400 < whole["document_tokens"] < 600
    assert needles_by_depth(whole)[0].endswith("| KV, bytes | at 20 % | at 90 % | all |")
    assert needles_by_depth(whole)[2].endswith(f"| {codes['float16']} of 4 |")
    assert memory_answers_table(whole)[2].startswith("| original | 6,144 | 6,144 |")
    assert memory_answers_by_family(whole)[3].startswith("| talk | 3 | 3 |")
    PAGE.write(whole, tmp_path / "whole")
    assert (tmp_path / "whole" / "memory-answers.png").stat().st_size > 1000


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    model = outpace.load("default")
    settings = replace(SETTINGS, families=("talk",), problems=1, fractions=(), tokens=(), batch=1, needles=0)
    real, calls = memory_answers.solve, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(memory_answers, "solve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_memory_answers(model.target, model.tokenizer, settings, tmp_path, QUIET)
    model = outpace.load("default")
    report = run_memory_answers(model.target, model.tokenizer, settings, tmp_path, QUIET)
    assert [row["right"] for row in report["rows"]] == [1] * settings.states and len(calls) == 3 + 4 - 2


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"fractions": (1.5,)}, "fractions 1.5"),
        ({"tokens": (8,)}, "partial KV of 8 tokens"),
        ({"block_size": 0}, "block_size"),
        ({"depths": (0.5, 1.2)}, r"depths \[0.5, 1.2\]"),
        ({"families": ("sums",)}, "sums"),
    ],
)
def test_settings_without_a_meaning(wrong, named):
    with pytest.raises(ValueError, match=named):
        MemoryAnswersSettings(**wrong)


def test_a_retrofitted_target_is_refused(tmp_path):
    target = latent_target("gpt_oss")[1]
    with pytest.raises(ValueError, match="name the original"):
        run_memory_answers(target, None, SETTINGS, tmp_path, QUIET)  # type: ignore[arg-type]
