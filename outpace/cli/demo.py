"""`outpace demo`: one text decoded twice, with and without speculation, then every method measured."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from outpace.cli.app import app, console, say

if TYPE_CHECKING:
    from outpace.api import GenerationOutput, Model

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
    say(f"[bold]Prompt[/bold]\n{PROMPT}")
    plain = _show(model, False, "Autoregressive")
    fast = _show(model, None, "Speculative, accepted draft tokens in green")
    if fast.tokens != plain.tokens:
        raise ValueError("demo: the speculative text differs from the autoregressive one; this is a bug")
    speedup = fast.tokens_per_second / plain.tokens_per_second
    say(
        f"The same {len(fast.tokens)} tokens, {speedup:.1f} times as fast: "
        f"{fast.tau:.2f} tokens per forward of the target.\n"
    )
    held_out = split(read_corpus())[1]
    dflash, suffix = open_dflash("dflash", model.tokenizer), load_draft("suffix", model)
    report = run_bench(model.target, dflash, model.tokenizer, held_out, demo_settings(), out, console, suffix)
    PAGE.write(report, out)
    write_json(out / "trace.json", json.loads(json.dumps(asdict(fast.trace))))
    print_report(report, console)
    say(
        f"report: {out}/report.md (report.json)   plots: {out}/speed.png, acceptance.png   "
        f"steps of the text above: {out}/trace.json"
    )


def _show(model: "Model", draft: bool | None, title: str) -> "GenerationOutput":
    """Decode PROMPT and print the text as it is committed; draft: see `api.generate`."""
    from outpace.api import SamplingParams, generate, stream

    console.print(f"[bold]{title}[/bold]")
    generate(model, PROMPT, draft=draft, sampling=SamplingParams(max_tokens=8))  # warm-up
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    pieces = stream(model, PROMPT, draft=draft, sampling=sampling)
    for piece in pieces:
        console.print(Text(piece.text, style="green" if piece.drafted else ""), end="", soft_wrap=True)
    output = pieces.finish()
    console.print(f"\n[dim]{output.tokens_per_second:.0f} tokens/s[/dim]\n")
    return output
