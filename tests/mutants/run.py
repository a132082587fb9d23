"""Mutation testing: plants one bug at a time in a copy of the repository and runs the tests that must fail.

    python tests/mutants/run.py [AREA ..] [-k TEXT]
    python tests/mutants/run.py --table

AREA is a file of this folder (engine, decode, ..), TEXT a part of a mutant's name. Exits 1 if a mutant
survives, if its source text is not in the file exactly once, or if its tests fail without it. --table prints
the list for docs/testing.md and runs nothing.
"""

import argparse
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv", "site", "*_cache", "__pycache__", "shared", "demo-report", "work", "build")
)
LIMIT = 600  # seconds of one run of the tests; a mutant that makes them hang or crash counts as caught
OUTCOMES = {0: "survived", 1: "caught"}  # by pytest's exit status


class Mutant(NamedTuple):
    name: str
    file: str
    source: str
    replacement: str
    tests: str  # separated by spaces


def areas() -> dict[str, list[Mutant]]:
    """Every file of this folder that defines MUTANTS."""
    mutants = {}
    for path in sorted(HERE.glob("*.py")):
        if path.name not in ("run.py", "test_mutants.py"):
            mutants[path.stem] = [Mutant(*fields) for fields in runpy.run_path(str(path))["MUTANTS"]]
    return mutants


def table() -> list[str]:
    """The lines of the table in docs/testing.md: a file, and the mutants of it."""
    names: dict[str, list[str]] = {}
    for mutant in (mutant for mutants in areas().values() for mutant in mutants):
        names.setdefault(mutant.file, []).append(mutant.name)
    return [f"| `{file}` | {'; '.join(names[file])} |" for file in sorted(names)]


def mismatch(mutant: Mutant, root: Path = ROOT) -> str | None:
    """Why a mutant cannot be applied; None if it can."""
    path = root / mutant.file
    if not path.is_file():
        return f"no file {mutant.file}"
    count = path.read_text(encoding="utf-8").count(mutant.source)
    if count != 1:
        return f"its source text is {count} times in {mutant.file}"
    if mutant.source == mutant.replacement:
        return "it changes nothing"
    absent = [test for test in mutant.tests.split() if not (root / test.split("::")[0]).exists()]
    return f"no tests {absent[0]}" if absent else None


def run_tests(root: Path, tests: str) -> int:
    """-> pytest's exit status; 1 if the tests hang or end by a signal."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "OUTPACE_CACHE": str(root / ".kernels"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    try:
        status = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, timeout=LIMIT, check=False
        ).returncode
        return 1 if status < 0 else status
    except subprocess.TimeoutExpired:
        return 1


def outcome(mutant: Mutant, root: Path) -> str:
    """Applies the mutant to the copy in `root`, runs its tests, restores the file."""
    problem = mismatch(mutant, root)
    if problem is not None:
        return problem
    path = root / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.source, mutant.replacement), encoding="utf-8")
    try:
        status = run_tests(root, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    return OUTCOMES.get(status, f"pytest ended with status {status}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("area", nargs="*", choices=[*areas(), []])
    parser.add_argument("-k", default="", metavar="TEXT")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table()))
        return 0
    chosen = [
        (area, mutant)
        for area, mutants in areas().items()
        for mutant in mutants
        if (not options.area or area in options.area) and options.k in mutant.name
    ]
    results, clean = [], {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        shutil.copytree(ROOT, root, ignore=LEFT_OUT)
        for area, mutant in chosen:
            if mutant.tests not in clean:
                clean[mutant.tests] = run_tests(root, mutant.tests) == 0
            result = outcome(mutant, root) if clean[mutant.tests] else "its tests fail without it"
            results.append(result)
            print(f"{area:10} {mutant.name:52} {result}", flush=True)
    caught = results.count("caught")
    print(f"{caught} of {len(results)} mutants caught")
    return int(caught < len(results))


if __name__ == "__main__":
    sys.exit(main())
