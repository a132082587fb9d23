"""A page's tables are made from reports: those of docs/ agree with what is committed."""

import json
from pathlib import Path

import pytest

from outpace.bench.render_docs import MARKED, PICTURES, TABLES, render, update_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MARKERS = "<!-- table: noise r.json -->\nold\n<!-- end -->\n"
REPORT = {
    "acceptance": [
        {
            "regime": "9+12",
            "variant": "cached",
            "tau": 1.5,
            "accepted_first": 0.25,
            "draft_ms": 1.0,
            "tokens_per_s": 80.0,
            "texts_that_differ_from_plain": 0,
            "prompts": 2,
        }
    ]
}


def test_the_pages_say_what_their_reports_say():
    kinds = set()
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        kinds |= {kind for _, kind, _, _, _ in MARKED.findall(text)}
        assert render(text, DOCS) == text, f"run: outpace tables docs/{page.name}"
    assert kinds == {*TABLES, PICTURES}


def test_a_table_is_made_from_its_report(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("A.\n" + MARKERS + "B.\n")
    assert update_page(page)
    assert page.read_text().splitlines()[2:5] == ["", "Not measured yet.", ""]
    (tmp_path / "r.json").write_text(json.dumps(REPORT))
    assert update_page(page)
    text = page.read_text()
    assert "| 9+12 | cached | 1.50 | 25% | 1.00 | 80 | 0 of 2 |" in text
    assert text.startswith("A.\n<!-- table: noise r.json -->\n\n|") and text.endswith("|\n<!-- end -->\nB.\n")
    assert not update_page(page)


def test_pictures_are_those_beside_the_report(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("report.json", "b.png", "a.png"):
        (tmp_path / "deep" / name).write_text("{}")
    result = render("<!-- table: pictures deep/report.json -->\n<!-- end -->\n", tmp_path)
    assert result.splitlines()[1:-1] == ["", "![a](deep/a.png)", "", "![b](deep/b.png)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: poems r.json -->\n<!-- end -->\n", "no table 'poems'; known: drafts, greedy"),
        ("<!-- table: noise r.json -->\n", "not closed"),
        ("<!-- table: noise -->\n<!-- end -->\n", "names no report"),
    ],
)
def test_markers_that_mean_nothing_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        render(text, tmp_path)
