"""python -m outpace."""

from outpace.cli.main import main

main()
