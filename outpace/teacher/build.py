"""Build a teacher cache: prompts -> responses by the target itself -> hidden states -> shards."""

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor

from outpace.checkpoint.publish import disk, one_writer
from outpace.config import check_ranges
from outpace.drafts.dflash_config import default_layer_ids
from outpace.models.config import ModelConfig
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.ops import ranks
from outpace.ops.sampling import seeded
from outpace.teacher.check import NOT_FINITE, check_states, tolerance_of
from outpace.teacher.prompts import Prompts
from outpace.teacher.source import OwnEngine, Questions, Source
from outpace.teacher.store import (
    DTYPES,
    FORMAT_VERSION,
    Shard,
    StoreError,
    TeacherCache,
    TeacherMeta,
    decode_aux,
    encode_aux,
    read_meta,
    tokenizer_sha256,
    write_meta,
    write_shard,
)

MOST_SAMPLES = 10_000_000
SOURCES = ("outpace", "transformers")
CAPTURE_TOKENS = 2048  # per capturing forward, padding included: longer ones pad more and miss the cache
LENGTHS, RESPONSE, CHECKED = 0, 2, 3  # streams of random numbers, next to that of the prompts


@dataclass(frozen=True, kw_only=True)
class TeacherRecipe:
    """How to build a teacher cache. Fields of recipes/teacher-*.toml.

    A cache holds samples x position_offsets: the same texts (generated at position 0), their hidden
    states captured at every offset, which may lie past the model's last position. Ranges include both
    ends; a response ends early at a stop token. `final` stores one more state of every token, after the
    final norm: training forms the target's distribution from it, and logits are never stored.
    Raises ValueError for settings that no build can use.
    """

    samples: int = 1000
    prompt_tokens: tuple[int, int] = (64, 256)
    response_tokens: tuple[int, int] = (256, 256)
    greedy_share: float = 0.5  # of the texts at temperature 0; the rest at 1
    position_offsets: tuple[int, ...] = (0,)
    target_layer_ids: tuple[int, ...] = ()  # (): drafts.dflash.default_layer_ids
    dtype: str = "bfloat16"  # or "fp8"
    final: bool = False  # for soft labels (KL, TV, LK)
    shard_samples: int = 64  # texts x offsets of one shard: what a kill can lose
    batch: int = 16  # texts generated together
    seed: int = 1
    source: str = "outpace"  # or "transformers": the engine that answers

    def __post_init__(self) -> None:
        counts = ("samples", "shard_samples", "batch", "prompt_tokens", "response_tokens")
        check_ranges(self, dict.fromkeys(counts, (1, MOST_SAMPLES)) | {"greedy_share": (0, 1)})
        for name in ("prompt_tokens", "response_tokens"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} {low}, {high}: give the minimum and the maximum")
        offsets = self.position_offsets
        if not offsets or min(offsets) < 0 or len(set(offsets)) < len(offsets):
            raise ValueError(f"position_offsets {list(offsets)}: at least one, none negative, none twice")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: a teacher cache holds {' or '.join(DTYPES)}")
        if self.source not in SOURCES:
            raise ValueError(f"source {self.source!r}: it must be {' or '.join(SOURCES)}")

    @property
    def shard_texts(self) -> int:
        return max(1, self.shard_samples // len(self.position_offsets))

    @property
    def shards(self) -> int:
        return -(-self.samples // self.shard_texts)

    @property
    def stored_samples(self) -> int:
        return self.samples * len(self.position_offsets)

    def lengths(self) -> Tensor:
        """[samples, 2] int64: prompt tokens and maximum response tokens of every text."""
        rng = seeded(self.seed, LENGTHS)
        ranges = (self.prompt_tokens, self.response_tokens)
        drawn = [torch.randint(a, b + 1, (self.samples,), generator=rng) for a, b in ranges]
        return torch.stack(drawn, dim=1)

    def temperature(self, text: int) -> float:
        """0 or 1, spread evenly over the texts, so that all shards have the same mix."""
        before, after = (int(n * self.greedy_share + 1e-9) for n in (text, text + 1))
        return 0.0 if after > before else 1.0


def predict_nbytes(recipe: TeacherRecipe, prompts: Prompts, hidden_size: int, n_layers: int) -> int:
    """Upper bound on the size of a build. Lengths are drawn from the seed, so the bound is loose by little
    more than the tokens that stop tokens cut off."""
    lengths = recipe.lengths()
    tokens = prompts.most_tokens(lengths[:, 0].tolist()) + int(lengths[:, 1].sum())
    tokens *= len(recipe.position_offsets)
    row = hidden_size + 4 if recipe.dtype == "fp8" else 2 * hidden_size
    overhead = 4096 + recipe.shards * 2048 + recipe.stored_samples * 28
    return tokens * (4 + (n_layers + recipe.final) * row) + overhead


def build(
    target: Decoder,
    tokenizer: Tokenizer,
    prompts: Prompts,
    folder: Path | str,
    recipe: TeacherRecipe,
    *,
    stop_after: int | None = None,
    source: Source | None = None,
) -> TeacherCache:
    """Build, or resume, the cache in `folder`; `stop_after` ends this call after that many shards. `source`:
    of the same weights, which answers instead of `target`.

    A shard depends only on the recipe, its number, target, tokenizer and prompts, so a killed build that is
    run again ends in the same bytes (on one machine, with one number of threads and the same kernels);
    finished shards are not made again. One shard is held in memory, about three times. Processes that
    torchrun started make a shard each at a time: the cache is that of one process. Those that hold the target
    together make each shard together. Raises ValueError where the recipe does not fit the target or the
    prompts; StoreError where the folder holds another build or other files, or the disk is too small;
    LoadError for a disk that fills up.
    """
    folder = Path(folder)
    given = target, tokenizer, prompts, folder, recipe, stop_after, source or OwnEngine(target)
    with ranks.joined():
        if not ranks.leads():
            return _build(*given)
        with one_writer(folder), disk(folder):
            return _build(*given)


def _build(
    target: Decoder,
    tokenizer: Tokenizer,
    prompts: Prompts,
    folder: Path,
    recipe: TeacherRecipe,
    stop_after: int | None,
    source: Source,
) -> TeacherCache:
    layer_ids = tuple(recipe.target_layer_ids) or default_layer_ids(target.config.num_layers)
    _check_fit(target, tokenizer, layer_ids, recipe, prompts)
    wanted = TeacherMeta(
        format_version=FORMAT_VERSION,
        target_fingerprint=fingerprint(target),
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        corpus_sha256=prompts.digest,
        template=prompts.template,
        target_layer_ids=layer_ids,
        hidden_size=target.config.hidden_size,
        dtype=recipe.dtype,
        planned_samples=recipe.stored_samples,
        recipe=asdict(recipe),
        shards=(),
    )
    todo: list[int] = []
    if ranks.leads():
        shards = begin(folder, wanted)
        todo = [k for k in range(recipe.shards) if not finished(folder, shards, k)]
    todo = ranks.gathered(todo)
    shards = list(read_meta(folder).shards)
    done = [s for k, s in enumerate(shards) if k not in todo]
    _check_disk(folder, recipe, wanted, done, prompts)
    columns = (
        TextColumn("teacher"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speeds]}"),
    )
    # so many shards are made at once, and this process makes that one of them
    together, own = (ranks.size(), ranks.rank()) if target.group is None else (1, 0)
    writes = target.group is None or ranks.leads()
    with Progress(*columns, refresh_per_second=2, disable=not ranks.leads()) as bar:
        started = (recipe.shards - len(todo)) * recipe.shard_texts
        task = bar.add_task("", total=recipe.samples, completed=min(started, recipe.samples), speeds="")
        todo = todo[:stop_after]
        for first in range(0, len(todo), together):
            made = []
            for k in todo[first : first + together][own::together]:
                new = _make_shard(source, target.config, prompts, layer_ids, recipe, k)
                if writes:
                    made.append((k, write_shard(folder, k, new.tensors, new.relative_error), new.texts))
                bar.update(task, speeds=new.speeds)
            made = ranks.gathered(made)
            for k, shard, _ in made:
                shards[k : k + 1] = [shard]
            if ranks.leads():
                write_meta(folder, replace(wanted, shards=tuple(shards)))
            bar.update(task, advance=sum(texts for *_, texts in made))
    ranks.wait()  # for the last meta.json
    return TeacherCache.open(folder, unfinished=True)


def _check_fit(
    target: Decoder,
    tokenizer: Tokenizer,
    layer_ids: tuple[int, ...],
    recipe: TeacherRecipe,
    prompts: Prompts,
) -> None:
    config = target.config
    distinct = list(layer_ids) == sorted(set(layer_ids))
    if not distinct or layer_ids[0] < 0 or layer_ids[-1] >= config.num_layers:
        raise ValueError(
            f"target_layer_ids {list(layer_ids)}: name ascending layers of 0..{config.num_layers - 1}, "
            "each once"
        )
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} ids, the target {config.vocab_size}: it is "
            "another model's"
        )
    prompt = recipe.prompt_tokens[1] if prompts.longest is None else prompts.longest
    longest = prompt + recipe.response_tokens[1]
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"prompts of {prompt} tokens and response_tokens reach {longest}; this model's positions end at "
            f"{config.max_position_embeddings}: lower them"
        )


