"""Commands that train, and the teacher cache they train from."""

import json
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.app import (
    AsJson,
    Corpus,
    Recipe,
    Set,
    Target,
    console,
    integer,
    recipe_settings,
    teacher_app,
    train_app,
)

Loss = Annotated[
    str | None,
    typer.Option(help="ce, kl, tv, nla, lk, or a sum such as 0.1*ce+0.9*tv (docs/losses.md)."),
]


@train_app.command("dflash")
def train_dflash(
    cache: Annotated[Path, typer.Option(help="Teacher cache folder (outpace teacher build).")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the draft is out/draft.")],
    target: Target = "default",
    recipe: Recipe = None,
    set_: Set = None,
    loss: Loss = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Of a block's positions: dpace, dpace-soft, decay, auf or flat (docs/losses.md)."),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="Go on from this draft or 'dflash': its sizes are, block and window are the recipe's."
        ),
    ] = None,
    corpus: Corpus = None,
) -> None:
    """Train a DFlash draft from a teacher cache. Resumes where it was stopped.

    A loss other than ce compares with the target's distribution: the cache needs final states
    (outpace teacher build --final).

    [bold]Examples[/bold]: outpace train dflash --cache work/cache --out work/dflash --weights dpace
    outpace train dflash --cache work/cache --out work/dflash --loss 0.1*ce+0.9*tv --set selector=64
    """
    from outpace.bench.prompts import held_out_prompts
    from outpace.loading import draft_folder, open_dflash, open_target
    from outpace.models.load import fingerprint
    from outpace.teacher.store import TeacherCache
    from outpace.text.corpus import read_corpus, split
    from outpace.train import dflash
    from outpace.train.drafts import read_provenance

    given = {name: value for name, value in (("loss", loss), ("weights", weights)) if value is not None}
    settings = recipe_settings(dflash.DFlashRecipe, recipe, set_, **given)
    if init in ("none", "ngram"):
        raise ValueError(f"--init {init}: it means no weights; name a draft's folder, or 'dflash'")
    loaded, tokenizer = open_target(target)
    teacher = TeacherCache.open(cache, target_fingerprint=fingerprint(loaded), final=settings.final)
    _, held_out = split(read_corpus(corpus))
    prompts = held_out_prompts(tokenizer, held_out, settings.eval_prompts, 256)
    start = None if init is None else open_dflash(init, tokenizer)
    before = None if init is None else read_provenance(draft_folder(init))
    dflash.train_dflash(settings, loaded, tokenizer, teacher, prompts, out, init=start, started_from=before)
    console.print(f"{out / 'draft'}: saved")


