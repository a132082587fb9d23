"""Settings, tools and messages of a chat, independent of the model's format; and their JSON."""

import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("low", "medium", "high")
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
MAX_DEPTH = 64  # of nested JSON: schemas are read recursively


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message. The fields of its header (all but `content`) are one word each, or None.

    `recipient`: the addressee, such as `functions.get_weather`; an assistant's message with one is a call.
    `content_type`: the format of a call's content; `constrained`: `<|constrain|>` announces it. `name`: a
    tool's full name (required), or the name of one of several users. `supervised` False: the message is
    context in training data, and not trained on.

    Raises ValueError for an unknown role, and for a header that could not be read back.
    """

    role: str
    content: str
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    constrained: bool = False
    name: str | None = None
    supervised: bool = True

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r}: known are {', '.join(ROLES)}")
        for field in ("channel", "recipient", "content_type", "name"):
            word = getattr(self, field)
            if word is not None and word.split() != [word]:
                raise ValueError(f"{field} {word!r}: it must be one word, without spaces")
        if self.channel is not None and self.channel.startswith("to="):
            raise ValueError(f"channel {self.channel!r} would be read as a recipient")
        if self.role == "tool" and self.name is None:
            raise ValueError("a tool's message needs the tool's name, such as functions.get_weather")
        if self.role == "tool" and not is_tool_name(self.name or ""):
            raise ValueError(f"tool name {self.name!r} would be read as something else: give it another")
        if self.constrained and self.content_type is None:
            raise ValueError("constrained, but no content_type: <|constrain|> announces one")
        if self.content_type is not None and not self.constrained and not is_bare_type(self.content_type):
            raise ValueError(
                f"content_type {self.content_type!r} would be read as a recipient: only one that "
                "<|constrain|> announces (constrained=True) may hold a dot or begin with to="
            )

    @property
    def is_call(self) -> bool:
        return self.role == "assistant" and self.recipient is not None

    @property
    def is_answer(self) -> bool:
        """The end of a turn: the text for the user."""
        return self.role == "assistant" and self.channel == FINAL and self.recipient is None


def is_bare_type(word: str) -> bool:
    """Whether a word of a header without `to=` is a content type. A dot marks a tool's name."""
    return "." not in word and not word.startswith("to=")


def is_tool_name(word: str) -> bool:
    """Whether a word in the place of the role is a tool's name, not a role or a recipient."""
    role = word.partition(":")[0]
    return not word.startswith("to=") and (role not in ROLES or word == "tool")


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function a model may call. `parameters`: a JSON schema, None for a function without any."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.name.split() != [self.name]:
            raise ValueError(f"tool name {self.name!r}: it must be one word, without spaces")
        check_depth(self.parameters, f"the schema of tool {self.name!r}")


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Tools under one name, such as a model's built-in browser and python in a system message.

    Without `tools` the description is plain text, for a tool that takes any content."""

    name: str
    tools: tuple[Tool, ...] = ()
    description: str | None = None


@dataclass(frozen=True, kw_only=True)
class System:
    """Settings of a conversation. None, or empty, leaves a line out. Dates as YYYY-MM-DD or YYYY-MM.

    The defaults are those of gpt-oss's training: instructions belong in `Developer`, not `identity`."""

    identity: str | None = "You are ChatGPT, a large language model trained by OpenAI."
    knowledge_cutoff: str | None = "2024-06"
    current_date: str | None = None
    reasoning: str | None = "medium"
    channels: tuple[str, ...] = (ANALYSIS, COMMENTARY, FINAL)
    tools: tuple[Namespace, ...] = ()

    def __post_init__(self) -> None:
        if self.reasoning is not None and self.reasoning not in EFFORTS:
            raise ValueError(f"reasoning {self.reasoning!r}: known are {', '.join(EFFORTS)}")


@dataclass(frozen=True, kw_only=True)
class Developer:
    """The application's instructions (elsewhere called the system prompt) and functions."""

    instructions: str | None = None
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Conversation:
    messages: tuple[Message, ...] = ()
    system: System | None = None
    developer: Developer | None = None


