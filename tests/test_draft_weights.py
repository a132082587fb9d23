"""--draft-quant as a user types it: the same text, its own cost table, and what is refused."""

import json

import pytest
from test_cli import run

pytestmark = pytest.mark.usefixtures("few_repeats")
OWN = ("--draft", "dflash")
PACKED = ("--draft-quant", "q8_0")


def test_the_text_is_the_same_and_the_table_is_another(monkeypatch, capsys, tmp_path):
    options = (
        "generate",
        "default",
        "import os\n",
        "-n",
        24,
        "--ignore-eos",
        "--speculate",
        "always",
        "--json",
    )
    texts, taus = set(), []
    for more in (("--draft", "none"), OWN, (*OWN, *PACKED), (*OWN, *PACKED, "--num-draft-tokens", 6)):
        code, out, _ = run(monkeypatch, capsys, *options, *more)
        assert code == 0
        texts.add(json.loads(out)["text"])
        taus.append(json.loads(out)["tau"])
    assert len(texts) == 1 and taus[0] == 1 < min(taus[1:])
    for more in (OWN, (*OWN, *PACKED), (*OWN, *PACKED)):
        options = ("calibrate", "--contexts", 32, "--seconds", 0.1, "--cache-dir", tmp_path, "--json")
        assert run(monkeypatch, capsys, *options, *more)[0] == 0
    assert len(list((tmp_path / "costs").iterdir())) == 2


def test_a_conversation(monkeypatch, capsys):
    options = ("chat", "default", "-m", "x = 1", "-n", 4, "--json", "--speculate", "always")
    items = [run(monkeypatch, capsys, *options, *more) for more in (OWN, (*OWN, *PACKED))]
    assert items[0][0] == items[1][0] == 0
    assert json.loads(items[0][1])["tokens"] == json.loads(items[1][1])["tokens"]


@pytest.mark.parametrize("suite", ["speed", "drafts"])
def test_suites_measure_a_packed_draft(monkeypatch, capsys, tmp_path, suite):
    options = ["bench", "--suite", suite, "--out", tmp_path / "out", "--json"]
    if suite == "speed":
        for item in ("methods=plain,dflash", "regimes=16+8", "batches=1", "repeats=1", "prompts=1"):
            options += ["--set", item]
        code, out, _ = run(monkeypatch, capsys, *options, *PACKED)
        draft = json.loads(out)["draft"]
    else:
        (tmp_path / "suite.toml").write_text(
            "temperatures = [0.0]\nprompts = 1\nprompt_tokens = 24\nnew_tokens = 8\nrepeats = 1\n"
            '[methods.lean]\ndraft = "dflash"\nweights = "q8_0"\ncontroller = [false]\n'
        )
        code, out, _ = run(monkeypatch, capsys, *options, "--recipe", tmp_path / "suite.toml")
        report = json.loads(out)
        draft = report["methods"]["lean"]
        assert draft["weights"] == "q8_0" and report["results"][1]["lossless"]["violations"] == 0
    assert code == 0 and draft["bytes"] < 1.3 * draft["parameters"]  # bfloat16 has 2 a value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("generate", "default", "x", "--draft", "ngram", *PACKED),
            "draft weights 'q8_0': 'ngram' has no weights",
        ),
        (("generate", "default", "x", *OWN, "--draft-quant", "int4"), "draft weights 'int4': known are q8_0"),
        (("calibrate", "--draft", "none", *PACKED), "'none' has no weights"),
        (
            ("bench", "--suite", "drafts", "--recipe", "x", "--out", "o", *PACKED),
            "--draft-quant q8_0: in --suite drafts every method has its own",
        ),
        (
            ("export", "dflash", "--to", "zlab", "--out", "o", "--dtype", "q8_0"),
            "only gguf holds packed blocks",
        ),
    ],
)
def test_refusals(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2 and message in " ".join(err.split())
    assert not list(tmp_path.iterdir())
