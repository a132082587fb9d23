"""A page's tables are made from reports: those of docs/ agree with what is committed."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from outpace.bench import machine
from outpace.bench.machine import unpublishable
from outpace.bench.render_docs import MARKED, PICTURES, TABLES, render, update_page
from outpace.bench.report import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MARKERS = "<!-- table: noise r.json -->\nold\n<!-- end -->\n"
COMPLETE = {"commit": "a" * 40, "date": "2026-11-24T12:00:00+00:00", "not_for_publication": None}
CHIP = {"processor": "x", "vector": "AVX2", "cores": 2, "threads": 2, "load_1min": 0.1}
REPORT = {
    **COMPLETE,
    "machine": CHIP,
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
    ],
}


def test_the_pages_show_what_their_reports_hold():
    kinds = set()
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        kinds |= {kind for _, kind, _, _, _ in MARKED.findall(text)}
        assert render(text, DOCS) == text, f"run: outpace tables docs/{page.name}"
    assert kinds <= {*TABLES, PICTURES} and len(kinds) > 5


PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SHOWN = re.compile(r"\]\(([^)]*reports/[^)]+|[^)]+\.png)\)|<!-- table: \S+ (\S+) -->")


def shown_reports():
    """(page, report.json) of every table, link and figure of the documentation, the log left out."""
    for page in PAGES:
        for link, table in SHOWN.findall(page.read_text()) if page.name != "log.md" else ():
            path = (page.parent / (link or table)).resolve()
            if path not in (DOCS / "overview.png", DOCS / "page.png"):
                yield page, path


@pytest.mark.parametrize(("page", "path"), sorted(set(shown_reports())))
def test_every_figure_and_table_comes_from_a_report_in_the_repository(page, path):
    assert path.is_file(), f"{page.name} shows {path.name}, which is not in the repository"
    report = json.loads(path.with_name("report.json").read_text())
    assert not report.get("not_for_publication")
    if (reason := unpublishable(report)) is not None:
        assert "not_for_publication" not in report  # older than the mark
        assert "reliminary" in page.read_text(), f"{page.name} shows {path}: {reason}"


@pytest.mark.parametrize("missing", [*CHIP, "commit", "date"])
def test_a_report_must_state_where_it_was_measured(missing):
    assert unpublishable({**COMPLETE, "machine": CHIP}) is None
    chip = {key: value for key, value in CHIP.items() if key != missing}
    report = {key: value for key, value in COMPLETE.items() if key != missing}
    assert missing in str(unpublishable({**report, "machine": chip}))


@pytest.mark.parametrize("kind", ["noise", PICTURES])
def test_a_report_of_a_dirty_tree_is_refused(tmp_path, kind):
    report = dict(REPORT)
    text = f"<!-- table: {kind} r.json -->\n<!-- end -->\n"
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert "reliminary" not in render(text, tmp_path)
    report["not_for_publication"] = "measured with uncommitted changes: outpace/x.py"
    (tmp_path / "r.json").write_text(json.dumps(report))
    with pytest.raises(
        ValueError, match=r"r.json: measured with uncommitted changes: outpace/x.py; measure it"
    ):
        render(text, tmp_path)


def test_an_older_report_of_a_dirty_tree_is_shown_as_preliminary(tmp_path):
    report = {key: value for key, value in REPORT.items() if key != "not_for_publication"}
    report["commit"] = "a" * 40 + "+"
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert "*Preliminary, to be measured again: measured with uncommitted changes.*" in render(
        MARKERS, tmp_path
    )


def test_provenance_marks_uncommitted_changes(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    place = tmp_path / "machine.py"
    place.write_text("x = 1\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "Start"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(machine, "__file__", str(place))
    clean = machine.provenance()
    assert clean["not_for_publication"] is None and len(clean["commit"]) == 40
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "report.json").write_text("{}")  # the report itself is no change of the code
    assert machine.provenance()["not_for_publication"] is None
    place.write_text("x = 2\n")
    marked = machine.provenance()
    assert marked["not_for_publication"] == "measured with uncommitted changes: machine.py"
    assert unpublishable({**marked, "machine": CHIP}) == marked["not_for_publication"]


def test_report_md_shows_the_mark():
    header = {
        **COMPLETE,
        "command": "c",
        "seconds": 1.0,
        "versions": {},
        "machine": {**CHIP, "memory_gib": 1},
    }
    page = Page("T", lambda report: [])
    assert "**Machine**: x (AVX2), 2 cores (2 threads)" in page.markdown(header)
    assert "Not for publication" not in page.markdown(header)
    assert "**Not for publication**: dirty" in page.markdown(header | {"not_for_publication": "dirty"})


def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("| a |\n|---|\n| 1 |\n")
    with pytest.raises(ValueError, match=r"page.md marks no table: `<!-- table: KIND REPORT -->` begins one"):
        update_page(page)


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
        (tmp_path / "deep" / name).write_text(json.dumps(REPORT))
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