JsonObject = dict[str, Any]
T = TypeVar("T")
KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}
TEXT_PARTS = ("text", "input_text", "output_text")
CONSTRAIN = "<|constrain|>"
REASONING = ("thinking", "reasoning_content", "reasoning")
COMMON = ("role", "content", "name", "channel", "recipient", "content_type", "weight", "id", "metadata")
ROLE_KEYS = {"assistant": (*COMMON, *REASONING, "tool_calls"), "tool": (*COMMON, "tool_call_id")}
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

    Besides `messages`: `tools` (OpenAI's list of functions), `reasoning` (low, medium, high), `system` (an
    object of settings) and `developer` (an object with instructions and tools). Other keys belong to the data
    set and are ignored, unless they look like one of these misspelt.

    `system` is the system message of a conversation without settings, and the default for each setting that
    is missing; with None such a conversation has no system message.

    - system and developer messages before all others are the instructions; later ones stay where they
      are, as developer messages of their own.
    - an assistant's `thinking`, `reasoning_content` or `reasoning` is a message on the analysis channel
      before it; its content is the answer (final), or with `tool_calls` the preamble (commentary).
    - parallel calls become calls one after the other, each followed by its result: Harmony stops at every
      call. Results find their call by `tool_call_id`, else by name, else by order.
    - `weight` 0 marks a message that is not trained on.

    Raises ValueError that names the field: messages[2].tool_calls[0].function.name.
    """
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        raise ValueError("a conversation is a JSON object with a list of `messages`")
    check_depth(value, "the conversation")
    for key in value:
        near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.8)
        if near and key not in KEYS:
            raise ValueError(f"unknown key `{key}`; did you mean `{near[0]}`?")
    reader = _ConversationReader(system)
    reader.read_settings(value)
    for i, message in enumerate(value["messages"]):
        reader.read_message(_expect(message, dict, f"messages[{i}]"), f"messages[{i}]")
    return reader.conversation()


def parse_tools(value: Any, place: str = "tools") -> tuple[Tool, ...]:
    """OpenAI's list of functions: `{"type": "function", "function": {..}}`, or the inner objects alone."""
    tools = []
    for i, tool in enumerate(_expect(value, list, place)):
        where = f"{place}[{i}]"
        tool = _expect(tool, dict, where)
        if tool.get("type", "function") != "function":
            _fail(where, f"type {tool['type']!r}: only functions; built-in tools belong in system.tools")
        function = _expect(tool.get("function", tool), dict, f"{where}.function")
        name = _string(function, "name", where) or _fail(where, "a function needs a name")
        parameters = function.get("parameters")
        if parameters is not None:
            _expect(parameters, dict, f"{where}.parameters")
        description = _string(function, "description", where) or ""
        with _errors_at(where):
            tools.append(Tool(name=name, description=description, parameters=parameters))
    return tuple(tools)


def check_depth(value: Any, place: str) -> None:
    """Raises ValueError for JSON nested more than MAX_DEPTH levels deep."""
    level, depth = [value], 0
    while level := [
        inner
        for one in level
        if isinstance(one, dict | list)
        for inner in (one.values() if isinstance(one, dict) else one)
    ]:
        if (depth := depth + 1) > MAX_DEPTH:
            raise ValueError(f"{place} is nested more than {MAX_DEPTH} levels deep: flatten it")


@dataclass(eq=False)
class _Call:
    id: str | None
    message: Message
    answered: bool = False


