"""Harmony, the conversation format of gpt-oss: a Conversation -> text, or token ids."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from tokenizers import Tokenizer, pre_tokenizers

from outpace.text.messages import ANALYSIS, Conversation, Developer, Message, Namespace, System, Tool
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
    """A schema as a type; `any` where the format has none for it (anyOf, $ref, ..)."""
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
    """The special tokens of the format. Contents never become one of them."""

    START = "<|start|>"
    CHANNEL = "<|channel|>"
    CONSTRAIN = "<|constrain|>"
    MESSAGE = "<|message|>"
    END = "<|end|>"  # of a message
    RETURN = "<|return|>"  # of the output
    CALL = "<|call|>"  # of a call: the tool's result comes next


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

    `drop_analysis`: see `drop_old_analysis`. `generation_prompt` ends with `<|start|>assistant`.
    `recipient_in`: a call's header may name the recipient next to the role, as the reference library and the
    published chat template write it, or next to the channel, as the model itself mostly does.
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


def drop_old_analysis(messages: Sequence[Message], *, generation_prompt: bool = True) -> list[Message]:
    """The history without the analysis channel (reasoning, calls of built-in tools and their results) of
    turns that ended with an answer. A turn that is still calling tools keeps its reasoning.

    Without `generation_prompt`, an answer that comes last is the subject of the prompt and keeps its
    reasoning.
    """
    answers = [i for i, message in enumerate(messages) if message.is_answer]
    if not generation_prompt and answers and answers[-1] == len(messages) - 1:
        answers.pop()
    last = answers[-1] if answers else 0
    return [m for i, m in enumerate(messages) if i >= last or m.channel != ANALYSIS]


def settings_pieces(conversation: Conversation) -> Iterator[str]:
    """The system and developer messages, without empty ones."""
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
    for message in (
        drop_old_analysis(messages, generation_prompt=generation_prompt) if drop_analysis else messages
    ):
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


def has_harmony_tokens(tokenizer: Tokenizer) -> bool:
    """Whether every special token of the format is one token."""
    return all(tokenizer.token_to_id(mark) is not None for mark in Mark)


class HarmonyTokens:
    """Harmony in one tokenizer's ids: the marks, text that stays text, and the bytes of a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError where a special token is missing, or tokens are not made of bytes."""
        missing = [str(mark) for mark in Mark if tokenizer.token_to_id(mark) is None]
        if missing:
            raise ValueError(
                f"the tokenizer has no {missing[0]} token: this model does not use Harmony; "
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
