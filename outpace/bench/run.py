"""A benchmark run: timed generations, interleaved methods, resumption, the header of the report."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outpace.bench.machine import describe_target, machine, provenance, versions
from outpace.decode.request import Generation, OnTokens
from outpace.decode.trace import Prediction, Trace
from outpace.models.decoder import Decoder

Prompts = Sequence[Sequence[int]]
Groups = list[list[list[int]]]  # groups of prompts, each group decoded as one batch
WARMUP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One timed generation. `first_s`: from the call to the first token of all rows; `decode_s`: from there
    to the return. Every method, ours or another library's, is timed with these two clocks."""

    tokens: list[list[int]]
    first_s: float
    decode_s: float
    trace: Trace

    @property
    def decoded(self) -> int:
        """Tokens emitted within decode_s: all but the first of each row."""
        return sum(len(row) - 1 for row in self.tokens)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Timed":
        trace = values["trace"]
        predicted = [Prediction(*p) for p in trace["predicted"]]
        return cls(**values | {"trace": Trace(**trace | {"predicted": predicted})})


Method = Callable[[Prompts, int, int], Timed]  # prompts of equal length, new tokens, seed
Runs = dict[tuple[int, int], Timed]  # (repeat, group of prompts) -> timed generation


def timed(generate: Callable[[OnTokens], Generation]) -> Timed:
    first = 0.0

    def on_tokens(row: int, tokens: list[int]) -> None:
        nonlocal first
        first = first or time.perf_counter()

    began = time.perf_counter()
    out = generate(on_tokens)
    ended = time.perf_counter()
    return Timed(tokens=out.tokens, first_s=first - began, decode_s=ended - first, trace=out.trace)


