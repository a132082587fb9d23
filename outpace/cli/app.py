"""The command line's frame: the app, its groups, options and helpers that commands share."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

if TYPE_CHECKING:
    from outpace.models.decoder import Decoder
    from outpace.teacher.store import TeacherCache

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
train_app = typer.Typer(no_args_is_help=True, help="Train a draft from a teacher cache, or a retrofit.")
teacher_app = typer.Typer(no_args_is_help=True, help="Build, describe and check a teacher cache.")
app.add_typer(train_app, name="train")
app.add_typer(teacher_app, name="teacher")
console = Console(quiet=os.environ.get("RANK", "0") != "0")  # of torchrun's processes one speaks
say = partial(console.print, highlight=False)  # numbers and paths stay uncoloured

Target = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Target: a checkpoint folder, a GGUF file, or 'default'."),
]
Draft = Annotated[
    str,
    typer.Option(
        help="Draft: a path in any known format, 'dflash' or 'eagle3' (of the default target), 'ngram' or "
        "'none'."
    ),
]
DeviceName = Annotated[
    str, typer.Option("--device", help="Where the target runs: cpu, cuda, cuda:N, or auto (a GPU if any).")
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="On a GPU: steps of one shape, so that drafts may be exact in bfloat16, at the price of larger "
        "steps.",
    ),
]
KVCacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        help="Number format of cached keys and values: auto (float32 on a CPU, bfloat16 on a GPU), float32, "
        "float16 or bfloat16. 16-bit: half the memory, faster for batches and long texts. The output "
        "may differ between formats, and is the same with every draft.",
    ),
]
ActivationDtype = Annotated[
    str,
    typer.Option(
        "--activation-dtype",
        help="Number format of activations where bfloat16 or MXFP4 weights multiply them: auto (float32 on a "
        "CPU, bfloat16 on a GPU), float32 or bfloat16. bfloat16: faster prompts, batches and drafts on CPUs "
        "with AVX512-BF16. The output may differ between formats, and is the same with every draft.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON output: one object instead of text.")]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        min=1,
        help="Number of processes that hold the target together, all that torchrun started (docs/scale.md).",
    ),
]
Recipe = Annotated[Path | None, typer.Option(help="TOML recipe. Default: the defaults of its fields.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Field of the recipe, repeatable: --set steps=500.")
]
Corpus = Annotated[Path | None, typer.Option(help="Folder of *.py files. Default: the standard library.")]


def _version(value: bool) -> None:
    if value:
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


def integers(text: str, option: str) -> list[int]:
    """A comma list. Raises ValueError for anything else."""
    values = []
    for part in text.split(","):
        try:
            values.append(int(part))
        except ValueError:
            raise ValueError(f"{option}: {part!r} is not a whole number") from None
    return values


def read_text(path: Path) -> str:
    """Raises ValueError for a file that is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start:,}): convert it first") from None


def recipe_settings(cls: type[T], recipe: Path | None, pairs: list[str] | None, **more: Any) -> T:
    """The recipe, --set on top of it, and over both the options of the command (`more`; None: not given)."""
    from outpace.config import load_settings, parse_overrides

    given = {name: value for name, value in more.items() if value is not None}
    return load_settings(cls, recipe, parse_overrides(cls, pairs or []) | given)


def teacher_cache(
    folder: Path, target: "Decoder", *, final: bool = False, retrofits: bool = True
) -> "TeacherCache":
    """Of this target, or of the original of a retrofitted one. Raises ValueError for any other."""
    from outpace.models.load import fingerprint
    from outpace.teacher.store import TeacherCache

    wanted, vocab_size = fingerprint(target, retrofits=retrofits), target.config.vocab_size
    return TeacherCache.open(folder, target_fingerprint=wanted, vocab_size=vocab_size, final=final)


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Ctrl-C of a run that resumes: a line that says so, and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print(
            f"\nstopped: the same command resumes from {out}", highlight=False, markup=False, soft_wrap=True
        )
        raise typer.Exit(130) from None


def out_of_memory(error: Exception) -> bool:
    """Whether Python or torch could not allocate."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
