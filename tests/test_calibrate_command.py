"""`outpace calibrate`, and what --method and --verify do to a request."""

import json

import pytest
from test_cli import run

from outpace.cli import calibrate as command

QUICKLY = ("calibrate", "--contexts", 32, "--seconds", 0.1)
pytestmark = pytest.mark.usefixtures("few_repeats")


def test_a_table_is_measured_once_and_kept(monkeypatch, capsys, tmp_path):
    options = (*QUICKLY, "--cache-dir", tmp_path, "--json")
    code, out, _ = run(monkeypatch, capsys, *options)
    first = json.loads(out)
    assert code == 0 and first["widths"] == list(range(1, 13)) and first["touched"]["experts"] == 8
    assert first["points"][0]["break_even"][0] == 1 and min(first["points"][0]["break_even"]) == 1
    assert first["said"]["draft"].startswith("Suffix, at most 12 columns")
    _, out, _ = run(monkeypatch, capsys, *options)
    assert json.loads(out) == first
    _, out, _ = run(monkeypatch, capsys, *options, "--force")
    assert json.loads(out)["points"] != first["points"]
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text("{}")
    code, out, err = run(monkeypatch, capsys, *options)
    assert code == 0 and json.loads(out)["fingerprint"] == first["fingerprint"]
    assert "has format None" in err and "measuring anew" in err
    code, out, _ = run(monkeypatch, capsys, *options[:-1], "--plot", tmp_path / "costs.png")
    assert code == 0 and "break-even" in out and str(tmp_path) in out.replace("\n", "")
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")


def test_a_request_goes_by_the_table_of_its_rule_or_by_the_greedy_one(monkeypatch, capsys, tmp_path):
    drawn = ("generate", "import os\n", "-n", 8, "--json", "--temperature", 1, "--rule", "gumbel")
    places = ("--draft", "ngram", "--cache-dir", tmp_path)
    monkeypatch.setattr(command, "QUICK", 0.0)

    def told():
        code, out, _ = run(monkeypatch, capsys, *drawn, *places)
        assert code == 0
        return json.loads(out)["method"]

    assert told().startswith("every guess verified in every round: a cost table would take")
    for rule, said in (
        ("greedy", "by greedy costs (outpace calibrate --rule gumbel)"),
        ("gumbel", "guesses as pay"),
    ):
        code, out, _ = run(monkeypatch, capsys, *QUICKLY, *places, "--rule", rule, "--json")
        assert code == 0 and json.loads(out)["said"]["judged"] == rule
        assert told().endswith(said)
    assert len(list((tmp_path / "costs").iterdir())) == 2
    code, _, err = run(monkeypatch, capsys, *QUICKLY, "--rule", "typical")
    assert code == 2 and "--rule typical: it must be one of greedy, match" in err


def test_every_method_says_the_same(monkeypatch, capsys, tmp_path):
    found, told = set(), []
    options = ("generate", "import os\n", "-n", 24, "--ignore-eos", "--json", "--cache-dir", tmp_path)
    for more in (
        (),
        ("--method", "auto"),
        ("--method", "plain"),
        ("--method", "draft"),
        ("--verify", 2),
        ("--tree", 6),
        ("--draft", "ngram"),
    ):
        code, out, _ = run(monkeypatch, capsys, *options, *more)
        said = json.loads(out)
        assert code == 0
        found.add(said["text"])
        told.append(said["method"])
        if more in ((), ("--method", "auto")) and told[-1].startswith("as many"):
            assert said["foreseen"]["tokens_per_s"] > 0
        if more == ("--method", "plain"):
            assert said["tau"] == 1 and "foreseen" not in said
    assert len(found) == 1
    assert told[2:5] == [
        "plain decoding",
        "every guess verified in every round",
        "2 guesses verified in every round",
    ]


def test_stats_say_what_was_foreseen(monkeypatch, capsys, tmp_path):
    run(monkeypatch, capsys, *QUICKLY, "--cache-dir", tmp_path, "--json")
    code, out, _ = run(monkeypatch, capsys, "generate", "x = 1", "-n", 16, "--stats", "--cache-dir", tmp_path)
    said = " ".join(out.split())
    assert code == 0 and "tokens/s were foreseen" in said and "as many guesses as pay" in said


def test_no_table_where_it_would_take_long(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "QUICK", 0.0)
    options = ("generate", "x = 1", "-n", 8, "--stats", "--cache-dir", tmp_path)
    code, out, _ = run(monkeypatch, capsys, *options)
    assert code == 0 and "a cost table would take" in " ".join(out.split())
    assert not (tmp_path / "costs").exists()


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("outpace.decode.costs.Costs.noisy", False)
    options = ("generate", "x = 1", "-n", 8, "--stats", "--cache-dir", tmp_path / "file")
    code, out, _ = run(monkeypatch, capsys, *options)
    assert code == 0 and "could not be kept" in " ".join(out.split())


def test_a_chat_takes_a_method_too(monkeypatch, capsys, tmp_path):
    answers = []
    for more in (("--method", "plain"), ("--verify", 3)):
        code, out, _ = run(monkeypatch, capsys, "chat", "-m", "Hello", "-n", 8, "--json", *more)
        answers.append(json.loads(out)["tokens"])
        assert code == 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "x", "--method", "fast"), "--method fast: it must be one of auto, plain, draft"),
        (("generate", "x", "--verify", 0), "--verify 0: this draft offers 1 to 11 guesses"),
        (("generate", "x", "--verify", 12), "--verify 12: this draft offers 1 to 11 guesses"),
        (("generate", "x", "--verify", 2, "--draft", "none"), "no guesses to verify without a draft"),
        (("generate", "x", "--verify", 2, "--method", "plain"), "no guesses to verify"),
        (("calibrate", "--draft", "none"), "nothing to calibrate without a draft"),
        (("calibrate", "--contexts", "1,b"), "--contexts: 'b' is not a whole number"),
        (("calibrate", "--batches", "0"), "at least 1 of each"),
        (("calibrate", "--seconds", "0"), "--seconds 0.0: give some time"),
    ],
)
def test_refusals(monkeypatch, capsys, tmp_path, arguments, said):
    cache = ("--cache-dir", tmp_path)
    code, _, err = run(monkeypatch, capsys, *arguments, *cache)
    assert code == 2 and said in " ".join(err.split()) and "Traceback" not in err
