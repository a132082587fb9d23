"""Checks in a process of their own, each of which is a test here."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path


def checks_of(path: Path) -> list[str]:
    return [
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


class Checked:
    """What pytest said of the checks in `path`."""

    def __init__(self, path: Path, **environment: str) -> None:
        flags = ["-q", "-rA", "--no-header", "-p", "no:xdist", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *flags, str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=500, env=os.environ | environment
        )
        self.output = done.stdout + done.stderr
        self.outcomes = re.findall(r"^([A-Z]+) \S*::(\w+)", self.output, re.M)

    def passed(self, name: str) -> None:
        mine = {outcome for outcome, check in self.outcomes if check == name}
        assert mine == {"PASSED"}, self.output[-6000:]
