"""`outpace bench` and `outpace tables` as typed: arguments of each suite, and errors."""

import json

import pytest
from test_cli import run

RECIPE = """
temperatures = [0.0]
prompts = 1
prompt_tokens = 24
new_tokens = 8
repeats = 1
[methods.DFlash]
draft = "dflash"
controller = [false]
[methods.tree]
draft = "dflash"
num_draft_tokens = 6
controller = [false]
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--suite", "speeds"),
            (
                "--suite speeds: known are speed, draft-context, context, recall, memory, pareto, tasks, "
                "memory-answers, synthetic, serve, soak, device, drafts, lossless, controller"
            ),
        ),
        (("--suite", "drafts"), "--suite drafts compares the methods of a --recipe, such as"),
        (("--suite", "lossless", "--drafts", "x"), "compares the methods of a --recipe"),
        (("--suite", "speed", "--drafts", "x"), "--drafts is for the suites drafts, lossless, controller"),
        (
            ("--suite", "drafts", "--recipe", "x", "--draft", "y"),
            "--draft y: the drafts of --suite drafts are",
        ),
        (("--quick",), "--quick shortens draft-context, not speed"),
        (("--suite", "draft-context", "--draft", "ngram"), "draft-context takes a DFlash apart; name one"),
        (("--suite", "draft-context", "--set", "contexts=9,8"), "contexts [9, 8]: give counts of tokens"),
        (("--suite", "draft-context", "--set", "context=9"), "did you mean `contexts`"),
        (("--suite", "draft-context", "--set", "shapes=gpt-5"), "no shape 'gpt-5'; known: draft, "),
        (("--suite", "controller", "--drafts", "x", "--recipe", "no.toml"), "recipe no.toml cannot be read"),
    ],
)
def test_bad_input_ends_in_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, "bench", "--out", "x", *arguments)
    assert code == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "x").exists()


def test_a_page_that_is_not_there(monkeypatch, capsys, tmp_path):
    code, _, err = run(monkeypatch, capsys, "tables", str(tmp_path / "page.md"))
    assert code == 2 and "is no file: name a Markdown page" in " ".join(err.split())


def test_a_suite_as_typed(monkeypatch, capsys, tmp_path):
    (tmp_path / "suite.toml").write_text(RECIPE)
    given = ("--recipe", str(tmp_path / "suite.toml"), "--out", str(tmp_path / "out"))
    code, out, _ = run(monkeypatch, capsys, "bench", "--suite", "drafts", *given, "--json")
    assert code == 0
    report = json.loads(out)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert [r["method"] for r in report["results"]] == ["plain", "DFlash", "tree"]
    assert all(r["lossless"]["violations"] == 0 for r in report["results"])
    assert report["recipe"]["new_tokens"] == 8
