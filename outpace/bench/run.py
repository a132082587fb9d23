"""One run of a suite: what was measured before a stop, methods taking turns, and the frame of the report."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from outpace.bench.machine import describe_target, machine, provenance, versions
from outpace.decode.request import Generation, OnTokens
from outpace.decode.trace import Prediction, Trace
from outpace.models.decoder import Decoder

Prompts = Sequence[Sequence[int]]
Groups = list[list[list[int]]]  # of prompts, each decoded as one batch
WARMUP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One timed generation. `first_s` runs from the call to the first token of all rows, `decode_s` from
    there to the return: the same two clocks for every method, ours or another library's."""

    tokens: list[list[int]]
    first_s: float
    decode_s: float
    trace: Trace

    @property
    def decoded(self) -> int:
        """Tokens emitted within decode_s: all but the first of each row."""
        return sum(len(row) - 1 for row in self.tokens)


Method = Callable[[Prompts, int, int], Timed]  # prompts of equal length, new tokens, seed
Runs = dict[tuple[int, int], Timed]  # (repeat, group of prompts) -> what ran


def timed(generate: Callable[[OnTokens], Generation]) -> Timed:
    first = 0.0

    def on_tokens(row: int, tokens: list[int]) -> None:
        nonlocal first
        first = first or time.perf_counter()

    began = time.perf_counter()
    out = generate(on_tokens)
    ended = time.perf_counter()
    return Timed(tokens=out.tokens, first_s=first - began, decode_s=ended - first, trace=out.trace)


def plain_json(settings: Any) -> Any:
    """A dataclass of settings as it reads back from JSON."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


class Run:
    """`asked` (settings, the draft's fingerprint..) and the target decide whether what an earlier run kept
    in folder/progress.jsonl answers this one. The machine is looked at before anything is measured."""

    def __init__(self, target: Decoder, folder: Path, **asked: Any) -> None:
        self.began = time.perf_counter()
        about = describe_target(target)
        self.kept = Kept(folder, {**asked, "target": about})
        self.frame = {
            **provenance(),
            "machine": machine(target.device),
            "versions": versions(),
            "target": about,
            **asked,
        }

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """What `measure` gave, now or before a stop."""
        if name not in self.kept:
            self.kept[name] = measure()
        return self.kept[name]

    def report(self, **results: Any) -> dict[str, Any]:
        """The whole report: nothing needs to be kept any longer."""
        self.kept.done()
        return {**self.frame, **results, "seconds": round(time.perf_counter() - self.began, 1)}


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
    left_out: Callable[[str, int, int], bool] = lambda method, repeat, group: False,
    deadline: float | None = None,
) -> dict[str, Runs]:
    """-> runs by method. The methods take turns over the same prompts, repeat after repeat, so that a slow
    minute of the machine meets all of them. Whole turns are kept under `name`; those that are kept already
    are not run again. A short unmeasured run of every method goes first. `on_run` is told the method of each
    run; `left_out`: (method, repeat, group) that do not run. After `deadline` (of time.perf_counter) no
    further repeat begins."""
    runs: dict[str, Runs] = {method: {} for method in methods}
    warm = False
    for repeat in range(repeats):
        if repeat and deadline is not None and time.perf_counter() > deadline:
            break
        for group, prompts in enumerate(groups):
            key = f"{name}, repeat {repeat}, group {group}"
            if key not in kept:
                if not warm:
                    for method, run in methods.items():
                        if not left_out(method, 0, 0):
                            run(groups[0], min(WARMUP_TOKENS, new_tokens), seed)
                    warm = True
                turn = {}
                for method in turn_order(list(methods), repeat, group):
                    if not left_out(method, repeat, group):
                        on_run(method)
                        done = methods[method](prompts, new_tokens, seed_of(seed, repeat, group))
                        turn[method] = as_json(done)
                kept[key] = turn
            else:
                for method in kept[key]:
                    on_run(method)
            for method, values in kept[key].items():
                runs[method][repeat, group] = from_json(values)
    return {method: done for method, done in runs.items() if done}


def as_json(run: Timed) -> dict[str, Any]:
    return dataclasses.asdict(run)


def from_json(values: dict[str, Any]) -> Timed:
    trace = values["trace"]
    predicted = [Prediction(**f) for f in trace["predicted"]]
    return Timed(**values | {"trace": Trace(**trace | {"predicted": predicted})})


def progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def advancing(bar: Progress, task: TaskID, before: str = "") -> Callable[[str], None]:
    """For `on_run`: the bar shows the method that runs, and moves on by one."""

    def on_run(method: str) -> None:
        bar.update(task, description=before + method, advance=1)

    return on_run
