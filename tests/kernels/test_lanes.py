"""The kernels as a CPU without AVX-512 compiles them: eight lanes instead of sixteen, the same answers."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outpace.kernels import bindings

HERE = Path(__file__).parent


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="-mno-avx512f is an x86 flag")
@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="the kernels of a processor without AVX-512 have eight lanes as they are",
)
@pytest.mark.skipif(not bindings.available(), reason=f"kernels not built: {bindings.why_not()}")
def test_eight_lanes_pass_the_same_tests():
    names = "test_cpu.py", "test_cpu_rows.py", "test_block_formats.py", "test_two_bytes.py", "test_rounded.py"
    tests = [str(HERE / name) for name in names]
    tests.append(str(HERE.parent / "ops" / "test_noise.py"))
    environment = os.environ | {"OUTPACE_CFLAGS": "-mno-avx512f"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, cwd=HERE.parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout, done.stdout[-500:]
