"""Commands that train, and the teacher cache they train from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.app import (
    AsJson,
    Corpus,
    Recipe,
    Set,
    Target,
    TensorParallel,
    console,
    integers,
    recipe_settings,
    resumable,
    say,
    teacher_app,
    teacher_cache,
    train_app,
)

if TYPE_CHECKING:
    from outpace.api import Model
    from outpace.teacher.store import TeacherCache
    from outpace.train.drafts import DraftRecipe

Chats = Annotated[
    Path | None,
    typer.Option("--prompts", help='JSONL file of conversations, {"messages": [..]} on every line.'),
]
Loss = Annotated[
    str | None,
    typer.Option(help="ce, kl, tv, nla, lk, or a sum such as 0.1*ce+0.9*tv (docs/losses.md)."),
]


@train_app.command("dflash")
def dflash(
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
    prompts: Chats = None,
    corpus: Corpus = None,
) -> None:
    """Train a DFlash draft from a teacher cache. Resumes where it was stopped.

    A loss other than ce compares with the target's distribution: the cache needs final states
    (outpace teacher build --final).

    [bold]Examples[/bold]: outpace train dflash --cache work/cache --out work/dflash --weights dpace
    outpace train dflash --cache work/cache --out work/dflash --loss 0.1*ce+0.9*tv --set selector=64
    """
    from outpace.api import load
    from outpace.loading import open_dflash
    from outpace.train.dflash import DFlashRecipe, train_dflash

    settings = recipe_settings(DFlashRecipe, recipe, set_, loss=loss, weights=weights)
    if init in ("none", "ngram"):
        raise ValueError(f"--init {init}: it means no weights; name a draft's folder, or 'dflash'")
    model = load(target)
    start = None if init is None else open_dflash(init, model.tokenizer)
    _train(
        train_dflash, settings, model, cache, _held_out(model, prompts, corpus, settings), out, init, start
    )


@train_app.command("eagle3")
def eagle3(
    cache: Annotated[Path, typer.Option(help="Teacher cache folder (outpace teacher build --final).")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the draft is out/draft.")],
    target: Target = "default",
    recipe: Recipe = None,
    set_: Set = None,
    loss: Loss = None,
    init: Annotated[
        str | None, typer.Option(help="Go on from this EAGLE-3, in any known format: its sizes are.")
    ] = None,
    prompts: Chats = None,
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
    from outpace.api import load
    from outpace.drafts.eagle3 import Eagle3
    from outpace.loading import open_weights
    from outpace.train.eagle3 import Eagle3Recipe, train_eagle3

    settings = recipe_settings(Eagle3Recipe, recipe, set_, loss=loss)
    model = load(target)
    start = None if init is None else open_weights(init, model.target, model.tokenizer)
    if init is not None and not isinstance(start, Eagle3):
        raise ValueError(f"--init {init}: it is no EAGLE-3; name the folder of one")
    _train(
        train_eagle3, settings, model, cache, _held_out(model, prompts, corpus, settings), out, init, start
    )


def _one_source(chats: Path | None, corpus: Path | None) -> None:
    if chats is not None and corpus is not None:
        raise ValueError("--prompts and --corpus: name one of them, the prompts come from there")


def _held_out(
    model: "Model", chats: Path | None, corpus: Path | None, settings: "DraftRecipe"
) -> list[list[int]]:
    """Prompts that a draft in training is judged on: of a file of conversations, or of held-out text."""
    from outpace.bench.prompts import held_out_prompts
    from outpace.loading import chat_prompts
    from outpace.text.corpus import read_corpus, split

    _one_source(chats, corpus)
    if chats is None:
        documents = split(read_corpus(corpus))[1]
        return held_out_prompts(model.tokenizer, documents, settings.eval_prompts, 256)
    prompts, _ = chat_prompts(chats, model.name, model.tokenizer, model.eos)
    return prompts[: settings.eval_prompts]


def _train(
    train: Callable[..., Any],
    settings: "DraftRecipe",
    model: "Model",
    cache: Path,
    prompts: list[list[int]],
    out: Path,
    init: str | None,
    start: Any,
) -> None:
    """Train a draft on the cache, judged on `prompts`; `start`: the draft named `init`."""
    from outpace.checkpoint.shipped import draft_path
    from outpace.train.drafts import read_provenance

    teacher = teacher_cache(cache, model.target, final=settings.final)
    before = None if init is None else read_provenance(draft_path(init))
    given = settings, model.target, model.tokenizer, teacher, prompts, out
    with resumable(out):
        train(*given, init=start, started_from=before)
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
    outpace generate default "What is 12 + 7?" --chat --draft work/suffix/draft --stats
    """
    from outpace.loading import open_target
    from outpace.train.suffix import build_suffix

    loaded, _ = open_target(target)
    teacher = teacher_cache(cache, loaded)
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
    source: Annotated[
        str | None,
        typer.Option(help="Engine that answers: outpace, or transformers for the same checkpoint folder."),
    ] = None,
    device_map: Annotated[
        str, typer.Option(help="Of transformers, for targets that take several devices: auto, balanced, ..")
    ] = "auto",
    prompts: Chats = None,
    corpus: Corpus = None,
    tensor_parallel_size: TensorParallel = 1,
) -> None:
    """Build a teacher cache: the target's answers to prompts, with hidden states. Resumes.

    Prompts are stretches of the corpus, or with --prompts conversations up to each turn of the model's.

    [bold]Examples[/bold]: outpace teacher build --out work/cache --set samples=500 --position-offsets 0,65536
    outpace teacher build --out work/cache --recipe recipes/drafts/teacher.toml
    outpace teacher build TARGET --out work/cache --prompts chats.jsonl --set response_tokens=[512,512]
    torchrun --nproc-per-node 2 -m outpace teacher build TARGET --out work/cache --tensor-parallel-size 2
    outpace teacher build TARGET --out work/cache --source transformers --device-map balanced
    """
    from outpace.checkpoint.shipped import target_path
    from outpace.loading import chat_prompts, open_target
    from outpace.teacher import build
    from outpace.teacher.prompts import ChatPrompts, TextPrompts
    from outpace.teacher.source import Transformers
    from outpace.text.corpus import read_corpus, split

    _one_source(prompts, corpus)
    offsets = None if position_offsets is None else integers(position_offsets, "--position-offsets")
    given = {"position_offsets": offsets, "final": final or None, "source": source}
    settings = recipe_settings(build.TeacherRecipe, recipe, set_, **given)
    if settings.source == "transformers" and tensor_parallel_size > 1:
        raise ValueError(
            "--tensor-parallel-size divides our engine's target: give transformers a --device-map"
        )
    loaded, tokenizer = open_target(target, tensor_parallel_size=tensor_parallel_size)
    drawn: ChatPrompts | TextPrompts
    if prompts is not None:
        drawn = ChatPrompts(*chat_prompts(prompts, target, tokenizer, frozenset(loaded.config.eos_token_ids)))
    else:
        drawn = TextPrompts(split(read_corpus(corpus))[0], tokenizer)
    answers = Transformers(target_path(target), device_map) if settings.source == "transformers" else None
    with resumable(out):
        built = build.build(loaded, tokenizer, drawn, out, settings, source=answers)
    _say_size(out, built)


