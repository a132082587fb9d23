"""The checks of a target through XLA pass, in a process of their own: torchax changes torch for all of it."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("xla_checks.py")


@pytest.mark.skipif(find_spec("torchax") is None, reason="torchax and jax are not installed: outpace[xla]")
def test_the_checks_pass():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "10 passed" in done.stdout
