"""The suite serve: real servers in their own processes under a short load, and the numbers made of it."""

import io
import re
import stat

import pytest
from rich.console import Console

from outpace.bench import servers
from outpace.bench.serve import OFF, ON, PAGE, ServeSettings, _measured, _prompts, run_serve
from outpace.bench.servers import LLAMA_SERVER, Answered
from outpace.loading import open_target
from outpace.text.corpus import read_corpus, split

SHORT = ServeSettings(
    concurrency=(2,), rates=(50.0,), arrivals=3, prompt_tokens=150, new_tokens=60, repeats=1
)


def _run(folder):
    target, tokenizer = open_target("default")
    documents = split(read_corpus())[1]
    return run_serve(target, "default", tokenizer, documents, SHORT, folder, Console(file=io.StringIO()))


def _check(report, methods):
    rows = report["results"]
    assert [(r["load"], r["method"]) for r in rows] == [
        (load, method) for load in ("2 clients", "50 requests/s") for method in methods
    ]
    for row in rows:
        assert row["tokens_per_s"] > 0 and (row["method"] != OFF or row["speedup"] == 1)
        assert 0 < row["first_ms"][0] <= row["first_ms"][1] and row["between_ms"][1] > 0
        assert row["method"] == LLAMA_SERVER or row["tau"] >= 1
    assert "| 2 clients | draft |" in PAGE.markdown(report, plots=False)


def test_a_load_is_measured_with_and_without_a_draft(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "find_llama_server", lambda: None)
    report = _run(tmp_path)
    _check(report, (OFF, ON))
    assert report["remarks"] == [f"llama-server left out: it is not installed ({servers.HOW_TO_GET})"]
    assert "make llama-server" in PAGE.markdown(report, plots=False)
    # a run that stopped goes on with what it has: no server starts
    monkeypatch.setattr(servers, "outpace_serve", None)
    assert _run(tmp_path)["results"] == report["results"]


@pytest.mark.skipif(not servers.find_llama_server(), reason="llama-server is not there: make llama-server")
def test_llama_server_takes_the_same_load(tmp_path):
    report = _run(tmp_path)
    _check(report, (OFF, ON, LLAMA_SERVER))
    assert [r["over_llama_server"] for r in report["results"] if r["method"] == LLAMA_SERVER] == [1, 1]
    assert re.match(r"llama-server, version: .*, CPU : .*SSE3 = 1", report["remarks"][0])


@pytest.mark.parametrize(
    ("script", "words"),
    [("echo no such model >&2", "llama-server does not start: no such model"), ("", "does not start")],
)
def test_a_server_that_does_not_start_is_quoted(tmp_path, monkeypatch, script, words):
    program = tmp_path / LLAMA_SERVER
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(servers, "find_llama_server", lambda: str(program))
    with (
        pytest.raises(OSError, match=words),
        servers.llama_server(tmp_path / "target.gguf", 2, 64),
    ):
        pass


def test_a_variant_of_a_problem_is_another_prompt_from_its_date_on():
    tokenizer = open_target("default")[1]
    prompt = _prompts(tokenizer, [], 8, SHORT)
    one, other, again = prompt(3, 0), prompt(3, 7), prompt(11, 0)
    assert max(len(prompt(i, 0)) for i in range(8)) <= SHORT.prompt_tokens and again == one
    same = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    assert tokenizer.decode(one[: same + 1]).endswith("Current date: 2024-01-01") and one[-20:] == other[-20:]


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
