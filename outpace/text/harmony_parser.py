"""Harmony, read back: token ids one at a time -> messages, and their text while it is being written."""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer

from outpace.text.chat_format import CALL, OTHER, ChatPart
from outpace.text.harmony import ENDS, HarmonyHeader, HarmonyTokens, Mark, prompt_ids
from outpace.text.messages import ANALYSIS, COMMENTARY, FINAL, Conversation, Developer, Message, System


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A message as the model wrote it. `end`: the token that ended it, None if cut off. `faults`: what does
    not follow the format; such a message is a best guess."""

    message: Message
    end: Mark | None
    faults: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.end is not None


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The next whole characters of message `index`; its header (a Message without content) is known."""

    index: int
    header: Message
    text: str


@dataclass
class _Open:
    """A message where the content is being read. Bytes of a character that has not all come yet wait in
    `decoder`; what can be no character becomes U+FFFD."""

    header: Message
    faults: list[str]
    pieces: list[str] = field(default_factory=list)
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )


class HarmonyParser:
    """Reads what a model generates after a prompt that ended with `<|start|>assistant` (where the prompt
    stated more of the message than that, feed it first), or, with role None, a text from its `<|start|>` on.

    Whatever comes, nothing raises, no special token gets into a text, and no text gets lost: what is
    out of place is kept as a message with `faults` and, unless a header stated otherwise, no channel, so
    that it is never taken for an answer. With `strict` the first fault raises ValueError, which names
    the token's number (the first is 0).

    `messages`: those that are complete, in order. `header`: the one being read, None between messages
    and in headers.
    """

    def __init__(
        self, tokens: HarmonyTokens, *, role: str | None = "assistant", strict: bool = False
    ) -> None:
        self.tokens = tokens
        self.strict = strict
        self.messages: list[Parsed] = []
        self._count = 0
        self._header: HarmonyHeader | None = None if role is None else HarmonyHeader(role)
        self._open: _Open | None = None

    @property
    def header(self) -> Message | None:
        return None if self._open is None else self._open.header

    @property
    def content(self) -> str:
        """Of the message being read, as far as it came."""
        return "" if self._open is None else "".join(self._open.pieces)

    def feed(self, token: int) -> Delta | None:
        """One more token; -> what it adds to the text of a message."""
        mark = self.tokens.marks.get(token)
        delta = None
        if mark in ENDS:
            delta = self._close(mark)
        elif mark is not None:
            delta = self._mark(mark)
        elif token == self.tokens.end_of_text:
            delta = self._close(None, "<|endoftext|> inside a message")
        elif (text := self.tokens.text_bytes(token)) is not None:
            delta = self._text(text)
        else:
            self._fault(f"token {token} is no text")
        self._count += 1
        return delta

    def feed_all(self, tokens: Iterable[int]) -> list[Delta]:
        return [delta for token in tokens if (delta := self.feed(token)) is not None]

    def finish(self) -> list[Parsed]:
        """All messages. One that was cut off comes last, with `end` None; what had come of a character
        that is cut in two is left out. May be called again, and tokens may follow: those begin again."""
        if self._open is not None:
            self._keep(None)
        elif self._header is not None and self._header.unparsed:
            self._header = None
        else:
            self._drop_header(None)
        return self.messages

    def _mark(self, mark: Mark) -> Delta | None:
        """A mark of a header."""
        delta = None
        if self._open is not None:
            if mark not in (Mark.START, Mark.CHANNEL):
                self._fault(f"{mark} inside a message")
                return None
            delta = self._close(None, f"{mark} inside a message that has no end")  # the next one begins
        if mark is Mark.START:
            self._drop_header(None)
            self._header = HarmonyHeader()
            return delta
        header = self._begin_header()
        if mark is Mark.MESSAGE:
            self._header = None
            for fault in (message := header.parse()).faults:
                self._fault(fault)
            self._open = _Open(message.header, list(message.faults))
        else:
            header.mark(mark)
        return delta

    def _text(self, text: bytes) -> Delta | None:
        if self._open is None:
            self._begin_header().text(text)
            return None
        return self._summary(self._open.decoder.decode(text))

    def _summary(self, text: str) -> Delta | None:
        if not text or self._open is None:
            return None
        self._open.pieces.append(text)
        return Delta(index=len(self.messages), header=self._open.header, text=text)

    def _begin_header(self) -> HarmonyHeader:
        """The header being read; between messages, the one of a message without `<|start|>`."""
        if self._header is None:
            self._header = HarmonyHeader()
            self._fault("a message without <|start|>")
        return self._header

    def _close(self, end: Mark | None, fault: str = "") -> Delta | None:
        if self._open is None:
            if self._header is None:
                self._fault(f"{end or '<|endoftext|>'} between messages")
            self._drop_header(end)
            return None
        if fault:
            self._fault(fault)
        delta = self._summary(self._open.decoder.decode(b"", final=True))
        self._keep(end)
        return delta

    def _keep(self, end: Mark | None) -> None:
        assert self._open is not None
        content, faults = "".join(self._open.pieces), tuple(self._open.faults)
        message = self._open.header.with_content(content)
        self.messages.append(Parsed(message=message, end=end, faults=faults))
        self._open = None

    def _drop_header(self, end: Mark | None) -> None:
        """A header that ends without `<|message|>`: its content is misplaced text."""
        header, self._header = self._header, None
        if header is None:
            return
        result = header.without_message()
        self._fault(result.faults[-1])
        if not header.empty:
            self.messages.append(Parsed(message=result.header, end=end, faults=result.faults))

    def _fault(self, fault: str) -> None:
        if self.strict:
            raise ValueError(f"token {self._count}: {fault}")
        if self._open is not None:
            self._open.faults.append(fault)
        elif self._header is not None:
            self._header.faults.append(fault)


def answer(parsed: Iterable[Parsed]) -> str:
    """What the person who asked is to read: the final channel."""
    return "".join(p.message.content for p in parsed if p.message.is_answer)


class HarmonyChat:
    """`talk.Talk` in Harmony.

    Of the output that was cut off, the history keeps what the person was told, and neither half a thought
    nor half a call: the next answer would go on from there.
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

    def say(self, text: str) -> None:
        self._add(Message(role="user", content=text))

    def give_result(self, text: str) -> None:
        last = self.conversation.messages[-1:]
        if not last or not last[0].is_call:
            raise ValueError("no call waits for a result")
        channel = last[0].channel or COMMENTARY
        name = last[0].recipient
        self._add(Message(role="tool", name=name, recipient="assistant", channel=channel, content=text))

    def take_back(self) -> None:
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
        kind = OTHER  # the model speaks for someone else
    return ChatPart(kind=kind or OTHER, text=text, index=index, to=header.recipient, finished=finished)
