"""Kill a writing command before its k-th file operation, for an even sample of all k."""

import hashlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from outpace.checkpoint import publish

OPERATIONS = ("rename", "replace", "unlink", "rmdir", "fsync")


@contextmanager
def counted(before: Callable[[int], None]) -> Iterator[None]:
    """Calls before(n) ahead of the n-th file operation, n from 0 on."""
    n = iter(range(10**9))
    originals = {(os, name): getattr(os, name) for name in OPERATIONS}
    originals[publish, "_exchange"] = publish._exchange

    def counting(call):
        def operation(*args, **kwargs):
            before(next(n))
            return call(*args, **kwargs)

        return operation

    for (module, name), call in originals.items():
        setattr(module, name, counting(call))
    try:
        yield
    finally:
        for (module, name), call in originals.items():
            setattr(module, name, call)


def killed_before(run: Callable[[], object], k: int) -> bool:
    """Run in a forked process that kills itself before file operation k; -> whether it came so far."""

    def kill(n: int) -> None:
        if n == k:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)  # OpenMP's other threads do not survive a fork
            with counted(kill):
                run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the command failed by itself"
    return False


def kill_points(run: Callable[[], object], most: int) -> list[int]:
    """Runs once; -> at most `most` of its file operations, the first and the last among them."""
    numbers: list[int] = []
    with counted(numbers.append):
        run()
    count = len(numbers)
    assert count > 1
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def contents(folder: Path) -> dict[str, str]:
    """File names -> sha256, without locks and what an unfinished write leaves."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.suffix != ".tmp"
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }
