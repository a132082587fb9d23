"""A Harmony header: who speaks, to whom, on which channel, in which type; in the orders models write it."""

from dataclasses import dataclass, field

from outpace.text.harmony import Mark
from outpace.text.messages import ROLES, Message, is_bare_type, is_tool_name


@dataclass(frozen=True)
class HeaderRead:
    header: Message  # without content, except of a message that has no <|message|>
    faults: tuple[str, ...]


@dataclass
class HarmonyHeader:
    """The parts between `<|start|>` and `<|message|>`: the first belongs to the role, each further one to
    the mark before it. With `role`, that word was generated before the first token came."""

    role: str | None = None
    parts: list[tuple[Mark | None, bytearray]] = field(default_factory=lambda: [(None, bytearray())])
    faults: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return len(self.parts) == 1 and not self.parts[0][1].strip()

    @property
    def unparsed(self) -> bool:
        """Whether a cut here loses nothing: not even the role is out, or only a role is."""
        fresh = self.role is None and not self.faults and len(self.parts) == 1
        return self.empty or (fresh and len(self.parts[0][1].split()) == 1)

    def text(self, more: bytes) -> None:
        self.parts[-1][1].extend(more)

    def mark(self, mark: Mark) -> None:
        """`<|channel|>` or `<|constrain|>`."""
        self.parts.append((mark, bytearray()))

    def parse(self) -> HeaderRead:
        """The header before `<|message|>`. A recipient (to=..) may are next to the role or the channel, a
        content type after the recipient, after the channel or after `<|constrain|>`."""
        read = _Reading(list(self.faults))
        for mark, text in self.parts:
            read.part(mark, text.decode("utf-8", "replace").split(), self.role)
        return HeaderRead(read.message(), tuple(read.faults))

    def without_message(self) -> HeaderRead:
        """A header that ended otherwise: role and channel as far as they came, all else is content."""
        faults = [*self.faults, "a message without <|message|>"]
        role, channel, texts = self.role or "assistant", None, []
        for mark, raw in self.parts:
            text = raw.decode("utf-8", "replace").strip()
            word, *rest = text.split(None, 1) or [""]
            if mark is None and self.role is None and word in ROLES and word != "tool":
                role, text = word, "".join(rest)
            elif mark is Mark.CHANNEL and channel is None and word and not word.startswith("to="):
                channel, text = word, "".join(rest)
            texts.append(text)
        content = " ".join(filter(None, texts))
        return HeaderRead(Message(role=role, channel=channel, content=content), tuple(faults))


@dataclass
class _Reading:
    """Words of a header, as they are understood."""

    faults: list[str]
    role: str = "assistant"
    name: str | None = None
    channel: str | None = None
    recipient: str | None = None
    type: str | None = None
    loose: list[str] = field(default_factory=list)  # words that nothing announced

    def part(self, mark: Mark | None, words: list[str], role: str | None) -> None:
        match mark:
            case None:
                words = self._author(words, role)
            case Mark.CHANNEL:
                if not words or words[0].startswith("to="):
                    self.faults.append("<|channel|> without a name")
                elif self.channel is not None:
                    self.faults.append("a second <|channel|>")
                    words = words[1:]
                else:
                    self.channel, words = words[0], words[1:]
            case _:
                if not words or self.type is not None:
                    self.faults.append("<|constrain|> without a type" if not words else "two content types")
                    words = words[1:]
                else:
                    self.type, words = words[0], words[1:]
        for word in words:
            if not word.startswith("to="):
                self.loose.append(word)
            elif self.recipient is None and word != "to=":
                self.recipient = word.removeprefix("to=")
            else:
                self.faults.append("a second recipient" if self.recipient else "to= without a recipient")

    def message(self) -> Message:
        """Of the loose words, one with a dot is the recipient, another the type; more are none of both."""
        constrained = self.type is not None
        if self.recipient is None and self.loose and "." in self.loose[0]:
            self.recipient = self.loose.pop(0)
        if not constrained and self.loose and is_bare_type(self.loose[0]):
            self.type = self.loose.pop(0)
        if self.loose:
            self.faults.append(f"words in a header that mean nothing: {' '.join(self.loose)[:80]!r}")
        if self.role == "tool" and self.recipient is None and "." not in (self.name or ""):
            self.faults.append(f"{self.name!r} is no role")
        return Message(
            role=self.role,
            name=self.name,
            channel=self.channel,
            recipient=self.recipient,
            content_type=self.type,
            constrained=constrained,
            content="",
        )

    def _author(self, words: list[str], known: str | None) -> list[str]:
        """Takes the author, where no one stated it before; -> the other words."""
        if known is not None:
            self.role = known
            return words[1:] if words[:1] == [known] else words
        if not words or words[0].startswith("to="):
            self.faults.append("a message without a role")
            return words
        role, colon, name = words[0].partition(":")
        if role in ROLES and role != "tool":
            self.role, self.name = role, name or None
            if colon and not name:
                self.faults.append(f"{words[0]} without a name")
        elif is_tool_name(words[0]):
            self.role, self.name = "tool", words[0]
        else:
            self.faults.append(f"{words[0]!r} is no role")
        return words[1:]
