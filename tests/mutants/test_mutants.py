"""The list of mutants fits the source: each can be applied, and the runner tells caught from survived."""

import runpy
from pathlib import Path

import pytest

RUN = runpy.run_path(str(Path(__file__).with_name("run.py")))
Mutant, areas, mismatch, outcome, table = (
    RUN[name] for name in ("Mutant", "areas", "mismatch", "outcome", "table")
)
ALL = [pytest.param(m, id=f"{area}: {m.name}") for area, mutants in areas().items() for m in mutants]


@pytest.mark.parametrize("mutant", ALL)
def test_the_source_text_is_there_once(mutant):
    assert mismatch(mutant) is None


def test_names_are_unique():
    names = [parameter.id for parameter in ALL]
    assert len(set(names)) == len(names) > 20


def test_the_page_lists_them_all():
    """Else: replace the table by what `python tests/mutants/run.py --table` prints."""
    page = (RUN["ROOT"] / "docs" / "testing.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith("| `outpace/")] == table()


@pytest.mark.parametrize(
    ("source", "replacement", "wanted"),
    [
        ("a + b", "a - b", "caught"),
        ("a + b", "b + a", "survived"),
        ("a * b", "a", "its source text is 0 times in code.py"),
        ("a", "b", "its source text is 2 times in code.py"),
    ],
)
def test_outcomes(tmp_path, source, replacement, wanted):
    code = "def add(a, b):\n    return a + b\n"
    (tmp_path / "code.py").write_text(code.replace("add", "plus"))
    (tmp_path / "test_it.py").write_text(
        "import importlib.util as u\nspec = u.spec_from_file_location('it', 'code.py')\n"
        "it = u.module_from_spec(spec)\nspec.loader.exec_module(it)\n\n\n"
        "def test_it():\n    assert it.plus(2, 3) == 5\n"
    )
    before = (tmp_path / "code.py").read_text()
    mutant = Mutant("it", "code.py", source, replacement, "test_it.py")
    assert outcome(mutant, tmp_path) == wanted
    assert (tmp_path / "code.py").read_text() == before
