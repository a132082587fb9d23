"""One function per command: generate, inspect, train, teacher, verify, bench, demo."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
train_app = typer.Typer(no_args_is_help=True, help="Train a target, or a draft from a teacher cache.")
teacher_app = typer.Typer(no_args_is_help=True, help="Build, describe and check a teacher cache.")
app.add_typer(train_app, name="train")
app.add_typer(teacher_app, name="teacher")
console = Console()

Target = Annotated[str, typer.Option(help="Checkpoint folder of the target, or 'default'.")]
Draft = Annotated[str, typer.Option(help="Draft folder (z-lab DFlash), 'default', 'ngram' or 'none'.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Recipe = Annotated[Path | None, typer.Option(help="TOML recipe; without one, the defaults.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a recipe's field: --set steps=500.")]
Corpus = Annotated[Path | None, typer.Option(help="Folder of *.py files; default: the standard library.")]


@app.callback()
def _about() -> None:
    """Lossless speculative decoding for GPT-OSS, Qwen3 and Llama: train drafts, decode, prove, measure."""


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    target: Target = "default",
    draft: Draft = "default",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n")] = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per forward.")] = 512,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the stop tokens.")] = False,
    stats: Annotated[bool, typer.Option(help="Say how it went: tau, tokens/s, time by part.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a text, streaming it.

    [bold]Examples[/bold]: outpace generate "def fibonacci(n):" --stats
    outpace generate --prompt-file main.py --temperature 0.8 --seed 7 --draft ngram
    """
    from outpace.decode.request import Request
    from outpace.load import open_draft, open_target
    from outpace.ops.sampling import Sampling
    from outpace.stream import run

    text = _prompt_text(prompt, prompt_file)
    loaded, tokenizer = open_target(target)
    request = Request(
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        stop=frozenset() if ignore_eos else frozenset(loaded.config.eos_token_ids),
        prefill_chunk=prefill_chunk,
    )
    write = (lambda piece: None) if as_json else _write
    bound = open_draft(draft, loaded, tokenizer)
    result = run(loaded, bound, tokenizer, text, request, seed, write)
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        _write("\n")
        if stats:
            console.print(result.summary(), style="dim", highlight=False)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="Checkpoint folder, or 'default'.")] = "default",
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint holds: architecture, shapes, parameters, bytes, what is missing or left over.

    Exits 1 where the tensors are not what config.json describes.

    [bold]Example[/bold]: outpace inspect default --json
    """
    from outpace.load import target_folder
    from outpace.models.inspect import inspect_target
    from outpace.show import show_inspection

    found = inspect_target(target_folder(path))
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        show_inspection(found, console)
    if not found.comparison.clean:
        raise typer.Exit(1)


@train_app.command("target")
def train_target(
    out: Annotated[Path, typer.Option(help="Folder of the run; the checkpoint is out/model.")],
    recipe: Recipe = None,
    set_: Set = None,
    init: Annotated[
        str | None, typer.Option(help="Go on from the weights and tokenizer of a folder, or 'default'.")
    ] = None,
    corpus: Corpus = None,
) -> None:
    """Train a small gpt-oss from raw text and save it with MXFP4 experts. Resumes where it was stopped.

    [bold]Example[/bold]: outpace train target --recipe recipes/target-micro.toml --out work/micro
    """
    from outpace.chat.tokenizer import read_tokenizer, train_bpe
    from outpace.corpus import read_corpus, split
    from outpace.load import open_target, target_folder
    from outpace.train import publish, target

    settings = _settings(target.TargetRecipe, recipe, set_)
    train, held_out = split(read_corpus(corpus))
    out.mkdir(parents=True, exist_ok=True)
    start, known = (None, None) if init is None else open_target(init)
    if not (out / "tokenizer.json").exists():
        bpe = known or train_bpe((d.text for d in train), settings.vocab_size)
        bpe.save(str(out / "tokenizer.json.tmp"))
        (out / "tokenizer.json.tmp").replace(out / "tokenizer.json")
    tokenizer = read_tokenizer(out)
    model = target.train_target(settings, tokenizer, train, held_out, out, init=start)
    with console.status("saving and judging what was saved"):
        before = None if init is None else publish.read_provenance(target_folder(init))
        said = publish.publish_target(model, tokenizer, settings, train, held_out, out, out / "model", before)
    console.print(
        f"{out / 'model'}: held-out {said['held_out_bits_per_byte']} bits per byte, "
        f"{said['repeated_8gram_share']:.1%} repeated 8-grams in greedy text "
        f"({said['repeated_8gram_share_of_real_text']:.1%} in real text), "
        f"its tokens at a mean probability of {said['greedy_probability']:.2f}"
    )


@train_app.command("dflash")
def train_dflash(
    cache: Annotated[Path, typer.Option(help="Teacher cache folder (outpace teacher build).")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the draft is out/draft.")],
    target: Target = "default",
    recipe: Recipe = None,
    set_: Set = None,
    weights: Annotated[str | None, typer.Option(help="'decay' or 'dpace'.")] = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="Go on from this draft or 'default': its sizes stand, block and window are the recipe's."
        ),
    ] = None,
    corpus: Corpus = None,
) -> None:
    """Train a DFlash draft from a teacher cache. Resumes where it was stopped.

    [bold]Example[/bold]: outpace train dflash --cache work/cache --out work/dflash --weights dpace
    """
    from outpace.bench.prompts import held_out_prompts
    from outpace.corpus import read_corpus, split
    from outpace.load import draft_folder, open_dflash, open_target
    from outpace.models.load import fingerprint
    from outpace.teacher.store import TeacherCache
    from outpace.train import dflash
    from outpace.train.publish import read_provenance

    settings = _settings(dflash.DFlashRecipe, recipe, set_, **({"weights": weights} if weights else {}))
    if init in ("none", "ngram"):
        raise ValueError(f"--init {init}: it stands for no weights; name a draft's folder, or 'default'")
    loaded, tokenizer = open_target(target)
    teacher = TeacherCache.open(cache, target_fingerprint=fingerprint(loaded))
    _, held_out = split(read_corpus(corpus))
    prompts = held_out_prompts(tokenizer, held_out, settings.eval_prompts, 256)
    start = None if init is None else open_dflash(init, tokenizer)
    before = None if init is None else read_provenance(draft_folder(init))
    dflash.train_dflash(settings, loaded, tokenizer, teacher, prompts, out, init=start, started_from=before)
    console.print(f"{out / 'draft'}: saved")


@teacher_app.command("build")
def teacher_build(
    out: Annotated[Path, typer.Option(help="Folder of the cache.")],
    target: Target = "default",
    recipe: Recipe = None,
    set_: Set = None,
    position_offsets: Annotated[
        str | None, typer.Option(help="The same text at shifted positions: 0,4096,65536,131072.")
    ] = None,
    corpus: Corpus = None,
) -> None:
    """Let the target answer prompts of the corpus and keep its hidden states. Resumes after a kill.

    [bold]Example[/bold]: outpace teacher build --out work/cache --set samples=500 --position-offsets 0,65536
    """
    from outpace.corpus import read_corpus, split
    from outpace.load import open_target
    from outpace.teacher import build

    more = {}
    if position_offsets is not None:
        parts = position_offsets.split(",")
        more["position_offsets"] = [_integer(x, "--position-offsets") for x in parts]
    settings = _settings(build.TeacherRecipe, recipe, set_, **more)
    loaded, tokenizer = open_target(target)
    train, _ = split(read_corpus(corpus))
    built = build.build(loaded, tokenizer, train, out, settings)
    size = f"{built.meta.tokens:,} tokens, {built.meta.nbytes / 2**20:,.1f} MiB"
    console.print(f"{out}: {len(built)} samples, {size}")


@teacher_app.command("info")
def teacher_info(path: Path, as_json: AsJson = False) -> None:
    """Say what a teacher cache holds and which target it belongs to."""
    from outpace.teacher.store import TeacherCache

    said = TeacherCache.open(path, unfinished=True).describe()
    if as_json:
        print(json.dumps(said, indent=2))
    else:
        for key, value in said.items():
            console.print(f"{key:>20}  {value}", highlight=False)


@teacher_app.command("verify")
def teacher_verify(path: Path, target: Annotated[str | None, typer.Option()] = None) -> None:
    """Check every byte of a teacher cache against its checksums, and its target where one is named."""
    from outpace.load import open_target
    from outpace.models.load import fingerprint
    from outpace.teacher.store import TeacherCache

    wanted = None if target is None else fingerprint(open_target(target)[0])
    checked = TeacherCache.open(path, target_fingerprint=wanted, unfinished=True).verify()
    console.print(f"{path}: {checked:,} bytes agree with their checksums")


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

    settings = _settings(BenchSettings, recipe, set_)
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


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ValueError("give a prompt, or --prompt-file, and not both")
    text = prompt if file is None else file.read_text(encoding="utf-8")
    if not text:
        raise ValueError("the prompt is empty: there is nothing to continue")
    return text


def _integer(text: str, where: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{where}: {text!r} is not a whole number") from None


def _settings(cls: type[T], recipe: Path | None, pairs: list[str] | None, **more: Any) -> T:
    """The recipe, what --set says on top, and what options of their own say (`more`) over both."""
    from outpace.settings import load_settings, parse_overrides

    return load_settings(cls, recipe, parse_overrides(cls, pairs or []) | more)


def main() -> None:
    """The console script: errors meant for people end in one line, not in a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        Console(stderr=True).print(
            f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
