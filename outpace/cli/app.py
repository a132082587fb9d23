"""The command line's frame: the app, its groups, options that commands share."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
train_app = typer.Typer(no_args_is_help=True, help="Train a target, or a draft from a teacher cache.")
teacher_app = typer.Typer(no_args_is_help=True, help="Build, describe and check a teacher cache.")
app.add_typer(train_app, name="train")
app.add_typer(teacher_app, name="teacher")
console = Console()

Target = Annotated[str, typer.Option(help="The target: a checkpoint folder, a GGUF file, or 'default'.")]
Draft = Annotated[
    str, typer.Option(help="A draft in any known format, 'default', 'suffix', 'ngram' or 'none'.")
]
OwnDraft = Annotated[
    str | None,
    typer.Option(
        help="A draft in any known format, 'suffix', 'default' (a DFlash), 'ngram' or 'none'. Left out: "
        "suffix beside the default target, none beside others."
    ),
]
DraftWeights = Annotated[
    str | None,
    typer.Option(
        help="q8_0: the draft's matrices in blocks of 8 bits, half of bfloat16's bytes; default: as in its "
        "files. The text stays the same."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Recipe = Annotated[Path | None, typer.Option(help="TOML recipe; without one, the defaults.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a recipe's field: --set steps=500.")]
Corpus = Annotated[Path | None, typer.Option(help="Folder of *.py files; default: the standard library.")]
TopK = Annotated[int, typer.Option(help="Draw from the so many likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest that hold this share; 1: from all.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens less likely than this times the likeliest.")]
Penalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1: tokens of the text so far become unlikelier.")
]
Rule = Annotated[
    str,
    typer.Option(
        help="How guesses are judged above temperature 0: match, rejection, block or gumbel. All give "
        "the target's distribution; with gumbel a seed gives one text, whatever the draft. Trees of guesses "
        "that nobody drew are matched under rejection and block, too."
    ),
]
DraftTemperature = Annotated[
    float | None, typer.Option(help="Of a draft's own draws (not with match); default: the target's.")
]
TreeColumns = Annotated[
    int,
    typer.Option("--tree", help="Verify trees of so many tokens a round, the last one included; 0: chains."),
]
Depth = Annotated[int, typer.Option(help="The most guesses in a line, of an EAGLE-3; 0: as usual.")]
Branch = Annotated[int, typer.Option(help="With --tree: followers looked at of each guess; 0: as usual.")]


@app.callback()
def _about() -> None:
    """Lossless speculative decoding for GPT-OSS, Qwen3 and Llama: train drafts, decode, prove, measure."""


def integer(text: str, where: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{where}: {text!r} is not a whole number") from None


def recipe_settings(cls: type[T], recipe: Path | None, pairs: list[str] | None, **more: Any) -> T:
    """The recipe, what --set says on top, and what options of their own say (`more`) over both."""
    from outpace.config import load_settings, parse_overrides

    return load_settings(cls, recipe, parse_overrides(cls, pairs or []) | more)
