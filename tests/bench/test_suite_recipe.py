"""What a suite's recipe may say: what means nothing is refused, what ships is read."""

from pathlib import Path

import pytest

from outpace.bench.suite import SuiteRecipe
from outpace.checkpoint.shipped import DRAFTS
from outpace.config import load_settings

WORKS = {"prompts": 2, "lossless_prompts": 4, "lossless_batch": 2, "methods": {"ngram": {"draft": "ngram"}}}


def test_the_recipe_that_the_others_spoil_is_read():
    assert set(load_settings(SuiteRecipe, None, WORKS).specs) == {"ngram"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": {}}, "needs a table"),
        ({"methods": {"plain": {"draft": "x"}}}, "no method may be called 'plain'"),
        (
            {"methods": {"a": {"draft": "x", "num_step": 3}}},
            "method 'a': its table: .*did you mean `num_steps`",
        ),
        ({"methods": {"a": {}}}, "method 'a': .*`draft` is not set"),
        ({"methods": {"a": {"draft": "x", "rules": ["typical"]}}}, "no rule 'typical'; known: match"),
        ({"methods": {"a": {"draft": "x", "controller": []}}}, "true, false, or both"),
        ({"batch": 3}, "prompts 2 do not fill batches of 3"),
        ({"lossless_batch": 3}, "lossless_prompts 4 do not fill"),
        ({"repeats": 0}, "repeats 0: it must be at least 1"),
        ({"new_tokens": 1}, "nothing to time"),
        ({"temperatures": [-1.0]}, "none below 0"),
        ({"widths": [1]}, "so at least 2"),
        ({"texts": ["poems"]}, "known: held-out, random"),
    ],
)
def test_recipes_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        load_settings(SuiteRecipe, None, WORKS | changes)


def test_the_recipes_that_ship_are_read():
    folder = Path(__file__).parents[2] / "recipes" / "drafts"
    fields = {path.stem: load_settings(SuiteRecipe, path, {}).specs for path in folder.glob("suite*.toml")}
    assert set(fields) == {"suite", "suite-micro", "suite-weak", "suite-answers"}
    assert fields["suite"] == fields["suite-micro"]
    assert {spec.draft for spec in fields["suite-answers"].values()} == {"ngram", *DRAFTS}
    assert fields["suite-weak"].items() <= fields["suite"].items()
