"""The command that turns one format of a target into another."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from outpace.cli.app import app, console


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Checkpoint folder, GGUF file, or 'default'.")],
    out: Annotated[
        Path, typer.Argument(help="Output: a name that ends in .gguf, or a folder for safetensors.")
    ],
    type: Annotated[
        str,
        typer.Option(
            help="Number format of the matrices: bf16, f16, f32, or q8_0 in GGUF. MXFP4 experts are kept."
        ),
    ] = "bf16",
    overwrite: Annotated[bool, typer.Option(help="Overwriting of existing files.")] = False,
) -> None:
    """Write a target as GGUF (for llama.cpp) or as HF safetensors, tokenizer and chat template included.

    MXFP4 experts go over bit for bit, both ways; one tensor is in memory at a time.

    [bold]Examples[/bold]: outpace convert default small.gguf --type q8_0
    outpace convert gpt-oss-20b-mxfp4.gguf gpt-oss-20b
    """
    from outpace.formats.convert import convert_target

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{out.name}", total=None)
        convert_target(
            source,
            out,
            type,
            overwrite=overwrite,
            on_bytes=lambda n, total: bar.update(task, advance=n, total=total),
        )
    console.print(f"{out}: written; `outpace inspect {out}` looks into it", highlight=False)
