"""Commands that make a target cheaper: retrofit mla."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from outpace.cli.app import AsJson, Corpus, Recipe, Set, Target, app, console, recipe_settings

retrofit_app = typer.Typer(no_args_is_help=True, help="Give a trained target a smaller memory.")
app.add_typer(retrofit_app, name="retrofit")


@retrofit_app.callback()
def _about() -> None:
    """Give a trained target a smaller memory."""


@retrofit_app.command("mla")
def mla(
    out: Annotated[Path, typer.Option(help="A new folder for the checkpoint and its report, mla.json.")],
    target: Target = "default",
    recipe: Recipe = None,
    set_: Set = None,
    corpus: Corpus = None,
    as_json: AsJson = False,
) -> None:
    """Latent KV, without training: keys and values of full-attention layers through one low-rank latent,
    calibrated on real text. The original projections stay beside it, untouched.

    [bold]Examples[/bold]: outpace retrofit mla --target default --out small
    outpace retrofit mla --target qwen3-8b --out small --set rank=512 --set allocate=equal --set method=pca
    """
    from outpace.corpus import read_corpus
    from outpace.shrink import MlaSettings, retrofit_mla

    settings = recipe_settings(MlaSettings, recipe, set_)
    with console.status("opening") as status:
        on_stage = (lambda stage: None) if as_json else status.update
        report = retrofit_mla(target, settings, read_corpus(corpus), out, on_stage)
    if as_json:
        print(json.dumps(report))
        return
    _show(report)
    console.print(f"written: {out}; `outpace generate --target {out}` uses it", highlight=False)


def _show(report: dict[str, Any]) -> None:
    table = Table("layer", "rank", "K lost", "V lost", "of what attention makes of them")
    for e in report["errors"]:
        lost = (f"{100 * e[key]:.2f} %" for key in ("k", "v", "loss"))
        table.add_row(str(e["layer"]), str(e["rank"]), *lost)
    console.print(table)
    numbers, held = report["numbers_per_token"], report["held_out"]
    saved = 1 - numbers["after"] / numbers["before"]
    console.print(
        f"{numbers['before']:,} -> {numbers['after']:,} numbers a token in these layers ({saved:.0%} less); "
        f"held-out loss {held['before']['nats_per_token']:.4f} -> {held['after']['nats_per_token']:.4f} "
        f"nats a token, KL {held['after']['kl']:.4f}, "
        f"same likeliest token {held['after']['same_likeliest']:.1%}",
        highlight=False,
    )
