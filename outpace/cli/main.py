"""The console script: every command, and errors that end in one line."""

from rich.console import Console
from rich.markup import escape

from outpace.cli import (  # noqa: F401 - they add their commands
    bench,
    calibrate,
    chat,
    checkpoints,
    convert,
    demo,
    doctor,
    drafts,
    measuring,
    plan,
    retrofit,
    text,
    training,
)
from outpace.cli.app import app


def main() -> None:
    """The console script: errors meant for people end in one line, not in a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        Console(stderr=True).print(
            f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        raise SystemExit(2) from None
