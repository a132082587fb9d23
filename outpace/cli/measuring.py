"""Commands that check and measure: check, bench, tables."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from outpace.cli.app import (
    AsJson,
    Corpus,
    Draft,
    DraftWeights,
    Recipe,
    Set,
    Target,
    app,
    console,
    recipe_settings,
)
from outpace.cli.measuring_memory import bench_memory, bench_pareto


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


COMPARING = ("drafts", "lossless", "controller")  # suites of the methods of a recipe
SUITES = ("speed", "draft-context", "context", "recall", "memory", "pareto", *COMPARING)
ALONE = ("context", "recall", "pareto")  # suites of a target without a draft


@app.command()
def bench(
    out: Annotated[Path, typer.Option(help="Folder for report.json, report.md and the plots.")],
    suite: Annotated[
        str,
        typer.Option(
            help="Suite. speed: methods side by side. "
            "draft-context: a draft's cost against context, by operation. "
            "context: a target's, whole and on partial KV. recall: its loss by position, and needles. "
            "memory: a retrofitted target with and without its retrofits, a draft and partial KV. "
            "pareto: what each size of a retrofit costs. "
            "drafts, lossless, controller: methods that the recipe names."
        ),
    ] = "speed",
    target: Target = "default",
    draft: Draft = "dflash",
    draft_weights: DraftWeights = None,
    drafts: Annotated[
        Path | None, typer.Option(help="Folder with the drafts of the recipe. Default: the current one.")
    ] = None,
    recipe: Recipe = None,
    set_: Set = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short form of draft-context.")] = False,
    corpus: Corpus = None,
    as_json: AsJson = False,
) -> None:
    """Benchmark methods, interleaved, on held-out prompts. Every suite but speed resumes.

    [bold]Example[/bold]: outpace bench --out report --set batches=1,8 --set methods=plain,dflash

    [bold]Example[/bold]: outpace bench --suite draft-context --out report --set contexts=2048,8192

    [bold]Example[/bold]: outpace bench gpt-oss-20b --suite context --out report

    [bold]Example[/bold]: outpace bench --out report --draft DRAFT --draft-quant q8_0

    [bold]Example[/bold]: outpace bench RETROFITTED --suite memory --draft suffix --out report

    [bold]Example[/bold]: outpace bench --suite drafts --drafts runs/drafts --recipe SUITE.toml --out report
    """
    if suite not in SUITES:
        raise ValueError(f"--suite {suite}: known are {', '.join(SUITES)}")
    if quick and suite != "draft-context":
        raise ValueError(f"--quick shortens draft-context, not {suite}: lower its settings with --set")
    compares = suite in COMPARING
    if compares and recipe is None:
        raise ValueError(
            f"--suite {suite} compares the methods of a --recipe, such as recipes/drafts/suite-embedded.toml"
        )
    if drafts is not None and not compares:
        raise ValueError(f"--drafts is for the suites {', '.join(COMPARING)}, not {suite}")
    if draft != "dflash" and compares:
        raise ValueError(f"--draft {draft}: the drafts of --suite {suite} are named in its --recipe")
    if suite in ALONE and (draft != "dflash" or draft_weights is not None):
        raise ValueError(f"--suite {suite} measures a target alone: leave --draft and --draft-quant out")
    if draft_weights is not None and compares:
        raise ValueError(
            f"--draft-quant {draft_weights}: in --suite {suite} every method states it for itself, in the "
            f'--recipe: weights = "{draft_weights}"'
        )
    shown = Console(stderr=True) if as_json else console
    given = (target, draft, draft_weights, recipe, set_, out, corpus, shown)
    if suite == "speed":
        report = _bench_speed(*given, printed=not as_json)
    elif suite == "context":
        report = _bench_context(target, recipe, set_, out, shown)
    elif suite == "recall":
        report = _bench_recall(target, recipe, set_, out, corpus, shown)
    elif suite == "memory":
        report = bench_memory(*given)
    elif suite == "pareto":
        report = bench_pareto(target, recipe, set_, out, corpus, shown)
    elif suite == "draft-context":
        report = _bench_draft_context(*given, quick)
    else:
        report = _bench_methods(suite, target, drafts or Path(), recipe, set_, out, corpus, shown)
    if as_json:
        print(json.dumps(report))
    else:
        console.print(f"written: {out}/report.json, report.md and the plots")


def _bench_speed(
    target: str,
    draft: str,
    weights: str | None,
    recipe: Path | None,
    set_: list[str] | None,
    out: Path,
    corpus: Path | None,
    shown: Console,
    printed: bool,
) -> dict[str, Any]:
    from outpace.bench.report import print_report, write_report
    from outpace.bench.speed import BenchSettings, run_bench
    from outpace.loading import SUFFIX, open_dflash, open_draft, open_target, own_draft
    from outpace.text.corpus import read_corpus, split

    settings = recipe_settings(BenchSettings, recipe, set_)
    loaded, tokenizer = open_target(target)
    held_out = split(read_corpus(corpus))[1]
    dflash = open_dflash(draft, tokenizer, weights)
    suffix = open_draft(SUFFIX, loaded, tokenizer) if own_draft(target) == SUFFIX else None
    report = run_bench(loaded, dflash, tokenizer, held_out, settings, shown, suffix=suffix)
    write_report(report, out)
    if printed:
        print_report(report, shown)
    return report


def _bench_draft_context(
    target: str,
    draft: str,
    weights: str | None,
    recipe: Path | None,
    set_: list[str] | None,
    out: Path,
    corpus: Path | None,
    shown: Console,
    quick: bool,
) -> dict[str, Any]:
    from outpace.bench.draft_context import (
        QUICK,
        DraftContextSettings,
        regime_lengths,
        run_draft_context,
        write_draft_context,
    )
    from outpace.bench.prompts import held_out_prompts
    from outpace.config import load_settings, parse_overrides
    from outpace.loading import open_dflash, open_target
    from outpace.text.corpus import read_corpus, split

    values = (QUICK if quick else {}) | parse_overrides(DraftContextSettings, set_ or [])
    settings = load_settings(DraftContextSettings, recipe, values)
    loaded, tokenizer = open_target(target)
    dflash = open_dflash(draft, tokenizer, weights)
    if dflash is None:
        raise ValueError(f"--draft {draft}: draft-context takes a DFlash apart; name one")
    held_out = split(read_corpus(corpus))[1]
    prompts = {
        regime: held_out_prompts(tokenizer, held_out, settings.prompts, regime_lengths(regime)[0])
        for regime in settings.acceptance
    }
    report = run_draft_context(loaded, dflash, prompts, settings, out, shown)
    write_draft_context(report, out)
    return report


def _bench_context(
    target: str, recipe: Path | None, set_: list[str] | None, out: Path, shown: Console
) -> dict[str, Any]:
    from outpace.bench.context import ContextSettings, run_context, write_context
    from outpace.loading import open_target

    settings = recipe_settings(ContextSettings, recipe, set_)
    report = run_context(open_target(target)[0], settings, out, shown)
    write_context(report, out)
    return report


def _bench_recall(
    target: str, recipe: Path | None, set_: list[str] | None, out: Path, corpus: Path | None, shown: Console
) -> dict[str, Any]:
    from outpace.bench.recall import RecallSettings, run_recall, write_recall
    from outpace.loading import open_target
    from outpace.text.corpus import read_corpus, split

    settings = recipe_settings(RecallSettings, recipe, set_)
    held_out = split(read_corpus(corpus))[1]
    report = run_recall(*open_target(target), held_out, settings, out, shown)
    write_recall(report, out)
    return report


def _bench_methods(
    suite: str,
    target: str,
    drafts: Path,
    recipe: Path | None,
    set_: list[str] | None,
    out: Path,
    corpus: Path | None,
    shown: Console,
) -> dict[str, Any]:
    from outpace.bench import comparison, controller_suite, lossless_suite
    from outpace.bench.suite import SuiteRecipe, SuiteRequest, calibration_text
    from outpace.loading import open_target
    from outpace.text.corpus import read_corpus, split

    settings = recipe_settings(SuiteRecipe, recipe, set_)
    loaded, tokenizer = open_target(target)
    train, held_out = split(read_corpus(corpus))
    text = calibration_text(tokenizer, train)
    asked = SuiteRequest(
        target=loaded,
        tokenizer=tokenizer,
        documents=held_out,
        recipe=settings,
        drafts=drafts,
        text=text,
        folder=out,
        console=shown,
    )
    if suite == "drafts":
        report = comparison.run_comparison(asked)
        comparison.write_comparison(report, out)
    elif suite == "lossless":
        report = lossless_suite.run_lossless(asked)
        lossless_suite.write_suite(report, out, lossless_suite.lossless_markdown(report))
    else:
        report = controller_suite.run_controller(asked)
        lossless_suite.write_suite(report, out, lossless_suite.controller_markdown(report))
    return report


@app.command("tables")
def tables(page: Annotated[Path, typer.Argument(help="Markdown page with marked tables.")]) -> None:
    """Regenerate a page's tables from the reports that its markers name.

    [bold]Example[/bold]: outpace tables docs/drafts.md
    """
    from outpace.bench.render_docs import update_page

    if not page.is_file():
        raise ValueError(f"{page} is no file: name a Markdown page")
    console.print(f"{page}: {'rewritten' if update_page(page) else 'as its reports say'}")