class Results:
    """Measured values by name in folder/progress.jsonl, for a run that continues after a stop. The first
    line is `key`; a file with another key (other settings, target or draft) is ignored and replaced by the
    first value. A line cut short by a kill is dropped."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        self.path = folder / "progress.jsonl"
        self.head = _line({"key": key})
        self.values: dict[str, Any] = {}
        self.size = 0  # bytes of complete lines under this key
        data = self.path.read_bytes() if self.path.is_file() else b""
        if data.startswith(self.head):
            complete = data[: data.rindex(b"\n") + 1]
            self.size = len(complete)
            for line in complete[len(self.head) :].splitlines():
                self.values |= json.loads(line)

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """The value of `name`: from the file, or measured now."""
        if name not in self.values:
            self[name] = measure()
        return self.values[name]

    def named(self, prefix: str) -> dict[str, Any]:
        return {name: value for name, value in self.values.items() if name.startswith(prefix)}

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


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


class Run(Results):
    """One run of a suite. Results of an earlier, stopped run in `folder` are reused if the target and
    `inputs` (settings, the draft's fingerprint, ..) are the same. The machine is described before anything
    is measured."""

    def __init__(self, target: Decoder, folder: Path, **inputs: Any) -> None:
        self.began = time.perf_counter()
        inputs = json.loads(json.dumps(inputs, default=dataclasses.asdict))
        target_json = describe_target(target)
        super().__init__(folder, {**inputs, "target": target_json})
        self.header = {
            **provenance(),
            "machine": machine(target.device),
            "versions": versions(),
            "target": target_json,
            **inputs,
        }

    def report(self, **results: Any) -> dict[str, Any]:
        """The complete report. progress.jsonl stays until `Page.write` has written it."""
        return {**self.header, **results, "seconds": round(time.perf_counter() - self.began, 1)}


def seed_for(seed: int, repeat: int, group: int) -> int:
    """The same for every method of a turn."""
    return seed * 1_000_003 + repeat * 1009 + group


class Schedule(Protocol):
    """What `interleave` reads of a suite's settings."""

    @property
    def repeats(self) -> int: ...
    @property
    def seed(self) -> int: ...


def interleave(
    name: str,
    methods: dict[str, Method],
    groups: Groups,
    new_tokens: int | Sequence[int],
    schedule: Schedule,
    results: Results,
    on_run: Callable[[str], None],
    skip: Callable[[str, int, int], bool] = lambda method, repeat, group: False,
    deadline: float | None = None,
) -> dict[str, Runs]:
    """-> runs by method. All methods decode one group of prompts before the next group starts, so that a slow
    minute of the machine affects all of them; the first method of a turn rotates. `new_tokens`: of all
    groups, or of each. A short warm-up of every method is not measured. Complete turns are stored in
    `results` under `name`, and stored turns are not run. `on_run` is called with the method of each run;
    `skip` (method, repeat, group) leaves runs out; no further repeat starts after `deadline` (of
    time.perf_counter)."""
    runs: dict[str, Runs] = {method: {} for method in methods}
    names, warm = list(methods), False
    counts = [new_tokens] * len(groups) if isinstance(new_tokens, int) else new_tokens
    for repeat in range(schedule.repeats):
        if repeat and deadline is not None and time.perf_counter() > deadline:
            break
        for group, prompts in enumerate(groups):
            key = f"{name}, repeat {repeat}, group {group}"
            if key in results:
                for method in results[key]:
                    on_run(method)
            else:
                for method in names if not warm else ():
                    if not skip(method, 0, 0):
                        methods[method](groups[0], min(WARMUP_TOKENS, counts[0]), schedule.seed)
                warm, turn = True, {}
                first = (repeat + group) % len(names)
                for method in (*names[first:], *names[:first]):
                    if not skip(method, repeat, group):
                        on_run(method)
                        seed = seed_for(schedule.seed, repeat, group)
                        turn[method] = methods[method](prompts, counts[group], seed).as_json()
                results[key] = turn
            for method, values in results[key].items():
                runs[method][repeat, group] = Timed.from_json(values)
    return {method: done for method, done in runs.items() if done}


class Bar(Progress):
    """A progress bar; each `step` names the work that starts and advances by one."""

    def __init__(self, console: Console, name: str, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console)
        self.task = self.add_task(name, total=total)

    def step(self, description: str) -> None:
        self.update(self.task, description=description, advance=1)

    def at(self, completed: int) -> None:
        self.update(self.task, completed=completed)


def at_least(settings: Any, suite: str, **least: int) -> None:
    """Raises ValueError for a field of `settings` below its least value."""
    for name, bound in least.items():
        if getattr(settings, name) < bound:
            raise ValueError(f"{suite}: {name} {getattr(settings, name)}: it must be at least {bound}")


def check_contexts(suite: str, contexts: Sequence[int]) -> None:
    if not contexts or min(contexts) < 1 or list(contexts) != sorted(set(contexts)):
        raise ValueError(f"{suite}: contexts {list(contexts)}: give counts of tokens, ascending, each once")


def check_known(suite: str, field: str, values: Iterable[str], known: Sequence[str]) -> None:
    """Raises ValueError for a value that is not among `known`, and for none at all."""
    unknown = [x for x in values if x not in known]
    if unknown or not list(values):
        one = field.removesuffix("ies") + "y" if field.endswith("ies") else field.removesuffix("s")
        message = f"no {one} {unknown[0]!r}" if unknown else f"name at least one of {field}"
        raise ValueError(f"{suite}: {message}; known: {', '.join(known)}")


def prompt_and_answer(suite: str, regime: str) -> tuple[int, int]:
    """ "P+D" -> tokens of the prompt, tokens decoded."""
    prompt, _, new = regime.partition("+")
    if prompt.isdigit() and new.isdigit() and int(prompt) and int(new) > 1:
        return int(prompt), int(new)
    raise ValueError(
        f'{suite}: regime {regime!r}: write "P+D" such as "64+128", with at least 2 decoded tokens, which is '
        "the least that can be timed after the first"
    )
