"""Recipes and overrides: what is taken, and what each refusal states."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from examples.tiny_target.problem_training import ProblemRecipe
from outpace.config import load_settings, parse_overrides


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 3
    rate: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Recipe:
    steps: int
    learning_rate: float = 1e-3
    bfloat16: bool = True
    name: str = "x"
    out: Path = Path("out")
    kind: Literal["decay", "dpace"] = "decay"
    ids: tuple[int, ...] = (1, 2)
    pair: tuple[int, float] = (1, 2.0)
    words: list[str] = field(default_factory=list)
    limit: int | None = None
    mixed: int | float = 1
    inner: Inner = Inner()
    extra: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps {self.steps}: it must be at least 1")


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return path

    return write


def test_recipe_then_overrides(recipe):
    path = recipe('steps = 5\nname = "a"\nids = [3, 4, 5]\n[inner]\nsize = 7\n')
    made = load_settings(Recipe, path, {"name": "b", "inner": {"rate": 2}})
    assert made == Recipe(steps=5, name="b", ids=(3, 4, 5), inner=Inner(size=7, rate=2.0))
    assert isinstance(made.inner.rate, float)


def test_without_a_recipe():
    assert load_settings(Recipe, None, {"steps": 2}) == Recipe(steps=2)


def test_conversions(recipe):
    path = recipe('steps = 1\nlearning_rate = 1\nout = "a/b"\npair = [3, 4]\nlimit = 9\nextra = {a = 1}')
    made = load_settings(Recipe, path, {"words": ("p", "q")})
    assert isinstance(made.learning_rate, float) and made.out == Path("a/b")
    assert made.pair == (3, 4.0) and isinstance(made.pair[1], float)
    assert made.limit == 9 and made.words == ["p", "q"] and made.extra == {"a": 1.0}
    assert load_settings(Recipe, path, {"limit": None}).limit is None
    assert type(load_settings(Recipe, path, {"mixed": 2}).mixed) is int
    assert type(load_settings(Recipe, path, {"mixed": 2.5}).mixed) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 1", ["stepz", "steps", "recipe.toml"]),
        ("steps = 1\nlerning_rate = 1.0", ["lerning_rate", "learning_rate", "recipe.toml"]),
        ("steps = 1\n[inner]\nsise = 1", ["inner.sise", "inner.size"]),
        ("steps = '5'", ["`steps`", "int", "'5'"]),
        ("steps = 5.0", ["`steps`", "int"]),
        ("steps = true", ["`steps`", "int", "True"]),
        ("steps = 1\nlearning_rate = true", ["`learning_rate`", "float"]),
        ("steps = 1\nbfloat16 = 1", ["`bfloat16`", "bool"]),
        ("steps = 1\nname = 1", ["`name`", "str"]),
        ("steps = 1\nkind = 'other'", ["`kind`", "'decay'", "'dpace'"]),
        ("steps = 1\nids = 3", ["`ids`", "tuple[int, ...]"]),
        ("steps = 1\nids = [1, 'a']", ["`ids`", "tuple[int, ...]"]),
        ("steps = 1\nids = 'ab'", ["`ids`"]),
        ("steps = 1\npair = [1]", ["`pair`", "tuple[int, float]"]),
        ("steps = 1\ninner = 3", ["`inner`", "Inner"]),
        ("steps = 1\n[inner]\nsize = 'x'", ["`inner.size`", "int"]),
        ("steps = 1\nlimit = 'x'", ["`limit`", "int or nothing"]),
        ("name = 'a'", ["`steps`", "not set"]),
        ("steps = 0", ["steps 0"]),
        ("steps = ", ["recipe.toml", "not TOML"]),
        ("steps = " + "[" * 5000 + "]" * 5000, ["recipe.toml", "not TOML"]),
        ("steps = 1\nids = [1, 1000000000000]", ["`ids`", "1000000000000"]),
        ("steps = 99999999999999999999999999", ["`steps`", "2147483647"]),
        ("steps = 1\ninner = {size = -1}", ["-1", "0 to"]),
        ("steps = 1\nlimit = -5", ["`limit`", "-5"]),
    ],
)
def test_refusals(recipe, text, message):
    with pytest.raises(ValueError) as error:
        load_settings(Recipe, recipe(text), {})
    for part in message:
        assert part in str(error.value)


def test_pairs_of_a_command_line_read_as_toml_or_as_words():
    pairs = ["steps=5", "learning_rate=1e-3", "words=plain,dflash", "ids=8", "pair=[1, 2.5]", "kind=dpace"]
    overrides = parse_overrides(Recipe, [*pairs, "name=11+7", "limit=3"])
    assert overrides == {
        "steps": 5,
        "learning_rate": 1e-3,
        "words": ["plain", "dflash"],
        "ids": [8],
        "pair": [1, 2.5],
        "kind": "dpace",
        "name": "11+7",
        "limit": 3,
    }
    assert load_settings(Recipe, None, overrides).ids == (8,)
    for row in ("ids=8,", "ids=[8]"):
        assert parse_overrides(Recipe, [row]) == {"ids": [8]}
    assert parse_overrides(Recipe, ["words=a", "name="]) == {"words": ["a"], "name": ""}
    with pytest.raises(ValueError, match="write key=value"):
        parse_overrides(Recipe, ["steps"])


def test_refused_overrides():
    for overrides, value in (
        ({"steps": None}, "`steps`"),
        ({"step": 1}, "did you mean `steps`"),
        ({"steps": 1, "words": "abc"}, "`words`"),
    ):
        with pytest.raises(ValueError, match=value):
            load_settings(Recipe, None, overrides)


def test_deep_overrides_are_words():
    deep = "[" * 5000 + "]" * 5000
    assert parse_overrides(Recipe, [f"name={deep}"]) == {"name": deep}


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.toml cannot be read"):
        load_settings(Recipe, tmp_path / "nowhere.toml", {})


def test_recipes_of_this_repository_load():
    items = sorted(Path(__file__).parent.parent.glob("examples/tiny_target/*.toml"))
    assert items
    for path in items:
        assert load_settings(ProblemRecipe, path, {}).steps
