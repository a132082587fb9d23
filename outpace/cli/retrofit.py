"""Commands that make a target cheaper: retrofit mla and dsa, and the trainings of both."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

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
    train_app,
)

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
    from outpace.retrofit.mla import MlaSettings, retrofit_mla

    settings = recipe_settings(MlaSettings, recipe, set_)
    make = partial(retrofit_mla, target, settings)
    _made(make, corpus, out, as_json, show_latents)


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
    from outpace.retrofit.dsa import DsaSettings, retrofit_dsa

    settings = recipe_settings(DsaSettings, recipe, set_)
    make = partial(retrofit_dsa, target, settings)
    _made(make, corpus, out, as_json, show_indexes)


def _made(
    make: Callable[..., dict[str, Any]],
    corpus: Path | None,
    out: Path,
    as_json: bool,
    show: Callable[[dict[str, Any]], None],
) -> None:
    """A retrofit of the corpus's texts, its stages stated while it runs, its report shown."""
    from outpace.text.corpus import read_corpus

    with console.status("opening") as status:
        report = make(read_corpus(corpus), out, (lambda stage: None) if as_json else status.update)
    if as_json:
        print(json.dumps(report))
        return
    show(report)
    _held_out(report["held_out"])
    console.print(f"written: {out}; `outpace generate {out}` uses it", highlight=False)


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
    from outpace.models.load import fingerprint
    from outpace.retrofit.mla import MlaRecipe
    from outpace.retrofit.mla import train_mla as train
    from outpace.teacher.store import TeacherCache

    settings = recipe_settings(MlaRecipe, recipe, set_)
    given = _opened(target, corpus)
    if cache is not None:
        original = fingerprint(given["target"], retrofits=False)
        given["teacher"] = TeacherCache.open(
            cache, target_fingerprint=original, vocab_size=given["target"].config.vocab_size, final=True
        )
    with resumable(out):
        report = train(settings, folder=out, **given)
    _summary(report, out)


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
    from outpace.retrofit.dsa import DsaRecipe
    from outpace.retrofit.dsa import train_dsa as train

    settings = recipe_settings(DsaRecipe, recipe, set_)
    given = _opened(target, corpus)
    with resumable(out):
        report = train(settings, folder=out, **given)
    _summary(report, out)


def _opened(target: str, corpus: Path | None) -> dict[str, Any]:
    """The target, its tokenizer and chat template, and the texts to train on and to evaluate on."""
    from outpace.checkpoint.open import open_checkpoint, target_path
    from outpace.checkpoint.tokenizer import open_template
    from outpace.loading import open_target
    from outpace.text.corpus import read_corpus, split

    template = open_template(open_checkpoint(target_path(target)))
    opened, texts = open_target(target), split(read_corpus(corpus))
    names = ("target", "tokenizer", "template", "train", "held_out")
    return dict(zip(names, (*opened, template, *texts), strict=True))


def _summary(report: dict[str, Any] | None, out: Path) -> None:
    assert report is not None, "a run that was not stopped ends"
    if "mass" in report:
        show_indexes(report)
    held = report["held_out"]
    for name, after in (("untrained", held["untrained"]), ("trained", held["after"])):
        console.print(name, end=": ", highlight=False)
        _held_out({"before": held["original"], "after": after})
    console.print(f"{out / 'model'}: saved", highlight=False)


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
    console.print(
        f"held-out loss {before:.4f} -> {after:.4f} nats per token ({after / before - 1:+.2%}), "
        f"KL {held['after']['kl']:.4f}, same top-1 token {held['after']['same_likeliest']:.1%}",
        highlight=False,
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
    console.print(
        f"{numbers['before']:,} -> {numbers['after']:,} numbers per token in these layers ({saved:.0%} less)",
        highlight=False,
    )
