"""Commands on conversations: chat, rows."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from outpace.cli.app import MaxTokens, Target, app, console
from outpace.cli.options import GenerationOptions, with_options

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from outpace.cli.chat_session import ChatSession, Screen
    from outpace.text.chat_format import ChatFormat, ChatPart
    from outpace.text.sft_rows import TrainingRow

BLOCK = '"""'  # a line of it begins and ends a message of several lines


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
    max_new_tokens: MaxTokens = 2048,
    raw: Annotated[
        bool, typer.Option("--raw", help="Raw output: tokens as generated, tags included.")
    ] = False,
    timing: Annotated[
        bool, typer.Option("--timing", help="Times of loading and of each answer, with tokens/s.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option(help="Number of layers to run, for debugging. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer.")] = False,
) -> None:
    """Chat with a model; reasoning is dimmed, tool calls are marked.

    Every line is a message (between two lines of \"\"\" several are one); piped lines are taken one by
    one. /reset begins again, /tool TEXT gives a call its result, /quit ends, Ctrl-C stops an answer. Where
    the output is no terminal, it gets the answers alone.

    [bold]Examples[/bold]: outpace chat gpt-oss-20b --draft ngram --reasoning high
    outpace chat gpt-oss-20b -m "What is 2 + 2?" --json
    outpace chat gpt-oss-20b --temperature 1 --top-p 0.95 --repetition-penalty 1.1 --acceptance rejection
    git diff | outpace chat gpt-oss-20b --system "Review this." -m - > review.md
    """
    import time

    from outpace.cli.chat_session import ChatSession, Screen, run
    from outpace.ops.sampling import generator

    request = options.request(max_new_tokens)
    functions = None if tools is None else _json_file(tools)
    screen = Screen(console, Console(stderr=True))
    began = time.perf_counter()
    target, tokenizer, bound = options.open(path, layers)
    stop = frozenset(target.config.eos_token_ids)
    dialogue = open_chat(path, tokenizer, stop, instructions, reasoning, functions, date)
    near = options.partial()
    used, controller, notes = options.speculation(target, bound, tokenizer, request.effective_rule)
    rng = generator(options.seed, target.device)
    session = ChatSession(target, used, dialogue, request, rng, controller, near)
    if timing:
        screen.note(f"loaded in {time.perf_counter() - began:.2f} s; {notes}")
    typed = not message and sys.stdin.isatty()
    run(
        session,
        _file_text(message) if message else _typed() if typed else (line.rstrip("\n") for line in sys.stdin),
        _speaker(screen, tokenizer, raw=raw, timing=timing, as_json=as_json),
        screen,
        forgiving=typed,
    )


def open_chat(
    path: str,
    tokenizer: "Tokenizer",
    stop: frozenset[int],
    instructions: str | None,
    reasoning: str,
    functions: list[dict[str, Any]] | None,
    date: str | None,
) -> "ChatFormat":
    """Harmony where the tokenizer speaks it, else the checkpoint's chat template."""
    import datetime

    from outpace.checkpoint.open import open_checkpoint, target_path
    from outpace.checkpoint.tokenizer import open_template
    from outpace.text.harmony import speaks_harmony
    from outpace.text.harmony_parser import HarmonyChat
    from outpace.text.messages import Developer, System, parse_tools
    from outpace.text.template import TemplateChat

    tools = parse_tools(functions, "--tools") if functions else ()
    if speaks_harmony(tokenizer):
        system = System(reasoning=reasoning, current_date=date or f"{datetime.date.today():%Y-%m-%d}")
        return HarmonyChat(tokenizer, system, Developer(instructions=instructions, tools=tools))
    template = open_template(open_checkpoint(target_path(path)))
    if template is None:
        raise ValueError(f"{path} has neither Harmony's tokens nor a chat template: try outpace generate")
    wrapped = [f if "function" in f else {"type": "function", "function": f} for f in functions or []]
    return TemplateChat(
        tokenizer,
        template,
        stop,
        instructions=instructions,
        tools=wrapped or None,
        reasoning_effort=reasoning,
    )


def _file_text(messages: list[str]) -> Iterator[str]:
    """Nothing in them is a command."""
    for message in messages:
        text = sys.stdin.read() if message == "-" else message
        if not text.strip():
            raise ValueError("--message: it is empty")
        yield f"/{text}" if text.startswith("/") else text


def _typed() -> Iterator[str]:
    """Lines, or blocks of them, until the input ends."""
    import contextlib

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
            console.print("\n(Ctrl-D or /quit ends the chat)", style="dim", highlight=False)
            continue
        except EOFError:
            console.print()
            return
        yield line


def _speaker(
    screen: "Screen", tokenizer: "Tokenizer", *, raw: bool, timing: bool, as_json: bool
) -> "Callable[[ChatSession], None]":
    """Lets the model answer, and shows it in the way that was asked for."""
    from tokenizers.decoders import DecodeStream

    def nothing(part: "ChatPart") -> None:
        pass

    def speak(session: "ChatSession") -> None:
        if as_json:
            print(json.dumps(session.answer(nothing).as_json()), flush=True)
            return
        if raw:
            decoder = DecodeStream(skip_special_tokens=False)
            turn = session.answer(nothing, lambda token: screen.raw(decoder.step(tokenizer, token) or ""))
        else:
            turn = session.answer(screen.part)
        screen.line_end()
        if turn.note:
            screen.note(turn.note)
        if timing:
            screen.note(turn.timing())

    return speak


@app.command()
def rows(
    target: Target,
    file: Annotated[
        Path, typer.Argument(help='JSONL file: {"messages": [..], "tools": [..]} on every line.')
    ],
    reasoning: Annotated[
        str, typer.Option(help="Reasoning effort of conversations that do not set it.")
    ] = "medium",
    date: Annotated[str | None, typer.Option(help="Date given to the model in those. Default: none.")] = None,
    show: Annotated[int | None, typer.Option(help="Number of rows to print.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row: ids and mask.")] = False,
) -> None:
    """Turn conversations into training rows for gpt-oss, and show which tokens are supervised.

    [bold]Examples[/bold]: outpace rows default chats.jsonl --show 3
    outpace rows gpt-oss-20b chats.jsonl --json > rows.jsonl
    """
    from outpace.checkpoint.open import open_checkpoint, target_path
    from outpace.checkpoint.tokenizer import open_tokenizer
    from outpace.text.harmony import HarmonyTokens
    from outpace.text.messages import System
    from outpace.text.sft_rows import read_rows

    tokens = HarmonyTokens(open_tokenizer(open_checkpoint(target_path(target))))
    count, total, supervised, longest, lines = 0, 0, 0, 0, 0
    wanted = show if show is not None else (sys.maxsize if as_json else 1)
    last = 0
    for row in read_rows(file, tokens, system=System(reasoning=reasoning, current_date=date)):
        if count < wanted and as_json:
            print(json.dumps(row.as_json()))
        elif count < wanted:
            console.rule(f"line {row.line}, turn {row.turn}", style="dim")
            console.print(_picture(row, tokens.tokenizer), highlight=False, soft_wrap=True)
        count, total, supervised = count + 1, total + len(row.ids), supervised + sum(row.mask)
        longest, lines, last = max(longest, len(row.ids)), lines + (row.line != last), row.line
    if as_json:
        return
    share = f", {supervised / total:.1%} of them supervised; the longest row has {longest:,}" if total else ""
    console.print(f"{lines:,} conversations, {count:,} rows, {total:,} tokens{share}", highlight=False)


def _picture(row: "TrainingRow", tokenizer: "Tokenizer") -> Text:
    """What the model is given, dimmed, and what it learns to say, in green, or in brackets where there are
    no colours."""
    picture = Text()
    for supervised, ids in row.spans():
        text = tokenizer.decode(ids, skip_special_tokens=False)
        marked = f"\u27e6{text}\u27e7" if supervised and not console.color_system else text
        picture.append(marked, style="green" if supervised else "dim")
    return picture


def _json_file(path: Path) -> list[dict[str, Any]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, list):
        raise ValueError(f"{path}: a list of functions is wanted")
    return data
