"""llama.cpp as a baseline: our greedy tokens on the same weights, and a row beside ours in the report."""

import dataclasses

import pytest
import tiny
from test_prompts import document
from test_speed import measure, quiet, tiny_settings

from outpace.bench import llama_cpp, speed
from outpace.bench.methods import Case, run_case
from outpace.models.load import build, named_tensors
from outpace.text.tokenizer import train_bpe

pytestmark = pytest.mark.skipif(
    not llama_cpp.installed(), reason=f"llama.cpp is not installed: {llama_cpp.HOW_TO_GET}"
)
DOCUMENTS = [document(name, 80) for name in "abc"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([d.text for d in DOCUMENTS], 300)


@pytest.fixture(scope="module")
def target():
    """With YaRN's range truncated, as llama.cpp always has it."""
    config = tiny.config("gpt_oss", vocab_size=300, head_dim=32)
    model = build(dataclasses.replace(config, rope=dataclasses.replace(config.rope, truncate=True)))
    tiny.randomise(named_tensors(model))
    return model.eval()


def test_greedy_tokens_are_ours_past_the_window_in_a_batch(target, tokenizer, monkeypatch):
    exact = "no flash attention, float32 KV"  # float16 moves a random model's top-1
    monkeypatch.setattr(llama_cpp, "SETTINGS", {exact: llama_cpp.SETTINGS[exact]})
    baseline, prompts = llama_cpp.Baseline(target, tokenizer), tiny.tokens(3, 11).tolist()
    ours = run_case(Case(method="plain", temperature=0.0), target, None)(prompts, 21, 0)
    for _ in range(2):  # the second time over what the first has left
        theirs = baseline(prompts, 21)
        assert theirs.tokens == ours.tokens
    assert theirs.trace.tau == 1.0 and theirs.trace.rounds == 3 * 20
    assert theirs.first_s > 0 and theirs.decode_s > 0
    assert len(baseline.remarks) == 1 and "fastest of" in baseline.remarks[0]


def test_it_has_a_row_and_a_ratio(target, tokenizer):
    settings = tiny_settings(methods=(speed.LLAMA_CPP, "plain", "ngram"), batches=(1, 2), repeats=2)
    report = measure(target, None, tokenizer, DOCUMENTS, settings, quiet())
    rows = {(r["method"], r["batch"]): r for r in report["results"]}
    assert set(rows) == {(m, b) for m in (speed.LLAMA_CPP, "plain", "ngram") for b in (1, 2)}
    for batch in (1, 2):
        assert rows[speed.LLAMA_CPP, batch]["over_llama_cpp"] == 1.0
        assert rows[speed.LLAMA_CPP, batch]["lossless"]["checked"] == 0
        plain = rows["plain", batch]
        assert plain["over_llama_cpp"] == pytest.approx(1 / rows[speed.LLAMA_CPP, batch]["speedup"], rel=0.5)
    page = speed.PAGE.markdown(report)
    assert "| llama.cpp | speedup" in page and "not compared, since it rounds otherwise" in page


def test_what_gguf_cannot_say_is_left_out_with_a_line(target, tokenizer, monkeypatch):
    def refuse(*_):
        raise ValueError("GGUF has no place for latent KV")

    monkeypatch.setattr(llama_cpp, "write_gguf", refuse)
    settings = tiny_settings(methods=(speed.LLAMA_CPP, "plain"), repeats=1)
    report = measure(target, None, tokenizer, DOCUMENTS, settings, quiet())
    assert {r["method"] for r in report["results"]} == {"plain"}
    assert "llama.cpp left out: GGUF has no place for latent KV" in report["remarks"]
