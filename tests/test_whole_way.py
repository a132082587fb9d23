"""The whole way in one process: raw text, target, teacher cache, draft, gates, lossless decoding, report."""

import io
import json
import sysconfig
from pathlib import Path

import pytest
from rich.console import Console

from examples.tiny_target.publish import publish_target
from examples.tiny_target.training import TargetRecipe, train_target
from outpace.bench.checks import run_checks
from outpace.bench.speed import PAGE, BenchSettings, run_bench
from outpace.config import load_settings
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.formats.load import load_dflash
from outpace.models.load import fingerprint, load_target
from outpace.teacher.build import TeacherRecipe, build
from outpace.teacher.prompts import TextPrompts
from outpace.teacher.store import TeacherCache
from outpace.text.corpus import read_corpus
from outpace.text.tokenizer import train_bpe
from outpace.train.dflash import DFlashRecipe, train_dflash

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory):
    """A micro target and draft, trained for seconds: they say nothing sensible, and everything runs."""
    work = tmp_path_factory.mktemp("whole-way")
    documents = read_corpus(Path(sysconfig.get_path("stdlib")) / "asyncio")
    held_out, train = documents[:8], documents[8:]
    recipe = load_settings(
        TargetRecipe,
        ROOT / "examples/tiny_target/micro.toml",
        {"steps": 12, "eval_every": 12, "num_layers": 6, "warmup": 2, "long_share": 0.1},
    )
    tokenizer = train_bpe((d.text for d in train), recipe.vocab_size)
    model = train_target(recipe, tokenizer, train, held_out, work / "target")
    value = publish_target(
        model, tokenizer, recipe, train, held_out, work / "target", work / "target" / "model"
    )
    target = load_target(work / "target" / "model")
    teacher = load_settings(
        TeacherRecipe, RECIPES / "teacher-micro.toml", {"samples": 12, "shard_samples": 4, "batch": 4}
    )
    build(target, tokenizer, TextPrompts(train, tokenizer), work / "cache", teacher)
    cache = TeacherCache.open(work / "cache", target_fingerprint=fingerprint(target))
    prompts = [tokenizer.encode(d.text).ids[:n] for d, n in zip(held_out, (20, 33, 48), strict=False)]
    learn = load_settings(DFlashRecipe, RECIPES / "dflash-micro.toml", {"steps": 10, "eval_every": 10})
    train_dflash(learn, target, tokenizer, cache, prompts, work / "dflash")
    draft = load_dflash(work / "dflash" / "draft", tokenizer)
    return work, value, target, tokenizer, cache, draft, prompts, held_out


def test_the_target_learned_something(walked) -> None:
    work, value, *_ = walked
    log = [json.loads(line) for line in (work / "target" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    assert 0 < value["held_out_bits_per_byte"] < 8


def test_gates_pass_on_what_was_built(walked) -> None:
    _, _, target, _, cache, draft, prompts, _ = walked
    for gate in run_checks(target, draft, cache, prompts):
        assert gate.passed is not False, f"{gate.name}: {gate.message}"


def test_decoding_is_lossless(walked) -> None:
    *_, target, _, _, draft, prompts, _ = walked
    request = Request(max_new_tokens=80)
    value = generate(target, prompts, request)
    drafted = generate(target, prompts, request, draft.bind(target))
    assert drafted.tokens == value.tokens
    assert drafted.trace.tau >= 1


def test_the_report_is_written_whole(walked) -> None:
    work, _, target, tokenizer, _, draft, _, held_out = walked
    settings = BenchSettings(
        methods=("plain", "ngram", "dflash"), regimes=("24+32",), batches=(1, 2), repeats=1, prompts=2
    )
    console = Console(file=io.StringIO())
    report = run_bench(target, draft, tokenizer, held_out, settings, work / "report", console)
    PAGE.write(report, work / "report")
    saved = json.loads((work / "report" / "report.json").read_text())
    assert {r["method"] for r in saved["results"]} == {"plain", "ngram", "dflash"}
    assert all(r["lossless"]["violations"] == 0 for r in saved["results"])
    assert (work / "report" / "speed.png").stat().st_size > 1000
