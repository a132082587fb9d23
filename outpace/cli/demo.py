"""`outpace demo`: one text decoded twice, with and without speculation, then every method measured."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from outpace.cli.app import app, console

if TYPE_CHECKING:
    from outpace.api import Model
    from outpace.decode.trace import Trace
    from outpace.drafts.base import Draft

PROMPT = '"""Queues of tasks."""\n\nimport threading\n\n\nclass TaskQueue:\n'
TOKENS = 120


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo-report")) -> None:
    """Demonstration on the embedded model: text with and without speculation, then the measured table."""
    from outpace.api import load, load_draft
    from outpace.bench.speed import PAGE, demo_settings, print_report, run_bench
    from outpace.checkpoint.save import write_json
    from outpace.loading import open_dflash
    from outpace.text.corpus import read_corpus, split

    model = load("default")
    console.print(f"[bold]Prompt[/bold]\n{PROMPT}", highlight=False)
    plain, slow, _ = _show(model, None, "Autoregressive")
    suffix = load_draft("suffix", model)
    tokens, fast, trace = _show(model, suffix, "Speculative, accepted draft tokens in green")
    if tokens != plain:
        raise ValueError("demo: the speculative text differs from the autoregressive one; this is a bug")
    console.print(
        f"The same {len(tokens)} tokens, {fast / slow:.1f} times as fast: "
        f"{trace.tau:.2f} tokens per forward of the target.\n",
        highlight=False,
    )
    held_out = split(read_corpus())[1]
    dflash = open_dflash("dflash", model.tokenizer)
    report = run_bench(model.target, dflash, model.tokenizer, held_out, demo_settings(), out, console, suffix)
    PAGE.write(report, out)
    write_json(out / "trace.json", json.loads(json.dumps(asdict(trace))))
    print_report(report, console)
    console.print(
        f"report: {out}/report.md (report.json)   plots: {out}/speed.png, acceptance.png   "
        f"steps of the text above: {out}/trace.json",
        highlight=False,
    )


def _show(model: "Model", draft: "Draft | None", title: str) -> "tuple[list[int], float, Trace]":
    """Decode PROMPT and print the text as it is committed; -> tokens, tokens/s after the first, the trace."""
    from tokenizers.decoders import DecodeStream

    from outpace.decode.generate import generate
    from outpace.decode.request import Request
    from outpace.text.tokenizer import encode_prompt

    decoder, times = DecodeStream(skip_special_tokens=True), []

    def on_tokens(row: int, tokens: list[int]) -> None:
        times.append(time.perf_counter())
        for i, token in enumerate(tokens):  # the target chose the last one of a step, the draft the others
            piece = decoder.step(model.tokenizer, token) or ""
            console.print(Text(piece, style="green" if i < len(tokens) - 1 else ""), end="", soft_wrap=True)

    console.print(f"[bold]{title}[/bold]")
    ids = encode_prompt(model.tokenizer, PROMPT)
    generate(model.target, [ids], Request(max_new_tokens=8), draft)  # warm-up: kernels and buffers
    done = generate(model.target, [ids], Request(max_new_tokens=TOKENS), draft, on_tokens=on_tokens)
    rate = (len(done.tokens[0]) - 1) / (times[-1] - times[0])
    console.print(f"\n[dim]{rate:.0f} tokens/s[/dim]\n")
    return done.tokens[0], rate, done.trace
