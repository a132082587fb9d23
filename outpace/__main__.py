"""python -m outpace."""

from outpace.cli import main

main()
