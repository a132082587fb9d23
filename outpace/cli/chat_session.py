"""A chat with a target: each answer is decoded, streamed in parts, and becomes history."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.segment import Segment, Segments

from outpace.decode.controller import Controller
from outpace.decode.generate import generate
from outpace.decode.partial import Partial
from outpace.decode.request import Request
from outpace.decode.trace import Trace
from outpace.drafts.base import Draft
from outpace.models.decoder import Decoder
from outpace.text.chat_format import CALL, OTHER, ChatFormat, ChatPart
from outpace.text.messages import ANALYSIS, COMMENTARY, FINAL

STYLES = {FINAL: "", COMMENTARY: "italic", ANALYSIS: "dim", CALL: "cyan", OTHER: "dim red"}
# a model may say anything, and a terminal obeys control characters: they are shown, not sent
VISIBLE = (
    {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"}
    | {127: 0x2421}
    | dict.fromkeys(range(128, 160), 0xFFFD)
)
HELP = "/reset begins again, /tool TEXT gives a call its result, /quit ends; Ctrl-C stops an answer"


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """One answer. `trace` is None where Ctrl-C stopped it (`stopped`)."""

    parts: list[ChatPart]
    tokens: list[int]
    prompt_tokens: int
    ended: bool  # by a token of the model's own
    stopped: bool
    first_token_seconds: float
    seconds: float
    trace: Trace | None

    @property
    def answer(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == FINAL)

    @property
    def calls(self) -> list[str]:
        return [part.to or "" for part in self.parts if part.kind == CALL and part.finished]

    @property
    def note(self) -> str | None:
        """What the user should know, besides the answer."""
        if self.stopped:
            return "stopped"
        if self.calls and self.ended:
            return f"{self.calls[-1]} is called: /tool TEXT gives it the result"
        cut = f"cut off after {len(self.tokens)} tokens: allow more with --max-tokens"
        if not self.answer:
            return (
                "no answer: what came does not follow the model's format"
                if self.ended
                else f"no answer, {cut}"
            )
        return None if self.ended else cut

    @property
    def tokens_per_s(self) -> float:
        """After the first token, which the prefill gave."""
        rest = self.seconds - self.first_token_seconds
        return max(len(self.tokens) - 1, 0) / rest if rest > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        measured = {}
        if self.trace is not None:
            parts = {part: round(seconds, 5) for part, seconds in self.trace.seconds.items()}
            measured = {
                "tau": round(self.trace.tau, 4),
                "rounds": self.trace.rounds,
                "seconds_by_part": parts,
                **self.trace.partial_as_json(),
            }
        return {
            "answer": self.answer,
            "parts": [part.as_json() for part in self.parts],
            "note": self.note,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "first_token_seconds": round(self.first_token_seconds, 5),
            "seconds": round(self.seconds, 5),
            "tokens_per_s": round(self.tokens_per_s, 2),
            **measured,
        }

    def timing(self) -> str:
        rounds = ""
        if self.trace is not None and self.trace.rounds:
            decode = sum(seconds for part, seconds in self.trace.seconds.items() if part != "prefill")
            each = decode / self.trace.rounds
            rounds = f"; {self.trace.rounds} rounds of {each * 1e3:.1f} ms, tau {self.trace.tau:.2f}"
        return (
            f"{self.prompt_tokens} tokens read, first stated after {self.first_token_seconds * 1e3:.0f} ms; "
            f"{len(self.tokens)} stated, {self.tokens_per_s:.0f} tokens/s{rounds}"
        )


@dataclass
class ChatSession:
    """What a chat needs besides its messages. One generator serves all answers: the same seed and the same
    messages give the same chat. Every answer begins with a prefill of the whole prompt: what was thought
    before the last answer is dropped from it, so it is rarely a continuation of the one before."""

    target: Decoder
    draft: Draft | None
    chat: ChatFormat
    request: Request  # its stop tokens are those of the chat format
    rng: torch.Generator
    controller: Controller | None = None
    partial: Partial | None = None

    def answer(
        self, on_part: Callable[[ChatPart], None], on_token: Callable[[int], None] | None = None
    ) -> ChatTurn:
        """Let the model speak. Raises ValueError where the conversation has outgrown its positions."""
        ids = self.chat.prompt()
        longest = self.target.config.max_position_embeddings
        headroom = longest - len(ids)
        if headroom < 1:
            raise ValueError(
                f"the conversation has grown to {len(ids)} tokens, and this model's positions end at "
                f"{longest}: begin again (/reset)"
            )
        stop = self.chat.stop
        request = replace(self.request, max_new_tokens=min(self.request.max_new_tokens, headroom), stop=stop)
        tokens: list[int] = []
        times: list[float] = []
        streamed: set[int] = set()

        def on_tokens(row: int, new: list[int]) -> None:
            times.append(time.perf_counter())
            for token in new:
                tokens.append(token)
                part = self.chat.feed(token)
                if on_token is not None:
                    on_token(token)
                if part is not None:
                    streamed.add(part.index)
                    on_part(part)

        began, trace = time.perf_counter(), None
        try:
            if self.draft is None:
                done = generate(self.target, [ids], request, rng=self.rng, on_tokens=on_tokens)
            else:
                done = generate(
                    self.target,
                    [ids],
                    request,
                    self.draft,
                    controller=self.controller,
                    partial=self.partial,
                    rng=self.rng,
                    on_tokens=on_tokens,
                )
            trace = done.trace
        except KeyboardInterrupt:
            pass
        parts = self.chat.end()
        for part in parts:
            if part.index not in streamed:  # no header stated what it was, or it is empty
                on_part(part)
        return ChatTurn(
            parts=parts,
            tokens=tokens,
            prompt_tokens=len(ids),
            ended=bool(tokens) and tokens[-1] in stop,
            stopped=trace is None,
            first_token_seconds=(times[0] if times else time.perf_counter()) - began,
            seconds=time.perf_counter() - began,
            trace=trace,
        )


class Screen:
    """Answers on a terminal: thoughts dimmed, calls as calls. Where the output is not a terminal, it gets
    the answer and nothing else; all else goes to `aside` (standard error)."""

    def __init__(self, out: Console, aside: Console) -> None:
        self.out = out
        self.aside = out if out.is_terminal else aside
        self._shown: tuple[Console, str, int] | None = None  # text before the cursor

    def part(self, part: ChatPart) -> None:
        console = self.out if part.kind in (FINAL, COMMENTARY) else self.aside
        style = STYLES[part.kind]
        if self._shown != (console, part.kind, part.index):
            self.line_end()
            if part.kind == CALL:
                self._write(console, f"-> {part.to} ", f"bold {style}")
            self._shown = (console, part.kind, part.index)
        self._write(console, part.text, style)

    def raw(self, text: str) -> None:
        self._shown = (self.out, "raw", 0)
        self._write(self.out, text, "")

    def line_end(self) -> None:
        if self._shown is not None:
            self._write(self._shown[0], "\n", "")
        self._shown = None

    def note(self, text: str, style: str = "dim") -> None:
        self.line_end()
        self._write(self.aside, f"({text})\n", style)

    @staticmethod
    def _write(console: Console, text: str, style: str) -> None:
        shown = text.translate(VISIBLE) if console.is_terminal else text
        # a Segment is printed as it is: rich's texts turn tabs into spaces
        segments = Segments([Segment(shown, console.get_style(style or "none"))])
        console.print(segments, end="", soft_wrap=True)


def run(
    session: ChatSession,
    lines: Iterable[str],
    speak: Callable[[ChatSession], None],
    screen: Screen,
    *,
    forgiving: bool,
) -> None:
    """Answer every line; `speak` lets the model answer. A line that begins with / is a command.

    Raises ValueError for what cannot be done; with `forgiving` that is reported and the chat goes on.
    """
    for line in lines:
        command, _, rest = line.partition(" ")
        try:
            match command:
                case "/quit" | "/exit":
                    return
                case "/reset":
                    session.chat.reset()
                    screen.note("the conversation begins again")
                    continue
                case "/help":
                    screen.note(HELP)
                    continue
                case "/tool":
                    session.chat.give_result(rest)
                case _ if command.startswith("/") and not command.startswith("//"):
                    raise ValueError(f"{command} is no command: {HELP}; a text may begin with //")
                case _ if not line.strip():
                    continue
                case _:
                    session.chat.say(line.removeprefix("/") if line.startswith("//") else line)
            _answer(session, speak)
        except ValueError as error:
            if not forgiving:
                raise
            screen.note(str(error), "red")


def _answer(session: ChatSession, speak: Callable[[ChatSession], None]) -> None:
    try:
        speak(session)
    except ValueError:
        session.chat.take_back()  # it was never answered
        raise
