"""Commands that write text: generate."""

import functools
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.app import AsJson, MaxTokens, Target, app, console
from outpace.cli.chat import open_chat
from outpace.cli.options import GenerationOptions, with_options


@app.command()
@with_options
def generate(
    target: Target,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the prompt.")] = None,
    *,
    options: GenerationOptions,
    mla: Annotated[
        bool | None,
        typer.Option(
            "--mla/--no-mla", help="Latent KV of a retrofitted target. Default: as its config specifies."
        ),
    ] = None,
    dsa: Annotated[
        bool | None,
        typer.Option(
            "--dsa/--no-dsa",
            help="Sparse attention of a retrofitted target. Default: as its config specifies.",
        ),
    ] = None,
    max_new_tokens: MaxTokens = 256,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Chat format: the prompt is a message, the output the answer without reasoning."
        ),
    ] = False,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per forward.")] = 512,
    ignore_eos: Annotated[bool, typer.Option(help="Generation beyond the end tokens.")] = False,
    stats: Annotated[
        bool, typer.Option(help="Statistics after the text: tau, tokens/s, time by part.")
    ] = False,
    timing: Annotated[
        bool,
        typer.Option("--timing", help="Times of a first and of a warm run (generates twice)."),
    ] = False,
    layers: Annotated[
        int | None, typer.Option(help="Number of layers to run, for debugging. Default: all.")
    ] = None,
    top_logits: Annotated[
        int | None, typer.Option(help="Number of largest logits to show per token, for debugging.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Generate text and stream it; with --chat, answer a message.

    [bold]Examples[/bold]: outpace generate default "def fibonacci(n):" --stats
    outpace generate default --prompt-file main.py --temperature 0.8 --seed 7 --draft ngram
    outpace generate default "def fibonacci(n):" --num-draft-tokens 16 --stats
    outpace generate default "import os" --temperature 1 --min-p 0.05 --acceptance gumbel --seed 7
    outpace generate default --prompt-file book.txt --kv-budget 4096 --draft ngram --stats
    outpace generate gpt-oss-20b "What is 2 + 2?" --chat
    outpace generate default "import os" -n 4 --layers 2 --top-logits 3 --timing
    """
    import time
    from dataclasses import replace

    from rich.console import Console

    from outpace.cli.text_stream import (
        Largest,
        answer_reader,
        no_answer,
        reader,
        run,
        timing_table,
        top_lines,
    )
    from outpace.text.tokenizer import encode_prompt

    text = _prompt_text(prompt, prompt_file)
    request = options.request(max_new_tokens, prefill_chunk=prefill_chunk)
    began = time.perf_counter()
    loaded, tokenizer, bound = options.open(target, layers)
    if mla is not None:
        loaded.use_mla_kv(mla)
    if dsa is not None:
        loaded.use_dsa(dsa)
    load_seconds = time.perf_counter() - began
    near = options.partial()
    used, controller, note = options.speculation(loaded, bound, tokenizer, request.effective_rule)
    largest = None if top_logits is None else Largest(top_logits, tokenizer)
    stop = frozenset(loaded.config.eos_token_ids)
    session = open_chat(target, tokenizer, stop, None, "medium", None, None) if chat else None
    if session is None:
        ids = encode_prompt(tokenizer, text)
        read = reader(tokenizer, ids)
    else:
        session.say(text)
        ids, stop, read = session.prompt(), session.stop, answer_reader(session)
    request = replace(request, stop=frozenset() if ignore_eos else stop)
    decode = functools.partial(
        run, loaded, used, ids, request=request, seed=options.seed, controller=controller, partial=near
    )
    result = decode(read=read, write=_hide if as_json else _write, largest=largest)
    values, warm = result.as_json() | {"method": note}, None
    if not as_json:
        _write("\n")
    if session is not None:
        parts = session.end()
        values |= {"parts": [part.as_json() for part in parts], "note": no_answer(parts, len(result.tokens))}
    if timing:
        warm = decode(read=reader(tokenizer, ids), write=_hide)
        values["timing"] = {"load": round(load_seconds, 6), "first": result.timing(), "warm": warm.timing()}
    if as_json:
        print(json.dumps(values))
        return
    if values.get("note"):
        Console(stderr=True).print(values["note"], style="dim", highlight=False)
    if largest is not None:
        console.print(top_lines(result), highlight=False, markup=False, soft_wrap=True)
    if warm is not None:
        console.print(timing_table(load_seconds, result, warm))
    if stats:
        console.print(f"{result.summary()}; {note}", style="dim", highlight=False)


def _hide(piece: str) -> None:
    pass


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ValueError(
            "give a prompt after the model, or --prompt-file, and not both: outpace generate MODEL PROMPT"
        )
    text = prompt if file is None else file.read_text(encoding="utf-8")
    if not text:
        raise ValueError("the prompt is empty: there is nothing to continue")
    return text
