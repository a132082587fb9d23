"""A script in several processes, as a user starts them."""

import os
import subprocess
import sys

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def torchrun(count, script, *arguments):
    """-> what has ended, with its text; one thread a process, as many bits hang on that."""
    command = [*TORCHRUN, str(count), str(script), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
