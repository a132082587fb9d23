"""A teacher cache in the making, by all processes that torchrun starts: `building.py FOLDER KILLED_AT`.

KILLED_AT: a shard that process 1 dies in writing; -1: none."""

import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
from test_build import RECIPE, make

from outpace.teacher import build

if __name__ == "__main__":
    folder, killed_at = Path(sys.argv[1]), int(sys.argv[2])
    write_shard = build.write_shard

    def dying(folder, k, *rest):
        if os.environ["RANK"] == "1" and k == killed_at:
            (folder / f"shard-{k:05d}.safetensors.tmp").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return write_shard(folder, k, *rest)

    build.write_shard = dying
    make(folder, RECIPE)
