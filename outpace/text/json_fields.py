"""Fields of a JSON object by type; what is wrong is reported with its place: messages[2].content."""

import json
from typing import Any, NoReturn

JsonValue = dict[str, Any]
TEXT_PARTS = ("text", "input_text", "output_text")


def fail(place: str, problem: str) -> NoReturn:
    raise ValueError(f"{place}: {problem}")


def kind(value: Any) -> str:
    """A JSON value in a reader's words."""
    match value:
        case str():
            return f"the text {value[:40]!r}"
        case list():
            return "a list"
        case dict():
            return "an object"
    return json.dumps(value)


def string(given: JsonValue, key: str, place: str) -> str | None:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        fail(f"{place}.{key}", f"a text is wanted, not {kind(value)}")
    return value


def an_object(value: Any, place: str) -> JsonValue:
    if not isinstance(value, dict):
        fail(place, f"an object is wanted, not {kind(value)}")
    return value


def a_list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        fail(place, f"a list is wanted, not {kind(value)}")
    return value


def check_keys(given: JsonValue, known: tuple[str, ...], place: str) -> None:
    """What is empty cannot be lost."""
    for key, value in given.items():
        if key not in known and value not in (None, "", [], {}):
            fail(place, f"unknown key `{key}`; known are {', '.join(known)}")


def text(content: Any, place: str) -> str:
    """A message's text, given whole or in parts."""
    match content:
        case None:
            fail(place, "a text is wanted, there is none")
        case str():
            return content
        case list():
            return "".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))
    fail(place, f"a text is wanted, not {kind(content)}")


def _part(part: Any, place: str) -> str:
    match part:
        case str():
            return part
        case {"type": named, "text": str(found)} if named in TEXT_PARTS:
            return found
        case {"type": named}:
            fail(place, f"a part of type {named!r}: only text can be here")
    fail(place, f"a part with type and text is wanted, not {kind(part)}")