class _ConversationReader:
    """The messages and settings read so far."""

    def __init__(self, system: System | None) -> None:
        self.system = system
        self.instructions: list[str] = []
        self.tools: tuple[Tool, ...] = ()
        self.messages: list[Message] = []
        self.calls: list[_Call] = []
        self.parallel: list[_Call] = []  # calls of the last message, not yet followed by their results

    def conversation(self) -> Conversation:
        self._place_calls()
        text = "\n\n".join(filter(None, self.instructions))
        # none where there is nothing to say: an empty developer message confuses gpt-oss
        developer = Developer(instructions=text or None, tools=self.tools) if text or self.tools else None
        return Conversation(messages=tuple(self.messages), system=self.system, developer=developer)

    def read_settings(self, value: JsonObject) -> None:
        """The settings next to `messages`."""
        for key, read in (("system", self._read_system), ("developer", self._read_developer)):
            match value.get(key):
                case None:
                    pass
                case str(text):
                    self.instructions.append(text)
                case other:
                    read(_expect(other, dict, key), key)
        effort = {key: value[key] for key in ("reasoning", "reasoning_effort") if value.get(key)}
        self._update_system(effort, "conversation")
        if value.get("tools") is not None:
            self.tools += parse_tools(value["tools"])

    def read_message(self, value: JsonObject, place: str) -> None:
        role = value.get("role")
        if role not in ROLES:
            _fail(f"{place}.role", f"{role!r}; known are {', '.join(ROLES)}")
        _check_keys(value, ROLE_KEYS.get(role, COMMON), place)
        if role == "tool":
            self._read_result(value, place)
        elif role in ("system", "developer") and not (self.messages or self.parallel):
            self._read_instructions(value.get("content"), f"{place}.content")
        else:
            self._place_calls()
            if role == "assistant":
                self._read_assistant(value, place)
                return
            content = _text(value.get("content"), f"{place}.content")
            if role != "user":  # a late change of the instructions
                role, content = "developer", f"# Instructions\n\n{content}"
            self.messages.append(_message(value, place, role=role, content=content))

    def _place_calls(self) -> None:
        """Calls without results."""
        self.messages += [call.message for call in self.parallel]
        self.parallel = []

    def _read_instructions(self, content: Any, place: str) -> None:
        if not isinstance(content, list):
            self.instructions.append(_text(content, place))
            return
        for i, part in enumerate(content):
            match part:
                case {"type": "system_content"}:
                    self._read_system(_without_type(part), f"{place}[{i}]")
                case {"type": "developer_content"}:
                    self._read_developer(_without_type(part), f"{place}[{i}]")
                case _:
                    self.instructions.append(_text([part], place))

    def _read_assistant(self, value: JsonObject, place: str) -> None:
        reasoning = {text for key in REASONING if (text := _string(value, key, place))}
        calls = _expect(value.get("tool_calls") or [], list, f"{place}.tool_calls")
        content = value.get("content")
        if len(reasoning) > 1:
            _fail(place, f"{' and '.join(key for key in REASONING if value.get(key))} differ: keep one")
        if content is None and not reasoning and not calls:
            _fail(place, "neither content nor thinking nor tool_calls: the message is empty")
        if calls and value.get("recipient"):
            _fail(place, "a recipient and tool_calls: give the call once")
        weight = {"weight": value.get("weight")}
        for text in reasoning:
            self.messages.append(_message(weight, place, role="assistant", content=text, channel=ANALYSIS))
        text = "" if content is None else _text(content, f"{place}.content")
        if text or (content is not None and not calls):
            channel = COMMENTARY if calls or value.get("recipient") else FINAL
            message = _message(value, place, role="assistant", content=text, channel=channel)
            self.messages.append(message)
            if message.is_call:
                self.calls.append(_Call(None, message))
        self.parallel = [_call(c, weight, f"{place}.tool_calls[{i}]") for i, c in enumerate(calls)]
        self.calls += self.parallel

    def _read_result(self, value: JsonObject, place: str) -> None:
        name = _string(value, "name", place)
        call = self._call_of_result(_string(value, "tool_call_id", place), name, place)
        channel, author = COMMENTARY, _full_name(name or "")
        if call is not None:
            call.answered = True
            if call in self.parallel:
                self.parallel.remove(call)
                self.messages.append(call.message)
            channel, author = call.message.channel or channel, call.message.recipient or author
        content = value.get("content")
        in_parts = isinstance(content, list) and all(
            isinstance(part, dict) and part.get("type") in TEXT_PARTS for part in content
        )
        if isinstance(content, dict | list) and not in_parts:
            content = json.dumps(content, ensure_ascii=False)
        header: JsonObject = {"name": author, "channel": channel, "recipient": "assistant"}
        if in_parts and name and "tool_call_id" not in value:  # openai_harmony's JSON gives the whole header
            header = {"name": name}
        stated = {key: one for key, one in value.items() if key != "name"}
        text = _text(content, f"{place}.content")
        self.messages.append(_message(stated, place, role="tool", content=text, **header))

    def _call_of_result(self, id: str | None, name: str | None, place: str) -> _Call | None:
        """None where only the tool's name is known."""
        if id is not None:
            same = [call for call in self.calls if call.id == id]
            if not same and name is None:
                _fail(f"{place}.tool_call_id", f"{id!r} is the id of no call before it")
            # ids are used again in later turns: the latest call without a result, else the latest
            return next((call for call in reversed(same) if not call.answered), same[-1] if same else None)
        unanswered = [call for call in self.calls if not call.answered]
        if name is not None:
            names = (name, _full_name(name))
            return next((call for call in unanswered if call.message.recipient in names), None)
        if not unanswered:
            _fail(place, "a result without a call: give the tool's `name`")
        return unanswered[0]

    def _update_system(self, given: JsonObject, place: str) -> None:
        values: JsonObject = {SETTINGS[key]: _string(given, key, place) for key in given}
        if values.get("reasoning"):
            values["reasoning"] = values["reasoning"].lower()
        with _errors_at(place):
            self.system = replace(self.system or System(), **values) if values else self.system

    def _read_system(self, given: JsonObject, place: str) -> None:
        _check_keys(given, (*SETTINGS, "channels", "channel_config", "tools"), place)
        self.system = self.system or System()
        self._update_system({key: value for key, value in given.items() if key in SETTINGS}, place)
        config = _expect(given.get("channel_config") or {}, dict, f"{place}.channel_config")
        if config.get("channel_required") is False:
            _fail(f"{place}.channel_config", "channels that are not required: gpt-oss does not know them")
        channels = given.get("channels", config.get("valid_channels"))
        if channels is not None:
            if not isinstance(channels, list) or not all(isinstance(c, str) for c in channels):
                _fail(f"{place}.channels", f"must be a list of names, not {_shown(channels)}")
            self.system = replace(self.system, channels=tuple(channels))
        spaces = _expect(given.get("tools") or {}, dict, f"{place}.tools")
        tools = tuple(_namespace(spaces[name], name, f"{place}.tools.{name}") for name in sorted(spaces))
        self.system = replace(self.system, tools=tools or self.system.tools)

    def _read_developer(self, value: JsonObject, place: str) -> None:
        _check_keys(value, ("instructions", "tools"), place)
        self.instructions.append(_string(value, "instructions", place) or "")
        match value.get("tools"):
            case None:
                pass
            case {"functions": {"tools": tools}, **others} if not others:
                self.tools += parse_tools(tools, f"{place}.tools.functions.tools")
            case tools:
                self.tools += parse_tools(tools, f"{place}.tools")