def begin(folder: Path, wanted: TeacherMeta) -> list[Shard]:
    """The finished shards. Writes a meta.json without shards into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in (*folder.glob("shard-*.tmp"), *folder.glob("meta.json.tmp")):
        left_over.unlink()
    if not (folder / "meta.json").exists():
        if any(folder.iterdir()):
            raise StoreError(f"{folder} holds other files and no meta.json: name an empty or a new folder")
        write_meta(folder, wanted)
        return []
    meta = read_meta(folder)
    for name in (f.name for f in fields(TeacherMeta) if f.name not in ("shards", "recipe")):
        old, new = getattr(meta, name), getattr(wanted, name)
        if old != new:
            raise StoreError(
                f"{folder} was started with {name} {old}, this build has {new}: give the first value, or "
                "another folder"
            )
    # the recipe of a JSON file has lists where ours has tuples
    new_recipe = {k: list(v) if isinstance(v, tuple) else v for k, v in wanted.recipe.items()}
    old_recipe = {"final": False, "source": SOURCES[0]} | meta.recipe  # of a cache older than the setting
    keys = sorted(k for k in old_recipe | new_recipe if old_recipe.get(k) != new_recipe.get(k))
    if keys:
        differing = ", ".join(f"{k} {old_recipe.get(k)} (now {new_recipe.get(k)})" for k in keys)
        raise StoreError(
            f"{folder} was started with {differing}: give the settings it was started with, or another folder"
        )
    return list(meta.shards)


def finished(folder: Path, shards: list[Shard], k: int) -> bool:
    """Recorded, present and of the right size; its contents are checked by whoever reads it."""
    if k >= len(shards):
        return False
    path = folder / shards[k].file
    return path.is_file() and path.stat().st_size == shards[k].nbytes


def _check_disk(
    folder: Path, recipe: TeacherRecipe, meta: TeacherMeta, finished: list[Shard], prompts: Prompts
) -> None:
    most = predict_nbytes(recipe, prompts, meta.hidden_size, len(meta.target_layer_ids))
    needed = most - sum(s.nbytes for s in finished)
    free = shutil.disk_usage(folder).free
    if needed > free:
        message = "" if recipe.dtype == "fp8" else ', or take dtype "fp8" (half the size)'
        raise StoreError(
            f"the cache needs up to {needed:,} bytes more and {folder} has {free:,} free: make room, "
            f"lower samples, response_tokens or position_offsets{message}"
        )


@dataclass(frozen=True)
class _NewShard:
    tensors: dict[str, Tensor]
    relative_error: float
    texts: int
    speeds: str


def _make_shard(
    source: Source,
    config: ModelConfig,
    prompts: Prompts,
    layer_ids: tuple[int, ...],
    recipe: TeacherRecipe,
    k: int,
) -> _NewShard:
    """Depends only on the recipe and the shard's number. The texts' indices alone decide which of them share
    a forward: rounding differs with the number of rows, and a resumed build must not."""
    first = k * recipe.shard_texts
    ids = range(first, min(first + recipe.shard_texts, recipe.samples))
    lengths = dict(zip(ids, recipe.lengths()[first : ids.stop].tolist(), strict=True))
    prompt = {i: prompts.draw(i, n, recipe.seed) for i, (n, _) in lengths.items()}
    began = time.perf_counter()
    longest = {i: n for i, (_, n) in lengths.items()}
    stop = prompts.stop | frozenset(config.eos_token_ids)
    response = _respond(source, prompt, longest, recipe, stop)
    generated = time.perf_counter()
    text = {i: prompt[i] + response[i] for i in ids}
    samples = [(i, offset) for i in ids for offset in recipe.position_offsets]
    begins = torch.tensor([0, *(len(text[i]) for i, _ in samples)]).cumsum(0)
    first_row = dict(zip(samples, begins.tolist(), strict=False))
    states, relative_error = _capture(source, text, config.hidden_size, first_row, layer_ids, recipe, k)
    captured = time.perf_counter()
    tensors = {
        "tokens": torch.tensor([t for i, _ in samples for t in text[i]], dtype=torch.int32),
        "begins": begins,
        "prompt_lengths": torch.tensor([len(prompt[i]) for i, _ in samples]),
        "offsets": torch.tensor([offset for _, offset in samples]),
        "temperatures": torch.tensor([recipe.temperature(i) for i, _ in samples]),
    }
    wrote = sum(map(len, response.values())) / (generated - began)
    read = len(tensors["tokens"]) / (captured - generated)
    speeds = f"{wrote:,.0f} tokens/s generated, {read:,.0f} captured"
    return _NewShard(tensors | states, relative_error, len(ids), speeds)


def _respond(
    source: Source,
    prompt: dict[int, list[int]],
    longest: dict[int, int],
    recipe: TeacherRecipe,
    stop: frozenset[int],
) -> dict[int, list[int]]:
    """Responses in batches of one temperature and of similar prompt lengths, which prefill pads."""
    values: dict[int, list[int]] = {}
    for temperature in (0.0, 1.0):
        same = [i for i in prompt if recipe.temperature(i) == temperature]
        same.sort(key=lambda i: len(prompt[i]))
        for n in range(0, len(same), recipe.batch):
            rows = same[n : n + recipe.batch]
            asked = Questions(
                prompts=[prompt[i] for i in rows],
                limits=[longest[i] for i in rows],
                temperature=temperature,
                stop=stop,
                seed=seeded(recipe.seed, RESPONSE, rows[0]).initial_seed(),
            )
            values |= dict(zip(rows, source.respond(asked), strict=True))
    return values


def _capture(
    source: Source,
    text: dict[int, list[int]],
    hidden_size: int,
    first_row: dict[tuple[int, int], int],
    layer_ids: tuple[int, ...],
    recipe: TeacherRecipe,
    k: int,
) -> tuple[dict[str, Tensor], float]:
    """first_row: (text, offset) -> its first row. -> the tensors of states of shard k, aux and, if the recipe
    has it, final, and the relative error of storing them. Raises StoreError where a sampled text had other
    states in its batch than it has alone."""
    R, C = sum(len(text[i]) for i, _ in first_row), hidden_size
    aux = States("aux", (R, len(layer_ids), C), recipe.dtype)
    final = States("final", (R, C), recipe.dtype) if recipe.final else None
    offsets = sorted({offset for _, offset in first_row})
    groups = list(_passes(text))
    batched = [(i, offset) for group in groups if len(group) > 1 for i in group for offset in offsets]
    checked = batched[int(seeded(recipe.seed, CHECKED, k).initial_seed()) % len(batched)] if batched else None
    for group in groups:
        width = len(text[group[-1]])
        # padding on the right: a causal model's earlier rows do not see it
        padded = [text[i] + [0] * (width - len(text[i])) for i in group]
        tokens = torch.tensor(padded)
        for offset in offsets:
            outputs, hidden = source.states(tokens, layer_ids, offset)
            for b, i in enumerate(group):
                at, n = first_row[i, offset], len(text[i])
                states = outputs[:, b, :n]
                if (i, offset) == checked:
                    name = f"text {i} at position {offset}, in a batch of {len(group)}"
                    given = source, tokens[b, :n], layer_ids, states, tolerance_of(source.dtype), offset
                    check_states(name, *given)
                aux.write(at, states.transpose(0, 1))
                if final is not None:
                    final.write(at, hidden[b, :n])
    if final is None:
        return aux.tensors, aux.relative_error()
    return aux.tensors | final.tensors, max(aux.relative_error(), final.relative_error())


class States:
    """Rows of states [R, .., C] as they are stored, and the error of storing them."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.dtype = name, dtype
        self.tensors = {name: torch.empty(shape, dtype=DTYPES[dtype])}
        if dtype == "fp8":
            self.tensors[f"{name}_scale"] = torch.empty(shape[:-1])
        self.missed = self.total = 0.0

    def write(self, first: int, states: Tensor) -> None:
        """states [n, .., C] become the rows from `first` on."""
        real = states.float().cpu()
        values, scale = encode_aux(real, self.dtype)
        rows = slice(first, first + len(real))
        self.tensors[self.name][rows] = values
        if scale is not None:
            self.tensors[f"{self.name}_scale"][rows] = scale
        self.missed += float((decode_aux(values, scale) - real).square().sum())
        self.total += float(real.square().sum())

    def relative_error(self) -> float:
        if not self.total < math.inf:
            raise ValueError(NOT_FINITE)
        return round(math.sqrt(self.missed / self.total), 7) if self.total else 0.0


def _passes(text: dict[int, list[int]]) -> Iterator[list[int]]:
    """Groups of texts of similar length, shortest first, of up to CAPTURE_TOKENS."""
    group: list[int] = []
    for i in sorted(text, key=lambda i: len(text[i])):
        if group and len(text[i]) * (len(group) + 1) > CAPTURE_TOKENS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
