"""Commands that measure: bench, check, tables."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from outpace.cli.app import (
    ActivationDtype,
    AsJson,
    Corpus,
    Deterministic,
    Draft,
    KVCacheDtype,
    Recipe,
    Set,
    Target,
    app,
    console,
    recipe_settings,
)
from outpace.cli.options import DraftQuant

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from outpace.bench.report import Page
    from outpace.models.decoder import Decoder
    from outpace.text.corpus import Document

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """The options of one `outpace bench`."""

    suite: str
    target: str
    draft: str
    weights: str | None
    drafts: Path
    recipe: Path | None
    set_: list[str] | None
    quick: bool
    out: Path
    corpus: Path | None
    shown: Console
    kv_cache_dtype: str
    activation_dtype: str
    device: str | None
    deterministic: bool

    def open_target(self, path: str | None = None) -> "tuple[Decoder, Tokenizer]":
        from outpace.loading import open_target
        from outpace.ops.dispatch import find_activation_dtype, find_device, find_kv_cache_dtype

        kv_cache_dtype = find_kv_cache_dtype(self.kv_cache_dtype)
        activation_dtype = find_activation_dtype(self.activation_dtype, find_device("cpu"))
        return open_target(path or self.target, None, 1, kv_cache_dtype, activation_dtype)

    def settings(self, cls: type[T]) -> T:
        return recipe_settings(cls, self.recipe, self.set_)

    def documents(self) -> "tuple[Sequence[Document], Sequence[Document]]":
        """-> training, held-out."""
        from outpace.text.corpus import read_corpus, split

        return split(read_corpus(self.corpus))


COMPARING = ("drafts", "lossless", "controller", "answers")  # suites of the methods of a recipe
# suites of a target without a draft
ALONE = ("context", "recall", "pareto", "tasks", "memory-answers", "synthetic", "serve", "soak")


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
            "pareto: what each size of a retrofit costs. tasks: held-out problems, answered and checked. "
            "memory-answers: the same with latents, an index, partial KV. "
            "synthetic: the speed that a given acceptance would bring. "
            "serve: a server under load, with and without its draft. soak: a server under rude clients. "
            "device: exactness and speed of the device that is there. "
            "drafts, lossless, controller, answers: methods that the recipe names; the last on problems."
        ),
    ] = "speed",
    target: Target = "default",
    draft: Draft = "dflash",
    draft_quant: DraftQuant = None,
    drafts: Annotated[
        Path | None, typer.Option(help="Folder with the drafts of the recipe. Default: the current one.")
    ] = None,
    recipe: Recipe = None,
    set_: Set = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short form of draft-context.")] = False,
    corpus: Corpus = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    activation_dtype: ActivationDtype = "auto",
    device: Annotated[
        str | None, typer.Option(help="Of the suite device: auto (its default), cpu, cuda, cuda:N or xla.")
    ] = None,
    deterministic: Deterministic = False,
    as_json: AsJson = False,
) -> None:
    """Benchmark methods, interleaved, on held-out prompts. Every suite but speed resumes.

    [bold]Example[/bold]: outpace bench --out report --set prompts=32 --set methods=plain,dflash

    [bold]Example[/bold]: outpace bench --suite draft-context --out report --set contexts=2048,8192

    [bold]Example[/bold]: outpace bench gpt-oss-20b --suite context --out report

    [bold]Example[/bold]: outpace bench --out report --draft DRAFT --draft-quant q8_0

    [bold]Example[/bold]: outpace bench RETROFITTED --suite memory --draft ngram --out report

    [bold]Example[/bold]: outpace bench default --suite tasks --out report --set problems=100

    [bold]Example[/bold]: outpace bench default --suite memory-answers --out report --set problems=12

    [bold]Example[/bold]: outpace bench FILE.gguf --suite synthetic --out report --set taus=5 --set blocks=8

    [bold]Example[/bold]: outpace bench --suite serve --out report --set concurrency=1,8 --set rates=5

    [bold]Example[/bold]: outpace bench --suite soak --out report --set requests=1000

    [bold]Example[/bold]: outpace bench --suite device --out report --set concurrency=1,8,32

    [bold]Example[/bold]: outpace bench --suite answers --recipe SUITE.toml --out report

    [bold]Example[/bold]: outpace bench MODEL --suite drafts --drafts work --recipe SUITE.toml --out report
    """
    if suite not in RUNS:
        raise ValueError(f"--suite {suite}: known are {', '.join(RUNS)}")
    if quick and suite != "draft-context":
        raise ValueError(f"--quick shortens draft-context, not {suite}: lower its settings with --set")
    if suite != "device" and (device is not None or deterministic):
        raise ValueError(f"--device and --deterministic are for --suite device, not {suite}")
    compares = suite in COMPARING
    if compares and recipe is None:
        raise ValueError(
            f"--suite {suite} compares the methods of a --recipe, such as recipes/drafts/suite-answers.toml"
        )
    if drafts is not None and not compares:
        raise ValueError(f"--drafts is for the suites {', '.join(COMPARING)}, not {suite}")
    if draft != "dflash" and compares:
        raise ValueError(f"--draft {draft}: the drafts of --suite {suite} are named in its --recipe")
    if suite in ALONE and (draft != "dflash" or draft_quant is not None):
        raise ValueError(f"--suite {suite} measures a target alone: leave --draft and --draft-quant out")
    if draft_quant is not None and compares:
        raise ValueError(
            f"--draft-quant {draft_quant}: in --suite {suite} every method has its own, in the "
            f'--recipe: weights = "{draft_quant}"'
        )
    from outpace.checkpoint.publish import one_writer

    shown = Console(stderr=True) if as_json else console
    job = Job(
        suite,
        target,
        draft,
        draft_quant,
        drafts or Path(),
        recipe,
        set_,
        quick,
        out,
        corpus,
        shown,
        kv_cache_dtype,
        activation_dtype,
        device,
        deterministic,
    )
    with one_writer(out):
        report, page = RUNS[suite](job)
        page.write(report, out)
    if as_json:
        print(json.dumps(report))
    else:
        _show(suite, report, page, shown)
        console.print(f"written: {out}/report.json, report.md and the plots")
    failed = [check["check"] for check in report.get("checks", ()) if not check["passed"]]
    if failed:
        raise ValueError(f"{out}/report.md: not passed: {'; '.join(failed)}")


def _show(suite: str, report: dict[str, Any], page: "Page", shown: Console) -> None:
    if suite == "speed":
        from outpace.bench.speed import print_report

        print_report(report, shown)
    if suite == "answers":
        from outpace.bench import answers

        answers.print_report(report, shown)
    if suite == "device":
        console.print(page.markdown(report), markup=False, highlight=False, soft_wrap=True)


Measured = tuple[dict[str, Any], "Page"]


def _speed(job: Job) -> Measured:
    from outpace.bench.speed import PAGE, BenchSettings, run_bench
    from outpace.loading import open_dflash

    settings = job.settings(BenchSettings)
    loaded, tokenizer = job.open_target()
    dflash = open_dflash(job.draft, tokenizer, job.weights, loaded)
    held_out = job.documents()[1]
    return run_bench(loaded, dflash, tokenizer, held_out, settings, job.out, job.shown), PAGE


def _draft_context(job: Job) -> Measured:
    from outpace.bench.draft_context import (
        PAGE,
        QUICK,
        DraftContextSettings,
        regime_lengths,
        run_draft_context,
    )
    from outpace.bench.prompts import prompts_for
    from outpace.config import load_settings, parse_overrides
    from outpace.loading import open_dflash

    values = (QUICK if job.quick else {}) | parse_overrides(DraftContextSettings, job.set_ or [])
    settings = load_settings(DraftContextSettings, job.recipe, values)
    loaded, tokenizer = job.open_target()
    dflash = open_dflash(job.draft, tokenizer, job.weights, loaded)
    if dflash is None:
        raise ValueError(f"--draft {job.draft}: draft-context takes a DFlash apart; name one")
    held_out = job.documents()[1]
    prompts = {
        regime: prompts_for(tokenizer, held_out, settings.prompts, regime_lengths(regime)[0])
        for regime in settings.acceptance
    }
    return run_draft_context(loaded, dflash, prompts, settings, job.out, job.shown), PAGE


def _context(job: Job) -> Measured:
    from outpace.bench.context import PAGE, ContextSettings, run_context

    settings = job.settings(ContextSettings)
    return run_context(job.open_target()[0], settings, job.out, job.shown), PAGE


def _recall(job: Job) -> Measured:
    from outpace.bench.recall import PAGE, RecallSettings, run_recall

    settings, held_out = job.settings(RecallSettings), job.documents()[1]
    return run_recall(*job.open_target(), held_out, settings, job.out, job.shown), PAGE


def _memory(job: Job) -> Measured:
    from outpace.bench.retrofits import MEMORY_PAGE as PAGE
    from outpace.bench.retrofits import MemorySettings, run_memory
    from outpace.loading import open_draft

    settings = job.settings(MemorySettings)
    loaded, tokenizer = job.open_target()
    bound = open_draft(job.draft, loaded, tokenizer, quantize=job.weights)
    if bound is None:
        raise ValueError(
            f"--draft {job.draft}: the suite memory decodes with a draft: ngram, suffix, or a folder"
        )
    held_out = job.documents()[1]
    return run_memory(loaded, tokenizer, bound, job.draft, held_out, settings, job.out, job.shown), PAGE


def _pareto(job: Job) -> Measured:
    from outpace.bench.retrofits import PARETO_PAGE as PAGE
    from outpace.bench.retrofits import ParetoSettings, run_pareto

    settings = job.settings(ParetoSettings)
    trained = {name: job.open_target(name)[0] for name in settings.trained}
    loaded, tokenizer = job.open_target()
    return run_pareto(loaded, tokenizer, trained, *job.documents(), settings, job.out, job.shown), PAGE


def _tasks(job: Job) -> Measured:
    from outpace.bench.tasks import PAGE, TasksSettings, run_tasks

    settings = job.settings(TasksSettings)
    return run_tasks(*job.open_target(), settings, job.out, job.shown), PAGE


def _memory_answers(job: Job) -> Measured:
    from outpace.bench.memory_answers import PAGE, MemoryAnswersSettings, run_memory_answers

    settings = job.settings(MemoryAnswersSettings)
    return run_memory_answers(*job.open_target(), settings, job.out, job.shown), PAGE


def _serve(job: Job) -> Measured:
    from outpace.bench.serve import PAGE, ServeSettings, run_serve

    settings, held_out = job.settings(ServeSettings), job.documents()[1]
    loaded, tokenizer = job.open_target()
    return run_serve(loaded, job.target, tokenizer, held_out, settings, job.out, job.shown), PAGE


def _soak(job: Job) -> Measured:
    from outpace.bench.soak import PAGE, SoakSettings, run_soak

    settings, held_out = job.settings(SoakSettings), job.documents()[1]
    loaded, tokenizer = job.open_target()
    return run_soak(loaded, job.target, tokenizer, held_out, settings, job.out, job.shown), PAGE


def _device(job: Job) -> Measured:
    from outpace.api import load, load_draft
    from outpace.bench.device import PAGE, Device, DeviceSettings, run_device
    from outpace.checkpoint.open import open_checkpoint
    from outpace.checkpoint.shipped import target_path
    from outpace.drafts.lookup import NGram
    from outpace.models.load import layout_of
    from outpace.models.memory import plan_memory

    settings = job.settings(DeviceSettings)
    length = settings.prompt_tokens + settings.new_tokens + 64
    sequences = max(settings.concurrency)
    name = "cpu" if job.device == "xla" else job.device or "auto"
    model = load(
        job.target,
        kv_cache_dtype=job.kv_cache_dtype,
        activation_dtype=job.activation_dtype,
        device=name,
        deterministic=job.deterministic,
        sequences=sequences,
        length=length,
    )
    kind, target = model.target.device.type, model.executor
    drafts: dict[str, Any] = {"ngram": NGram(block_size=8)}
    named = None if job.draft == "none" else load_draft(job.draft, model, quantize=job.weights)
    if named is not None:
        drafts[job.draft] = named
    if job.device == "xla":
        from outpace.models.xla import XLATarget

        kind, target = "xla", XLATarget(model.target)
    elif job.draft == "dflash":
        drafts["tree of dflash"] = load_draft(job.draft, model, num_draft_tokens=16)
    plan = None
    if kind == "cuda":
        layout = layout_of(open_checkpoint(target_path(job.target)).names(), target.config)
        plan = plan_memory(
            target.config, layout, sequences, length, kv_cache_dtype=model.target.kv_cache_dtype
        )
    held_out = job.documents()[1]
    device = Device(name=kind, target=target, drafts=drafts, plan=plan)
    return run_device(device, model.tokenizer, held_out, settings, job.out, job.shown), PAGE


def _synthetic(job: Job) -> Measured:
    from outpace.bench.synthetic import PAGE, SyntheticSettings, run_synthetic
    from outpace.checkpoint.open import is_gguf
    from outpace.checkpoint.shipped import target_path

    settings, path = job.settings(SyntheticSettings), target_path(job.target)
    loaded, tokenizer = job.open_target()
    file = path if is_gguf(path) else None
    return run_synthetic(loaded, tokenizer, job.documents()[1], settings, job.out, job.shown, file), PAGE


def _methods(job: Job) -> Measured:
    from outpace.bench import answers, comparison
    from outpace.bench.suite import SuiteRecipe, SuiteRequest, calibration_text

    recipe = job.settings(SuiteRecipe)
    loaded, tokenizer = job.open_target()
    train, held_out = job.documents()
    request = SuiteRequest(
        target=loaded,
        tokenizer=tokenizer,
        documents=held_out,
        recipe=recipe,
        drafts=job.drafts,
        calibration_text=calibration_text(tokenizer, train),
        folder=job.out,
        console=job.shown,
    )
    suites = comparison.SUITES | {"answers": (answers.run_answers, answers.PAGE)}
    run, page = suites[job.suite]
    return run(request), page


RUNS: dict[str, Callable[[Job], Measured]] = {
    "speed": _speed,
    "draft-context": _draft_context,
    "context": _context,
    "recall": _recall,
    "memory": _memory,
    "pareto": _pareto,
    "tasks": _tasks,
    "memory-answers": _memory_answers,
    "synthetic": _synthetic,
    "serve": _serve,
    "soak": _soak,
    "device": _device,
    **dict.fromkeys(COMPARING, _methods),
}


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
    from outpace.bench.prompts import prompts_for
    from outpace.loading import open_draft, open_target
    from outpace.teacher.store import TeacherCache
    from outpace.text.corpus import read_corpus, split

    if stages:
        if cache is not None:
            raise ValueError("--stages reads no teacher cache: leave --cache out")
        _check_stages(target, draft, prompts, as_json)
        return
    loaded, tokenizer = open_target(target)
    texts = prompts_for(tokenizer, split(read_corpus())[1], prompts, 256)
    teacher = None if cache is None else TeacherCache.open(cache)
    on_gate = None if as_json else _show_gate
    bound = None if draft == "ngram" else open_draft(draft, loaded, tokenizer)
    gates = run_checks(loaded, bound, teacher, texts, on_gate=on_gate)
    if as_json:
        print(json.dumps([asdict(gate) for gate in gates], indent=2))
    if failed(gates):
        raise typer.Exit(1)


def _show_gate(gate: Any) -> None:
    """One line: pass, FAIL or not run; the name; what was found."""
    mark = {True: "[green]pass[/green]", False: "[bold red]FAIL[/bold red]", None: "[dim]----[/dim]"}
    console.print(f"{mark[gate.passed]}  {gate.name}: [dim]{gate.message}[/dim]", highlight=False)


def _check_stages(target: str, draft: str, prompts: int, as_json: bool) -> None:
    from outpace.bench.prompts import held_out_prompts
    from outpace.bench.stages import compare_stages, show_stages
    from outpace.checkpoint.shipped import draft_path
    from outpace.formats.load import read_draft
    from outpace.loading import loaded_files, open_target, open_weights
    from outpace.text.corpus import read_corpus, split

    loaded, tokenizer = open_target(target)
    weights = open_weights(draft, loaded, tokenizer)  # activations in float32, as in the equations
    if weights is None:
        raise ValueError(f"--draft {draft} has no stages: name a DFlash or an EAGLE-3")
    files = read_draft(draft_path(draft), loaded_files(loaded, tokenizer))[1]
    texts = held_out_prompts(tokenizer, split(read_corpus())[1], prompts, 65)
    result = compare_stages(weights, files, loaded, texts)
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
