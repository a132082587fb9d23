"""The suite answers: whole answers by every method, counted, checked, resumed, and printed."""

import json
import statistics

import pytest
import tiny
from rich.console import Console

from examples.tiny_target.make import ALONE
from examples.tiny_target.problem_rows import sample_pieces
from outpace.bench import answers
from outpace.bench.answers import ALL, PAGE, family_table, run_answers
from outpace.bench.suite import SuiteRecipe, SuiteRequest
from outpace.config import load_settings
from outpace.decode.request import Generation
from outpace.decode.trace import Trace
from outpace.models.load import build, named_tensors
from outpace.tasks.prompts import draw
from outpace.text.harmony import HarmonyTokens, prompt_ids
from outpace.text.sft_rows import rows
from outpace.text.tokenizer import train_bpe

FAMILIES = ("addition", "functions", "strings")
METHODS = {"n-gram": {"draft": "ngram", "controller": [False, True]}}


@pytest.fixture(scope="module")
def tokens():
    return HarmonyTokens(train_bpe(sample_pieces(1, 30), 400, alone=ALONE))


@pytest.fixture(scope="module")
def target():
    model = build(tiny.config("gpt_oss", vocab_size=400))
    tiny.randomise(named_tensors(model))
    return model.eval()


def request_for(target, tokens, folder, **changes):
    values = {"methods": METHODS, "families": FAMILIES, "problems": 3, "longest_answer": 17}
    values |= {"temperatures": [0.0, 0.8], "calibrate_s": 0.01, "prompt_tokens": 40, "new_tokens": 8}
    return SuiteRequest(
        target=target,
        tokenizer=tokens.tokenizer,
        documents=[],
        recipe=load_settings(SuiteRecipe, None, values | changes),
        drafts=folder,
        calibration_text=[],
        folder=folder / "out",
        console=Console(quiet=True),
    )


@pytest.fixture(scope="module")
def report(target, tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    return run_answers(request_for(target, tokens, folder))


def test_every_method_writes_what_autoregressive_decoding_writes(report):
    rows_ = [r for r in report["results"] if r["method"] != "llama.cpp"]
    assert {r["family"] for r in rows_} == {*FAMILIES, ALL}
    for temperature in (0.0, 0.8):
        names = [(r["method"], r["controller"]) for r in rows_ if r["temperature"] == temperature]
        assert {*names} == {("plain", False), ("n-gram", False), ("n-gram", True)}
    drafted = [r for r in rows_ if r["method"] != "plain"]
    assert all(r["lossless"]["violations"] == 0 < r["lossless"]["checked"] for r in drafted)
    whole = [r for r in rows_ if r["family"] == ALL]
    assert all(r["answers"] == 9 and "right" not in r and r["answer_tokens"] <= 17 for r in whole)


def test_all_families_together_are_the_runs_of_each(report):
    rows_ = [r for r in report["results"] if r["method"] == "plain" and r["temperature"] == 0]
    *each, whole = rows_
    assert whole["answer_tokens"] == statistics.fmean(r["answer_tokens"] for r in each)
    assert (
        min(r["tokens_per_s"] for r in each) <= whole["tokens_per_s"] <= max(r["tokens_per_s"] for r in each)
    )


def test_the_page_has_a_row_for_every_family(report):
    page = PAGE.markdown(report)
    assert page.count("| functions |") == 2 and page.count("| all |") == 2
    assert "## Temperature 0.8" in page and "n-gram, controller" in page
    header, _, *lines, _ = family_table(report, 0.0)
    assert len(lines) == 4 and header.count("|") == lines[0].count("|") == 6
    PAGE.plots["answers.png"][1](report)


def test_right_answers_are_counted_and_whole(target, tokens, tmp_path, monkeypatch):
    """The answers of training in place of the target's, one of them wrong: each up to its stop token."""
    known = {}
    for name in FAMILIES:
        for problem in draw(name, 3, 1):
            ids = rows(problem.conversation("medium"), tokens)[-1].ids
            prompt = prompt_ids(problem.prompt("medium"), tokens)
            end = next(i for i, t in enumerate(ids) if i >= len(prompt) and t in tokens.stop)
            known[tuple(prompt)] = ids[len(prompt) : end + 1]
    spoilt = next(iter(known))
    known[spoilt] = [*known[spoilt][:-1], tokens.tokenizer.token_to_id("7"), known[spoilt][-1]]

    def generate(target, prompts, request, rng):
        assert request.stop == tokens.stop
        return Generation([known[tuple(prompts[0])]], Trace())

    monkeypatch.setattr(answers, "generate", generate)
    report = run_answers(request_for(target, tokens, tmp_path, temperatures=[0.0], methods=METHODS))
    right = {r["family"]: r["right"] for r in report["results"] if "right" in r}
    assert right == {"addition": 2, "functions": 3, "strings": 3}
    plain = [r for r in report["results"] if r["method"] == "plain"]
    assert plain[-1]["answer_tokens"] == statistics.fmean(map(len, known.values()))


def test_a_stopped_run_goes_on(target, tokens, tmp_path, monkeypatch):
    request = request_for(target, tokens, tmp_path, temperatures=[0.0])
    real, asked = answers.interleave, []

    def stopping(name, *rest):
        asked.append(name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(name, *rest)

    monkeypatch.setattr(answers, "interleave", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_answers(request)
    lines = (request.folder / "progress.jsonl").read_text().splitlines()
    done = [name for line in lines[1:] for name in json.loads(line)]
    assert sum("addition, repeat" in name for name in done) == 3
    report = run_answers(request)
    assert {r["family"] for r in report["results"]} == {*FAMILIES, ALL}
    assert (request.folder / "progress.jsonl").read_text().startswith("\n".join(lines))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"families": ["sums"]}, "no family 'sums'; known: addition"),
        ({"problems": 0}, "problems 0"),
        ({"longest_answer": 1}, "longest_answer 1"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused(target, tokens, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        request_for(target, tokens, tmp_path, **changes)
