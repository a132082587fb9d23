"""The suite synthetic: its rows by hand, the same text from all methods, llama.cpp on the very file."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from outpace.bench import llama_cpp, synthetic
from outpace.bench.metrics import ResultCell
from outpace.bench.run import Timed
from outpace.bench.synthetic import PAGE, SyntheticSettings, run_synthetic, synthetic_table
from outpace.decode.trace import Trace
from outpace.formats.convert import convert_target
from outpace.loading import open_target
from outpace.text.corpus import read_corpus, split

QUIET = Console(quiet=True)
SMALL = {"taus": (2.5,), "blocks": (4,), "prompts": 2, "prompt_tokens": 40, "new_tokens": 60, "repeats": 1}


@pytest.fixture(scope="module")
def documents():
    return split([d for d in read_corpus() if d.name.startswith(("json/", "email/"))])[1]


def timed(tau, decode_s, tokens=100):
    trace, rows = Trace(), [0]
    for _ in range(tokens // tau):
        trace.add(1, rows, [tau - 1], [tau - 1])
    trace.seconds |= {"prefill": 0.1, "verify": decode_s}
    return Timed(tokens=[[7] * (tokens + 1)], first_s=0.1, decode_s=decode_s, trace=trace)


def test_break_even_is_where_a_step_costs_as_much_as_its_tokens(monkeypatch):
    settings = SyntheticSettings(taus=(4.0,), blocks=(8,))
    runs = {"plain": timed(1, 2.0), "tau 4, block 8": timed(4, 1.0), "llama.cpp": timed(1, 4.0)}
    cell = ResultCell("synthetic", 1, 101, [[[1, 2]]], {name: {(0, 0): run} for name, run in runs.items()})
    target = SimpleNamespace()
    rows = {name: synthetic._row(target, cell, name, settings) for name in runs}
    row = rows["tau 4, block 8"]
    assert (row["speedup"], row["over_llama_cpp"], row["asked"]) == (2.0, 4.0, 4.0)
    assert row["break_even"] == pytest.approx(row["tau"] / 2, abs=1e-3)  # two plain tokens a step
    assert rows["plain"]["over_llama_cpp"] == 2.0 and rows["plain"]["break_even"] is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_methods_say_the_same(documents, tmp_path, temperature):
    settings = SyntheticSettings(**SMALL, temperature=temperature, draft_layers=1, rates={"none": [0.0] * 3})
    report = run_synthetic(*open_target("default"), documents, settings, tmp_path, QUIET)
    rows = {row["method"]: row for row in report["results"]}
    assert abs(rows["tau 2.5, block 4"]["tau"] - 2.5) < 0.5 and rows["none"]["tau"] < 1.1
    assert rows["tau 2.5, block 4"]["lossless"]["checked"] >= 118
    assert all(row["lossless"]["violations"] == 0 for row in rows.values())
    assert rows["none"]["speedup"] < 1 and rows["none"]["time"]["draft"] > 0
    assert ("llama.cpp" in rows) == (llama_cpp.installed() and not temperature)
    PAGE.write(report, tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "a DFlash of 1 layers" in page and "Acceptance is given here, not measured" in page
    assert len(synthetic_table(report)) == len(rows) + 3


@pytest.mark.skipif(not llama_cpp.installed(), reason="llama-cpp-python is not installed: make oracle")
def test_llama_cpp_reads_the_very_file(documents, tmp_path, monkeypatch):
    file = tmp_path / "target.gguf"
    convert_target("default", file, "bf16")
    opened = []
    load = llama_cpp.load_model
    monkeypatch.setattr(llama_cpp, "load_model", lambda path: opened.append(path) or load(path))
    target, tokenizer = open_target(str(file))
    settings = SyntheticSettings(**SMALL)
    report = run_synthetic(target, tokenizer, documents, settings, tmp_path / "report", QUIET, file)
    assert opened == [file]
    assert [row["method"] for row in report["results"]] == ["plain", "tau 2.5, block 4", "llama.cpp"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"taus": (4.0, 5.0), "blocks": (8,)}, "as many of one as of the other"),
        ({"taus": (), "blocks": ()}, "one at least, or rates"),
        ({"rates": {"mine": [0.5, 1.5]}}, "each from 0 to 1"),
        ({"taus": (1.0,), "blocks": (1,)}, "one of each draft token"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"new_tokens": 1}, "new_tokens 1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        SyntheticSettings(**settings)
