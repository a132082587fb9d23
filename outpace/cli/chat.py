"""The command chat: messages typed, piped or given; answers streamed; every answer becomes history."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.segment import Segment, Segments

from outpace.cli.app import ActivationDtype, KVCacheDtype, Target, app, console, read_text, say
from outpace.cli.generate import answer_note
from outpace.cli.options import GenerationOptions, MaxTokens, with_options

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from outpace.api import GenerationOutput, Model, SamplingParams
    from outpace.decode.reuse import PrefixCache
    from outpace.drafts.base import Draft
    from outpace.text.chat_format import ChatFormat, ChatPart

BLOCK = '"""'  # a line of it begins and ends a message of several lines
HELP = "/reset starts over, /tool TEXT gives a call its result, /quit ends; Ctrl-C stops an answer"
STYLES = {"final": "", "commentary": "italic", "analysis": "dim", "call": "cyan", "other": "dim red"}
# a model may write anything, and a terminal obeys control characters: they are shown, not sent
VISIBLE = (
    {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"}
    | {127: 0x2421}
    | dict.fromkeys(range(128, 160), 0xFFFD)
)


@app.command()
@with_options
def chat(
    path: Target = "default",
    message: Annotated[
        list[str] | None,
        typer.Option(
            "--message", "-m", help="Message to send instead of asking; repeatable. '-' is all of stdin."
        ),
    ] = None,
    instructions: Annotated[
        str | None, typer.Option("--system", "--developer", help="Instructions for the model.")
    ] = None,
    reasoning: Annotated[str, typer.Option(help="Reasoning effort: low, medium or high.")] = "medium",
    tools: Annotated[
        Path | None, typer.Option(help="JSON file with a list of functions that the model may call.")
    ] = None,
    date: Annotated[str | None, typer.Option(help="Date given to the model. Default: today.")] = None,
    *,
    options: GenerationOptions,
    max_tokens: MaxTokens = 2048,
    raw: Annotated[
        bool, typer.Option("--raw", help="Raw output: tokens as generated, tags included.")
    ] = False,
    timing: Annotated[
        bool, typer.Option("--timing", help="Times of loading and of each answer, with tokens/s.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option(help="Number of layers to run, for debugging. Default: all.")
    ] = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    activation_dtype: ActivationDtype = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer.")] = False,
) -> None:
    """Chat with a model; reasoning is dimmed, tool calls are marked.

    Every line is a message (between two lines of \"\"\" several are one); piped lines are taken one by
    one. /reset starts over, /tool TEXT gives a call its result, /quit ends, Ctrl-C stops an answer. Where
    the output is no terminal, it gets the answers alone.

    [bold]Examples[/bold]: outpace chat gpt-oss-20b --draft ngram --reasoning high
    outpace chat gpt-oss-20b -m "What is 2 + 2?" --json
    outpace chat gpt-oss-20b --temperature 1 --top-p 0.95 --repetition-penalty 1.1 --acceptance rejection
    git diff | outpace chat gpt-oss-20b --system "Review this." -m - > review.md
    """
    from outpace.api import load
    from outpace.loading import open_chat
    from outpace.ops.sampling import generator

    sampling = options.sampling(max_tokens)
    functions = None if tools is None else _functions(tools)
    screen = Screen(console, Console(stderr=True))
    began = time.perf_counter()
    model = load(path, layers=layers, kv_cache_dtype=kv_cache_dtype, activation_dtype=activation_dtype)
    talk = open_chat(
        path,
        model.tokenizer,
        model.eos,
        instructions=instructions,
        reasoning=reasoning,
        functions=functions,
        date=date,
    )
    draft, how, note = options.speculation(model, sampling)
    rng = generator(options.seed, model.target.device)
    session = ChatSession(model, talk, sampling, rng, draft, how, _prefix_cache(model, draft, how))
    if timing:
        screen.note(f"loaded in {time.perf_counter() - began:.2f} s; {note}")
    typed = not message and sys.stdin.isatty()
    piped = (line.rstrip("\n") for line in sys.stdin)
    run(
        session,
        _given(message) if message else _typed() if typed else piped,
        _printer(screen, model.tokenizer, raw=raw, timing=timing, as_json=as_json),
        screen,
        forgiving=typed,
    )


def _prefix_cache(model: "Model", draft: "Draft | None", how: dict[str, Any]) -> "PrefixCache | None":
    """None where a beginning cannot be taken up exactly."""
    from outpace.decode.reuse import PrefixCache

    if how.get("partial") is not None or model.declined is not None:
        return None
    with contextlib.suppress(ValueError):
        return PrefixCache(model.target, draft)
    return None


@dataclass
class ChatSession:
    """A model, its chat format with the messages so far, and how answers are generated. One random generator
    serves all answers: the same seed and messages give the same chat. With a `prefix_cache` the prefill
    begins where a prompt parts from the text before: at the dropped reasoning of the last answer."""

    model: "Model"
    chat: "ChatFormat"
    sampling: "SamplingParams"
    rng: "torch.Generator"
    draft: "Draft | None" = None
    how: dict[str, Any] | None = None  # `controller` and `partial` of api.stream
    prefix_cache: "PrefixCache | None" = None

    def add_user(self, text: str) -> None:
        """Add a message of the user. Raises ValueError for one that is too long."""
        from outpace.api import check_text

        check_text(self.model, text)
        self.chat.add_user(text)

    def answer(
        self, on_part: Callable[["ChatPart"], None], on_token: Callable[[int], None] | None = None
    ) -> "GenerationOutput":
        """Generate an answer; Ctrl-C stops it. Raises ValueError where the conversation is too long."""
        from outpace.api import stream

        ids = self.chat.prompt()
        positions = self.model.target.config.max_position_embeddings
        if len(ids) >= positions:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, and this model's positions end at {positions}: "
                "start over (/reset)"
            )
        limit = min(self.sampling.max_tokens, positions - len(ids))
        pieces = stream(
            self.model,
            ids,
            draft=self.draft or False,
            sampling=replace(self.sampling, max_tokens=limit),
            chat=self.chat,
            rng=self.rng,
            prefix_cache=self.prefix_cache,
            **self.how or {},
        )
        streamed: set[int] = set()
        try:
            for piece in pieces:
                if on_token is not None:
                    on_token(piece.token)
                if piece.part is not None:
                    streamed.add(piece.part.index)
                    on_part(piece.part)
        except KeyboardInterrupt:
            pass
        output = pieces.finish()
        for part in output.parts:
            if part.index not in streamed:  # it is empty, or its kind was not known while it streamed
                on_part(part)
        return output


class Screen:
    """Answers on a terminal: reasoning dimmed, calls marked. Where the output is not a terminal, it gets the
    answer and nothing else; all else goes to `stderr`."""

    def __init__(self, out: Console, stderr: Console) -> None:
        self.out = out
        self.stderr = out if out.is_terminal else stderr
        self._line: tuple[Console, str, int] | None = None  # console, kind and message before the cursor

    def part(self, part: "ChatPart") -> None:
        console = self.out if part.kind in ("final", "commentary") else self.stderr
        style = STYLES[part.kind]
        if self._line != (console, part.kind, part.index):
            self.line_end()
            if part.kind == "call":
                self._write(console, f"-> {part.to} ", f"bold {style}")
            self._line = (console, part.kind, part.index)
        self._write(console, part.text, style)

    def raw(self, text: str) -> None:
        self._line = (self.out, "raw", 0)
        self._write(self.out, text, "")

    def line_end(self) -> None:
        if self._line is not None:
            self._write(self._line[0], "\n", "")
        self._line = None

    def note(self, text: str, style: str = "dim") -> None:
        self.line_end()
        self._write(self.stderr, f"({text})\n", style)

    @staticmethod
    def _write(console: Console, text: str, style: str) -> None:
        shown = text.translate(VISIBLE) if console.is_terminal else text
        # a Segment is printed as it is: rich's texts turn tabs into spaces
        segments = Segments([Segment(shown, console.get_style(style or "none"))])
        console.print(segments, end="", soft_wrap=True)


def run(
    session: ChatSession,
    lines: Iterable[str],
    answer: Callable[[ChatSession], None],
    screen: Screen,
    *,
    forgiving: bool,
) -> None:
    """Answer every line; `answer` generates and shows. A line that begins with / is a command.

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
                    screen.note("the conversation starts over")
                    continue
                case "/help":
                    screen.note(HELP)
                    continue
                case "/tool":
                    session.chat.add_tool_result(rest)
                case _ if command.startswith("/") and not command.startswith("//"):
                    raise ValueError(f"{command} is no command: {HELP}; a text may begin with //")
                case _ if not line.strip():
                    continue
                case _:
                    session.add_user(line.removeprefix("/") if line.startswith("//") else line)
            try:
                answer(session)
            except ValueError:
                session.chat.remove_last()  # it was never answered
                raise
        except ValueError as error:
            if not forgiving:
                raise
            screen.note(str(error), "red")


def _printer(
    screen: Screen, tokenizer: "Tokenizer", *, raw: bool, timing: bool, as_json: bool
) -> Callable[[ChatSession], None]:
    """Generates an answer and shows it in the form of the options."""
    from tokenizers.decoders import DecodeStream

    def hide(part: "ChatPart") -> None:
        pass

    def answer(session: ChatSession) -> None:
        if as_json:
            output = session.answer(hide)
            parts = [part.as_json() for part in output.parts]
            values = output.as_json() | {"answer": output.text, "parts": parts, "note": answer_note(output)}
            values["cached_tokens"] = output.trace.reused
            print(json.dumps(values), flush=True)
            return
        if raw:
            decoder = DecodeStream(skip_special_tokens=False)
            output = session.answer(hide, lambda token: screen.raw(decoder.step(tokenizer, token) or ""))
        else:
            output = session.answer(screen.part)
        screen.line_end()
        if note := answer_note(output):
            screen.note(note)
        if timing:
            screen.note(f"{output.summary()}; {output.trace.reused} tokens of the prompt in the cache")

    return answer


def _given(messages: list[str]) -> Iterator[str]:
    """The messages of --message; none of them is a command."""
    for message in messages:
        text = sys.stdin.read() if message == "-" else message
        if not text.strip():
            raise ValueError("--message: it is empty")
        yield f"/{text}" if text.startswith("/") else text


def _typed() -> Iterator[str]:
    """Lines, or blocks of them, until the input ends."""
    with contextlib.suppress(ImportError):  # arrow keys and a history, where Python has it
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ")
            if line.strip() == BLOCK:
                lines = []
                while (line := input(". ")).strip() != BLOCK:
                    lines.append(line)
                line = "\n".join(lines)
        except KeyboardInterrupt:  # perhaps meant for an answer that was over already
            say("\n(Ctrl-D or /quit ends the chat)", style="dim")
            continue
        except EOFError:
            console.print()
            return
        yield line


def _functions(path: Path) -> list[dict[str, Any]]:
    try:
        functions = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(functions, list):
        raise ValueError(f"{path}: it must hold a list of functions")
    return functions
