"""`outpace demo`: one problem answered twice, with and without speculation, then every method measured."""

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from outpace.cli.app import app, console, say

if TYPE_CHECKING:
    from outpace.api import GenerationOutput, Model

FAMILY, SEED = "json", 18  # of the problem that is shown
TOKENS = 600  # of its answer, at most
RECIPE: dict[str, Any] = {
    "temperatures": (0.0,),
    "problems": 2,
    "calibrate_s": 2.0,
    "methods": {
        "n-gram": {"draft": "ngram", "controller": (False,)},
        "EAGLE-3": {"draft": "eagle3", "num_steps": 5, "controller": (False,)},
        "DFlash 2, tree of 16": {"draft": "dflash", "num_draft_tokens": 16, "controller": (False,)},
        "DFlash 2": {"draft": "dflash"},
    },
}


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo-report")) -> None:
    """Demonstration on the embedded model: a problem with and without speculation, then every method.

    The problems are held out: the model has never seen them.
    """
    from outpace.api import load
    from outpace.bench.answers import PAGE, print_report, run_answers
    from outpace.bench.suite import SuiteRecipe, SuiteRequest
    from outpace.checkpoint.save import write_json
    from outpace.tasks.families import FAMILIES

    model = load("default")
    problem = FAMILIES[FAMILY].draw(random.Random(SEED), held_out=True)
    say("[bold]Problem[/bold]")
    say(f"{problem.question}\n", markup=False)
    plain = _show(model, problem.question, False, "Autoregressive")
    fast = _show(model, problem.question, "dflash", "Speculative, accepted draft tokens in green")
    if fast.tokens != plain.tokens:
        raise ValueError("demo: the speculative answer differs from the autoregressive one; this is a bug")
    verdict = "right" if problem.is_right(fast.text) else f"wrong: it should be {problem.answer}"
    speedup = fast.tokens_per_second / plain.tokens_per_second
    say(
        f"The answer is {verdict}. The same {len(fast.tokens)} tokens, {speedup:.1f} times as fast: "
        f"{fast.tau:.2f} tokens per forward of the target.\n",
        markup=False,
    )
    request = SuiteRequest(
        target=model.target,
        tokenizer=model.tokenizer,
        documents=(),
        recipe=SuiteRecipe(**RECIPE),
        drafts=out,
        calibration_text=(),
        folder=out,
        console=console,
    )
    report = run_answers(request)
    PAGE.write(report, out)
    write_json(out / "trace.json", json.loads(json.dumps(asdict(fast.trace))))
    print_report(report, console)
    say(
        f"report: {out}/report.md (report.json)   plot: {out}/answers.png   "
        f"steps of the answer above: {out}/trace.json"
    )


def _show(model: "Model", question: str, draft: str | bool, title: str) -> "GenerationOutput":
    """Answer, and print the working (dim) and the answer as they are committed; draft: see `api.generate`."""
    from outpace.api import SamplingParams, generate, stream

    console.print(f"[bold]{title}[/bold]")
    chat = [{"role": "user", "content": question}]
    generate(model, chat, draft=draft, sampling=SamplingParams(max_tokens=8))  # warm-up
    pieces, message = stream(model, chat, draft=draft, sampling=SamplingParams(max_tokens=TOKENS)), 0
    for piece in pieces:
        if piece.part is None:
            continue
        if piece.part.index != message:
            console.print()
            message = piece.part.index
        style = "green" if piece.drafted else ""
        dim = " dim" if piece.part.kind == "analysis" else ""
        console.print(Text(piece.part.text, style=style + dim), end="", soft_wrap=True)
    output = pieces.finish()
    console.print(f"\n[dim]{output.tokens_per_second:.0f} tokens/s[/dim]\n")
    return output
