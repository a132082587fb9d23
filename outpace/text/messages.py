"""Parts of a chat: settings, tools and messages; frozen, checked when made, of no one format."""

import difflib
import json
from dataclasses import dataclass, replace
from typing import Any, NoReturn

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("low", "medium", "high")
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
MAX_DEPTH = 64  # of nested JSON: schemas are read recursively


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message. What is in its header (all but `content`) is one word each, or None for absent.

    `recipient`: who is addressed, such as `functions.get_weather`; an assistant's message with one is a
    call. `content_type` is the format a call's content is written in; `constrained`: it was announced by
    `<|constrain|>`. `name`: a tool's full name (a tool must have one), or which of several users speaks.
    `supervised` False: training data holds this message, but a model shall not learn to say it.

    Raises ValueError for a role nobody has, and for a header that could not be read back.
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

    def with_content(self, content: str) -> "Message":
        return replace(self, content=content)

    @property
    def is_call(self) -> bool:
        return self.role == "assistant" and self.recipient is not None

    @property
    def is_answer(self) -> bool:
        """The end of a turn: what the person who asked gets to read."""
        return self.role == "assistant" and self.channel == FINAL and self.recipient is None


def is_bare_type(word: str) -> bool:
    """Whether a header's word without `to=` names a content type. A dot marks a tool's name."""
    return "." not in word and not word.startswith("to=")


def is_tool_name(word: str) -> bool:
    """Whether a word in the place of the role names a tool, and is neither a role nor a recipient."""
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
    """Tools under one name, as a system message describes a model's built-in ones (browser, python).

    Without `tools` the description is plain text, as for a tool that takes whatever it is sent."""

    name: str
    tools: tuple[Tool, ...] = ()
    description: str | None = None


@dataclass(frozen=True, kw_only=True)
class System:
    """The settings of a conversation. None, or empty, leaves a line out. Dates as YYYY-MM-DD or YYYY-MM.

    The defaults are what gpt-oss was trained with: instructions belong into `Developer`, not `identity`."""

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
    """What the application wants of the model (elsewhere called the system prompt), and its functions."""

    instructions: str | None = None
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Conversation:
    messages: tuple[Message, ...] = ()
    system: System | None = None
    developer: Developer | None = None


JsonValue = dict[str, Any]
TEXT_PARTS = ("text", "input_text", "output_text")


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
        parts = isinstance(content, list) and _are_parts(content)
        if isinstance(content, dict | list) and not parts:
            content = json.dumps(content, ensure_ascii=False)
        result = text(content, f"{place}.content")
        values = {key: value for key, value in values.items() if key != "name"}
        header: JsonValue = {"name": author, "channel": channel, "recipient": "assistant"}
        if parts and name and "tool_call_id" not in values:  # openai_harmony's JSON states the whole header
            header = {"name": name}
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
    check_depth(value, "the conversation")
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
