"""The console script: every command, and errors that end in one line."""

import logging
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from outpace.cli import (  # noqa: F401 - they add their commands
    calibrate,
    chat,
    checkpoints,
    demo,
    doctor,
    drafts,
    generate,
    measure,
    plan,
    problems,
    retrofit,
    rows,
    serve,
    training,
)
from outpace.cli.app import app, out_of_memory


def main() -> None:
    """The console script: errors meant for people end in one line, not in a traceback."""
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - of torchrun's processes one speaks
    if sys.stdout is None:  # closed by the shell: >&-
        _fail("the standard output is closed: redirect it to a file")
    log = logging.getLogger("outpace")
    log.handlers = [_Notes()]
    log.setLevel(logging.INFO)
    try:
        app()
    except UnicodeDecodeError as error:  # files are decoded where they are read
        _fail(f"the input is not UTF-8 (byte {error.start:,}): convert it first")
    except (ValueError, OSError) as error:
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error):
            _fail("not enough memory: use smaller sizes or a shorter context")
        raise


class _Notes(logging.Handler):
    """What the package logs, on stderr: what takes time, and what is lost."""

    def emit(self, record: logging.LogRecord) -> None:
        shown = Console(stderr=True)
        shown.print(record.getMessage(), style="dim", highlight=False, markup=False, soft_wrap=True)


def _fail(message: str) -> None:
    Console(stderr=True).print(
        f"[bold red]error:[/bold red] {escape(message)}", highlight=False, soft_wrap=True
    )
    raise SystemExit(2) from None
