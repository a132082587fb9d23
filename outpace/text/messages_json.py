"""JSON -> messages: thoughts and calls become messages of their own, and results find their call."""

import json
from dataclasses import dataclass
from typing import Any

from outpace.text.json_fields import (
    TEXT_PARTS,
    JsonValue,
    a_list,
    an_object,
    check_keys,
    fail,
    kind,
    string,
    text,
)
from outpace.text.messages import ANALYSIS, COMMENTARY, FINAL, ROLES, Message

CONSTRAIN = "<|constrain|>"
THOUGHTS = ("thinking", "reasoning_content", "reasoning")
COMMON = ("role", "content", "name", "channel", "recipient", "content_type", "weight", "id", "metadata")
ROLE_KEYS = {"assistant": (*COMMON, *THOUGHTS, "tool_calls"), "tool": (*COMMON, "tool_call_id")}


@dataclass(eq=False)
class Call:
    id: str | None
    message: Message
    answered: bool = False


class MessageReader:
    """The messages read so far (`done`), and the calls among them, which results refer to."""

    def __init__(self) -> None:
        self.done: list[Message] = []
        self.calls: list[Call] = []
        self.waiting: list[Call] = []  # made at once, and not yet followed by their results

    @property
    def began(self) -> bool:
        return bool(self.done or self.waiting)

    def add(self, value: JsonValue, place: str) -> None:
        role = value.get("role")
        if role not in ROLES:
            fail(f"{place}.role", f"{role!r}; known are {', '.join(ROLES)}")
        check_keys(value, ROLE_KEYS.get(role, COMMON), place)
        if role == "tool":
            self._result(value, place)
            return
        self.place_waiting()
        if role == "assistant":
            self._assistant(value, place)
            return
        content = text(value.get("content"), f"{place}.content")
        if role != "user":  # a late change of the instructions
            role, content = "developer", f"# Instructions\n\n{content}"
        self.done.append(_message(value, place, role=role, content=content))

    def place_waiting(self) -> None:
        """Calls where the results never came."""
        self.done += [call.message for call in self.waiting]
        self.waiting = []

    def _assistant(self, value: JsonValue, place: str) -> None:
        thoughts = {thought for key in THOUGHTS if (thought := string(value, key, place))}
        calls = a_list(value.get("tool_calls") or [], f"{place}.tool_calls")
        content = value.get("content")
        if len(thoughts) > 1:
            fail(place, f"{' and '.join(k for k in THOUGHTS if value.get(k))} differ: keep one of them")
        if content is None and not thoughts and not calls:
            fail(place, "neither content nor thinking nor tool_calls: the assistant generates nothing")
        weight = {"weight": value.get("weight")}
        for thought in thoughts:
            self.done.append(_message(weight, place, role="assistant", content=thought, channel=ANALYSIS))
        if calls and value.get("recipient"):
            fail(place, "a recipient and tool_calls: say the call once")
        addressed = bool(calls or value.get("recipient"))
        content_text = "" if content is None else text(content, f"{place}.content")
        if content_text or (content is not None and not calls):
            channel = COMMENTARY if addressed else FINAL
            message = _message(value, place, role="assistant", content=content_text, channel=channel)
            self.done.append(message)
            if message.is_call:
                self.calls.append(Call(None, message))
        self.waiting = [_call(c, weight, f"{place}.tool_calls[{i}]") for i, c in enumerate(calls)]
        self.calls += self.waiting

    def _result(self, values: JsonValue, place: str) -> None:
        name = string(values, "name", place)
        call = self._answered(string(values, "tool_call_id", place), name, place)
        channel, author = COMMENTARY, _full_name(name or "")
        if call is not None:
            call.answered = True
            if call in self.waiting:
                self.waiting.remove(call)
                self.done.append(call.message)
            channel, author = call.message.channel or channel, call.message.recipient or author
        content = values.get("content")
        if isinstance(content, dict) or (isinstance(content, list) and not _are_parts(content)):
            content = json.dumps(content, ensure_ascii=False)
        result = text(content, f"{place}.content")
        values = {key: value for key, value in values.items() if key != "name"}
        header = {"name": author, "channel": channel, "recipient": "assistant"}
        self.done.append(_message(values, place, role="tool", content=result, **header))

    def _answered(self, id: str | None, name: str | None, place: str) -> Call | None:
        """The call a result belongs to; None where only the tool's name is known."""
        if id is not None:
            same = [c for c in self.calls if c.id == id]
            if not same and name is None:
                fail(f"{place}.tool_call_id", f"{id!r} is the id of no call before it")
            # ids are used again in later turns: the latest call that still waits, else the latest
            return next((c for c in reversed(same) if not c.answered), same[-1] if same else None)
        unanswered = [c for c in self.calls if not c.answered]
        if name is not None:
            return next((c for c in unanswered if c.message.recipient in (name, _full_name(name))), None)
        if not unanswered:
            fail(place, "a result without a call before it: give the tool's `name`")
        return unanswered[0]


def _call(value: Any, weight: JsonValue, place: str) -> Call:
    value = an_object(value, place)
    if value.get("type", "function") != "function":
        fail(f"{place}.type", f"{value['type']!r}: only functions can be called")
    inner = f"{place}.function" if "function" in value else place
    function = an_object(value.get("function", value), inner)
    name = string(function, "name", inner)
    if not name:
        fail(f"{inner}.name", "the function's name is wanted, there is none")
    arguments = function.get("arguments", {})
    message = _message(
        weight,
        inner,
        role="assistant",
        channel=COMMENTARY,
        recipient=_full_name(name),
        content_type="json",
        constrained=True,
        content=arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
    )
    return Call(string(value, "id", place), message)


def _full_name(name: str) -> str:
    """Functions live in a namespace of that name; a name with a dot has its own already."""
    return name if "." in name or not name else f"functions.{name}"


def _message(value: JsonValue, place: str, **known: Any) -> Message:
    """`known`, updated with the header fields in `text`."""
    header = {key: word for key in ("channel", "recipient", "name") if (word := string(value, key, place))}
    if header.get("recipient") == "all":
        del header["recipient"]
    content_type = string(value, "content_type", place)
    if content_type:
        constrained = content_type.startswith(CONSTRAIN)
        known |= {"content_type": content_type.removeprefix(CONSTRAIN), "constrained": constrained}
    weight = value.get("weight")
    if weight not in (None, 0, 1):
        fail(f"{place}.weight", f"{kind(weight)}; 0 (not to be learned) or 1 is wanted")
    try:
        return Message(**(known | header), supervised=weight != 0)
    except ValueError as error:
        fail(place, str(error))


def _are_parts(content: list[Any]) -> bool:
    return all(isinstance(part, dict) and part.get("type") in TEXT_PARTS for part in content)
