"""Methods take turns over the same prompts, repeat after repeat, so that a slow minute meets all of them."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outpace.bench.results import Runs
from outpace.bench.timing import Method, Timed
from outpace.decode.trace import Prediction, Trace


class Kept:
    """Values by name in folder/progress.jsonl; its first line is `key`. A file of another key (other
    settings, target or draft) is not read: what it holds answers another question; the first value kept
    replaces it. A line that a kill cut short was never kept."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        self.path = folder / "progress.jsonl"
        self.head = _line({"key": key})
        self.values: dict[str, Any] = {}
        self.size = 0  # bytes of the file that are ours and whole
        data = self.path.read_bytes() if self.path.is_file() else b""
        if data.startswith(self.head):
            whole = data[: data.rindex(b"\n") + 1]
            self.size = len(whole)
            for line in whole[len(self.head) :].splitlines():
                self.values |= json.loads(line)

    @property
    def names(self) -> list[str]:
        return list(self.values)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.truncate(self.size)
            file.seek(self.size)
            file.write((b"" if self.size else self.head) + _line({name: value}))
            file.flush()
            os.fsync(file.fileno())
            self.size = file.tell()
        self.values[name] = value

    def done(self) -> None:
        self.path.unlink(missing_ok=True)


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


Groups = list[list[list[int]]]  # of prompts, each decoded as one batch
REHEARSAL_TOKENS = 8


def turn_order(names: list[str], repeat: int, group: int) -> Iterator[str]:
    """The first of a turn changes."""
    shift = (repeat + group) % len(names)
    yield from names[shift:]
    yield from names[:shift]


def seed_of(seed: int, repeat: int, group: int) -> int:
    """The same for every method of a turn."""
    return seed * 1_000_003 + repeat * 1009 + group


def take_turns(
    name: str,
    methods: dict[str, Method],
    groups: Groups,
    new_tokens: int,
    repeats: int,
    seed: int,
    kept: Kept,
    on_run: Callable[[str], None],
) -> dict[str, Runs]:
    """-> runs by method. Whole turns are kept under `name`; those that are kept already are not run again. A
    short unmeasured run of every method goes first. `on_run` is told the method of each run."""
    runs: dict[str, Runs] = {method: {} for method in methods}
    rehearsed = False
    for repeat in range(repeats):
        for group, prompts in enumerate(groups):
            key = f"{name}, repeat {repeat}, group {group}"
            if key not in kept:
                if not rehearsed:
                    for run in methods.values():
                        run(groups[0], min(REHEARSAL_TOKENS, new_tokens), seed)
                    rehearsed = True
                turn = {}
                for method in turn_order(list(methods), repeat, group):
                    on_run(method)
                    turn[method] = as_json(methods[method](prompts, new_tokens, seed_of(seed, repeat, group)))
                kept[key] = turn
            else:
                for method in methods:
                    on_run(method)
            for method in methods:
                runs[method][repeat, group] = from_json(kept[key][method])
    return runs


def as_json(run: Timed) -> dict[str, Any]:
    return dataclasses.asdict(run)


def from_json(values: dict[str, Any]) -> Timed:
    trace = values["trace"]
    predicted = [Prediction(**f) for f in trace["predicted"]]
    return Timed(**values | {"trace": Trace(**trace | {"predicted": predicted})})


def progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)
