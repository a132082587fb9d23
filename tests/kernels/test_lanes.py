"""The kernels as other CPUs compile them, or would use them: the same answers."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outpace.kernels import bindings

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not bindings.available(), reason=f"kernels not built: {bindings.why_not()}")


def passes(flags, *names):
    """The output of these tests, of kernels that are compiled with more flags."""
    environment = os.environ | {"OUTPACE_CFLAGS": flags}
    tests = [str(HERE.parent / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, cwd=HERE.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="-mno-avx512f is an x86 flag")
@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="the kernels of a processor without AVX-512 have eight lanes as they are",
)
def test_eight_lanes_pass_the_same_tests():
    names = "test_cpu.py", "test_cpu_rows.py", "test_block_formats.py", "test_two_bytes.py", "test_rounded.py"
    out = passes("-mno-avx512f", *(f"kernels/{name}" for name in names), "ops/test_noise.py")
    assert "skipped" not in out, out[-500:]


@pytest.mark.skipif(not bindings.tiles(), reason="no AMX, or the system does not allow it")
def test_tiles_for_matrices_of_any_size_pass_the_same_tests():
    """Else only those of more than 192 KiB: here models of tiny sizes have them, too."""
    kernels = "kernels/test_cpu.py", "kernels/test_rounded.py", "models/test_native_step.py"
    passes("-DTILED_FROM=0", *kernels, "drafts/test_dflash_native.py", "drafts/test_eagle3_native.py")
