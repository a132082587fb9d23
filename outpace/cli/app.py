"""The command line's frame: the app, its groups, options that commands share."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
train_app = typer.Typer(no_args_is_help=True, help="Train a draft from a teacher cache, or a retrofit.")
teacher_app = typer.Typer(no_args_is_help=True, help="Build, describe and check a teacher cache.")
app.add_typer(train_app, name="train")
app.add_typer(teacher_app, name="teacher")
console = Console()

Target = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Target: a checkpoint folder, a GGUF file, or 'default'."),
]
Draft = Annotated[
    str, typer.Option(help="Draft: a path in any known format, 'dflash', 'suffix', 'ngram' or 'none'.")
]
OwnDraft = Annotated[
    str | None,
    typer.Option(
        help="Draft: a path in any known format, 'suffix', 'dflash', 'ngram' or 'none'. Left out, the best "
        "one known for the target: suffix for the default one, none for others."
    ),
]
DraftWeights = Annotated[
    str | None,
    typer.Option(
        "--draft-quant",
        help="Number format of the draft's matrices: q8_0 (8-bit blocks). Default: as stored. The output "
        "stays the same.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON output: one object instead of text.")]
Recipe = Annotated[Path | None, typer.Option(help="TOML recipe. Default: the defaults of its fields.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Field of the recipe, repeatable: --set steps=500.")
]
Corpus = Annotated[Path | None, typer.Option(help="Folder of *.py files. Default: the standard library.")]
TopK = Annotated[int, typer.Option(help="Top-k sampling: number of tokens kept (0 = all).")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling: probability mass kept (1 = all).")]
MinP = Annotated[
    float, typer.Option(help="Minimum probability of a token, relative to the most likely one (0 = off).")
]
Rule = Annotated[
    str,
    typer.Option(
        "--acceptance",
        help="Acceptance rule above temperature 0: match, rejection, block or gumbel. All keep the target's "
        "distribution; with gumbel a seed gives one text, with any draft. Trees that are not sampled are "
        "matched under rejection and block, too.",
    ),
]
DraftTemperature = Annotated[
    float | None,
    typer.Option(help="Temperature of the draft's own sampling (not with match). Default: the target's."),
]
TreeColumns = Annotated[
    int,
    typer.Option("--num-draft-tokens", help="Nodes of the draft tree per step, root included (0 = a chain)."),
]
Depth = Annotated[
    int, typer.Option("--num-steps", help="Depth of an EAGLE-3's proposal, in tokens (0 = its usual one).")
]
Branch = Annotated[
    int, typer.Option("--topk", help="Children per node of a draft tree (0 = the usual number).")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Number of tokens to generate at most.")]
Temperature = Annotated[
    float, typer.Option("--temperature", "--temp", help="Sampling temperature (0 = greedy).")
]
Seed = Annotated[int, typer.Option(help="Seed of the random draws.")]


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"outpace {version('outpace')}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Version of the package, and exit."),
    ] = False,
) -> None:
    """Lossless speculative decoding for GPT-OSS, Qwen3 and Llama: train drafts, decode, check, measure."""


def integer(text: str, where: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{where}: {text!r} is not a whole number") from None


def recipe_settings(cls: type[T], recipe: Path | None, pairs: list[str] | None, **more: Any) -> T:
    """The recipe, --set on top of it, and options of the command (`more`) over both."""
    from outpace.config import load_settings, parse_overrides

    return load_settings(cls, recipe, parse_overrides(cls, pairs or []) | more)
