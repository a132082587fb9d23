"""Commands that prove and measure: verify, bench, demo."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outpace.cli.app import AsJson, Draft, Recipe, Set, Target, app, console, recipe_settings


@app.command()
def verify(
    target: Target = "default",
    draft: Draft = "default",
    cache: Annotated[Path | None, typer.Option(help="Teacher cache folder.")] = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts to decode.")] = 8,
    as_json: AsJson = False,
) -> None:
    """The gates: is the cache the target's, is the verify causal, does it accept what it must?

    Exits 1 where a gate fails.

    [bold]Example[/bold]: outpace verify --target default --draft default --cache work/cache
    """
    from outpace.bench.gates import failed, run_gates
    from outpace.bench.prompts import held_out_prompts
    from outpace.corpus import read_corpus, split
    from outpace.load import open_dflash, open_target
    from outpace.show import gates_as_json, show_gate
    from outpace.teacher.store import TeacherCache

    loaded, tokenizer = open_target(target)
    texts = held_out_prompts(tokenizer, split(read_corpus())[1], prompts, 256)
    teacher = None if cache is None else TeacherCache.open(cache)
    on_gate = None if as_json else (lambda gate: show_gate(gate, console))
    gates = run_gates(loaded, open_dflash(draft, tokenizer), teacher, texts, on_gate=on_gate)
    if as_json:
        print(json.dumps(gates_as_json(gates), indent=2))
    if failed(gates):
        raise typer.Exit(1)


@app.command()
def bench(
    out: Annotated[Path, typer.Option(help="Folder for report.json, report.md and the plots.")],
    target: Target = "default",
    draft: Draft = "default",
    recipe: Recipe = None,
    set_: Set = None,
    as_json: AsJson = False,
) -> None:
    """Measure decoding methods side by side, interleaved, on held-out prompts.

    [bold]Example[/bold]: outpace bench --out report --set batches=1,8 --set methods=plain,dflash
    """
    from outpace.bench.report import print_report, write_report
    from outpace.bench.speed import BenchSettings, run_bench
    from outpace.corpus import read_corpus, split
    from outpace.load import open_dflash, open_target

    settings = recipe_settings(BenchSettings, recipe, set_)
    loaded, tokenizer = open_target(target)
    held_out = split(read_corpus())[1]
    shown = Console(stderr=True) if as_json else console
    report = run_bench(loaded, open_dflash(draft, tokenizer), tokenizer, held_out, settings, shown)
    write_report(report, out)
    if as_json:
        print(json.dumps(report))
    else:
        print_report(report, console)
        console.print(f"written: {out}/report.json, report.md and the plots")


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo-report")) -> None:
    """The gates and the measured table on the embedded default: what `make demo` runs."""
    from outpace.bench.gates import failed, run_gates
    from outpace.bench.prompts import held_out_prompts
    from outpace.bench.report import print_report, write_report
    from outpace.bench.speed import demo_settings, run_bench
    from outpace.corpus import read_corpus, split
    from outpace.load import open_dflash, open_target
    from outpace.show import gates_as_json, show_gate

    loaded, tokenizer = open_target("default")
    dflash = open_dflash("default", tokenizer)
    held_out = split(read_corpus())[1]
    texts = held_out_prompts(tokenizer, held_out, 2, 256)
    gates = run_gates(loaded, dflash, None, texts, on_gate=lambda gate: show_gate(gate, console))
    report = run_bench(loaded, dflash, tokenizer, held_out, demo_settings(), console)
    report["gates"] = gates_as_json(gates)
    write_report(report, out)
    print_report(report, console)
    console.print(f"written: {out}/report.json, report.md and the plots")
    if failed(gates):
        raise typer.Exit(1)
