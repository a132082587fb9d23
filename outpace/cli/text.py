"""Commands that write text: generate."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.app import AsJson, Draft, Target, app, console


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    target: Target = "default",
    draft: Draft = "default",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n")] = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per forward.")] = 512,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the stop tokens.")] = False,
    stats: Annotated[bool, typer.Option(help="Say how it went: tau, tokens/s, time by part.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a text, streaming it.

    [bold]Examples[/bold]: outpace generate "def fibonacci(n):" --stats
    outpace generate --prompt-file main.py --temperature 0.8 --seed 7 --draft ngram
    """
    from outpace.decode.request import Request
    from outpace.load import open_draft, open_target
    from outpace.ops.sampling import Sampling
    from outpace.stream import run

    text = _prompt_text(prompt, prompt_file)
    loaded, tokenizer = open_target(target)
    request = Request(
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        stop=frozenset() if ignore_eos else frozenset(loaded.config.eos_token_ids),
        prefill_chunk=prefill_chunk,
    )
    write = (lambda piece: None) if as_json else _write
    bound = open_draft(draft, loaded, tokenizer)
    result = run(loaded, bound, tokenizer, text, request, seed, write)
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        _write("\n")
        if stats:
            console.print(result.summary(), style="dim", highlight=False)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ValueError("give a prompt, or --prompt-file, and not both")
    text = prompt if file is None else file.read_text(encoding="utf-8")
    if not text:
        raise ValueError("the prompt is empty: there is nothing to continue")
    return text
