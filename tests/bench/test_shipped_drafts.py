"""runs/drafts.sh: its recipes load, and its suite compares all drafts that it trains."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outpace.bench.suite import SuiteRecipe
from outpace.checkpoint.shipped import DRAFTS
from outpace.cli import demo
from outpace.cli.main import app
from outpace.config import load_settings
from outpace.train.dflash import DFlashRecipe
from outpace.train.eagle3 import Eagle3Recipe

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "drafts"
SCRIPT = (ROOT / "runs" / "drafts.sh").read_text()
TRAINED = re.findall(r"^ *train (\w+) (\S+)", SCRIPT, re.MULTILINE)  # kinds of drafts, and their recipes
SETTINGS = {"dflash": DFlashRecipe, "eagle3": Eagle3Recipe}


def test_every_draft_of_the_suite_is_trained():
    assert {kind for kind, _ in TRAINED} == set(DRAFTS)
    recipe = load_settings(SuiteRecipe, RECIPES / "suite-answers.toml", {})
    assert {spec.draft for spec in recipe.specs.values()} == {"ngram", *DRAFTS}


def test_the_demo_compares_what_ships():
    recipe = SuiteRecipe(**demo.RECIPE)
    assert {spec.draft for spec in recipe.specs.values()} <= {"ngram", *DRAFTS} and len(recipe.families) == 16


def test_the_demo_answers_and_measures(tmp_path, monkeypatch):
    few = {"families": ("talk",), "problems": 1, "calibrate_s": 0.01}
    monkeypatch.setattr(demo, "RECIPE", demo.RECIPE | few)
    run = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert run.exit_code == 0 and "The answer is right." in run.output and "DFlash 2" in run.output
    report = json.loads((tmp_path / "report.json").read_text())
    rows = [row for row in report["results"] if row["method"] != "llama.cpp"]
    assert {row["family"] for row in rows} == {"talk", "all"}
    assert all(row["lossless"]["violations"] == 0 for row in rows) and (tmp_path / "trace.json").is_file()


@pytest.mark.parametrize(("kind", "name"), TRAINED)
def test_its_recipes_are_known(kind, name):
    path = RECIPES / f"{name}.toml"
    recipe = load_settings(SETTINGS[kind], path, {})
    assert all(getattr(recipe, name) == value for name, value in tomllib.loads(path.read_text()).items())
