"""Harmony, the conversation format of gpt-oss: a Conversation -> text, or token ids."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from tokenizers import Tokenizer, pre_tokenizers

from outpace.text.messages import (
    ANALYSIS,
    ROLES,
    Conversation,
    Developer,
    Message,
    Namespace,
    System,
    Tool,
    is_bare_type,
    is_tool_name,
)
from outpace.text.tokenizer import END_OF_TEXT, PlainEncoder, token_id

Schema = dict[str, Any]
NUMBERS = {"integer": "number"}  # by JSON schema's name, where TypeScript has another


def tools_section(namespaces: list[Namespace]) -> str:
    """`# Tools` and all namespaces, as it is in a system or developer message (openai/harmony,
    docs/format.md). Byte for byte what openai_harmony 0.0.8 writes, its line breaks in comments included."""
    return "\n\n".join(["# Tools", *map(_namespace, namespaces)])


def _namespace(space: Namespace) -> str:
    comment = "// " if space.tools else ""  # without functions the description is plain text
    lines = [f"## {space.name}\n", *(comment + line for line in _lines(space.description or ""))]
    if space.tools:
        functions = [line for tool in space.tools for line in _function(tool)]
        lines += [f"namespace {space.name} {{\n", *functions, f"}} // namespace {space.name}"]
    return "\n".join(lines)


def _function(tool: Tool) -> list[str]:
    arguments = "" if tool.parameters is None else f"_: {_type(tool.parameters, '')}"
    return [
        *(f"// {line}" for line in _lines(tool.description)),
        f"type {tool.name} = ({arguments}) => any;\n",
    ]


def _type(schema: Any, indent: str) -> str:
    """What a schema states, as a type; `any` where the format has no word for it (anyOf, $ref, ..)."""
    if not isinstance(schema, dict):
        return "any"
    if isinstance(variants := schema.get("oneOf"), list):
        return "".join(
            f"\n{indent} | {_variant(v, indent)}{_remarks([_described(v), _default(v, quoted=True)])}"
            for v in variants
        )
    kind = schema.get("type")
    if isinstance(kind, list) and (names := [k for k in kind if isinstance(k, str)]):
        return " | ".join(NUMBERS.get(name, name) for name in names)
    match kind:
        case "object":
            return _object(schema, indent)
        case "string":
            values = schema.get("enum")
            words = [f'"{v}"' for v in values if isinstance(v, str)] if isinstance(values, list) else []
            return " | ".join(words) or "string"
        case "array":
            return f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
        case "number" | "integer" | "boolean":
            return NUMBERS.get(str(kind), str(kind))
    return "any"


def _object(schema: Schema, indent: str) -> str:
    value = _described(schema)
    comment = f"{indent}// {value}\n" if value is not None else ""
    properties, required = schema.get("properties"), schema.get("required")
    lines = []
    if isinstance(properties, dict):
        must = required if isinstance(required, list) else []
        lines = [_property(k, v, "" if k in must else "?", indent) for k, v in properties.items()]
    return f"{comment}{{\n{''.join(lines)}{indent}}}"


def _property(name: str, schema: Any, optional: str, indent: str) -> str:
    schema = schema if isinstance(schema, dict) else {}
    comments = []
    if isinstance(title := schema.get("title"), str):
        comments += [title, ""]
    if "oneOf" not in schema and (value := _described(schema)) is not None:
        comments.append(value)
    if isinstance(examples := schema.get("examples"), list) and examples:
        comments += ["Examples:", *(f'- "{e}"' for e in examples if isinstance(e, str))]
    above = "".join(f"{indent}// {c}\n" if c else f"{indent}//\n" for c in comments)
    if isinstance(schema.get("oneOf"), list):
        return above + _property_of_variants(name, schema, optional, indent)
    remark = "" if "oneOf" in schema else _remarks([_default(schema)])
    kind = _nullable(schema, _type(schema, indent + "    "))
    return f"{above}{indent}{name}{optional}: {kind},{remark}\n"


def _property_of_variants(name: str, schema: Schema, optional: str, indent: str) -> str:
    """A line for every variant; a remark that is above all of them is not repeated."""
    variants, value = schema["oneOf"], _described(schema)
    above = value is not None and (not variants or _described(variants[0]) != value)
    comments = [value if above else None, _default(schema)]
    lines = [f"{indent}// {c}\n" for c in comments if c is not None]
    lines.append(f"{indent}{name}{optional}:\n")
    for i, variant in enumerate(variants):
        own = _described(variant)
        shown = None if own == value or (i == 0 and above) else own
        lines.append(f"{indent} | {_variant(variant, indent)}{_remarks([shown, _default(variant)])}\n")
    return "".join([*lines, f"{indent},\n"])


def _variant(schema: Any, indent: str) -> str:
    return _nullable(schema, _type(schema, indent + "   "))


def _nullable(schema: Any, kind: str) -> str:
    null = isinstance(schema, dict) and schema.get("nullable") is True and "null" not in kind
    return f"{kind} | null" if null else kind


def _described(schema: Any) -> str | None:
    value = schema.get("description") if isinstance(schema, dict) else None
    return value if isinstance(value, str) else None


def _default(schema: Any, quoted: bool = False) -> str | None:
    """`default: 20`. A word of an enum is bare, except where `quoted`."""
    if not isinstance(schema, dict) or "default" not in schema:
        return None
    value, words = schema["default"], schema.get("enum")
    if not isinstance(value, str):
        return f"default: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"
    if isinstance(words, list) and words:
        return f"default: {json.dumps(value, ensure_ascii=False) if quoted else value}"
    return f'default: "{value}"'


def _remarks(items: list[str | None]) -> str:
    given = [item for item in items if item is not None]
    return f" // {' '.join(given)}" if given else ""


def _lines(text: str) -> list[str]:
    """Lines as they end with \\n or \\r\\n; str.splitlines knows ten further ends."""
    lines = re.split(r"\r?\n", text)
    return lines if lines[-1] else lines[:-1]


RecipientIn = Literal["role", "channel"]


class Mark(StrEnum):
    """The special tokens of the format. What a person wrote never becomes one of them."""

    START = "<|start|>"
    CHANNEL = "<|channel|>"
    CONSTRAIN = "<|constrain|>"
    MESSAGE = "<|message|>"
    END = "<|end|>"  # of a message
    RETURN = "<|return|>"  # of the output: the model is done
    CALL = "<|call|>"  # of a call: the tool's result is wanted


ENDS = frozenset((Mark.END, Mark.RETURN, Mark.CALL))


def render(
    conversation: Conversation,
    *,
    drop_analysis: bool = True,
    generation_prompt: bool = True,
    recipient_in: RecipientIn = "role",
) -> str:
    """The conversation as text, for people to read: where a message's content holds the name of a
    special token, the text does not tell the two apart. `prompt_ids` does.

    `drop_analysis` leaves out the analysis of turns that were answered (`kept`). `generation_prompt` ends
    with `<|start|>assistant`, for the model to go on. `recipient_in`: a call's header may name the
    recipient next to the role, as the reference library and the published chat template write it, or
    next to the channel, as the model itself mostly does.
    """
    return "".join(_pieces(conversation, drop_analysis, generation_prompt, recipient_in))


def prompt_ids(
    conversation: Conversation,
    tokenizer: "Tokenizer | HarmonyTokens",
    *,
    drop_analysis: bool = True,
    generation_prompt: bool = True,
    recipient_in: RecipientIn = "role",
) -> list[int]:
    """`render`, as token ids of the checkpoint's own tokenizer. Raises ValueError where it lacks Harmony's
    special tokens."""
    tokens = tokenizer if isinstance(tokenizer, HarmonyTokens) else HarmonyTokens(tokenizer)
    return tokens.encode(_pieces(conversation, drop_analysis, generation_prompt, recipient_in))


def kept(messages: Sequence[Message], *, answering: bool = True) -> list[Message]:
    """What of the history a model gets to see: not the analysis channel (thoughts, calls of built-in
    tools and their results) of turns that ended with an answer. A turn that is still calling tools keeps
    its thoughts.

    `answering` states that the next thing is a new message of the assistant. Without it, an answer that
    is last ends a turn that is being looked at, and keeps its thoughts as well.
    """
    answers = [i for i, message in enumerate(messages) if message.is_answer]
    if not answering and answers and answers[-1] == len(messages) - 1:
        answers.pop()
    settled = answers[-1] if answers else 0
    return [m for i, m in enumerate(messages) if i >= settled or m.channel != ANALYSIS]


def settings_pieces(conversation: Conversation) -> Iterator[str]:
    """The system and developer messages, as far as there is something to say."""
    system, developer = conversation.system, conversation.developer
    functions = developer is not None and bool(developer.tools)
    for role, content in (("system", _system(system, functions)), ("developer", _developer(developer))):
        if content:
            yield from message_pieces(Message(role=role, content=content))


def message_pieces(
    message: Message, end: Mark | None = None, recipient_in: RecipientIn = "role"
) -> Iterator[str]:
    """A message from `<|start|>` to `end` (default: `<|call|>` after a call, else `<|end|>`); the marks are
    `Mark`s, all other pieces are text. The first two pieces are those of a generation prompt."""
    yield Mark.START
    if message.role == "tool":
        yield message.name or ""
    else:
        yield message.role
        if message.name is not None:
            yield f":{message.name}"
    recipient = f" to={message.recipient}" if message.recipient is not None else ""
    late = recipient_in == "channel" and message.channel is not None and message.role == "assistant"
    if recipient and not late:
        yield recipient
    if message.channel is not None:
        yield Mark.CHANNEL
        yield message.channel + (recipient if late else "")
    if message.content_type is not None and message.constrained:
        yield from (" ", Mark.CONSTRAIN, message.content_type)
    elif message.content_type is not None:
        yield f" {message.content_type}"
    yield Mark.MESSAGE
    yield message.content
    yield end or (Mark.CALL if message.is_call else Mark.END)


def _pieces(
    conversation: Conversation, drop_analysis: bool, generation_prompt: bool, recipient_in: RecipientIn
) -> Iterator[str]:
    yield from settings_pieces(conversation)
    messages = conversation.messages
    for message in kept(messages, answering=generation_prompt) if drop_analysis else messages:
        yield from message_pieces(message, recipient_in=recipient_in)
    if generation_prompt:
        yield from (Mark.START, "assistant")


def _system(system: System | None, functions: bool) -> str:
    if system is None:
        return ""
    about = [system.identity] if system.identity else []
    if system.knowledge_cutoff:
        about.append(f"Knowledge cutoff: {system.knowledge_cutoff}")
    if system.current_date:
        about.append(f"Current date: {system.current_date}")
    sections = ["\n".join(about)] if about else []
    if system.reasoning:
        sections.append(f"Reasoning: {system.reasoning}")
    if system.tools:
        sections.append(tools_section(list(system.tools)))
    if system.channels:
        names = ", ".join(system.channels)
        line = f"# Valid channels: {names}. Channel must be included for every message."
        if functions:
            line += "\nCalls to these tools must go to the commentary channel: 'functions'."
        sections.append(line)
    return "\n\n".join(sections)


def _developer(developer: Developer | None) -> str:
    if developer is None:
        return ""
    sections = ["# Instructions", developer.instructions] if developer.instructions else []
    if developer.tools:
        sections.append(tools_section([Namespace(name="functions", tools=developer.tools)]))
    return "\n\n".join(sections)


def speaks_harmony(tokenizer: Tokenizer) -> bool:
    """Whether every special token of the format is one token."""
    return all(tokenizer.token_to_id(mark) is not None for mark in Mark)


class HarmonyTokens:
    """Harmony in one tokenizer's ids: the marks, text that stays text, and the bytes of a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError where a special token is missing, or tokens are not made of bytes."""
        missing = [str(mark) for mark in Mark if tokenizer.token_to_id(mark) is None]
        if missing:
            raise ValueError(
                f"the tokenizer has no {missing[0]} token: this model does not speak Harmony; "
                "use its own chat template"
            )
        if "ByteLevel" not in _decoders(tokenizer):
            raise ValueError("the tokenizer is not a byte-level one: Harmony is parsed from bytes")
        self.tokenizer = tokenizer
        self.ids: dict[Mark, int] = {mark: token_id(tokenizer, mark) for mark in Mark}
        self.marks: dict[int, Mark] = {id: mark for mark, id in self.ids.items()}
        self.end_of_text: int | None = tokenizer.token_to_id(END_OF_TEXT)
        self._plain = PlainEncoder(tokenizer)
        self._added = self._plain.added

    @property
    def stop(self) -> frozenset[int]:
        """Where to stop generating: `<|return|>`, `<|call|>`, and the end of text as a safety net."""
        ends = {self.ids[Mark.RETURN], self.ids[Mark.CALL]}
        return frozenset(ends if self.end_of_text is None else ends | {self.end_of_text})

    def encode(self, pieces: Iterable[str]) -> list[int]:
        """Marks as their ids, everything else as text: `<|start|>` in it is nine characters."""
        ids: list[int] = []
        for piece in pieces:
            ids += [self.ids[piece]] if isinstance(piece, Mark) else self._plain.encode(piece)
        return ids

    def text_bytes(self, token: int) -> bytes | None:
        """The bytes per token means; None for a special token, and for an id the tokenizer lacks."""
        if token in self._added or not 0 <= token < 2**32:
            return None
        name = self.tokenizer.id_to_token(token)
        return None if name is None else b"".join(self._bytes.get(c) or c.encode() for c in name)

    @cached_property
    def _bytes(self) -> dict[str, bytes]:
        """Byte-level tokens name each byte by a character: printable ones by themselves, the others by
        the characters from U+0100 on, in order."""
        names = sorted(pre_tokenizers.ByteLevel.alphabet())
        others = [b for b in range(256) if chr(b) not in names]
        moved = {name: bytes([b]) for name, b in zip((n for n in names if ord(n) > 255), others, strict=True)}
        return {name: bytes([ord(name)]) for name in names if ord(name) < 256} | moved


def _decoders(tokenizer: Tokenizer) -> set[str]:
    if tokenizer.decoder is None:
        return set()
    data = json.loads(tokenizer.decoder.__getstate__())
    return {part.get("type") for part in (data, *data.get("decoders", []))}


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
