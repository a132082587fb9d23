"""The checks of a target through XLA pass, in a process of their own: torchax changes torch for all of it."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from in_process import Checked, checks_of

# each program runs a few times only: the compiler would take longer than it saves
QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
CHECKS = Path(__file__).with_name("xla_checks.py")
pytestmark = pytest.mark.skipif(
    find_spec("torchax") is None, reason="torchax and jax are not installed: outpace[xla]"
)


@pytest.fixture(scope="module")
def checked():
    return Checked(CHECKS, XLA_FLAGS=QUICKLY)


@pytest.mark.parametrize("name", checks_of(CHECKS))
def test_a_check_passes(checked, name):
    checked.passed(name)
