"""Mutators: a sound file -> a damaged or hostile one, drawn from a `random.Random` and so repeatable."""

import json
import random
import struct
import tomllib
from collections.abc import Callable
from typing import Any

Mutator = Callable[[random.Random, bytes], bytes]
Json = Any

NASTY: list[Json] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e-45),
    *(1e308, 1e999, -1e999, float("nan"), "", " ", "x", "nan", "1e5", "../../etc/passwd", "/dev/zero"),
    *(
        "\x00",
        "\x1b[31mred",
        "\ud800",
        "é" * 40,
        "x" * 70_000,
        "{{ x }}",
        [],
        [[]],
        {},
        {"": None},
        [None] * 3,
    ),
    *([0] * 5000, list(range(64)), {"a": {"b": {"c": 1}}}, "torch.float64", "float8", [1, "a", None]),
]
ALPHABET = "\x00\t\n\r \"'\\{}[]<|>abcxyz019.-_/%\x7fé中\U0001f642\u202e\ufeff"


def deep(depth: int, kind: str) -> Json:
    """A list or an object nested `depth` times."""
    value: Json = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def places(value: Json, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values inside, the root excluded."""
    paths: list[tuple[Any, ...]] = []
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value[:50]))
        if isinstance(value, list)
        else []
    )
    for key, inner in items:
        paths += [(*path, key), *places(inner, (*path, key))]
    return paths


def mutate_value(rng: random.Random, value: Json) -> Json:
    """A JSON document with one to three values replaced, removed, renamed, swapped, scaled or nested."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        paths = places(value)
        if not paths:
            return rng.choice(NASTY)
        *parents, key = rng.choice(paths)
        holder = value
        for step in parents:
            holder = holder[step]
        what = rng.randrange(8)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, dict):
            holder[rng.choice(("", str(key) + "x", "__class__", "outpace"))] = holder.pop(key)
        elif what == 2:
            holder[key] = deep(rng.choice((3, 90, 500, 3000)), rng.choice(("list", "dict")))
        elif what == 3 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = holder[key] * rng.choice((-1, 0, 2, 3, 0.5, 1000, 10**9))
        elif what == 4 and isinstance(holder[key], str):
            holder[key] = garbled(rng, holder[key])
        elif what == 5 and isinstance(holder[key], list):
            holder[key] = (holder[key] * rng.choice((0, 2, 50)))[: rng.choice((1, 4000))]
        elif what == 6:
            other = rng.choice(paths)
            inner = value
            for step in other:
                inner = inner[step] if _has(inner, step) else None
            holder[key] = json.loads(json.dumps(inner))
        else:
            holder[key] = rng.choice(NASTY)
    return value


def _has(holder: Json, step: Any) -> bool:
    if isinstance(holder, dict):
        return step in holder
    return isinstance(holder, list) and isinstance(step, int) and step < len(holder)


def garbled(rng: random.Random, text: str) -> str:
    """Text with a few characters changed, a part repeated or cut."""
    at = rng.randrange(len(text) + 1)
    drawn = "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 9)))
    return rng.choice((text[:at] + drawn + text[at:], text[:at], text[at:], text[:at] * 20, drawn))


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut, repeated, inserted or overwritten."""
    values = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(values) + 1)
        match rng.randrange(6):
            case 0:
                if values:
                    values[at % len(values)] ^= 1 << rng.randrange(8)
            case 1:
                del values[at:]
            case 2:
                del values[at : at + rng.randrange(1, 64)]
            case 3:
                values[at:at] = rng.randbytes(rng.randrange(1, 32))
            case 4:
                values[at : at + 8] = struct.pack("<q", rng.choice((-1, 0, 2**31, 2**40, 2**63 - 1)))
            case 5:
                values[at:at] = values[max(0, at - 64) : at]
    return bytes(values)


def front_damaged(rng: random.Random, data: bytes, front: int = 4096) -> bytes:
    """`damaged` within the first bytes, where binary formats have their header."""
    return damaged(rng, data[:front]) + data[front:]


def json_mutated(rng: random.Random, data: bytes) -> bytes:
    """A JSON file changed by value, sometimes by byte."""
    if rng.random() < 0.15:
        return damaged(rng, data)
    value = mutate_value(rng, json.loads(data))
    return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def jsonl_mutated(rng: random.Random, data: bytes) -> bytes:
    """One line of a JSONL file changed, as JSON."""
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json_mutated(rng, lines[at]).replace(b"\n", b" ")
    return b"\n".join(lines) + b"\n"


def toml_mutated(rng: random.Random, data: bytes) -> bytes:
    """A TOML recipe changed by value, sometimes by byte, sometimes nested deep."""
    if rng.random() < 0.2:
        return damaged(rng, data)
    if rng.random() < 0.05:
        return b"steps = " + b"[" * 3000 + b"]" * 3000
    values = mutate_value(rng, tomllib.loads(data.decode()))
    if not isinstance(values, dict):
        values = {"steps": values}
    return "\n".join(f"{_toml_key(k)} = {_toml(v)}" for k, v in values.items()).encode("utf-8", "replace")


def _toml_key(key: str) -> str:
    return json.dumps(key)


def _toml(value: Json) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, float) and value != value:
        return "nan"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return '""' if value is None else json.dumps(value)


def safetensors_mutated(rng: random.Random, data: bytes) -> bytes:
    """Values or bytes of the header changed, or a tensor's bytes."""
    size = struct.unpack("<Q", data[:8])[0]
    choice = rng.randrange(4)
    if choice == 0:
        return front_damaged(rng, data, 8 + size)
    if choice == 1:
        return data[: 8 + size] + damaged(rng, data[8 + size :])
    header = json_mutated(rng, data[8 : 8 + size])
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def text_mutated(rng: random.Random, data: bytes) -> bytes:
    text = data.decode()
    for _ in range(rng.choice((1, 2, 5))):
        text = garbled(rng, text)
    return text.encode("utf-8", "surrogatepass")
