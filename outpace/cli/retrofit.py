"""Commands that make a target cheaper: retrofit mla and dsa, and the trainings of both."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from outpace.cli.app import (
    AsJson,
    Corpus,
    Recipe,
    Set,
    Target,
    app,
    console,
    recipe_settings,
    resumable,
    say,
    teacher_cache,
    train_app,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from outpace.models.decoder import Decoder
    from outpace.retrofit.pipeline import RetrofitSettings
    from outpace.retrofit.train import RetrofitTrainer
    from outpace.text.corpus import Document

retrofit_app = typer.Typer(no_args_is_help=True, help="Reduce the KV cache of a trained target.")
app.add_typer(retrofit_app, name="retrofit")


@retrofit_app.callback()
def _about() -> None:
    """Reduce the KV cache of a trained target."""


@retrofit_app.command("mla")
def mla(
    out: Annotated[
        Path, typer.Option(help="Folder to create, with the checkpoint and its report, mla.json.")
    ],
    target: Target = "default",
    recipe: Recipe = None,
    set_: Set = None,
    corpus: Corpus = None,
    as_json: AsJson = False,
) -> None:
    """Latent KV, without training: keys and values of full-attention layers through one low-rank latent,
    calibrated on real text. The original projections stay next to it, untouched.

    [bold]Examples[/bold]: outpace retrofit mla default --out small
    outpace retrofit mla qwen3-8b --out small --set rank=512 --set allocate=equal --set method=pca
    """
    from outpace.retrofit.mla import MlaSettings

    _made(target, recipe_settings(MlaSettings, recipe, set_), corpus, out, as_json, show_latents)


@retrofit_app.command("dsa")
def dsa(
    out: Annotated[
        Path, typer.Option(help="Folder to create, with the checkpoint and its report, dsa.json.")
    ],
    target: Target = "default",
    recipe: Recipe = None,
    set_: Set = None,
    corpus: Corpus = None,
    as_json: AsJson = False,
) -> None:
    """Sparse attention, without training: in full-attention layers an index, made of the attention's own
    projections, picks the tokens that a query looks at. The attention stays as it is, untouched.

    [bold]Examples[/bold]: outpace retrofit dsa default --out sparse
    outpace retrofit dsa qwen3-8b --out sparse --set top_k=2048 --set index_dim=64
    """
    from outpace.retrofit.dsa import DsaSettings

    _made(target, recipe_settings(DsaSettings, recipe, set_), corpus, out, as_json, show_indexes)


def _made(
    target: str,
    settings: "RetrofitSettings",
    corpus: Path | None,
    out: Path,
    as_json: bool,
    show: Callable[[dict[str, Any]], None],
) -> None:
    """A retrofit of the corpus's texts, its stages stated while it runs, its report shown."""
    from outpace.retrofit.pipeline import retrofit
    from outpace.text.corpus import read_corpus

    with console.status("opening") as status:
        on_stage = (lambda stage: None) if as_json else status.update
        report = retrofit(target, settings, read_corpus(corpus), out, on_stage)
    if as_json:
        print(json.dumps(report))
        return
    show(report)
    _held_out(report["held_out"])
    say(f"written: {out}; `outpace generate {out}` uses it")


@train_app.command("mla")
def train_mla(
    out: Annotated[Path, typer.Option(help="Folder of the run; the checkpoint is out/model.")],
    target: Annotated[
        str, typer.Argument(metavar="MODEL", help="Target with latent KV (outpace retrofit mla).")
    ],
    cache: Annotated[
        Path | None,
        typer.Option(help="Teacher cache of the original, built with --final. Default: train on the corpus."),
    ] = None,
    recipe: Recipe = None,
    set_: Set = None,
    corpus: Corpus = None,
) -> None:
    """Train the latents of a retrofitted target towards the original in the same checkpoint, everything else
    frozen. Resumes where it was stopped.

    [bold]Example[/bold]: outpace train mla small --out work/mla --recipe recipes/memory/mla.toml
    """
    from outpace.retrofit.mla import MlaRecipe, MlaTrainer

    settings = recipe_settings(MlaRecipe, recipe, set_)

    def kind(opened: "Decoder", tokenizer: "Tokenizer", train: "list[Document]") -> MlaTrainer:
        teacher = None if cache is None else teacher_cache(cache, opened, final=True, retrofits=False)
        return MlaTrainer(settings, opened, tokenizer, train, teacher)

    _train(kind, target, corpus, out)


