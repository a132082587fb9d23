"""Methods take turns over the same prompts, repeat after repeat, so that a slow minute meets all of them."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from outpace.bench.results import Runs
from outpace.bench.resume import Kept
from outpace.bench.timing import Method, Timed
from outpace.decode.trace import Prediction, Trace

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
