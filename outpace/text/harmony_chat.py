"""A chat with a model that speaks Harmony (gpt-oss): its history, its prompts, its answers in parts."""

from dataclasses import replace

from tokenizers import Tokenizer

from outpace.text.chat_format import CALL, OTHER, ChatPart
from outpace.text.harmony import HarmonyTokens, prompt_ids
from outpace.text.harmony_parser import HarmonyParser, Parsed
from outpace.text.messages import ANALYSIS, COMMENTARY, FINAL, Conversation, Developer, Message, System


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
