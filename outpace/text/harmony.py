"""Harmony, the conversation format of gpt-oss: a Conversation -> text, or token ids."""

import json
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Literal

from tokenizers import Tokenizer, pre_tokenizers

from outpace.text.harmony_tools import tools_section
from outpace.text.messages import ANALYSIS, Conversation, Developer, Message, Namespace, System
from outpace.text.tokenizer import END_OF_TEXT, encode, token_id

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
        self._added = frozenset(tokenizer.get_added_tokens_decoder())

    @property
    def stop(self) -> frozenset[int]:
        """Where to stop generating: `<|return|>`, `<|call|>`, and the end of text as a safety net."""
        ends = {self.ids[Mark.RETURN], self.ids[Mark.CALL]}
        return frozenset(ends if self.end_of_text is None else ends | {self.end_of_text})

    def encode(self, pieces: Iterable[str]) -> list[int]:
        """Marks as their ids, everything else as text."""
        ids: list[int] = []
        for piece in pieces:
            ids += [self.ids[piece]] if isinstance(piece, Mark) else self.encode_text(piece)
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Ordinary tokens alone: `<|start|>` in a text is nine characters, not the special token."""
        ids = encode(self.tokenizer, text)
        return ids if self._added.isdisjoint(ids) else encode(self._ordinary, text)

    def text_bytes(self, token: int) -> bytes | None:
        """The bytes per token means; None for a special token, and for an id the tokenizer lacks."""
        if token in self._added or not 0 <= token < 2**32:
            return None
        name = self.tokenizer.id_to_token(token)
        return None if name is None else b"".join(self._bytes.get(c) or c.encode() for c in name)

    @cached_property
    def _ordinary(self) -> Tokenizer:
        """The tokenizer without its added tokens. A switch for it exists, but it would change the
        tokenizer of everyone else too. Only made when a text calls for it: large vocabularies take long."""
        data = json.loads(self.tokenizer.to_str())
        return Tokenizer.from_str(json.dumps(data | {"added_tokens": [], "post_processor": None}))

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
