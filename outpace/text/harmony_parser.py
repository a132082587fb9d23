"""Harmony, read back: token ids one at a time -> messages, and their text while it is being written."""

import codecs
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer

from outpace.text.chat_format import CALL, OTHER, ChatPart, SchemaText
from outpace.text.harmony import ENDS, HarmonyTokens, Mark, prompt_ids
from outpace.text.messages import (
    ANALYSIS,
    COMMENTARY,
    FINAL,
    ROLES,
    Conversation,
    Developer,
    Message,
    System,
    Tool,
    is_bare_type,
    is_tool_name,
)

# of a function without parameters
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A message as the model wrote it. `end`: the token that ended it, None if it was cut off. `errors`:
    departures from the format; such a message is a best guess."""

    message: Message
    end: Mark | None
    errors: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.end is not None


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The next whole characters of message `index`; `header` is that message without content. An empty
    message has one with an empty text, at its end."""

    index: int
    header: Message
    text: str


@dataclass
class _Header:
    """The parts between `<|start|>` and `<|message|>`: the first belongs to the role, each further one to
    the mark before it. `role`: the prompt's, where it gave one before the first token."""

    role: str | None = None
    parts: list[tuple[Mark | None, bytearray]] = field(default_factory=lambda: [(None, bytearray())])
    errors: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return len(self.parts) == 1 and not self.parts[0][1].strip()

    @property
    def at_most_a_role(self) -> bool:
        """Whether output that is cut off here loses nothing."""
        fresh = self.role is None and not self.errors and len(self.parts) == 1
        return self.empty or (fresh and len(self.parts[0][1].split()) == 1)

    def parse(self) -> tuple[Message, list[str]]:
        """-> the message without content, and further errors. A recipient (to=..) may follow the role or the
        channel, a content type the recipient, the channel or `<|constrain|>`."""
        errors: list[str] = []
        channel, recipient, kind = None, None, None
        loose: list[str] = []  # words without a mark or to=
        role, name, words = self._author(_words(self.parts[0][1]), errors)
        for mark, text in self.parts:
            words = words if mark is None else _words(text)
            if mark is Mark.CHANNEL and (not words or words[0].startswith("to=")):
                errors.append("<|channel|> without a name")
            elif mark is Mark.CHANNEL and channel is None:
                channel, *words = words
            elif mark is Mark.CHANNEL:
                errors.append("a second <|channel|>")
                words = words[1:]
            elif mark is Mark.CONSTRAIN and words and kind is None:
                kind, *words = words
            elif mark is Mark.CONSTRAIN:
                errors.append("two content types" if words else "<|constrain|> without a type")
                words = words[1:]
            for word in words:
                if not word.startswith("to="):
                    loose.append(word)
                elif recipient is None and word != "to=":
                    recipient = word.removeprefix("to=")
                else:
                    errors.append("a second recipient" if recipient else "to= without a recipient")
        constrained = kind is not None
        if recipient is None and loose and "." in loose[0]:
            recipient = loose.pop(0)
        if not constrained and loose and is_bare_type(loose[0]):
            kind = loose.pop(0)
        if loose:
            errors.append(f"unknown words in a header: {' '.join(loose)[:80]!r}")
        if role == "tool" and recipient is None and "." not in (name or ""):
            errors.append(f"{name!r} is not a role")
        message = Message(
            role=role,
            name=name,
            channel=channel,
            recipient=recipient,
            content_type=kind,
            constrained=constrained,
            content="",
        )
        return message, errors

    def _author(self, words: list[str], errors: list[str]) -> tuple[str, str | None, list[str]]:
        """-> role, name, and the words after them."""
        if self.role is not None:
            return self.role, None, words[1:] if words[:1] == [self.role] else words
        if not words or words[0].startswith("to="):
            errors.append("a message without a role")
            return "assistant", None, words
        role, colon, name = words[0].partition(":")
        if role in ROLES and role != "tool":
            if colon and not name:
                errors.append(f"{words[0]} without a name")
            return role, name or None, words[1:]
        if is_tool_name(words[0]):
            return "tool", words[0], words[1:]
        errors.append(f"{words[0]!r} is not a role")
        return "assistant", None, words[1:]

    def without_message(self) -> Message:
        """A header that ends without `<|message|>`: role and channel if present, the rest as content."""
        role, channel, texts = self.role or "assistant", None, []
        for mark, raw in self.parts:
            text = raw.decode("utf-8", "replace").strip()
            word, *rest = text.split(None, 1) or [""]
            if mark is None and self.role is None and word in ROLES and word != "tool":
                role, text = word, "".join(rest)
            elif mark is Mark.CHANNEL and channel is None and word and not word.startswith("to="):
                channel, text = word, "".join(rest)
            texts.append(text)
        return Message(role=role, channel=channel, content=" ".join(filter(None, texts)))


