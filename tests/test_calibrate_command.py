"""`outpace calibrate`, and what --speculate and --num-speculative-tokens do to a request."""

import json

import pytest
from test_cli import run

from outpace.decode import auto as command

QUICKLY = ("calibrate", "--contexts", 32, "--seconds", 0.1)
pytestmark = pytest.mark.usefixtures("few_repeats")


def test_a_table_is_measured_once_and_kept(monkeypatch, capsys, tmp_path):
    options = (*QUICKLY, "--cache-dir", tmp_path, "--json")
    code, out, _ = run(monkeypatch, capsys, *options)
    first = json.loads(out)
    assert code == 0 and first["widths"] == list(range(1, 13)) and first["touched"]["experts"] == 8
    assert first["points"][0]["break_even"][0] == 1 and min(first["points"][0]["break_even"]) == 1
    assert first["described"]["draft"].startswith("BoundDFlash, at most 12 positions")
    assert first["acceptance"] > 0.7  # of answers; of text that the target cannot continue a tenth
    _, out, err = run(monkeypatch, capsys, *options)
    assert json.loads(out) == first and "measured before" in err and "--force" in err
    _, out, _ = run(monkeypatch, capsys, *options, "--force")
    assert json.loads(out)["points"] != first["points"]
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text("{}")
    code, out, err = run(monkeypatch, capsys, *options)
    assert code == 0 and json.loads(out)["fingerprint"] == first["fingerprint"]
    assert "has format None" in err and "measuring again" in err
    code, out, _ = run(monkeypatch, capsys, *options[:-1], "--plot", tmp_path / "costs.png")
    assert code == 0 and "break-even" in out and str(tmp_path) in out.replace("\n", "")
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")


def test_a_request_uses_the_table_of_its_rule_or_the_greedy_one(monkeypatch, capsys, tmp_path):
    drawn = (
        "generate",
        "default",
        "import os\n",
        "-n",
        8,
        "--json",
        "--temperature",
        1,
        "--acceptance",
        "gumbel",
    )
    places = ("--draft", "ngram", "--cache-dir", tmp_path)
    monkeypatch.setattr(command, "QUICK", 0.0)

    def method_line():
        code, out, _ = run(monkeypatch, capsys, *drawn, *places)
        assert code == 0
        return json.loads(out)["method"]

    assert method_line().startswith("full draft length in every step: a cost table would take")
    for rule, value in (
        ("greedy", "by greedy costs (outpace calibrate --acceptance gumbel)"),
        ("gumbel", "draft length chosen by measured costs"),
    ):
        code, out, _ = run(monkeypatch, capsys, *QUICKLY, *places, "--acceptance", rule, "--json")
        assert code == 0 and json.loads(out)["described"]["rule"] == rule
        assert method_line().endswith(value)
    assert len(list((tmp_path / "costs").iterdir())) == 2
    code, _, err = run(monkeypatch, capsys, *QUICKLY, "--acceptance", "typical")
    assert code == 2 and "--acceptance typical: it must be one of greedy, match" in err


def test_the_text_is_the_same_with_every_method(monkeypatch, capsys, tmp_path):
    names, items = set(), []
    options = (
        "generate",
        "default",
        "import os\n",
        "-n",
        24,
        "--ignore-eos",
        "--json",
        "--cache-dir",
        tmp_path,
    )
    for more in (
        (),
        ("--speculate", "auto"),
        ("--speculate", "off"),
        ("--speculate", "always"),
        ("--num-speculative-tokens", 2),
        ("--num-draft-tokens", 6),
        ("--draft", "ngram"),
    ):
        code, out, _ = run(monkeypatch, capsys, *options, *more)
        data = json.loads(out)
        assert code == 0
        names.add(data["text"])
        items.append(data["method"])
        if more in ((), ("--speculate", "auto")) and items[-1].startswith("draft length chosen"):
            assert data["predicted"]["tokens_per_s"] > 0
        if more == ("--speculate", "off"):
            assert data["tau"] == 1 and "predicted" not in data
    assert len(names) == 1
    assert items[2:5] == [
        "autoregressive decoding",
        "full draft length in every step",
        "draft length 2 in every step",
    ]


def test_stats_show_the_prediction(monkeypatch, capsys, tmp_path):
    run(monkeypatch, capsys, *QUICKLY, "--cache-dir", tmp_path, "--json")
    code, out, _ = run(
        monkeypatch, capsys, "generate", "default", "x = 1", "-n", 16, "--stats", "--cache-dir", tmp_path
    )
    message = " ".join(out.split())
    assert code == 0 and "tokens/s predicted" in message and "draft length chosen" in message


def test_no_table_where_it_would_take_long(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "QUICK", 0.0)
    options = ("generate", "default", "x = 1", "-n", 8, "--stats", "--cache-dir", tmp_path)
    code, out, _ = run(monkeypatch, capsys, *options)
    assert code == 0 and "a cost table would take" in " ".join(out.split())
    assert not (tmp_path / "costs").exists()


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("outpace.decode.costs.Costs.busy", False)
    options = ("generate", "default", "x = 1", "-n", 8, "--stats", "--cache-dir", tmp_path / "file")
    code, out, _ = run(monkeypatch, capsys, *options)
    assert code == 0 and "could not be saved" in " ".join(out.split())


def test_a_chat_takes_a_method_too(monkeypatch, capsys, tmp_path):
    answers = []
    for more in (("--speculate", "off"), ("--num-speculative-tokens", 3)):
        code, out, _ = run(monkeypatch, capsys, "chat", "-m", "Hello", "-n", 8, "--json", *more)
        answers.append(json.loads(out)["tokens"])
        assert code == 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("generate", "default", "x", "--speculate", "fast"),
            "--speculate fast: it must be one of auto, off, always",
        ),
        (
            ("generate", "default", "x", "--num-speculative-tokens", 0),
            "--num-speculative-tokens 0: this draft proposes 1 to 11 tokens",
        ),
        (
            ("generate", "default", "x", "--num-speculative-tokens", 12),
            "--num-speculative-tokens 12: this draft proposes 1 to 11 tokens",
        ),
        (
            ("generate", "default", "x", "--num-speculative-tokens", 2, "--draft", "none"),
            "no draft tokens to verify without a draft",
        ),
        (
            ("generate", "default", "x", "--num-speculative-tokens", 2, "--speculate", "off"),
            "no draft tokens to verify",
        ),
        (("calibrate", "--draft", "none"), "nothing to calibrate without a draft"),
        (("calibrate", "--contexts", "1,b"), "--contexts: 'b' is not a whole number"),
        (("calibrate", "--contexts", "256,0"), "--contexts 0: each must be at least 1"),
        (("calibrate", "--batches", "0"), "--batches 0: each must be at least 1"),
        (("calibrate", "--seconds", "0"), "--seconds 0.0: it must be above 0"),
    ],
)
def test_refusals(monkeypatch, capsys, tmp_path, arguments, message):
    cache = ("--cache-dir", tmp_path)
    code, _, err = run(monkeypatch, capsys, *arguments, *cache)
    assert code == 2 and message in " ".join(err.split()) and "Traceback" not in err
