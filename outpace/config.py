"""A TOML recipe plus overrides -> one frozen dataclass; a key nobody knows is an error. The cache folder."""

import dataclasses
import difflib
import math
import os
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
UNIONS = (Union, types.UnionType)
LARGEST = 2**31 - 1
Ranges = dict[str, tuple[float, float]]  # of a field: lowest and highest value


def load_settings(
    cls: type[T], path: Path | None, overrides: dict[str, Any], source: str = "an override"
) -> T:
    """`cls` from the recipe at `path` (None: its defaults alone), then `overrides` on top, which errors call
    `source`.

    `cls` is a dataclass where the fields are bool, int, float, str, Path, Literal, tuples, lists, dicts with
    string keys, unions of these, or further dataclasses (a table of the recipe). An int is taken where
    a float is wanted; nothing else is converted, except str to Path and list to tuple.

    Raises ValueError for a recipe that cannot be read, an unknown key (naming the nearest known one),
    a value of the wrong type, a missing one, whatever the dataclass itself refuses, and whole numbers that
    are negative or above 2^31 - 1 (seeds may have 64 bits).
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"recipe {path} cannot be read: {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"recipe {path} is not TOML: {error}") from error
    recipe = _values(cls, values, str(path), "")
    override = _values(cls, overrides, source, "")
    values, where = _merge(recipe, override), f"{path}" if path else "the settings"
    made = _make(cls, values, where)
    _check_sizes(values, where)
    return made


def typed(cls: type[T], values: dict[str, Any], source: str) -> T:
    """`cls` from the values of a JSON object. Raises ValueError, naming `source` and the key, as
    `load_settings` does."""
    return _make(cls, _values(cls, values, source, ""), source)


def parse_overrides(cls: type, pairs: Sequence[str]) -> dict[str, Any]:
    """key=value pairs of a command line, each value as TOML reads it, for `load_settings`.

    `a,b` is a list too, a word needs no quotes, and a field of `cls` that holds many takes one alone.
    Raises ValueError for a pair without `=`.
    """
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair}: write key=value")
        value = _read(text)
        values[key] = [value] if _holds_many(hints.get(key)) and not isinstance(value, list) else value
    return values


def _read(text: str) -> Any:
    for toml in (text, f"[{text}]") if "," in text else (text,):
        try:
            return tomllib.loads(f"x = {toml}")["x"]
        except (tomllib.TOMLDecodeError, RecursionError):
            pass
    return [_read(part) for part in text.removesuffix(",").split(",")] if "," in text else text


def _holds_many(hint: Any) -> bool:
    if get_origin(hint) in UNIONS:
        return any(map(_holds_many, get_args(hint)))
    return get_origin(hint) in (tuple, list, frozenset)


def _values(cls: type, values: dict[str, Any], source: str, prefix: str) -> dict[str, Any]:
    """Checked values by field name; a nested dataclass stays a dict until everything is merged."""
    hints = get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls) if f.init]
    checked = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            hint = f"; did you mean `{prefix}{near[0]}`?" if near else ""
            raise ValueError(f"{source}: unknown key `{prefix}{key}`{hint}")
        checked[key] = _value(hints[key], value, source, prefix + key)
    return checked


def _value(wanted: Any, value: Any, source: str, key: str) -> Any:
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type) and isinstance(value, dict):
        return _values(wanted, value, source, key + ".")
    fitted, value = _fit(wanted, value)
    if not fitted:
        raise ValueError(f"{source}: `{key}` wants {_name(wanted)}, not {value!r}")
    if not all(isinstance(x, int) or math.isfinite(x) for x in _numbers(value)):
        raise ValueError(f"{source}: `{key}` is {value!r}: it must be finite")
    return value


def _check_sizes(values: dict[str, Any], source: str) -> None:
    """Whole numbers are sizes and counts, unless they are seeds."""
    for key, value in values.items():
        low, high = (-(2**63), 2**64 - 1) if key.endswith("seed") else (0, LARGEST)
        for number in _numbers(value):
            if type(number) is int and not low <= number <= high:
                raise ValueError(f"{source}: `{key}` is {number}: it must be {low} to {high}")


def check_ranges(settings: Any, ranges: Mapping[str, tuple[float, float]], what: str = "") -> None:
    """Raises ValueError for a number of the dataclass `settings` that is not finite or lies outside its range
    (lowest, highest) in `ranges`, both ends included. Messages start with `what`."""
    for name, value in vars(settings).items():
        low, high = ranges.get(name, (-math.inf, math.inf))
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, int | float) or (low <= number <= high and abs(number) < math.inf):
                continue
            if not abs(number) < math.inf:
                rule = "it must be finite"
            elif number > high:
                rule = f"it must be at most {high:g}"
            else:
                rule = "it must be above 0" if 0 < low < 1 else f"it must be at least {low:g}"
            raise ValueError(f"{what}{name} {value}: {rule}")


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict | list | tuple | frozenset):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)
    elif isinstance(value, int | float):
        yield value


def _fit(wanted: Any, value: Any) -> tuple[bool, Any]:
    """Whether `value` is of the wanted type, and what it then becomes."""
    origin, arguments = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return True, value
    if origin is Literal:
        return any(value == a and type(value) is type(a) for a in arguments), value
    if origin in UNIONS:
        return _fit_union(arguments, value)
    if origin in (tuple, list, frozenset):
        return _fit_row(origin, arguments, value)
    if origin is dict and isinstance(value, dict):
        items = {k: _fit(arguments[1], v) for k, v in value.items()}
        return all(ok for ok, _ in items.values()), {k: v for k, (_, v) in items.items()}
    if wanted is float and type(value) is int:
        return True, float(value)
    if wanted is Path and isinstance(value, str):
        return True, Path(value)
    if wanted is int or wanted is float:
        return type(value) is wanted, value  # a bool is an int to Python, and a mistake in a recipe
    return isinstance(value, origin or wanted), value


def _fit_union(members: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    if value is None:
        return type(None) in members, None
    exact = [m for m in members if type(value) is m]  # int | float keeps an int an int
    for member in (*exact, *(m for m in members if m is not type(None))):
        fitted, converted = _fit(member, value)
        if fitted:
            return True, converted
    return False, value


def _fit_row(origin: type, arguments: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    if not isinstance(value, list | tuple | frozenset):
        return False, value
    if origin is tuple and arguments[-1:] != (Ellipsis,):
        if len(arguments) != len(value):
            return False, value
        parts = [_fit(a, v) for a, v in zip(arguments, value, strict=True)]
    else:
        parts = [_fit(arguments[0], v) for v in value]
    if not all(ok for ok, _ in parts):
        return False, value
    return True, origin(v for _, v in parts)


def _name(wanted: Any) -> str:
    origin, arguments = get_origin(wanted), get_args(wanted)
    if wanted is type(None):
        return "nothing"
    if wanted is Ellipsis:
        return "..."
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in arguments)
    if origin in UNIONS:
        return " or ".join(_name(a) for a in arguments)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_name(a) for a in arguments)}]"
    return str(getattr(wanted, "__name__", wanted))


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _make(cls: type[T], values: dict[str, Any], source: str) -> T:
    hints = get_type_hints(cls)
    for key, value in values.items():
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, dict):
            values = values | {key: _make(hints[key], value, source)}  # type: ignore[arg-type]
    unset = dataclasses.MISSING
    fields = [f for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    missing = [f.name for f in fields if f.default is unset and f.default_factory is unset]
    missing = [name for name in missing if name not in values]
    if missing:
        raise ValueError(f"{source}: `{missing[0]}` is not set and has no default")
    return cls(**values)


def cache_folder() -> Path:
    """For measured tables: $OUTPACE_CACHE, else $XDG_CACHE_HOME/outpace, else ~/.cache/outpace."""
    own, users = os.environ.get("OUTPACE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(users) if users else Path.home() / ".cache") / "outpace"
