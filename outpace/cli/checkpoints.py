"""Commands on checkpoints: inspect, synth, convert."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from outpace.cli.app import AsJson, Target, app, console, say

if TYPE_CHECKING:
    from outpace.doctor.checkpoint import Inspection, Report


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
    from outpace.checkpoint.shipped import target_path
    from outpace.doctor.checkpoint import validate_checkpoint

    with _bytes_bar() as bar:
        task = bar.add_task("values", visible=deep, total=None)
        report = validate_checkpoint(
            target_path(path), deep=deep, on_bytes=lambda n, total: bar.update(task, advance=n, total=total)
        )
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        _show_report(report)
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
    the tokenizer is the embedded one, and the head favours its 1,280 ids.
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
        say(f"{written.folder}: {files}; `outpace inspect {written.folder}` looks into it", soft_wrap=True)


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

    with _bytes_bar() as bar:
        task = bar.add_task(f"{out.name}", total=None)
        convert_target(
            source,
            out,
            type,
            overwrite=overwrite,
            on_bytes=lambda n, total: bar.update(task, advance=n, total=total),
        )
    say(f"{out}: written; `outpace inspect {out}` looks into it")


def _show_inspection(inspection: "Inspection") -> None:
    c = inspection.config
    say(f"[bold]{c.architecture}[/bold]  {inspection.folder}")
    windows = sum(bool(c.window(i)) for i in range(c.num_layers))
    sliding = f" ({windows} with a window of {c.sliding_window})" if windows else ""
    experts = f"{c.num_experts} experts, {c.experts_per_token} per token; " if c.num_experts else ""
    say(
        f"{c.num_layers} layers{sliding}, width {c.hidden_size}, "
        f"{c.num_heads} heads on {c.num_kv_heads} kv heads of {c.head_dim}; {experts}"
        f"vocabulary {c.vocab_size:,}; positions to {c.max_position_embeddings:,} ({c.rope.kind} rope)"
    )
    table = Table("part", "parameters", "bytes", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for part, (parameters, nbytes) in inspection.parts.items():
        table.add_row(part, f"{parameters:,}", f"{nbytes:,}")
    table.add_row("total", f"{inspection.parameters:,}", f"{inspection.nbytes:,}", style="bold")
    console.print(table)
    stored = ", ".join(f"{k} {v:,} bytes" for k, v in inspection.dtypes.items())
    say(
        f"active per token: {inspection.active_parameters:,} parameters; stored as {stored}; "
        f"KV cache grows by {inspection.kv_bytes_per_token:,} bytes per token (float32)"
    )


def _show_report(report: "Report") -> None:
    """Contents of the checkpoint, then each finding with its fix."""
    if report.inspection is not None:
        _show_inspection(report.inspection)
    for finding in report.findings:
        style = "red" if finding.fault else "yellow"
        say(f"[bold {style}]{finding.name}[/bold {style}]: {escape(finding.message)}")
        if finding.fix:
            say(f"  -> {escape(finding.fix)}")
    if report.passed:
        scope = "every value scanned" if report.deep else "headers only; --scan reads every value"
        console.print(f"names, shapes and dtypes are what the config describes ({scope})", style="green")


def _bytes_bar() -> Progress:
    """On stderr, and gone when it is done: stdout is for the result."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=(stderr := Console(stderr=True)),
        transient=True,
        disable=not stderr.is_terminal,
    )
