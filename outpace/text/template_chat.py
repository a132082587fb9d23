"""A chat with a model that has a chat template: its history, its prompts, its answers in parts."""

from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from outpace.text.chat_format import ChatPart
from outpace.text.messages import ANALYSIS, FINAL
from outpace.text.template import ChatTemplate
from outpace.text.tokenizer import encode

THINK = ("<think>", "</think>")


class TemplateChat:
    """`talk.Talk` by a chat template (text/template.py). What is between `<think>` and `</think>`, where
    the model has such tokens, is analysis, and is given back to the template as `reasoning_content`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        stop: frozenset[int],
        *,
        instructions: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> None:
        """`variables`: what else the template reads: reasoning_effort, enable_thinking, .."""
        self.tokenizer = tokenizer
        self.template = template
        self.tools = tools
        self.variables = variables
        self._stop = stop
        self._marks = tuple(tokenizer.token_to_id(mark) for mark in THINK)
        self._begin = [{"role": "system", "content": instructions}] if instructions else []
        self.reset()

    @property
    def stop(self) -> frozenset[int]:
        return self._stop

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def give_result(self, text: str) -> None:
        """A template's calls are part of its text: there is none to find."""
        self.messages.append({"role": "tool", "content": text})

    def take_back(self) -> None:
        self.messages.pop()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = [*self._begin]
        self._listen([])

    def prompt(self) -> list[int]:
        text = self.template.render(self.messages, tools=self.tools, **self.variables)
        ids = encode(self.tokenizer, text)
        self._listen(ids)
        return ids

    def feed(self, token: int) -> ChatPart | None:
        self._done = token in self._stop
        if token in self._marks and None not in self._marks:
            self._thinking = token == self._marks[0]
            return None
        text = self._decoder.step(self.tokenizer, token) or ""
        kind = ANALYSIS if self._thinking else FINAL
        if not self._said[kind]:  # the template's own line breaks around a thought
            text = text.lstrip("\n")
        if not text:
            return None
        self._said[kind] += text
        return ChatPart(kind=kind, text=text, index=0 if self._thinking else 1)

    def end(self) -> list[ChatPart]:
        thought, text = self._said[ANALYSIS], self._said[FINAL]
        if text:
            more = {"reasoning_content": thought} if thought else {}
            self.messages.append({"role": "assistant", "content": text, **more})
        kinds = [(ANALYSIS, 0, bool(text) or not self._thinking), (FINAL, 1, self._done)]
        value = self._said
        self._listen([])
        return [
            ChatPart(kind=kind, text=value[kind], index=i, finished=finished)
            for kind, i, finished in kinds
            if value[kind]
        ]

    def _listen(self, prompt: list[int]) -> None:
        """For an answer. Some templates end inside a thought."""
        marks = [token for token in prompt if token in self._marks and token is not None]
        self._thinking = bool(marks) and marks[-1] == self._marks[0]
        self._said = {ANALYSIS: "", FINAL: ""}
        self._done = False
        self._decoder = DecodeStream(skip_special_tokens=True)
