"""runs/equal_drafts.sh walked in one process, in sizes of seconds: its drafts, recipes, suite and page."""

import io
import re
import tomllib
from pathlib import Path

import pytest
import tiny
from rich.console import Console
from test_prompts import document

from outpace.bench.comparison import COMPARISON_PAGE, run_comparison
from outpace.bench.render_docs import update_page
from outpace.bench.suite import SuiteRecipe, SuiteRequest
from outpace.config import load_settings
from outpace.models.load import build as build_target
from outpace.models.load import fingerprint, named_tensors
from outpace.teacher.build import TeacherRecipe, build
from outpace.teacher.prompts import TextPrompts
from outpace.teacher.store import TeacherCache
from outpace.text.corpus import Document
from outpace.text.tokenizer import train_bpe
from outpace.train.dflash import DFlashRecipe, train_dflash
from outpace.train.eagle3 import Eagle3Recipe, train_eagle3
from outpace.train.suffix import build_suffix

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "drafts"
SCRIPT = (ROOT / "runs" / "equal_drafts.sh").read_text()
TRAINED = re.findall(r"^train (\S+) (\S+)$", SCRIPT, re.MULTILINE)  # (kind, name), as the script does it
BUDGET = {"steps": 2, "rows": 3, "seed": 1, "eval_every": 1, "eval_prompts": 1, "eval_new_tokens": 8}
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 24, "bfloat16": False}


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """A random target of four layers, its cache, and every draft of the script after two steps."""
    work = tmp_path_factory.mktemp("equal")
    documents = [document(name, 60) for name in "abc"]
    tokenizer = train_bpe([d.text for d in documents], 300)
    target = build_target(tiny.config("gpt_oss", vocab_size=300))
    tiny.randomise(named_tensors(target))
    target.eval()
    few = {
        "samples": 9,
        "prompt_tokens": [8, 12],
        "response_tokens": [20, 30],
        "shard_samples": 4,
        "batch": 4,
    }
    few |= {"target_layer_ids": [0, 1, 3]}
    texts = [Document(f"train-{d.name}", d.text) for d in documents]
    build(
        target,
        tokenizer,
        TextPrompts(texts, tokenizer),
        work / "cache",
        load_settings(TeacherRecipe, RECIPES / "teacher.toml", few),
    )
    cache = TeacherCache.open(work / "cache", target_fingerprint=fingerprint(target))
    prompts = [tiny.tokens(9).tolist()]
    build_suffix(target, cache, work / "suffix")
    for kind, name in TRAINED:
        path, given = RECIPES / f"{name}.toml", (target, tokenizer, cache, prompts, work / name)
        if kind == "dflash":
            train_dflash(load_settings(DFlashRecipe, path, BUDGET | SIZES | {"anchors": 6}), *given)
        else:
            train_eagle3(load_settings(Eagle3Recipe, path, BUDGET | SIZES), *given)
    return work, target, tokenizer, documents


def test_the_script_trains_what_the_suite_compares():
    suite = load_settings(SuiteRecipe, RECIPES / "suite.toml", {})
    compared = {spec.draft for spec in suite.specs.values()}
    assert compared == {"ngram", "suffix/draft"} | {f"{name}/draft" for _, name in TRAINED}
    assert re.search(r'train suffix .*--cache "\$work/cache" --out "\$work/suffix"', SCRIPT)
    assert {kind for kind, _ in TRAINED} == {"dflash", "eagle3"}


def test_one_budget_for_all(tmp_path):
    """What the script sets is in no recipe, so that no recipe can differ in it."""
    set_by_script = {"steps", "rows", "seed", "row_tokens", "init"}
    for _, name in TRAINED:
        assert not set_by_script & set(tomllib.loads((RECIPES / f"{name}.toml").read_text()))


def test_the_walk_ends_in_a_report_on_equal_data(walked, tmp_path):
    work, target, tokenizer, documents = walked
    few = {"prompts": 1, "prompt_tokens": 20, "new_tokens": 9, "repeats": 1, "calibrate_s": 0.01}
    suite = tomllib.loads((RECIPES / "suite.toml").read_text())
    for name, value in suite["methods"].items():
        value["controller"] = [False, True] if name == "DFlash 2" else [False]
    suite = load_settings(SuiteRecipe, None, suite | few | {"temperatures": [0.0]})
    folder, quiet = tmp_path / "reports", Console(file=io.StringIO())
    text = tiny.tokens(200).tolist()
    given = {"recipe": suite, "drafts": work, "calibration_text": text, "folder": folder, "console": quiet}
    report = run_comparison(SuiteRequest(target=target, tokenizer=tokenizer, documents=documents, **given))
    assert report["remarks"] == []  # one cache, one budget, everyone's origin known
    trained = {name: a["trained"] for name, a in report["methods"].items() if name != "n-gram"}
    assert len({t["cache_sha256"] for t in trained.values()}) == 1
    assert trained.pop("suffix")["tokens"] is None  # it is made of the cache, without steps
    assert len({t["tokens"] for t in trained.values()}) == 1
    assert next(iter(trained.values()))["tokens"] > 2 * 3 * (8 + 1)
    assert all(r["lossless"]["violations"] == 0 for r in report["results"])
    assert {r["method"] for r in report["results"]} == {"plain", *suite.specs}  # type: ignore[attr-defined]
    kinds = {name: a["kind"] for name, a in report["methods"].items()}
    assert kinds["DFlash 2"].startswith("DFlash, convolutions 2 x")
    assert (kinds["P-EAGLE"], kinds["EAGLE-3 tree"]) == ("P-EAGLE", "EAGLE-3")
    report |= {"commit": "0" * 40, "not_for_publication": None}  # this test runs in a changed tree, too
    COMPARISON_PAGE.write(report, folder)
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- table: greedy reports/report.json -->\n<!-- end -->\n\nAfter.\n")
    assert update_page(page)
    text = page.read_text()
    assert "| DFlash 2, tree | greedy |" in text and text.endswith("<!-- end -->\n\nAfter.\n")
    assert not update_page(page)