def _without_type(part: JsonObject) -> JsonObject:
    return {key: value for key, value in part.items() if key != "type"}


def _namespace(value: Any, name: str, place: str) -> Namespace:
    value = _expect(value, dict, place)
    tools = parse_tools(value.get("tools") or [], f"{place}.tools")
    return Namespace(name=name, tools=tools, description=_string(value, "description", place))


def _call(value: Any, weight: JsonObject, place: str) -> _Call:
    value = _expect(value, dict, place)
    if value.get("type", "function") != "function":
        _fail(f"{place}.type", f"{value['type']!r}: only functions can be called")
    inner = f"{place}.function" if "function" in value else place
    function = _expect(value.get("function", value), dict, inner)
    name = _string(function, "name", inner) or _fail(f"{inner}.name", "the name of the function is missing")
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
    return _Call(_string(value, "id", place), message)


def _full_name(name: str) -> str:
    """Functions are in a namespace of that name; a name with a dot has a namespace already."""
    return name if "." in name or not name else f"functions.{name}"


def _message(value: JsonObject, place: str, **known: Any) -> Message:
    """`known`, updated with the header fields in `value`."""
    header = {key: word for key in ("channel", "recipient", "name") if (word := _string(value, key, place))}
    if header.get("recipient") == "all":
        del header["recipient"]
    content_type = _string(value, "content_type", place)
    if content_type:
        constrained = content_type.startswith(CONSTRAIN)
        known |= {"content_type": content_type.removeprefix(CONSTRAIN), "constrained": constrained}
    weight = value.get("weight")
    if weight not in (None, 0, 1):
        _fail(f"{place}.weight", f"must be 0 (not trained on) or 1, not {_shown(weight)}")
    with _errors_at(place):
        return Message(**(known | header), supervised=weight != 0)


def _text(content: Any, place: str) -> str:
    """The text of a message, whole or in parts."""
    if isinstance(content, list):
        return "".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))
    return _fail(place, "there is no text") if content is None else _expect(content, str, place)


def _part(part: Any, place: str) -> str:
    match part:
        case str():
            return part
        case {"type": kind, "text": str(text)} if kind in TEXT_PARTS:
            return text
        case {"type": kind}:
            return _fail(place, f"a part of type {kind!r}: only text is supported")
    return _fail(place, f"must be a part with type and text, not {_shown(part)}")


def _fail(place: str, problem: str) -> NoReturn:
    raise ValueError(f"{place}: {problem}")


@contextmanager
def _errors_at(place: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _expect(value: Any, kind: type[T], place: str) -> T:
    return value if isinstance(value, kind) else _fail(place, f"must be {KINDS[kind]}, not {_shown(value)}")


def _string(given: JsonObject, key: str, place: str) -> str | None:
    value = given.get(key)
    return None if value is None else _expect(value, str, f"{place}.{key}")


def _check_keys(given: JsonObject, known: tuple[str, ...], place: str) -> None:
    """Unknown keys without a value are harmless."""
    for key, value in given.items():
        if key not in known and value not in (None, "", [], {}):
            _fail(place, f"unknown key `{key}`; known are {', '.join(known)}")


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    return KINDS[type(value)] if isinstance(value, list | dict) else json.dumps(value)
