"""JSON from strangers: bounded in size and depth, no key twice, no NaN, and errors that name the file."""

import json
from pathlib import Path
from typing import Any

from outpace.checkpoint.base import LoadError
from outpace.text.messages import check_depth

MOST_BYTES = 32 * 2**20
MOST_VALUES = 1_000_000  # in Python a value takes 50 to 200 bytes, whatever it takes in the file
LONGEST_NAME = 512


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises LoadError, naming the file."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise LoadError(f"{path} is not a file")
        if size > MOST_BYTES:
            raise LoadError(f"{path} has {size:,} bytes; no such file needs more than {MOST_BYTES:,}")
        data = path.read_bytes()
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """`where` begins every message. Raises LoadError for what is not an object of strict JSON in UTF-8, for
    a key that is twice, and for more than MOST_VALUES values."""
    values = data.count(b",") + data.count(b"{") + data.count(b"[")
    if values > MOST_VALUES:
        raise LoadError(f"{where} holds about {values:,} JSON values; the limit is {MOST_VALUES:,}")
    try:
        content = json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
        if b"\\ud" in data.lower():  # half of a surrogate pair is a string that cannot be printed
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise LoadError(f"{where} is nested too deeply for JSON that describes a checkpoint") from None
    except ValueError as error:  # not JSON, not UTF-8, an integer of thousands of digits, or ours
        raise LoadError(f"{where} is not JSON: {str(error)[:200]}") from None
    try:  # what json reads may still be too deep to be copied or printed
        check_depth(content, where)
    except ValueError as error:
        raise LoadError(str(error)) from None
    if not isinstance(content, dict):
        raise LoadError(f"{where} holds a {type(content).__name__}, not an object")
    return content


def check_name(name: str, where: str) -> None:
    """Raises LoadError for a tensor's name that a terminal should not be shown."""
    if not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        raise LoadError(f"{where} names a tensor {name[:60]!a}: not printable, empty, or too long")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} is twice")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
