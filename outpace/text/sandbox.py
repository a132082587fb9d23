"""A child process with limits on time and memory, for chat templates and tokenizers of unknown origin.

Limits inside the interpreter cannot stop one long call of C code; those of a process can. On Linux the
child's address space is limited too; macOS has no such limit, and only time is bounded there.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("sandbox_child.py")


class Sandbox:
    """One child, started by the first request and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started the child: a fork must not use its pipes
        self._lock = threading.Lock()

    def run(self, kind: str, *, seconds: float, memory: int, **request: Any) -> Any:
        """The result of `sandbox_child.py: render` or `check_tokenizer`.

        Raises ValueError with the child's message, printable, or for a request that took more than
        `seconds`, took more than `memory` bytes of address space, or crashed the child.
        """
        message = json.dumps({"kind": kind, "seconds": seconds, "memory": memory, **request}).encode()
        with self._lock:
            process = self._running()
            try:
                reply = _exchange(process, message, time.monotonic() + seconds)
            except TimeoutError:
                self._kill()
                raise ValueError(f"takes more than {seconds:g} seconds") from None
            except (EOFError, BrokenPipeError):
                if process.wait() == -signal.SIGXCPU:
                    raise ValueError(f"takes more than {seconds:g} seconds") from None
                raise ValueError(f"crashes, or needs more than {memory >> 20:,} MiB of memory") from None
            except BaseException:  # Ctrl-C: the reply would be taken for the next one's
                self._kill()
                raise
            if "out_of_memory" in reply:
                self._kill()
                raise ValueError(f"needs more than {memory >> 20:,} MiB of memory")
        if "error" in reply:
            raise ValueError(printable(reply["error"]))
        return reply["result"]

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(CHILD), json.dumps([p for p in sys.path if p])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,
            )
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        assert process is not None and process.stdin and process.stdout
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


SANDBOX = Sandbox()


def _exchange(process: "subprocess.Popen[bytes]", message: bytes, deadline: float) -> dict[str, Any]:
    """Raises TimeoutError, EOFError or BrokenPipeError."""
    assert process.stdin and process.stdout
    process.stdin.write(len(message).to_bytes(8, "big") + message)
    process.stdin.flush()
    output, reply, size = process.stdout.fileno(), bytearray(), 8
    poll = select.poll()
    poll.register(output, select.POLLIN | select.POLLHUP)
    while len(reply) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError
        if not (data := os.read(output, 2**20)):
            raise EOFError
        reply += data
        if size == 8 and len(reply) >= 8:
            size += int.from_bytes(reply[:8], "big")
    result: dict[str, Any] = json.loads(reply[8:])
    return result


def printable(text: str) -> str:
    """Text that a terminal can be shown: control and other unprintable characters as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