@train_app.command("eagle3")
def train_eagle3(
    cache: Annotated[Path, typer.Option(help="Teacher cache folder (outpace teacher build --final).")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the draft is out/draft.")],
    target: Target = "default",
    recipe: Recipe = None,
    set_: Set = None,
    loss: Loss = None,
    init: Annotated[
        str | None, typer.Option(help="Go on from this EAGLE-3, in any known format: its sizes are.")
    ] = None,
    corpus: Corpus = None,
) -> None:
    """Train an EAGLE-3 draft from a teacher cache, over its own draft tokens. Resumes where it was stopped.

    The same caches serve that DFlash learns from. Its loss is kl where none is named, which needs final
    states (outpace teacher build --final); ce does without. --set parallel=true makes a P-EAGLE, which
    draft tokens in one pass.

    [bold]Examples[/bold]: outpace train eagle3 --cache work/cache --out work/eagle3 --set draft_vocab=2048
    outpace train eagle3 --cache work/cache --out work/lk --loss lk --recipe recipes/eagle3-default.toml
    outpace train eagle3 --cache work/cache --out work/p-eagle --recipe recipes/p-eagle.toml
    """
    from outpace.bench.prompts import held_out_prompts
    from outpace.drafts.eagle3 import Eagle3
    from outpace.loading import draft_folder, open_target, open_weights
    from outpace.models.load import fingerprint
    from outpace.teacher.store import TeacherCache
    from outpace.text.corpus import read_corpus, split
    from outpace.train import eagle3
    from outpace.train.drafts import read_provenance

    settings = recipe_settings(eagle3.Eagle3Recipe, recipe, set_, **({} if loss is None else {"loss": loss}))
    loaded, tokenizer = open_target(target)
    start = None if init is None else open_weights(init, loaded, tokenizer)
    if init is not None and not isinstance(start, Eagle3):
        raise ValueError(f"--init {init}: it is no EAGLE-3; name the folder of one")
    before = None if init is None else read_provenance(draft_folder(init))
    teacher = TeacherCache.open(cache, target_fingerprint=fingerprint(loaded), final=settings.final)
    _, held_out = split(read_corpus(corpus))
    prompts = held_out_prompts(tokenizer, held_out, settings.eval_prompts, 256)
    assert start is None or isinstance(start, Eagle3)
    eagle3.train_eagle3(settings, loaded, tokenizer, teacher, prompts, out, init=start, started_from=before)
    console.print(f"{out / 'draft'}: saved")


@train_app.command("suffix")
def train_suffix(
    cache: Annotated[Path, typer.Option(help="Teacher cache folder (outpace teacher build).")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the draft is out/draft.")],
    target: Target = "default",
    answers: Annotated[int | None, typer.Option(min=1, help="Only so many of them; default: all.")] = None,
) -> None:
    """Build a suffix index from the answers in a teacher cache. Takes seconds.

    [bold]Example[/bold]: outpace train suffix --cache work/cache --out work/suffix
    outpace generate default "import os" --draft work/suffix/draft --num-draft-tokens 16 --stats
    """
    from outpace.loading import open_target
    from outpace.models.load import fingerprint
    from outpace.teacher.store import TeacherCache
    from outpace.train.suffix import build_suffix

    loaded, _ = open_target(target)
    teacher = TeacherCache.open(cache, target_fingerprint=fingerprint(loaded))
    with console.status("sorting the answers"):
        result = build_suffix(loaded, teacher, out, answers)
    used = int((result.text < 0).sum())
    console.print(f"{out / 'draft'}: {len(result.text) - used:,} tokens of {used:,} answers")


@teacher_app.command("build")
def teacher_build(
    out: Annotated[Path, typer.Option(help="Folder of the cache.")],
    target: Target = "default",
    recipe: Recipe = None,
    set_: Set = None,
    position_offsets: Annotated[
        str | None, typer.Option(help="The same text at shifted positions: 0,4096,65536,131072.")
    ] = None,
    final: Annotated[
        bool, typer.Option("--final", help="Keep final states too, for losses on the target's distribution.")
    ] = False,
    corpus: Corpus = None,
) -> None:
    """Build a teacher cache: the target's answers to prompts of the corpus, with hidden states. Resumes.

    [bold]Examples[/bold]: outpace teacher build --out work/cache --set samples=500 --position-offsets 0,65536
    outpace teacher build --out work/cache --recipe recipes/drafts/teacher.toml
    """
    from outpace.loading import open_target
    from outpace.teacher import build
    from outpace.text.corpus import read_corpus, split

    more: dict[str, object] = {"final": True} if final else {}
    if position_offsets is not None:
        parts = position_offsets.split(",")
        more["position_offsets"] = [integer(x, "--position-offsets") for x in parts]
    settings = recipe_settings(build.TeacherRecipe, recipe, set_, **more)
    loaded, tokenizer = open_target(target)
    train, _ = split(read_corpus(corpus))
    built = build.build(loaded, tokenizer, train, out, settings)
    size = f"{built.meta.tokens:,} tokens, {built.meta.nbytes / 2**20:,.1f} MiB"
    console.print(f"{out}: {len(built)} samples, {size}")


@teacher_app.command("info")
def teacher_info(path: Path, as_json: AsJson = False) -> None:
    """Describe a teacher cache and the target it belongs to."""
    from outpace.teacher.store import TeacherCache

    given = TeacherCache.open(path, unfinished=True).describe()
    if as_json:
        print(json.dumps(given, indent=2))
    else:
        for key, value in given.items():
            console.print(f"{key:>20}  {value}", highlight=False)


@teacher_app.command("verify")
def teacher_verify(path: Path, target: Annotated[str | None, typer.Option()] = None) -> None:
    """Check every byte of a teacher cache against its checksums, and its target where one is named."""
    from outpace.loading import open_target
    from outpace.models.load import fingerprint
    from outpace.teacher.store import TeacherCache

    wanted = None if target is None else fingerprint(open_target(target)[0])
    checked = TeacherCache.open(path, target_fingerprint=wanted, unfinished=True).verify()
    console.print(f"{path}: {checked:,} bytes agree with their checksums")
