"""JSON objects and lists of records: sort, rename, filter, extract, nest, and write as CSV or YAML."""

import bisect
import json
import random
from typing import Any

from outpace.tasks.problem import Problem, lines, quoting
from outpace.tasks.vocabulary import CITIES, COLORS, FIELDS, NAMES

Record = dict[str, Any]


def value(rng: random.Random) -> Any:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice([True, False])
    return rng.randint(0, 99) if kind == 1 else rng.choice(CITIES if kind == 2 else COLORS)


def record(rng: random.Random, size: int) -> Record:
    return {key: value(rng) for key in rng.sample(FIELDS, size)}


def records(rng: random.Random, size: int) -> tuple[str, list[Record]]:
    """-> (key of the numbers, records of one name and one number each)."""
    key = rng.choice(["age", "count", "grade", "price", "rank", "score", "size", "weight"])
    return key, [{"name": name, key: rng.randint(0, 99)} for name in rng.sample(NAMES, size)]


def sort_keys(rng: random.Random, size: int) -> Problem:
    it, done, steps = record(rng, size), list[str](), []
    for key in it:
        bisect.insort(done, key)
        steps.append(f'"{key}": {" ".join(done)}')
    question = f"Sort the keys of this JSON: {json.dumps(it)}"
    return Problem(
        question=question, trace=quoting("{", steps), answer=json.dumps({key: it[key] for key in done})
    )


def rename_key(rng: random.Random, size: int) -> Problem:
    it = record(rng, size)
    old = rng.choice(list(it))
    new = rng.choice([key for key in FIELDS if key not in it])
    question = f'Rename the key "{old}" of this JSON to "{new}": {json.dumps(it)}'
    renamed = {new if key == old else key: value for key, value in it.items()}
    return Problem(question=question, trace=f"{old} becomes {new}", answer=json.dumps(renamed))


def drop_key(rng: random.Random, size: int) -> Problem:
    it = record(rng, size)
    old = rng.choice(list(it))
    question = f'Remove the key "{old}" from this JSON: {json.dumps(it)}'
    kept = {key: value for key, value in it.items() if key != old}
    return Problem(question=question, trace=f"without {old}", answer=json.dumps(kept))


def extract(rng: random.Random, size: int) -> Problem:
    it = record(rng, size)
    key = rng.choice(list(it))
    question = f'What is the value of "{key}" in this JSON? {json.dumps(it)}'
    text = json.dumps(it[key])
    return Problem(question=question, trace=f'"{key}": {text}', answer=text)


def nest(rng: random.Random, size: int) -> Problem:
    it = record(rng, size)
    inner = sorted(rng.sample(range(size), min(2, size - 1)))
    keys = [list(it)[i] for i in inner]
    name = rng.choice(["data", "details", "info"])
    question = f'Move {" and ".join(keys)} under a new key "{name}", the last: {json.dumps(it)}'
    nested = {key: it[key] for key in it if key not in keys} | {name: {key: it[key] for key in keys}}
    steps = [f'"{key}": {"yes" if key in keys else "no"}' for key in it]
    return Problem(question=question, trace=quoting("{", steps), answer=json.dumps(nested))


def keep_records(rng: random.Random, size: int) -> Problem:
    key, rows = records(rng, size)
    limit, above = rng.randint(20, 80), rng.random() < 0.5
    steps, kept, sign = [], [], ">" if above else "<"
    for row in rows:
        good = row[key] > limit if above else row[key] < limit
        steps.append(f"{json.dumps(row)} {row[key]}{sign}{limit} {'yes' if good else 'no'}")
        kept += [row] if good else []
    side = "above" if above else "below"
    question = f"Keep the records with {key} {side} {limit}: {json.dumps(rows)}"
    return Problem(question=question, trace=quoting("[", steps), answer=json.dumps(kept))


def to_csv(rng: random.Random, size: int) -> Problem:
    key, rows = records(rng, size)
    text = lines([f"name,{key}", *(f"{row['name']},{row[key]}" for row in rows)])
    return Problem(
        question=f"Write this JSON as CSV: {json.dumps(rows)}", trace=f"columns name, {key}", answer=text
    )


def to_yaml(rng: random.Random, size: int) -> Problem:
    it = record(rng, size)
    text = lines([f"{key}: {v if isinstance(v, str) else json.dumps(v)}" for key, v in it.items()])
    question = f"Write this JSON as YAML: {json.dumps(it)}"
    return Problem(question=question, trace=f"{size} keys", answer=text)


def documents(rng: random.Random, size: int) -> Problem:
    kinds = [sort_keys, rename_key, drop_key, extract, nest, keep_records, to_csv, to_yaml]
    return rng.choice(kinds)(rng, size)
