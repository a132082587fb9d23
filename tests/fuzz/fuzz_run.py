"""Runs fuzz cases in forked processes under limits of time and memory: `make fuzz`, or this file with --help.

A case is a kind of input and a number; with the seed they decide every byte, so that a line of the table's
failures is also the command that repeats it.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from fuzz_kinds import KINDS, Argv, Kind, lay_out, make_samples

from outpace.cli.main import main as outpace_main

PROCESSOR_SECONDS = 20
WALL_SECONDS = 60.0  # a case that waits uses no processor; a busy machine is no hang
MEMORY = 4 * 2**30
ACCEPTED, CLEAN, TRACEBACK, CRASH, HANG, OUT_OF_MEMORY = (
    "accepted",
    "clean",
    "traceback",
    "crash",
    "hang",
    "memory",
)
CLASSES = (ACCEPTED, CLEAN, TRACEBACK, CRASH, HANG, OUT_OF_MEMORY)
GOOD = (ACCEPTED, CLEAN)


@dataclass(frozen=True)
class Outcome:
    kind: str
    number: int
    result: str
    argv: Argv
    output: str
    seconds: float


def _virtual_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[0]) * resource.getpagesize()


def _child(argv: Argv, folder: Path, log: int) -> None:
    """Runs one command in this (forked) process and ends it with the command's exit status."""
    code = 3
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_AS, (_virtual_bytes() + MEMORY,) * 2)
        torch.set_num_threads(1)  # a forked OpenMP pool has no threads: a parallel region would wait for them
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", errors="backslashreplace")
        sys.argv = ["outpace", *argv]
        outpace_main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
    finally:  # whatever happens, this copy of the caller must not go on
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_command(argv: Argv, folder: Path) -> tuple[str, str, float]:
    """-> class, output, seconds."""
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _child(argv, folder, log.fileno())
        ended = os.pidfd_open(pid)
        done = select.select([ended], [], [], WALL_SECONDS)[0]
        if not done:
            with contextlib.suppress(ProcessLookupError):  # before the child's setpgid there is no such group
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(ended)
        seconds = time.perf_counter() - began
        log.seek(0)
        output = log.read(200_000).decode("utf-8", "replace")
    return _class(bool(done), status, output), output, seconds


def _class(done: bool, status: int, output: str) -> str:
    if not done:
        return HANG
    if os.WIFSIGNALED(status):
        return HANG if os.WTERMSIG(status) == signal.SIGXCPU else CRASH
    code = os.WEXITSTATUS(status)
    if "MemoryError" in output or "bad_alloc" in output or "can't allocate memory" in output:
        return OUT_OF_MEMORY
    if "Traceback (most recent call last)" in output or "\x1b[31mred" in output:
        return TRACEBACK
    if code not in (0, 1, 2):
        return CRASH
    return CLEAN if code else ACCEPTED


def run_case(kind: Kind, number: int, seed: int, base: Path) -> Outcome:
    """Lays out the case in a folder of its own and runs its command."""
    rng = random.Random(f"{seed}/{kind.name}/{number}")
    with tempfile.TemporaryDirectory(prefix="outpace-fuzz-") as place:
        folder = Path(place)
        lay_out(base, folder)
        if kind.change is not None:
            kind.change(rng, folder)
        argv = kind.draw(rng)
        result, output, seconds = run_command(argv, folder)
        return Outcome(kind.name, number, result, argv, output, seconds)


def _shared(cases: list[tuple[Kind, int]], seed: int, base: Path, jobs: int) -> list[Outcome]:
    """The cases on `jobs` forked workers, each of which writes its outcomes to a file of its own."""
    workers = []
    for job in range(jobs):
        place = base.parent / f"outcomes-{job}.jsonl"
        pid = os.fork()
        if pid == 0:
            with place.open("w") as file:
                for kind, number in cases[job::jobs]:
                    outcome = run_case(kind, number, seed, base)
                    file.write(json.dumps(outcome.__dict__) + "\n")
                    file.flush()
                    if outcome.result not in GOOD:
                        print(f"{outcome.result}: {repeat(outcome, seed)}", flush=True)
            os._exit(0)
        workers.append((pid, place))
    result = []
    for pid, place in workers:
        if os.waitpid(pid, 0)[1]:
            raise SystemExit("a fuzz worker died")
        result += [Outcome(**json.loads(line)) for line in place.read_text().splitlines()]
    return result


