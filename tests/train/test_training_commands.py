"""`outpace teacher build --final`, `train eagle3` and `train dflash --loss` as a user types them."""

import json
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from outpace.cli.main import main
from outpace.formats.load import load_draft
from outpace.ops.dispatch import product_dtype

TINY = ("num_heads=2", "head_dim=16", "intermediate_size=40", "rows=1", "steps=2", "eval_prompts=1")
QUICK = [x for s in (*TINY, "save_every=1", "eval_every=2", "eval_new_tokens=8") for x in ("--set", s)]


def run(monkeypatch, capsys, *arguments):
    """-> exit code, stdout, stderr."""
    monkeypatch.setattr("sys.argv", ["outpace", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    given = capsys.readouterr()
    return ended.value.code, given.out, given.err


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two files to train on and one held out."""
    folder = tmp_path_factory.mktemp("corpus")
    for file in sorted(Path(sysconfig.get_path("stdlib"), "asyncio").glob("*.py"))[:12]:
        shutil.copy(file, folder)
    return folder


def cached(monkeypatch, capsys, corpus, folder, *more):
    lengths = ("samples=3", "prompt_tokens=[8, 12]", "response_tokens=[10, 14]")
    settings = [x for s in lengths for x in ("--set", s)]
    code, _, err = run(
        monkeypatch, capsys, "teacher", "build", "--out", folder, "--corpus", corpus, *settings, *more
    )
    assert code == 0, err
    return folder


def test_latents_learn_from_a_cache(monkeypatch, capsys, tmp_path, corpus):
    cache = cached(monkeypatch, capsys, corpus, tmp_path / "cache", "--final")
    small = ("--set", "rows=1", "--set", "row_tokens=64")
    equal = ("--set", "rank=30", "--set", "method=pca")
    code, _, err = run(monkeypatch, capsys, "retrofit", "mla", "--out", tmp_path / "small", *small, *equal)
    assert code == 0, err
    small = (*small, "--corpus", corpus)  # of which one file is held out
    where = (tmp_path / "small", "--cache", cache, "--out", tmp_path / "run")
    short = [x for s in ("steps=2", "validation_texts=1", "layer_share=0.5") for x in ("--set", s)]
    code, out, err = run(monkeypatch, capsys, "train", "mla", *where, *small, *short)
    assert code == 0 and "trained: held-out loss" in out, err
    data = json.loads((tmp_path / "run" / "model" / "mla.json").read_text())
    assert data["steps"] == 2 and data["held_out"]["after"]["kl"] > 0
    other = (tmp_path / "run" / "model", "--cache", tmp_path / "none", "--out", tmp_path / "x")
    code, _, err = run(monkeypatch, capsys, "train", "mla", *other, *small, *short)
    assert code == 2 and "none" in err


def test_an_eagle3_is_trained_and_decodes(monkeypatch, capsys, tmp_path, corpus):
    cache = cached(monkeypatch, capsys, corpus, tmp_path / "cache", "--final")
    code, out, _ = run(monkeypatch, capsys, "teacher", "info", cache, "--json")
    assert code == 0 and json.loads(out)["final"] is True
    where = ("--cache", cache, "--corpus", corpus)
    options = (*QUICK, "--set", "draft_vocab=300", "--set", "steps_ahead=3")
    for name, more in (("chain", ()), ("one-pass", ("--loss", "lk", "--set", "parallel=true"))):
        code, _, err = run(
            monkeypatch, capsys, "train", "eagle3", *where, "--out", tmp_path / name, *options, *more
        )
        assert code == 0, err
        draft = load_draft(tmp_path / name / "draft")
        assert draft.config.draft_vocab_size == 300 and draft.config.parallel == (name == "one-pass")
        data = json.loads((tmp_path / name / "draft" / "provenance.json").read_text())
        assert data["recipe"]["loss"] == ("kl" if name == "chain" else "lk")
        assert data["products"] == str(product_dtype(torch.device("cpu"))).removeprefix("torch.")
    _, plain, _ = run(monkeypatch, capsys, "generate", "default", "import os", "-n", 12, "--draft", "none")
    _, drafted, _ = run(
        monkeypatch,
        capsys,
        "generate",
        "default",
        "import os",
        "-n",
        12,
        "--draft",
        tmp_path / "chain" / "draft",
    )
    assert drafted == plain and len(plain) > 5
    first = tmp_path / "chain" / "draft"
    code, _, err = run(
        monkeypatch, capsys, "train", "eagle3", *where, "--out", tmp_path / "more", *QUICK, "--init", first
    )
    assert code == 0, err
    data = json.loads((tmp_path / "more" / "draft" / "provenance.json").read_text())
    assert data["started_from"]["recipe"]["draft_vocab"] == 300


def test_a_dflash_takes_losses_on_the_targets_distribution(monkeypatch, capsys, tmp_path, corpus):
    cache = cached(monkeypatch, capsys, corpus, tmp_path / "cache", "--final")
    where = ("--cache", cache, "--corpus", corpus, "--out", tmp_path / "draft")
    loss = ("--loss", "0.1*ce+0.9*tv", "--weights", "dpace-soft")
    code, _, err = run(monkeypatch, capsys, "train", "dflash", *where, *QUICK, *loss)
    assert code == 0, err
    value = json.loads((tmp_path / "draft" / "draft" / "provenance.json").read_text())["recipe"]
    assert (value["loss"], value["weights"]) == ("0.1*ce+0.9*tv", "dpace-soft")


def test_what_does_not_fit_ends_in_one_line(monkeypatch, capsys, tmp_path, corpus):
    cache = cached(monkeypatch, capsys, corpus, tmp_path / "cache")
    where = ("--cache", cache, "--corpus", corpus, "--out", tmp_path / "x")
    for kind, more, value in (
        ("eagle3", (), "holds no final states"),
        ("dflash", ("--loss", "kl"), "holds no final states"),
        ("eagle3", ("--loss", "mse"), "loss 'mse': give one of ce, kl"),
        ("dflash", ("--loss", "mse"), "loss 'mse': give one of ce, kl"),
        ("eagle3", ("--init", "dflash"), "--init dflash: it is no EAGLE-3"),
        ("eagle3", ("--loss", "ce", "--set", "draft_vocab=5000"), "draft_vocab_size 5000 must lie in"),
        ("eagle3", ("--loss", "ce", "--set", "target_layer_ids=[0]"), "the draft also reads [0]"),
    ):
        code, _, err = run(monkeypatch, capsys, "train", kind, *where, *more)
        assert code == 2 and value in " ".join(err.split()), err
