"""The doctor: why does this model talk nonsense?"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from outpace.cli.app import AsJson, app, console, say

LAYERS = "layers against the reference"
MARKS = {
    "pass": "[green]pass[/green]",
    "warn": "[yellow]warn[/yellow]",
    "fail": "[bold red]FAIL[/bold red]",
    "skipped": "[dim]----[/dim]",
}


@app.command()
def doctor(
    path: Annotated[str, typer.Argument(help="Checkpoint folder, GGUF file, or 'default'.")] = "default",
    other: Annotated[str | None, typer.Argument(help="Path for --reference hf or gguf.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Reference: 'hf' (transformers on PATH or OTHER), 'gguf' (the file OTHER), or a path."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers to compare. Default: all.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of text to run.")] = 192,
    text: Annotated[Path | None, typer.Option(help="Text file to run instead of the built-in text.")] = None,
    thorough: Annotated[
        bool, typer.Option(help="Exhaustive search of known mistakes on the text, without a time limit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Diagnose a model that generates nonsense: staged checks, each with a result.

    Tokenizer, embedding, number format, attention, RoPE, router, and what the model generates. With a
    reference, layer by layer, and where one departs, the known mistake that explains it. Exits 1 where a
    check fails.

    [bold]Examples[/bold]: outpace doctor default
    outpace doctor my-folder --reference hf
    outpace doctor my-folder --reference gguf model.gguf --layers 4
    """
    from outpace.doctor.examine import Examination, examine

    what = Examination(
        path=path,
        reference=reference,
        other=other,
        layers=layers,
        tokens=tokens,
        text=text,
        thorough=thorough,
    )
    items = []
    for check in examine(what):
        items.append(check)
        if not as_json:
            line = f"{MARKS[check.status]}  {check.name}: [dim]{escape(check.message)}[/dim]"
            say(line)
            if check.name == LAYERS:
                show_layers(check.evidence)
    if as_json:
        print(json.dumps([check.as_json() for check in items], indent=2))
    if any(check.status == "fail" for check in items):
        raise typer.Exit(1)


def show_layers(rows: dict[str, dict[str, Any]]) -> None:
    """One line a layer: cosine and largest difference of both halves, each fed with what the reference's
    got, and the error from end to end. What departs is red."""
    table = Table("      layer", "attention", "", "MLP", "", "end to end", "router", box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for layer, row in rows.items():
        cells = [layer]
        for half in ("attention", "mlp"):
            style = "red" if half in row["departs"] else "dim"
            for figure in (f"{row[half]['cosine']:.6f}", f"{row[half]['largest']:.1e}"):
                cells.append(f"[{style}]{figure}[/{style}]")
        alike = row["routed_alike"]
        cells += [f"{row['so_far']['error']:.1e}", "" if alike is None else f"{alike:.0%}"]
        table.add_row(*cells, style=None if row["departs"] else "dim")
    console.print(table)
