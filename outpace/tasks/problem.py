"""A problem with its worked answer: what a small target learns from, and what its answers are checked by."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from outpace.text.messages import ANALYSIS, COMMENTARY, FINAL, Conversation, Developer, Message, System, Tool

IDENTITY = "You are the embedded model of Outpace."
TEST_SHARE = 10  # per cent of all problems, by the hash of the question: no training row has one of these
DRAWS = 200  # until a problem of the wanted side of the split is found


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function call that a problem asks for: the function, its arguments as JSON, and what it returns."""

    tool: Tool
    arguments: str
    result: str

    def messages(self) -> tuple[Message, Message]:
        name = f"functions.{self.tool.name}"
        call = Message(
            role="assistant",
            channel=COMMENTARY,
            recipient=name,
            content_type="json",
            constrained=True,
            content=self.arguments,
        )
        answer = Message(
            role="tool", name=name, recipient="assistant", channel=COMMENTARY, content=self.result
        )
        return call, answer


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`question` of the user, `trace`: the working, one step a line, `answer`: the only text that counts as
    right. With a `call` the answer needs the call's result; `others` are functions that it does not need."""

    question: str
    trace: str
    answer: str
    call: Call | None = None
    others: tuple[Tool, ...] = ()

    def is_right(self, answer: str) -> bool:
        return answer.strip() == self.answer

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.question.encode()).digest()
        return int.from_bytes(digest[:4]) % 100 < TEST_SHARE

    def prompt(self, effort: str = "medium") -> Conversation:
        """Settings, functions and the question; `effort`: low, medium or high."""
        tools = () if self.call is None else (self.call.tool, *self.others)
        return Conversation(
            system=System(identity=IDENTITY, knowledge_cutoff=None, reasoning=effort),
            developer=Developer(tools=tuple(sorted(tools, key=lambda tool: tool.name))) if tools else None,
            messages=(Message(role="user", content=self.question),),
        )

    def conversation(self, effort: str = "medium") -> Conversation:
        """The prompt, and the messages that answer it: the trace unless the effort is low."""
        start = self.prompt(effort)
        messages = list(start.messages)
        if effort != "low":
            messages.append(Message(role="assistant", channel=ANALYSIS, content=self.trace))
        if self.call is not None:
            messages += self.call.messages()
        messages.append(Message(role="assistant", channel=FINAL, content=self.answer))
        return Conversation(system=start.system, developer=start.developer, messages=tuple(messages))

    def as_json(self, effort: str = "medium") -> dict[str, Any]:
        """The conversation as a line of a training file: OpenAI's `messages` and `tools`, and settings."""
        start, called = self.prompt(effort), self.call is not None
        thinking = {} if effort == "low" else {"thinking": self.trace}
        messages: list[dict[str, Any]] = [{"role": "user", "content": self.question}]
        if self.call is not None:
            function = {"name": self.call.tool.name, "arguments": self.call.arguments}
            calls = [{"id": "call_1", "type": "function", "function": function}]
            messages.append({"role": "assistant", **thinking, "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": "call_1", "content": self.call.result})
        messages.append({"role": "assistant", **({} if called else thinking), "content": self.answer})
        tools = () if start.developer is None else start.developer.tools
        functions = [{"type": "function", "function": asdict(tool)} for tool in tools]
        settings = {"system": {"identity": IDENTITY, "knowledge_cutoff": None}, "reasoning": effort}
        return {**settings, "messages": messages} | ({"tools": functions} if functions else {})


@dataclass(frozen=True, kw_only=True)
class Family:
    """Problems of one kind. `make(rng, size)`: a problem of that difficulty; `sizes`: the smallest and the
    largest that are trained; `longer`: one beyond them, tested apart."""

    make: Callable[[random.Random, int], Problem]
    sizes: tuple[int, int]
    longer: int

    def draw(self, rng: random.Random, *, held_out: bool, longer: bool = False) -> Problem:
        """A problem of the trained sizes (or of `longer`), on the wanted side of the split. Raises
        RuntimeError where a family has too few problems to have one there."""
        for _ in range(DRAWS):
            size = self.longer if longer else rng.randint(*self.sizes)
            problem = self.make(rng, size)
            if problem.held_out == held_out:
                return problem
        raise RuntimeError(f"no problem with held_out={held_out} among {DRAWS}: the family is too small")


def lines(steps: list[str]) -> str:
    return "\n".join(steps)


def quoting(start: str, steps: list[str]) -> str:
    """A trace that begins with the very characters before what it works on: from there on copying leads."""
    return start + lines(steps)