def repeat(outcome: Outcome, seed: int) -> str:
    return f"python tests/fuzz/fuzz_run.py --seed {seed} --kind {outcome.kind!r} --case {outcome.number}"


def table(outcomes: list[Outcome]) -> str:
    """A Markdown table: kind x class."""
    counts = Counter((o.kind, o.result) for o in outcomes)
    rows = [f"| kind | cases | {' | '.join(CLASSES)} |", "|---|" + "---|" * (len(CLASSES) + 1)]
    kinds = list(dict.fromkeys(o.kind for o in outcomes))
    for kind in sorted(kinds):
        values = [counts[kind, c] for c in CLASSES]
        rows.append(f"| {kind} | {sum(values):,} | " + " | ".join(f"{v:,}" for v in values) + " |")
    totals = [sum(counts[k, c] for k in kinds) for c in CLASSES]
    rows.append(f"| all | {sum(totals):,} | " + " | ".join(f"{v:,}" for v in totals) + " |")
    return "\n".join(rows)


def call(*argv: str) -> None:
    """A command of outpace in this process. Raises AssertionError where it fails."""
    sys.argv = ["outpace", *argv]
    try:
        outpace_main()
    except SystemExit as ended:
        assert not ended.code, f"{argv} ended with {ended.code}"


def samples(folder: Path) -> Path:
    base = folder / "samples"
    base.mkdir()
    before = Path.cwd()
    os.chdir(base)
    try:
        make_samples(base, call)
    finally:
        os.chdir(before)
    return base


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000, help="number of cases over all kinds (10000)")
    parser.add_argument("--seed", type=int, default=1, help="seed of all of them (1)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--kind", help="only this kind: " + ", ".join(k.name for k in KINDS))
    parser.add_argument("--case", type=int, help="only this case of --kind, with its output")
    parser.add_argument("--out", type=Path, help="file for the table, as Markdown")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    chosen = [k for k in KINDS if options.kind in (None, k.name)]
    if not chosen:
        parser.error(f"--kind {options.kind}: not a kind")
    with tempfile.TemporaryDirectory(prefix="outpace-fuzz-") as place:
        os.environ["OUTPACE_CACHE"] = os.environ.get("OUTPACE_CACHE", str(Path(place, "cache")))
        base = samples(Path(place))
        if options.case is not None:
            outcome = run_case(chosen[0], options.case, options.seed, base)
            print(outcome.output)
            print(f"{outcome.result} after {outcome.seconds:.1f} s: outpace {' '.join(outcome.argv)}")
            return outcome.result not in GOOD
        cases = [(chosen[i % len(chosen)], i // len(chosen)) for i in range(options.cases)]
        print(
            f"seed {options.seed}, {len(cases):,} cases, "
            f"{PROCESSOR_SECONDS} s and {MEMORY / 2**30:g} GiB each",
            flush=True,
        )
        outcomes = _shared(cases, options.seed, base, options.jobs)
    print(table(outcomes))
    if options.out is not None:
        options.out.write_text(table(outcomes) + "\n")
    for outcome in outcomes:
        if outcome.result not in GOOD:
            last = outcome.output.strip().splitlines()[-1:] or [""]
            print(f"{outcome.result}: {last[0][:160]}\n    {repeat(outcome, options.seed)}")
    shutil.rmtree(place, ignore_errors=True)
    return any(o.result not in GOOD for o in outcomes)


if __name__ == "__main__":
    sys.exit(main())
