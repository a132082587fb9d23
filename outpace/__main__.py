"""python -m outpace."""

from outpace.cli import app

app(prog_name="outpace")