@train_app.command("dsa")
def train_dsa(
    out: Annotated[Path, typer.Option(help="Folder of the run; the checkpoint is out/model.")],
    target: Annotated[
        str, typer.Argument(metavar="MODEL", help="Target with an index (outpace retrofit dsa).")
    ],
    recipe: Recipe = None,
    set_: Set = None,
    corpus: Corpus = None,
) -> None:
    """Train the index of sparse attention by the attention itself, everything else frozen. Resumes where it
    was stopped.

    [bold]Example[/bold]: outpace train dsa sparse --out work/dsa --recipe recipes/memory/dsa.toml
    """
    from outpace.retrofit.dsa import DsaRecipe, DsaTrainer

    _train(partial(DsaTrainer, recipe_settings(DsaRecipe, recipe, set_)), target, corpus, out)


def _train(
    kind: "Callable[[Decoder, Tokenizer, list[Document]], RetrofitTrainer]",
    target: str,
    corpus: Path | None,
    out: Path,
) -> None:
    """Open the target, train it on the corpus's texts by a trainer of this kind, and show the report."""
    from outpace.checkpoint.open import open_checkpoint
    from outpace.checkpoint.shipped import target_path
    from outpace.checkpoint.tokenizer import open_template
    from outpace.loading import open_target
    from outpace.retrofit.train import train_retrofit
    from outpace.text.corpus import read_corpus, split

    template = open_template(open_checkpoint(target_path(target)))
    opened, tokenizer = open_target(target)
    train, held_out = split(read_corpus(corpus))
    with resumable(out):
        report = train_retrofit(kind(opened, tokenizer, train), tokenizer, template, held_out, out)
    assert report is not None, "a run that was not stopped ends"
    if "mass" in report:
        show_indexes(report)
    held = report["held_out"]
    for name, after in (("untrained", held["untrained"]), ("trained", held["after"])):
        say(name, end=": ")
        _held_out({"before": held["original"], "after": after})
    say(f"{out / 'model'}: saved")


def show_indexes(report: dict[str, Any]) -> None:
    """A table of mass kept, a line of held-out loss."""
    shares = sorted({row["share"] for row in report["mass"]})
    table = Table("layer", *(f"of {share:.1%} (latest, best)" for share in shares))
    for layer in sorted({row["layer"] for row in report["mass"]}):
        rows = {row["share"]: row for row in report["mass"] if row["layer"] == layer}
        value = (f"{r['index']:.1%} ({r['recent']:.1%}, {r['best']:.1%})" for r in map(rows.get, shares) if r)
        table.add_row(str(layer), *value)
    console.print("the attention's mass that the index keeps, if it may pick this share of the context")
    console.print(table)


def _held_out(held: dict[str, Any]) -> None:
    before, after = held["before"]["nats_per_token"], held["after"]["nats_per_token"]
    say(
        f"held-out loss {before:.4f} -> {after:.4f} nats per token ({after / before - 1:+.2%}), "
        f"KL {held['after']['kl']:.4f}, same top-1 token {held['after']['same_likeliest']:.1%}"
    )


def show_latents(report: dict[str, Any]) -> None:
    """A table of errors, a line of numbers remembered."""
    table = Table("layer", "rank", "K lost", "V lost", "of what attention makes of them")
    for e in report["errors"]:
        lost = (f"{100 * e[key]:.2f}%" for key in ("k", "v", "loss"))
        table.add_row(str(e["layer"]), str(e["rank"]), *lost)
    console.print(table)
    numbers = report["numbers_per_token"]
    saved = 1 - numbers["after"] / numbers["before"]
    say(f"{numbers['before']:,} -> {numbers['after']:,} numbers per token in these layers ({saved:.0%} less)")