@teacher_app.command("import")
def teacher_import(
    files: Annotated[Path, typer.Argument(help="Folder of the files: vLLM's shared_storage_path.")],
    out: Annotated[Path, typer.Option(help="Folder of the cache.")],
    target: Target = "default",
    layer_ids: Annotated[
        str | None, typer.Option(help="The run's eagle_aux_hidden_state_layer_ids: 3,12,21,24.")
    ] = None,
    final: Annotated[
        bool,
        typer.Option("--final", help="Keep final states too; the last layer id is the number of layers."),
    ] = False,
    prompt_lengths: Annotated[
        Path | None,
        typer.Option(help='JSON object: tokens of each prompt, {"request-0": 37, ..}. Default: 1.'),
    ] = None,
    recipe: Recipe = None,
    set_: Set = None,
) -> None:
    """Make a teacher cache from the hidden states that vLLM saved (extract_hidden_states). Resumes.

    Every file is checked, and a sampled text of every shard is run by MODEL, the target that vLLM served:
    its states have to be the file's, to a tolerance (--set tolerance=0.05).

    [bold]Example[/bold]: outpace teacher import /dev/shm/states TARGET --out work/cache --layer-ids 3,12,21
    """
    from outpace.checkpoint.strict_json import read_object
    from outpace.loading import open_target
    from outpace.teacher.vllm_files import ImportRecipe, import_files

    ids = None if layer_ids is None else integers(layer_ids, "--layer-ids")
    settings = recipe_settings(ImportRecipe, recipe, set_, vllm_layer_ids=ids, final=final or None)
    lengths = None if prompt_lengths is None else read_object(prompt_lengths)
    loaded, tokenizer = open_target(target)
    with resumable(out):
        cache = import_files(loaded, tokenizer, files, out, settings, lengths)
    _say_size(out, cache)


def _say_size(out: Path, cache: "TeacherCache") -> None:
    size = f"{cache.meta.tokens:,} tokens, {cache.meta.nbytes / 2**20:,.1f} MiB"
    console.print(f"{out}: {len(cache)} samples, {size}", soft_wrap=True)


@teacher_app.command("info")
def teacher_info(path: Path, as_json: AsJson = False) -> None:
    """Describe a teacher cache and the target it belongs to."""
    from outpace.teacher.store import TeacherCache

    description = TeacherCache.open(path, unfinished=True).describe()
    if as_json:
        print(json.dumps(description, indent=2))
    else:
        for key, value in description.items():
            say(f"{key:>20}  {value}")


@teacher_app.command("verify")
def teacher_verify(path: Path, target: Annotated[str | None, typer.Option()] = None) -> None:
    """Check every byte of a teacher cache against its checksums, and its target where one is named."""
    from outpace.loading import open_target
    from outpace.models.load import fingerprint
    from outpace.teacher.store import TeacherCache

    wanted = None if target is None else fingerprint(open_target(target)[0])
    checked = TeacherCache.open(path, target_fingerprint=wanted, unfinished=True).verify()
    console.print(f"{path}: {checked:,} bytes agree with their checksums")
