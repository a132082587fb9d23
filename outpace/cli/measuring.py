"""Commands that check and render: check, tables."""

import json
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.app import AsJson, Draft, Target, app, console


@app.command()
def check(
    target: Target = "default",
    draft: Draft = "dflash",
    cache: Annotated[Path | None, typer.Option(help="Teacher cache folder.")] = None,
    prompts: Annotated[int, typer.Option(help="Number of held-out prompts to decode.")] = 8,
    stages: Annotated[
        bool,
        typer.Option(
            "--stages", help="Stage-by-stage comparison of the draft's forward with a reference, instead."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check target, draft and cache: matching cache, causal verification, acceptance, losslessness.

    With --stages, the draft on 64 tokens of each prompt: fc, attention, MLP, head, against the equations in
    float64, read from its files. Exits 1 where a gate fails, or a stage is not the reference's.

    [bold]Examples[/bold]: outpace check default --draft dflash --cache work/cache
    outpace check gpt-oss-20b --draft eagle3 --stages --prompts 2
    """
    from outpace.bench.checks import failed, run_checks
    from outpace.bench.prompts import held_out_prompts
    from outpace.cli.display import gates_as_json, show_gate
    from outpace.loading import open_draft, open_target
    from outpace.teacher.store import TeacherCache
    from outpace.text.corpus import read_corpus, split

    if stages:
        if cache is not None:
            raise ValueError("--stages reads no teacher cache: leave --cache out")
        _check_stages(target, draft, prompts, as_json)
        return
    loaded, tokenizer = open_target(target)
    texts = held_out_prompts(tokenizer, split(read_corpus())[1], prompts, 256)
    teacher = None if cache is None else TeacherCache.open(cache)
    on_gate = None if as_json else (lambda gate: show_gate(gate, console))
    bound = None if draft == "ngram" else open_draft(draft, loaded, tokenizer)
    gates = run_checks(loaded, bound, teacher, texts, on_gate=on_gate)
    if as_json:
        print(json.dumps(gates_as_json(gates), indent=2))
    if failed(gates):
        raise typer.Exit(1)


def _check_stages(target: str, draft: str, prompts: int, as_json: bool) -> None:
    from outpace.bench.prompts import held_out_prompts
    from outpace.bench.stages import compare_stages, show_stages
    from outpace.drafts.dflash import BoundDFlash
    from outpace.drafts.eagle3_decode import BoundEagle3
    from outpace.formats.load import read_draft
    from outpace.loading import draft_folder, loaded_files, open_draft, open_target
    from outpace.text.corpus import read_corpus, split

    loaded, tokenizer = open_target(target)
    bound = open_draft(draft, loaded, tokenizer)
    if not isinstance(bound, BoundDFlash | BoundEagle3):
        raise ValueError(f"--draft {draft} has no stages: name a DFlash or an EAGLE-3")
    files = read_draft(draft_folder(draft), loaded_files(loaded, tokenizer))[1]
    texts = held_out_prompts(tokenizer, split(read_corpus())[1], prompts, 65)
    result = compare_stages(bound.draft, files, loaded, texts)
    if as_json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        show_stages(result, console)
    if not result.passed:
        raise typer.Exit(1)


@app.command("tables")
def tables(page: Annotated[Path, typer.Argument(help="Markdown page with marked tables.")]) -> None:
    """Regenerate a page's tables from the reports that its markers name.

    [bold]Example[/bold]: outpace tables docs/drafts.md
    """
    from outpace.bench.render_docs import update_page

    if not page.is_file():
        raise ValueError(f"{page} is no file: name a Markdown page")
    console.print(f"{page}: {'rewritten' if update_page(page) else 'as its reports say'}")
