"""The chat format of a model: messages to a prompt, generated tokens to readable parts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

CALL, OTHER = "call", "other"
SchemaText = Callable[[Mapping[str, Any]], str]  # writes a JSON schema in llguidance's language


@dataclass(frozen=True, kw_only=True)
class ChatPart:
    """A message of the output, or the next piece of it while it streams.

    `kind`: "final" is the answer; "commentary" is text for the user before calls; "analysis" is reasoning;
    "call" is a call of the tool `to`; "other" does not follow the format. `index` counts the messages of one
    answer. `finished` False: it was cut off.
    """

    kind: str
    text: str
    index: int
    to: str | None = None
    finished: bool = True

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "to": self.to, "text": self.text, "finished": self.finished}


class ChatFormat(Protocol):
    """A chat's messages in a model's own format. After `prompt`, an answer goes to `feed`, then `end`."""

    @property
    def stop(self) -> frozenset[int]: ...

    @property
    def answer_ends(self) -> frozenset[int]:
        """The tokens that may end the text for the user."""

    def answer_begins(self, tokens: Sequence[int]) -> bool:
        """Whether the text for the user begins after these tokens of an answer: after the reasoning."""

    def call_grammar(self, name: str | None, schema_text: SchemaText) -> str:
        """An answer that ends in a call of one of the chat's functions, or of the one with this name, in
        llguidance's language. Raises ValueError where there is no such function, or the format has no
        calls."""

    def free_grammar(
        self, strict: Collection[str], answer: Mapping[str, Any] | None, schema_text: SchemaText
    ) -> str:
        """An answer that is text for the user, of the schema `answer` where there is one, or ends in a call;
        the arguments of the functions in `strict` have the form of their schemas. Raises ValueError as
        `call_grammar`."""

    @property
    def call_ends(self) -> frozenset[int]:
        """The tokens that may end a call."""

    def add_user(self, text: str) -> None:
        """Add the user's next message."""

    def add_tool_result(self, text: str) -> None:
        """Add the result of the last call. Raises ValueError where there is none."""

    def remove_last(self) -> None:
        """Remove the last message."""

    def reset(self) -> None:
        """Remove all messages."""

    def prompt(self) -> list[int]:
        """Token ids after which the model answers."""

    def feed(self, token: int) -> ChatPart | None:
        """One more token of the answer; -> the text that it adds."""

    def end(self) -> list[ChatPart]:
        """The answer is over, complete or not; -> all of it. It becomes part of the messages."""
