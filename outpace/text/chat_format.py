"""The chat format of a model: messages to a prompt, generated tokens to readable parts."""

from dataclasses import dataclass
from typing import Any, Protocol

CALL, OTHER = "call", "other"


@dataclass(frozen=True, kw_only=True)
class ChatPart:
    """A message of the output, or what is new of it while it streams.

    `kind`: "final" is the answer; "commentary" is reported to the person as well, before calls; "analysis" is
    thought; "call" goes to the tool `to`; "other" is what the format has no place for. `index` counts the
    messages of one answer. `finished` False: it was cut off.
    """

    kind: str
    text: str
    index: int
    to: str | None = None
    finished: bool = True

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "to": self.to, "text": self.text, "finished": self.finished}


class ChatFormat(Protocol):
    """The messages so far, in a model's own format. An answer is fed in after `prompt`, then ended."""

    @property
    def stop(self) -> frozenset[int]: ...

    def say(self, text: str) -> None:
        """The person's next message."""
        ...

    def give_result(self, text: str) -> None:
        """The result of the call that was made last. Raises ValueError where none is open."""
        ...

    def take_back(self) -> None:
        """Forget what the person stated last."""
        ...

    def reset(self) -> None:
        """Begin again."""
        ...

    def prompt(self) -> list[int]:
        """Token ids after which the model answers."""
        ...

    def feed(self, token: int) -> ChatPart | None:
        """One more token of the answer; -> what it adds to what people read."""
        ...

    def end(self) -> list[ChatPart]:
        """The answer is over, complete or not; -> all of it. It becomes history."""
        ...
