"""JSON -> a Conversation: messages as the OpenAI API, chat templates and openai_harmony write them."""

import difflib
from dataclasses import replace
from typing import Any

from outpace.text.json_fields import JsonValue, a_list, an_object, check_keys, fail, kind, string, text
from outpace.text.messages import Conversation, Developer, Namespace, System, Tool
from outpace.text.messages_json import COMMON, MessageReader

KEYS = ("messages", "tools", "system", "developer", "reasoning", "reasoning_effort")
SETTINGS = {
    "identity": "identity",
    "model_identity": "identity",
    "reasoning": "reasoning",
    "reasoning_effort": "reasoning",
    "current_date": "current_date",
    "conversation_start_date": "current_date",
    "knowledge_cutoff": "knowledge_cutoff",
}


def parse_conversation(value: Any, *, system: System | None = None) -> Conversation:
    """A conversation from decoded JSON: an object with `messages`, or the list of messages itself.

    Alongside `messages`: `tools` (OpenAI's list of functions), `reasoning` (low, medium, high), `system` (an
    object of settings) and `developer` (an object with instructions and tools). Other keys are the data
    set's own and are ignored, unless they look like one of these misspelt.

    `system` is the system message of a conversation that states nothing of it, and what its settings
    replace; with None such a conversation has no system message.

    - system and developer messages before all others are the instructions; later ones stay where they
      are, as developer messages of their own.
    - an assistant's `thinking`, `reasoning_content` or `reasoning` is a message on the analysis channel
      before it; its content is the answer (final), or with `tool_calls` the preamble (commentary).
    - calls made at once become calls one after the other, each followed by its result: Harmony stops at
      every call. Results find their call by `tool_call_id`, else by name, else by order.
    - `weight` 0 marks a message that shall not be learned.

    Raises ValueError that names the field: messages[2].tool_calls[0].function.name.
    """
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        raise ValueError("a conversation is a JSON object with a list of `messages`")
    for key in value:
        near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.8)
        if near and key not in KEYS:
            raise ValueError(f"unknown key `{key}`; did you mean `{near[0]}`?")
    settings = _Settings(system)
    settings.read(value)
    reader = MessageReader()
    for i, message in enumerate(value["messages"]):
        place = f"messages[{i}]"
        an_object(message, place)
        if reader.began or not settings.take(message, place):
            reader.add(message, place)
    reader.place_waiting()
    return Conversation(messages=tuple(reader.done), system=settings.system, developer=settings.developer())


def parse_tools(value: Any, place: str = "tools") -> tuple[Tool, ...]:
    """OpenAI's list of functions: `{"type": "function", "function": {..}}`, or the inner objects alone."""
    items = []
    for i, tool in enumerate(a_list(value, place)):
        where = f"{place}[{i}]"
        tool = an_object(tool, where)
        if tool.get("type", "function") != "function":
            fail(where, f"type {tool['type']!r}: only functions; built-in tools are in system.tools")
        function = an_object(tool.get("function", tool), f"{where}.function")
        name = string(function, "name", where)
        if not name:
            fail(where, "a function needs a name")
        parameters = function.get("parameters")
        if parameters is not None:
            an_object(parameters, f"{where}.parameters")
        description = string(function, "description", where) or ""
        try:
            items.append(Tool(name=name, description=description, parameters=parameters))
        except ValueError as error:
            fail(where, str(error))
    return tuple(items)


class _Settings:
    """What a conversation states before its first message."""

    def __init__(self, system: System | None) -> None:
        self.system = system
        self.instructions: list[str] = []
        self.tools: tuple[Tool, ...] = ()

    def developer(self) -> Developer | None:
        """None where there is nothing to say: an empty developer message confuses gpt-oss."""
        message = "\n\n".join(filter(None, self.instructions))
        return Developer(instructions=message or None, tools=self.tools) if message or self.tools else None

    def read(self, value: JsonValue) -> None:
        """The settings alongside `messages`."""
        for key, part in (("system", self._system), ("developer", self._developer)):
            match value.get(key):
                case None:
                    pass
                case str(found):
                    self.instructions.append(found)
                case found:
                    part(an_object(found, key), key)
        self._replace(
            {key: value[key] for key in ("reasoning", "reasoning_effort") if value.get(key)}, "conversation"
        )
        if value.get("tools") is not None:
            self.tools += parse_tools(value["tools"])

    def take(self, message: JsonValue, place: str) -> bool:
        """Whether the message was one of the settings."""
        if message.get("role") not in ("system", "developer"):
            return False
        check_keys(message, COMMON, place)
        content, place = message.get("content"), f"{place}.content"
        if not isinstance(content, list):
            self.instructions.append(text(content, place))
            return True
        for i, part in enumerate(content):
            where = f"{place}[{i}]"
            match part:
                case {"type": "system_content"}:
                    self._system({k: v for k, v in part.items() if k != "type"}, where)
                case {"type": "developer_content"}:
                    self._developer({k: v for k, v in part.items() if k != "type"}, where)
                case _:
                    self.instructions.append(text([part], place))
        return True

    def _replace(self, given: JsonValue, place: str) -> None:
        values: JsonValue = {}
        for key in given:
            value = string(given, key, place)
            values[SETTINGS[key]] = value.lower() if value and SETTINGS[key] == "reasoning" else value
        try:
            self.system = replace(self.system or System(), **values) if values else self.system
        except ValueError as error:
            fail(place, str(error))

    def _system(self, given: JsonValue, place: str) -> None:
        check_keys(given, (*SETTINGS, "channels", "channel_config", "tools"), place)
        self.system = self.system or System()
        self._replace({key: value for key, value in given.items() if key in SETTINGS}, place)
        config = an_object(given.get("channel_config") or {}, f"{place}.channel_config")
        if config.get("channel_required") is False:
            fail(f"{place}.channel_config", "channels that are not required: gpt-oss does not know them")
        channels = given.get("channels", config.get("valid_channels"))
        if channels is not None:
            if not isinstance(channels, list) or not all(isinstance(c, str) for c in channels):
                fail(f"{place}.channels", f"a list of names is wanted, not {kind(channels)}")
            self.system = replace(self.system, channels=tuple(channels))
        spaces = an_object(given.get("tools") or {}, f"{place}.tools")
        entries = [_namespace(spaces[name], name, f"{place}.tools.{name}") for name in sorted(spaces)]
        self.system = replace(self.system, tools=tuple(entries) or self.system.tools)

    def _developer(self, value: JsonValue, place: str) -> None:
        check_keys(value, ("instructions", "tools"), place)
        self.instructions.append(string(value, "instructions", place) or "")
        match value.get("tools"):
            case None:
                pass
            case {"functions": {"tools": tools}, **others} if not others:
                self.tools += parse_tools(tools, f"{place}.tools.functions.tools")
            case tools:
                self.tools += parse_tools(tools, f"{place}.tools")


def _namespace(value: Any, name: str, place: str) -> Namespace:
    value = an_object(value, place)
    tools = parse_tools(value.get("tools") or [], f"{place}.tools")
    return Namespace(name=name, tools=tools, description=string(value, "description", place))