def _words(raw: bytearray) -> list[str]:
    return raw.decode("utf-8", "replace").split()


@dataclass
class _Open:
    """A message whose content is being read. `decoder` buffers the bytes of an incomplete character; bytes
    that can be no character become U+FFFD."""

    header: Message
    errors: list[str]
    pieces: list[str] = field(default_factory=list)
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )


class HarmonyParser:
    """Reads the output of a model after a prompt that ends with `<|start|>assistant` (feed it the rest of the
    prompt where that goes on), or, with role None, a text from its `<|start|>` on.

    For any sequence of tokens, nothing raises, no special token gets into a text, and no text is lost:
    misplaced text becomes a message with `errors` and, unless a header gave one, no channel, so that it is
    never taken for an answer. With `strict` the first error raises ValueError, which names the token's number
    (the first is 0).

    `messages`: the complete ones, in order. `header`: of the message being read, None between messages and
    in headers.
    """

    def __init__(
        self, tokens: HarmonyTokens, *, role: str | None = "assistant", strict: bool = False
    ) -> None:
        self.tokens = tokens
        self.strict = strict
        self.messages: list[Parsed] = []
        self._count = 0
        self._header: _Header | None = None if role is None else _Header(role)
        self._open: _Open | None = None

    @property
    def header(self) -> Message | None:
        return None if self._open is None else self._open.header

    @property
    def content(self) -> str:
        """Of the message being read, so far."""
        return "" if self._open is None else "".join(self._open.pieces)

    def feed(self, token: int) -> Delta | None:
        """One more token; -> what it adds to the text of a message: of misplaced text, all of it at once."""
        mark = self.tokens.marks.get(token)
        delta = None
        if mark in ENDS:
            delta = self._close(mark)
        elif mark is not None:
            delta = self._read_mark(mark)
        elif token == self.tokens.end_of_text:
            delta = self._close(None, "<|endoftext|> inside a message")
        elif (text := self.tokens.text_bytes(token)) is not None:
            delta = self._read_text(text)
        else:
            self._record_error(f"token {token} is not text")
        self._count += 1
        return delta

    def feed_all(self, tokens: Iterable[int]) -> list[Delta]:
        return [delta for token in tokens if (delta := self.feed(token)) is not None]

    def finish(self) -> list[Parsed]:
        """All messages. One that was cut off comes last, with `end` None and without an incomplete character.
        May be called again, and tokens may follow: they begin a new message."""
        if self._open is not None:
            self._finish_message(None)
        elif self._header is not None and self._header.at_most_a_role:
            self._header = None
        else:
            self._drop_header(None)
        return self.messages

    def _read_mark(self, mark: Mark) -> Delta | None:
        """A mark of a header."""
        delta = None
        if self._open is not None:
            if mark not in (Mark.START, Mark.CHANNEL):
                self._record_error(f"{mark} inside a message")
                return None
            delta = self._close(None, f"{mark} inside a message that has no end")  # the next one begins
        if mark is Mark.START:
            delta = delta or self._drop_header(None)
            self._header = _Header()
            return delta
        header = self._begin_header()
        if mark is Mark.MESSAGE:
            self._header = None
            message, errors = header.parse()
            for error in (errors := header.errors + errors):
                self._record_error(error)
            self._open = _Open(message, errors)
        else:
            header.parts.append((mark, bytearray()))
        return delta

    def _read_text(self, text: bytes) -> Delta | None:
        if self._open is None:
            self._begin_header().parts[-1][1].extend(text)
            return None
        return self._delta(self._open.decoder.decode(text))

    def _delta(self, text: str) -> Delta | None:
        if not text or self._open is None:
            return None
        self._open.pieces.append(text)
        return Delta(index=len(self.messages), header=self._open.header, text=text)

    def _begin_header(self) -> _Header:
        """The header being read; between messages, the one of a message without `<|start|>`."""
        if self._header is None:
            self._header = _Header()
            self._record_error("a message without <|start|>")
        return self._header

    def _close(self, end: Mark | None, error: str = "") -> Delta | None:
        if self._open is None:
            if self._header is None:
                self._record_error(f"{end or '<|endoftext|>'} between messages")
            return self._drop_header(end)
        if error:
            self._record_error(error)
        delta = self._delta(self._open.decoder.decode(b"", final=True))
        if not self._open.pieces:
            delta = Delta(index=len(self.messages), header=self._open.header, text="")
        self._finish_message(end)
        return delta

    def _finish_message(self, end: Mark | None) -> None:
        assert self._open is not None
        content, errors = "".join(self._open.pieces), tuple(self._open.errors)
        message = replace(self._open.header, content=content)
        self.messages.append(Parsed(message=message, end=end, errors=errors))
        self._open = None

    def _drop_header(self, end: Mark | None) -> Delta | None:
        """A header that ends without `<|message|>`: its content is misplaced text."""
        header, self._header = self._header, None
        if header is None:
            return None
        error = "a message without <|message|>"
        self._record_error(error)
        if header.empty:
            return None
        message, errors = header.without_message(), (*header.errors, error)
        self.messages.append(Parsed(message=message, end=end, errors=errors))
        without = replace(message, content="")
        return Delta(index=len(self.messages) - 1, header=without, text=message.content)

    def _record_error(self, error: str) -> None:
        if self.strict:
            raise ValueError(f"token {self._count}: {error}")
        if self._open is not None:
            self._open.errors.append(error)
        elif self._header is not None:
            self._header.errors.append(error)


