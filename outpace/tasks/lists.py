"""Lists of numbers: sort, reverse, drop repeats, count, sum up, take the largest."""

import bisect
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from outpace.tasks.problem import Problem, quoting


def numbers(rng: random.Random, count: int, top: int = 99) -> list[int]:
    return [rng.randint(0, top) for _ in range(count)]


def spaced(values: list[int]) -> str:
    return " ".join(map(str, values))


def sort(rng: random.Random, size: int) -> Problem:
    values, done, steps = numbers(rng, size), list[int](), []
    down = rng.random() < 0.3
    for value in values:
        bisect.insort(done, value)
        steps.append(f"{value}: {spaced(done[::-1] if down else done)}")
    order = ", largest first" if down else ""
    question = f"Sort this list{order}: {values}"
    return Problem(question=question, trace=quoting("[", steps), answer=str(done[::-1] if down else done))


def reverse(rng: random.Random, size: int) -> Problem:
    values = numbers(rng, size)
    form = rng.choice(["Reverse this list: {}", "Write this list from the last to the first: {}"])
    return Problem(question=form.format(values), trace=f"the last is {values[-1]}", answer=str(values[::-1]))


def unique(rng: random.Random, size: int) -> Problem:
    pool = numbers(rng, max(2, size // 2))
    values = [rng.choice(pool) for _ in range(size)]
    kept, steps = list[int](), []
    for value in values:
        steps.append(f"{value} {'again' if value in kept else 'new'}")
        if value not in kept:
            kept.append(value)
    question = f"Remove repeats from this list, keep the order: {values}"
    return Problem(question=question, trace=quoting("[", steps), answer=str(kept))


def tally(items: Sequence[Any], wanted: Any) -> tuple[list[str], int]:
    """-> (each item with how often `wanted` came up to there, the last of these)."""
    totals = list(accumulate(int(item == wanted) for item in items))
    return [f"{item} {total}" for item, total in zip(items, totals, strict=True)], totals[-1]


def count(rng: random.Random, size: int) -> Problem:
    pool = numbers(rng, 4)
    values = [rng.choice(pool) for _ in range(size)]
    wanted = rng.choice(pool)
    steps, total = tally(values, wanted)
    question = f"How many times is {wanted} in this list? {values}"
    return Problem(question=question, trace=quoting("[", steps), answer=str(total))


def running_sum(rng: random.Random, size: int) -> Problem:
    values = numbers(rng, size, top=20)
    sums = list(accumulate(values))
    steps = [
        f"{value}: {before}+{value}={after}"
        for before, value, after in zip([0, *sums], values, sums, strict=False)
    ]
    whole = rng.random() < 0.4
    question = f"What is the sum of this list? {values}" if whole else f"Running sums of this list: {values}"
    return Problem(question=question, trace=quoting("[", steps), answer=str(sums[-1] if whole else sums))


def largest(rng: random.Random, size: int) -> Problem:
    values, least = numbers(rng, size), rng.random() < 0.5
    best = list(accumulate(values, min if least else max))
    steps = [f"{value} {now}" for value, now in zip(values, best, strict=True)]
    question = f"What is the {'smallest' if least else 'largest'} number in this list? {values}"
    return Problem(question=question, trace=quoting("[", steps), answer=str(best[-1]))


def lists(rng: random.Random, size: int) -> Problem:
    return rng.choice([sort, reverse, unique, count, running_sum, largest])(rng, size)
