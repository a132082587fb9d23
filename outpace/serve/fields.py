"""What this server would pass over in a request is refused by name, inside messages and tools too."""

from collections.abc import Sequence as Rows
from typing import Any

from outpace.serve.schema import ChatBody, Sampled, Speculative
from outpace.text.messages import TEXT_PARTS

UNKNOWN = "this server does not implement it; leave it out"
INSTRUCTIONS = ("role", "content")
MESSAGE = (*INSTRUCTIONS, "name", "channel", "recipient", "content_type")
REASONING = ("reasoning", "reasoning_content", "thinking")
ROLES = {
    "system": INSTRUCTIONS,
    "developer": INSTRUCTIONS,
    "assistant": (*MESSAGE, *REASONING, "tool_calls"),
    "tool": (*MESSAGE, "tool_call_id"),
}
FUNCTION = ("name", "description", "parameters", "strict")


class FieldError(ValueError):
    """A field that is refused, with its place in the body."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


def only(value: dict[str, Any], place: str, *known: str) -> None:
    """Raises FieldError for a field that is not `known`; one without a value is harmless."""
    for name, given in value.items():
        if name not in known and given not in (None, "", [], {}):
            raise FieldError(f"{place}.{name}", UNKNOWN)


def check_body(body: Sampled) -> None:
    """Raises FieldError for what is unknown, and for what another field leaves without an effect."""
    if body.stream_options is not None and not body.stream:
        raise FieldError("stream_options", "only a stream has them: set stream, or leave them out")
    if not isinstance(body, ChatBody):
        return
    if body.top_logprobs and not body.logprobs:
        raise FieldError("top_logprobs", "they come with logprobs: set it, or leave them out")
    if body.max_completion_tokens not in (None, body.max_tokens) and body.max_tokens is not None:
        raise FieldError("max_tokens", "max_completion_tokens is another number: give one of them")
    asked = body.speculative
    if body.prediction is not None and (asked is False or (isinstance(asked, Speculative) and asked.method)):
        raise FieldError("prediction", "speculative asks for another draft, or none: give one of them")
    if body.prediction is not None:
        check_parts(body.prediction.content, "prediction.content")
    for i, message in enumerate(body.messages):
        check_message(message, f"messages[{i}]")
    for i, tool in enumerate(body.tools or ()):
        check_tool(tool, f"tools[{i}]")


def check_message(message: dict[str, Any], place: str) -> None:
    role = message.get("role")
    only(message, place, *ROLES.get(role if isinstance(role, str) else "", MESSAGE))
    check_parts(message.get("content"), f"{place}.content")
    calls = message.get("tool_calls")
    for i, call in enumerate(_objects(calls)):
        where = f"{place}.tool_calls[{i}]"
        if isinstance(function := call.get("function"), dict):
            only(call, where, "id", "type", "function")
            only(function, f"{where}.function", "name", "arguments")
        else:
            only(call, where, "id", "type", "name", "arguments")


def check_parts(content: Any, place: str) -> None:
    """The parts of a message's text."""
    for i, part in enumerate(_objects(content)):
        if part.get("type") in TEXT_PARTS:  # others are refused or read where texts are
            only(part, f"{place}[{i}]", "type", "text")


def check_tool(tool: dict[str, Any], place: str) -> None:
    function = tool
    if isinstance(inner := tool.get("function"), dict):
        only(tool, place, "type", "function")
        function, place = inner, f"{place}.function"
    only(function, place, "type", *FUNCTION)
    if type(function.get("strict")) not in (bool, type(None)):
        raise FieldError(f"{place}.strict", f"{function['strict']!r}: it must be true or false")


def _objects(value: Any) -> Rows[dict[str, Any]]:
    return [each if isinstance(each, dict) else {} for each in value] if isinstance(value, list) else ()
