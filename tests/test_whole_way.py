"""The whole way in one process: problems, target, teacher cache, draft, gates, lossless decoding, report."""

import io
import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from examples.tiny_target.make import make
from outpace.bench.answers import PAGE, run_answers
from outpace.bench.checks import run_checks
from outpace.bench.suite import SuiteRecipe, SuiteRequest
from outpace.config import load_settings
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.loading import open_draft, open_target
from outpace.models.load import fingerprint
from outpace.tasks.families import FAMILIES
from outpace.teacher.build import TeacherRecipe, build
from outpace.teacher.prompts import ChatPrompts
from outpace.teacher.store import TeacherCache
from outpace.text.harmony import HarmonyTokens, prompt_ids
from outpace.train.dflash import DFlashRecipe, train_dflash

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
KINDS = "addition", "talk", "units"


def prompts_of(tokens, count, held_out):
    rng = random.Random(1)
    drawn = [FAMILIES[KINDS[i % len(KINDS)]].draw(rng, held_out=held_out) for i in range(count)]
    return [prompt_ids(problem.prompt(), tokens) for problem in drawn]


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory):
    """A micro target and draft, trained for seconds: they solve nothing, and everything runs."""
    work = tmp_path_factory.mktemp("whole-way")
    few = ["steps=12", "warmup=2", "eval_every=12", "test_problems=1"]
    make(ROOT / "examples/tiny_target/micro.toml", few, None, work / "target")
    target, tokenizer = open_target(str(work / "target" / "model"))
    tokens = HarmonyTokens(tokenizer)
    teacher = load_settings(
        TeacherRecipe, RECIPES / "teacher-micro.toml", {"samples": 12, "shard_samples": 4, "batch": 4}
    )
    questions = ChatPrompts(prompts_of(tokens, 12, held_out=False), tokens.stop)
    build(target, tokenizer, questions, work / "cache", teacher)
    cache = TeacherCache.open(work / "cache", target_fingerprint=fingerprint(target))
    prompts = prompts_of(tokens, 3, held_out=True)
    learn = load_settings(DFlashRecipe, RECIPES / "dflash-micro.toml", {"steps": 10, "eval_every": 10})
    train_dflash(learn, target, tokenizer, cache, prompts, work / "dflash")
    draft = open_draft(str(work / "dflash" / "draft"), target, tokenizer)
    return work, target, tokenizer, cache, draft, prompts


def test_the_target_learned_something(walked) -> None:
    work, *_ = walked
    log = [json.loads(line) for line in (work / "target" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    provenance = json.loads((work / "target" / "model" / "provenance.json").read_text())
    assert provenance["steps"] == 12 and provenance["exact"].keys() == FAMILIES.keys()


def test_gates_pass_on_what_was_built(walked) -> None:
    _, target, _, cache, draft, prompts = walked
    for gate in run_checks(target, draft, cache, prompts):
        assert gate.passed is not False, f"{gate.name}: {gate.message}"


def test_decoding_is_lossless(walked) -> None:
    *_, draft, prompts = walked
    target, request = walked[1], Request(max_new_tokens=80)
    expected = generate(target, prompts, request)
    drafted = generate(target, prompts, request, draft)
    assert drafted.tokens == expected.tokens
    assert drafted.trace.tau >= 1


def test_the_report_is_written_whole(walked) -> None:
    work, target, tokenizer, *_ = walked
    values = {"temperatures": [0.0], "families": KINDS, "problems": 1, "longest_answer": 24}
    methods = {
        name: {"draft": draft, "controller": [False]}
        for name, draft in (("n-gram", "ngram"), ("DFlash", "dflash/draft"))
    }
    request = SuiteRequest(
        target=target,
        tokenizer=tokenizer,
        documents=[],
        recipe=load_settings(SuiteRecipe, None, values | {"methods": methods}),
        drafts=work,
        calibration_text=[],
        folder=work / "report",
        console=Console(file=io.StringIO()),
    )
    PAGE.write(run_answers(request), work / "report")
    saved = json.loads((work / "report" / "report.json").read_text())
    rows = [row for row in saved["results"] if row["method"] != "llama.cpp"]
    assert {row["method"] for row in rows} == {"plain", "n-gram", "DFlash"}
    assert all(row["lossless"]["violations"] == 0 for row in rows)
    assert (work / "report" / "answers.png").stat().st_size > 1000