def answer(parsed: Iterable[Parsed]) -> str:
    """The text for the user: the final channel."""
    return "".join(p.message.content for p in parsed if p.message.is_answer)


def _call_rules(tools: Sequence[Tool], schemas: Sequence[str | None]) -> list[str]:
    """A call of one of these functions in llguidance's language, and the reasoning before it; arguments
    without a schema are any text. The recipient stands behind the channel, or before it."""
    calls = []
    for i, tool in enumerate(tools):
        to = f" to=functions.{tool.name}"
        behind, before = (json.dumps(text, ensure_ascii=False) for text in (COMMENTARY + to, to))
        header = f'(<|channel|> {behind} | {before} <|channel|> "{COMMENTARY}")'
        calls.append(f"{header} type <|message|> arguments_{i}")
    return [
        f"call: {' | '.join(calls)}",
        'type: " "? <|constrain|> "json" | " json" | " "?',
        f'thought: <|channel|> "{ANALYSIS}" <|message|> TEXT <|end|> <|start|> "assistant"',
        r"TEXT: /(.|\n)*/",
        *(f"arguments_{i}: {f'%json {text}' if text else 'TEXT'}" for i, text in enumerate(schemas)),
    ]


class HarmonyChat:
    """`ChatFormat` in Harmony.

    Of output that was cut off, the history keeps text for the user, but no incomplete reasoning or call: the
    next answer would continue it.
    """

    def __init__(
        self, tokenizer: Tokenizer, system: System | None = None, developer: Developer | None = None
    ) -> None:
        """Raises ValueError where the tokenizer has no Harmony tokens."""
        self.tokens = HarmonyTokens(tokenizer)
        self.conversation = Conversation(system=system, developer=developer)
        self.parser = HarmonyParser(self.tokens)

    @property
    def stop(self) -> frozenset[int]:
        return self.tokens.stop

    @property
    def answer_ends(self) -> frozenset[int]:
        return frozenset({self.tokens.ids[Mark.RETURN]})

    def answer_begins(self, tokens: Sequence[int]) -> bool:
        if tokens[-1:] != [self.tokens.ids[Mark.MESSAGE]]:
            return False
        header = list(tokens[:-1])
        while self.tokens.ids[Mark.START] in header:
            header = header[header.index(self.tokens.ids[Mark.START]) + 1 :]
        if self.tokens.ids[Mark.CHANNEL] not in header:
            return False
        channel = header[header.index(self.tokens.ids[Mark.CHANNEL]) + 1 :]
        return self.tokens.tokenizer.decode(channel).split()[:1] == [FINAL]

    @property
    def call_ends(self) -> frozenset[int]:
        return frozenset({self.tokens.ids[Mark.CALL]})

    def call_grammar(self, name: str | None, schema_text: SchemaText) -> str:
        tools = [tool for tool in self._functions if name in (None, tool.name)]
        if not tools:
            raise ValueError("no function is given" if name is None else f"no function is called {name!r}")
        schemas = [schema_text(tool.parameters or NO_ARGUMENTS) for tool in tools]
        return "\n".join(["start: thought? call", *_call_rules(tools, schemas)])

    def free_grammar(
        self, strict: Collection[str], answer: Mapping[str, Any] | None, schema_text: SchemaText
    ) -> str:
        schemas = [
            schema_text(tool.parameters or NO_ARGUMENTS) if tool.name in strict else None
            for tool in self._functions
        ]
        return "\n".join(
            [
                "start: (thought | note)* (answer | call)",
                f'note: <|channel|> "{COMMENTARY}" <|message|> TEXT <|end|> <|start|> "assistant"',
                f'answer: <|channel|> "{FINAL}" <|message|> text',
                f"text: {'TEXT' if answer is None else f'%json {schema_text(answer)}'}",
                *_call_rules(self._functions, schemas),
            ]
        )

    @property
    def _functions(self) -> list[Tool]:
        developer = self.conversation.developer
        return [] if developer is None else list(developer.tools)

    def add_user(self, text: str) -> None:
        self._add(Message(role="user", content=text))

    def add_tool_result(self, text: str) -> None:
        last = self.conversation.messages[-1:]
        if not last or not last[0].is_call:
            raise ValueError("no call waits for a result")
        channel = last[0].channel or COMMENTARY
        name = last[0].recipient
        self._add(Message(role="tool", name=name, recipient="assistant", channel=channel, content=text))

    def remove_last(self) -> None:
        self.conversation = replace(self.conversation, messages=self.conversation.messages[:-1])

    def reset(self) -> None:
        self.conversation = replace(self.conversation, messages=())

    def prompt(self) -> list[int]:
        self.parser = HarmonyParser(self.tokens)
        return prompt_ids(self.conversation, self.tokens)

    def feed(self, token: int) -> ChatPart | None:
        delta = self.parser.feed(token)
        return None if delta is None else _part(delta.header, delta.text, delta.index, True)

    def end(self) -> list[ChatPart]:
        parsed = self.parser.finish()
        for item in parsed:
            if _is_history(item):
                self._add(item.message)
        return [_part(p.message, p.message.content, i, p.finished) for i, p in enumerate(parsed)]

    def _add(self, message: Message) -> None:
        self.conversation = replace(self.conversation, messages=(*self.conversation.messages, message))


def _is_history(parsed: Parsed) -> bool:
    message = parsed.message
    note = message.channel in (FINAL, COMMENTARY) and not message.is_call
    return message.role == "assistant" and bool(message.content) and (parsed.finished or note)


def _part(header: Message, text: str, index: int, finished: bool) -> ChatPart:
    kind = header.channel if header.channel in (ANALYSIS, COMMENTARY, FINAL) else OTHER
    if header.is_call:
        kind = CALL
    elif header.role != "assistant":
        kind = OTHER  # a message in the name of someone else
    return ChatPart(kind=kind or OTHER, text=text, index=index, to=header.recipient, finished=finished)
