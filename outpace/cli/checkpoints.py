"""Commands on checkpoints: inspect, synth."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from outpace.cli.app import AsJson, Target, app, console


@app.command()
def inspect(
    path: Target = "default",
    deep: Annotated[
        bool,
        typer.Option("--scan", help="Value scan: NaN, Inf, zeros, implausible sizes in any tensor."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Inspect a checkpoint: contents, and agreement with its config.json.

    Compares names, shapes and dtypes, and says what is wrong and how to fix it.
    Exits 1 where something is.

    [bold]Examples[/bold]: outpace inspect default --json
    outpace inspect FOLDER --scan
    """
    from outpace.checkpoint.open import target_path
    from outpace.cli.display import show_report
    from outpace.doctor.checkpoint import validate_checkpoint

    with _bytes_bar() as bar:
        task = bar.add_task("values", visible=deep, total=None)
        report = validate_checkpoint(
            target_path(path), deep=deep, on_bytes=lambda n, total: bar.update(task, advance=n, total=total)
        )
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show_report(report, console)
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def synth(
    path: Annotated[Path, typer.Argument(help="Folder to create.")],
    like: Annotated[
        str, typer.Option(help="Published model: gpt-oss-20b, gpt-oss-120b, qwen3-8b, llama-3.1-8b, ..")
    ],
    layers: Annotated[int | None, typer.Option(help="Number of layers to write. Default: all.")] = None,
    seed: int = 0,
    dtype: Annotated[
        str, typer.Option(help="Dtype of all but MXFP4: bfloat16, float16, float32.")
    ] = "bfloat16",
    overwrite: Annotated[bool, typer.Option(help="Overwriting of weights in the folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write random weights in the shape and the format of a published model.

    For measuring load time, memory and speed without a download. Its output makes no sense:
    the tokenizer is the embedded one, and the head favours its ids.
    A run that was stopped goes on with the shards it lacks.

    [bold]Examples[/bold]: outpace synth big --like gpt-oss-20b  (13.8 GB)
    outpace synth small --like gpt-oss-120b --layers 2 --seed 7
    """
    from outpace.checkpoint.publish import one_writer
    from outpace.formats import random_weights as make

    plan = make.plan(like, layers=layers, seed=seed, dtype=dtype)
    with one_writer(path), _bytes_bar() as bar:
        task = bar.add_task(f"{like}, {plan.parameters / 1e9:.2f} billion parameters", total=plan.nbytes)
        written = make.synthesise(path, plan, overwrite=overwrite, on_bytes=lambda n: bar.advance(task, n))
    if as_json:
        print(json.dumps(asdict(written)))
    else:
        kept = f" ({written.kept_shards} kept from an earlier run)" if written.kept_shards else ""
        files = f"{written.nbytes:,} bytes, shards: {written.shards}{kept}, {written.seconds:.1f} s"
        console.print(
            f"{written.folder}: {files}; `outpace inspect {written.folder}` looks into it",
            highlight=False,
            soft_wrap=True,
        )


def _bytes_bar() -> Progress:
    """On stderr, and gone when it is done: stdout is for the result."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
