"""Commands on drafts as files: export, import, preflight."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from outpace.cli.app import AsJson, app, console, say

DraftPath = Annotated[
    str, typer.Argument(help="Draft: a folder or GGUF file of any known format, or 'dflash'.")
]


@app.command()
def export(
    draft: DraftPath,
    to: Annotated[
        str,
        typer.Option(
            help="Format. For a DFlash zlab, speculators, transformers or gguf; "
            "sglang-eagle3, speculators-eagle3 "
            "or gguf for an EAGLE-3."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; for gguf, a file.")],
    target: Annotated[
        str | None,
        typer.Option(help="Target: a checkpoint, or 'default'. Needed for speculators and gguf."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Number format: bf16, f32, or q8_0 for gguf. Default: as stored.")
    ] = None,
    allow_lossy_format: Annotated[
        bool, typer.Option(help="Write the draft though an engine that loads the format computes otherwise.")
    ] = False,
) -> None:
    """Export a draft to the format of an engine.

    What the format cannot hold is refused by name. speculators' files name their target and carry copies of
    its embedding and head; GGUF carries its vocabulary: both need --target.

    [bold]Examples[/bold]: outpace export run/draft --to zlab --out draft
    outpace export dflash --to gguf --target default --out dflash-draft.gguf --dtype q8_0
    """
    from outpace.checkpoint.shipped import draft_path
    from outpace.formats.export import DTYPES, PACKED, export_draft, open_target_files
    from outpace.formats.load import read_draft

    if dtype is not None and dtype not in (*DTYPES, PACKED):
        raise ValueError(f"--dtype {dtype}: choose {', '.join((*DTYPES, PACKED))}")
    files = None if target is None else open_target_files(target)
    path = draft_path(draft)
    if out.exists() and out.resolve() == path.resolve():
        raise ValueError(f"{out} is the draft itself: choose another place")
    result, description, notes = read_draft(path, files)
    precision = None if dtype is None else DTYPES.get(dtype)
    warnings = export_draft(
        description, to, out, files, precision, packed=dtype == PACKED, allow_lossy=allow_lossy_format
    )
    for note in notes:
        say(f"[dim]note: {escape(note)}[/dim]", soft_wrap=True)
    for warning in warnings:
        text = f"[yellow]{warning.check}:[/yellow] {warning.engine} {escape(warning.message)}"
        say(text, soft_wrap=True)
    say(f"{escape(str(out))}: written as {to} (from {result})")


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="Draft: a folder or GGUF file; the format is detected.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    target: Annotated[
        str | None,
        typer.Option(help="Target: a checkpoint. Needed where the format does not name it."),
    ] = None,
) -> None:
    """Import a draft of any known format into ours: z-lab's for DFlash, SGLang's for EAGLE-3.

    Contradictions, left-over tensors and keys that mean something else are errors.

    [bold]Example[/bold]: outpace import downloads/dflash --target checkpoints/gpt-oss-20b --out draft
    """
    from outpace.formats.export import import_draft, open_target_files

    if not path.exists():
        raise ValueError(f"{path} is not there: name a draft's folder or GGUF file")
    files = None if target is None else open_target_files(target)
    result, written, notes = import_draft(path, out, files)
    for note in notes:
        say(f"[dim]note: {escape(note)}[/dim]", soft_wrap=True)
    say(f"{escape(str(out))}: {written}, read from {result}")


@app.command()
def preflight(
    draft: DraftPath,
    target: Annotated[str, typer.Option(help="Target: a checkpoint, or 'default'.")] = "default",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Engine to report, repeatable: outpace, SGLang, vLLM, SpecForge, speculators, "
            "llama.cpp, transformers."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report what each engine reads in a draft's files, the differences, and the fix. Runs nothing.

    Exits 1 where an engine would take something otherwise than it is meant.

    [bold]Examples[/bold]: outpace preflight run/draft --target checkpoints/gpt-oss-20b
    outpace preflight draft --target default --engine SGLang --engine vLLM
    """
    from outpace.checkpoint.shipped import draft_path
    from outpace.formats.export import open_target_files
    from outpace.formats.preflight import ENGINES, show_preflight
    from outpace.formats.preflight import preflight as look

    result = look(draft_path(draft), open_target_files(target), tuple(engine) if engine else ENGINES)
    if as_json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        show_preflight(result, console)
    if not result.clean:
        raise typer.Exit(1)
