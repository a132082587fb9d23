"""The suite serve: a real server in its own process under a short load, and what is made of the numbers."""

import io

import pytest
from rich.console import Console

from outpace.bench import serve
from outpace.bench.serve import OFF, ON, PAGE, Answered, ServeSettings, _measured, run_serve
from outpace.loading import open_target
from outpace.text.corpus import read_corpus, split

SHORT = ServeSettings(concurrency=(2,), rates=(50.0,), arrivals=3, prompt_tokens=40, new_tokens=12, repeats=1)


def test_a_load_is_measured_with_and_without_a_draft(tmp_path, monkeypatch):
    target, tokenizer = open_target("default")
    documents = split(read_corpus())[1]
    console = Console(file=io.StringIO())
    report = run_serve(target, "default", tokenizer, documents, SHORT, tmp_path, console)
    rows = report["results"]
    assert [(r["load"], r["method"]) for r in rows] == [
        (load, method) for load in ("2 clients", "50 requests/s") for method in (OFF, ON)
    ]
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["tau"] >= 1 and (row["method"] == ON or row["speedup"] == 1)
        assert 0 < row["first_ms"][0] <= row["first_ms"][1] and 0 < row["between_ms"][0]
    assert "| 2 clients | draft |" in PAGE.markdown(report, plots=False)
    # a run that stopped goes on with what it has: no server starts
    monkeypatch.setattr(serve, "_served", None)
    again = run_serve(target, "default", tokenizer, documents, SHORT, tmp_path, console)
    assert again["results"] == rows


def test_latencies_are_those_of_requests():
    asked = [Answered([0.5, 0.6, 0.9], 5, 2), Answered([0.1], 1, 0)]
    values = _measured(asked, 2.0)
    assert values["first"] == [0.5, 0.1] and values["between"] == [pytest.approx(0.1)]
    assert values["tokens"] == 6 and values["steps"] == 2


@pytest.mark.parametrize(
    "wrong", [{"concurrency": ()}, {"concurrency": (0,)}, {"rates": (-1.0,)}, {"arrivals": 1}]
)
def test_settings_that_measure_nothing(wrong):
    with pytest.raises(ValueError, match="serve: "):
        ServeSettings(**wrong)
