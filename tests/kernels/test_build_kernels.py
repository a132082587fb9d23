"""What building the kernels says: once that it takes time, and what is lost without them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.kernels import build


@pytest.mark.skipif(build.load()[0] is None, reason=f"no CPU kernels: {build.why_not()}")
def test_a_first_build_is_announced_and_a_second_is_not(caplog, monkeypatch, tmp_path):
    built = build.load()[0]._name

    def compiler(*command):
        if "-o" in command:
            shutil.copy(built, command[command.index("-o") + 1])
        return "a compiler"

    caplog.set_level("INFO", "outpace")
    monkeypatch.setattr(build, "_run", compiler)
    monkeypatch.setattr(build, "_cache", lambda: tmp_path / "cache")
    for _ in range(2):
        library, reason = build.load.__wrapped__()
        assert reason is None and Path(library._name).parent == tmp_path / "cache"
    assert caplog.messages == ["compiling the CPU kernels: once on this machine, about ten seconds"]


def test_a_machine_without_a_compiler_is_told_what_it_loses(caplog, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    library, reason = build.load.__wrapped__()
    assert library is None and reason == "no C compiler (cc, gcc or clang) on the PATH"
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(
        f"no CPU kernels: {reason}; PyTorch's operators"
    )


def test_kernels_that_are_switched_off_are_not_missed(caplog, monkeypatch):
    monkeypatch.setenv("OUTPACE_KERNELS", "0")
    assert build.load.__wrapped__() == (None, "switched off by OUTPACE_KERNELS=0")
    assert not caplog.messages


@pytest.mark.parametrize("draft", ["eagle3", "dflash"])
def test_without_kernels_drafts_decode_the_same(draft):
    """By the command, in a process of its own: whole trees are committed by torch's operators."""
    command = [sys.executable, "-m", "outpace", "generate", "default", "What is 12 + 7?", "--chat"]
    texts = [
        subprocess.run(
            [*command, "--draft", draft],
            env=os.environ | {"OUTPACE_KERNELS": on},
            capture_output=True,
            text=True,
        )
        for on in ("0", "1")
    ]
    assert texts[0].returncode == 0, texts[0].stderr[-1000:]
    assert texts[0].stdout == texts[1].stdout and texts[0].stdout
