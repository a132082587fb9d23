"""The command: exit codes, JSON, options, and errors in one line."""

import json

import planted
import pytest
from planted import each, plant

from outpace.checkpoint.shipped import target_path
from outpace.cli.main import main

LAYERS = json.loads((target_path("default") / "config.json").read_text())["num_hidden_layers"]


def run(monkeypatch, capsys, *arguments):
    """-> exit code, stdout, stderr."""
    monkeypatch.setattr("sys.argv", ["outpace", "doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    given = capsys.readouterr()
    return ended.value.code, given.out, given.err


def test_the_default_passes(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "default", "--tokens", 16, "--layers", 2)
    assert code == 0
    assert "pass  tokenizer round trip" in out and "----  prediction of a text" in out
    assert "FAIL" not in out


def test_layers_are_shown_one_by_one(monkeypatch, capsys):
    options = ("--reference", target_path("default"), "--layers", 2, "--tokens", 16)
    code, out, _ = run(monkeypatch, capsys, "default", *options)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and ["0", "1.000000", "0.0e+00", "1.000000", "0.0e+00", "0.0e+00", "100%"] in lines


def test_a_failure_exits_1_and_json_says_what(monkeypatch, capsys, tmp_path):
    wrong = plant(target_path("default"), tmp_path / "wrong", each("_blocks", planted.split))
    options = ("--reference", target_path("default"), "--layers", 2, "--tokens", 48, "--json")
    code, out, _ = run(monkeypatch, capsys, wrong, *options)
    assert code == 1
    fields = {check["name"]: check for check in json.loads(out)}
    assert fields["why the MLP departs"]["evidence"]["ours"] == ["split nibbles (GGML's order)"]
    assert fields["layers against the reference"]["evidence"]["0"]["departs"] == ["mlp"]
    assert fields["column order of down"]["status"] == "fail"
    assert {check["status"] for check in fields.values()} <= {"pass", "warn", "fail", "skipped"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such/model",), "no/such/model is not there"),
        (("default", "--reference", "gguf"), "--reference gguf needs a file"),
        (("default", "other"), "a second path belongs to --reference"),
        (("default", "--tokens", 1), "at least 2"),
        (("default", "--layers", LAYERS + 1), f"give 1 to {LAYERS}"),
        (("default", "--reference", "hf", "no/such"), "no/such is not there"),
        (("default", "--text", "no/such.txt"), "no/such.txt"),
    ],
)
def test_bad_input_ends_in_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2 and message in " ".join(err.split()) and "Traceback" not in err


def test_transformers_is_not_started_where_it_would_not_fit(monkeypatch, capsys):
    monkeypatch.setattr("outpace.doctor.transformers_reference.available_memory", lambda: 2**20)
    code, _, err = run(monkeypatch, capsys, "default", "--reference", "hf", "--tokens", 8, "--layers", 1)
    assert code == 2 and "--layers 4" in err


def test_help_has_examples(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "--help")
    assert code == 0 and "outpace doctor my-folder --reference hf" in " ".join(out.split())
