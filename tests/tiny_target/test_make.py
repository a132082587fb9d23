"""The command that trains the embedded target, as typed."""

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from examples.tiny_target.make import main


@pytest.mark.parametrize("files", [0, 1])
def test_it_needs_text_to_train_on_and_text_held_out(files, tmp_path, monkeypatch):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for file in sorted((Path(sysconfig.get_path("stdlib")) / "asyncio").glob("*.py"))[:files]:
        shutil.copy(file, corpus)
    monkeypatch.setattr(sys, "argv", ["make", "--corpus", str(corpus), "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit, match="each needs one" if files else r"no \*\.py source below"):
        main()
    assert not (tmp_path / "run").exists()


def test_an_unknown_field_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make", "--set", "step=5", "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit, match="did you mean `steps`"):
        main()
