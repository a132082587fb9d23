"""Parts of a chat: settings, tools and messages; frozen, checked when made, of no one format."""

from dataclasses import dataclass, replace
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("low", "medium", "high")
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message. What is in its header (all but `content`) is one word each, or None for absent.

    `recipient`: who is addressed, such as `functions.get_weather`; an assistant's message with one is a
    call. `content_type` states what a call's content is written in; `constrained`: it was announced by
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
