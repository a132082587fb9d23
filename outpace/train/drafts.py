"""Training of any draft: the recipe's common fields, the optimizers, the order of samples, provenance."""

import hashlib
import json
import math
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from outpace.checkpoint.publish import published
from outpace.checkpoint.save import write_json
from outpace.checkpoint.strict_json import read_object
from outpace.config import Ranges, check_ranges
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.base import Draft
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.ops import ranks
from outpace.ops.dispatch import product_dtype
from outpace.ops.ranks import Mean
from outpace.ops.sampling import shuffled
from outpace.teacher.store import TeacherCache, TeacherSample
from outpace.train.checkpoint import Checkpoint, Log, OneFile
from outpace.train.losses import needs_target
from outpace.train.sharded import ShardedCheckpoint, ShardedDraft
from outpace.train.trainer import (
    Muon,
    StepLoss,
    backward,
    fit,
    numbers,
    take_step,
    training_folder,
    warmup_cosine,
)

MAX_VALIDATION_SAMPLES = 128  # they are read again at every evaluation
MOST, ABOVE_0 = math.inf, sys.float_info.min


@dataclass(frozen=True, kw_only=True)
class DraftRecipe:
    """A draft's size and training, in what all kinds have in common. Raises ValueError for what no run can
    use."""

    RANGES: ClassVar[Ranges] = (
        dict.fromkeys(("rows", "micro_batches", "steps", "save_every", "eval_every"), (1, MOST))
        | dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), (1, 2**16))
        | dict.fromkeys(("head_dim", "intermediate_size"), (1, 2**24))
        | dict.fromkeys(("lr", "clip"), (ABOVE_0, MOST))
        | dict.fromkeys(("muon_lr", "weight_decay", "draft_vocab", "sliding_window"), (0, MOST))
        | dict.fromkeys(("eval_prompts", "target_layer_ids"), (0, MOST))
        | dict.fromkeys(("row_tokens", "eval_new_tokens"), (1, MOST))
        | {"warmup_share": (0, 1), "held_out_share": (0, math.nextafter(1, 0))}
    )

    num_layers: int = 1
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    draft_vocab: int = 0  # the most frequent tokens of the responses; 0: all of the target's
    sliding_window: int = 0  # of every layer; 0: full attention
    target_layer_ids: tuple[int, ...] = ()  # layers of the cache that the draft reads
    mask_token: str | None = None  # None: a learned mask_embedding
    loss: str = "ce"  # of train/losses.py: ce, kl, tv, nla, lk, or a sum such as 0.1*ce+0.9*tv
    shard: bool = False  # weights and optimizer states over the processes of torchrun (train/sharded.py)
    recompute: bool = False  # layers run again in the backward: less memory, a third more work
    rows: int = 4  # of a step
    micro_batches: int = 1  # of a process's rows of a step: less memory, a third more work
    row_tokens: int | None = None  # rows are cut to this many tokens
    steps: int = 2000
    lr: float = 6e-4  # AdamW's
    muon_lr: float = 0.0  # 0: AdamW alone; else the matrices learn by Muon at this rate
    warmup_share: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    bfloat16: bool = True  # products, where the device multiplies it as such
    seed: int = 1
    save_every: int = 100
    eval_every: int = 500
    held_out_share: float = 0.02  # of the cache, for validation: it shows what is memorized
    eval_prompts: int = 8
    eval_new_tokens: int = 128

    def __post_init__(self) -> None:
        check_ranges(self, self.RANGES)
        needs_target(self.loss)  # raises for an unknown loss

    @property
    def final(self) -> bool:
        """Whether training needs the target's final states."""
        return needs_target(self.loss)

    def dtype(self, device: torch.device) -> torch.dtype:
        return product_dtype(device) if self.bfloat16 else torch.float32

    def sizes(self, target: Decoder) -> dict[str, Any]:
        """The fields that the configs of all kinds of drafts have."""
        own = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        theirs = ("hidden_size", "vocab_size", "rope", "rms_norm_eps", "max_position_embeddings")
        parts = ((self, own), (target.config, theirs))
        return {name: getattr(source, name) for source, names in parts for name in names}

    def mask_token_id(self, tokenizer: Tokenizer) -> int | None:
        mask = None if self.mask_token is None else tokenizer.token_to_id(self.mask_token)
        if mask is None and self.mask_token is not None:
            raise ValueError(
                f"the tokenizer has no mask_token {self.mask_token!r}: name a token that text never uses, or "
                "none for a learned embedding"
            )
        return mask

    def training_count(self, cache: TeacherCache) -> int:
        """The first so many samples are for training, the rest for validation."""
        return len(cache) - int(len(cache) * self.held_out_share)

    def split(self, cache: TeacherCache) -> tuple[list[int], list[int]]:
        """Training and validation samples: those with a draft token to learn from, since a step without any
        would end a long run. Raises ValueError where none is left for training."""
        count = self.training_count(cache)
        training = self._usable(cache, range(count))
        if not training:
            within = f" within row_tokens {self.row_tokens}" if self.row_tokens else ""
            raise ValueError(
                f"none of {count} cached rows has a draft token to learn from: that takes a response of at "
                f"least two tokens{within}"
            )
        return training, self._usable(cache, range(count, len(cache))[:MAX_VALIDATION_SAMPLES])

    def _usable(self, cache: TeacherCache, samples: range) -> list[int]:
        texts = ((i, *cache.text(i)) for i in samples)
        return [i for i, tokens, prompt in texts if len(tokens[: self.row_tokens]) >= max(prompt, 1) + 2]


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens of a draft among its target's. `ids` [n] int64: token ids, None: all; row_of [V] int64: the
    draft's row of each token, -1 for none; head [n, C]: the target's head on those tokens; full_head
    [V, C]."""

    ids: Tensor | None
    row_of: Tensor | None
    head: Tensor
    full_head: Tensor

    @staticmethod
    def of(ids: Tensor | None, target: Decoder, dtype: torch.dtype) -> "DraftVocabulary":
        head = target.dense_head.detach().to(dtype)
        if ids is None:
            return DraftVocabulary(None, None, head, head)
        row_of = torch.full((target.config.vocab_size,), -1, device=ids.device)
        row_of[ids] = torch.arange(len(ids), device=ids.device)
        return DraftVocabulary(ids, row_of, head[ids], head)

    def rows(self, tokens: Tensor) -> Tensor:
        return tokens if self.row_of is None else self.row_of[tokens]


Batches = Iterable[tuple[int, list[TeacherSample]]]  # each with the index of its first sample


D = TypeVar("D", bound=nn.Module)
R = TypeVar("R", bound=DraftRecipe)


class DraftTrainer(ABC, Generic[D]):
    """The part of training that depends on the kind of draft: its network, its loss, its metrics."""

    title: ClassVar[str]
    by_adam: ClassVar[tuple[str, ...]]  # ends of the names of matrices that Muon leaves to AdamW
    draft: D

    @property
    def config(self) -> Any:
        return self.draft.config

    @abstractmethod
    def loss(self, step: int, samples: list[int], rows: list[TeacherSample]) -> StepLoss: ...

    @abstractmethod
    def validate(self, batches: Batches) -> dict[str, Mean]:
        """Metrics of samples outside the training. Far below the training's, more steps do not help: it takes
        more answers."""

    @abstractmethod
    def bind(self) -> Draft:
        """The draft for decoding with its target."""

    @abstractmethod
    def save(self, folder: Path) -> None: ...

    def finish(self, batches: Batches) -> None:
        """Runs after the last step, on the validation samples."""

    def states(self) -> dict[str, Any]:
        """Contents of a checkpoint besides draft and optimizers."""
        return {}


def train_draft(
    kind: Callable[[R, Decoder, Tokenizer, TeacherCache, D | None], DraftTrainer[D]],
    recipe: R,
    target: Decoder,
    tokenizer: Tokenizer,
    cache: TeacherCache,
    held_out: list[list[int]],
    folder: Path,
    *,
    init: D | None = None,
    started_from: dict[str, Any] | None = None,
    stop_after: int | None = None,
) -> D:
    """Train a draft by a trainer of this kind, resuming from folder/checkpoint.pt if there is one; -> the
    draft, float32.

    `target` is frozen from here on. `held_out`: prompts that the cache does not hold, for real acceptance
    every `eval_every` steps. `init`: a draft to start from; its own sizes then apply, not the recipe's.
    `started_from`: its provenance. After the last step folder/draft holds the draft and provenance.json.
    Processes that torchrun started train together, each on its share of every step's rows.
    Raises ValueError where cache, target and recipe do not fit.
    """
    with ranks.joined(), training_folder(folder):
        trainer = kind(recipe, target, tokenizer, cache, init)
        draft = trainer.draft
        if recipe.final and cache.sample(0).final is None:
            raise ValueError(
                f"loss {recipe.loss!r}, or another setting, compares with the target's distribution, and the "
                "cache holds no final states: build one with `teacher build --final`, or take loss ce"
            )
        target.requires_grad_(False)
        training, validation = recipe.split(cache)
        sharded = ShardedDraft(draft, target.device) if recipe.shard and ranks.size() > 1 else None
        learners = optimizers(draft, recipe, trainer.by_adam)
        warmup = max(1, round(recipe.steps * recipe.warmup_share))

        def update(step: int) -> dict[str, Any]:
            began = time.perf_counter()
            factor = warmup_cosine(step, recipe.steps, warmup)
            for name, optimizer in learners.items():
                for group in optimizer.param_groups:
                    group["lr"] = factor * (recipe.muon_lr if name == "muon" else recipe.lr)
            chosen = shuffled(step * recipe.rows, recipe.rows, len(training), recipe.seed, 0)

            def loss(samples: list[int]) -> StepLoss:
                given = partial(trainer.loss, step, samples, [cache.sample(i) for i in samples])
                return given() if sharded is None else sharded(given)[0]

            own = ranks.own([training[i] for i in chosen], recipe.micro_batches)
            metrics = backward([partial(loss, samples) for samples in own])
            metrics |= take_step(list(draft.parameters()), learners.values(), recipe.clip)
            speed = metrics["tokens"] / (time.perf_counter() - began)
            return metrics | {"lr": recipe.lr * factor, "tokens_per_s": round(speed, 1)}

        def batches() -> Batches:
            for i in range(0, len(validation), recipe.rows):
                yield i, [cache.sample(n) for n in validation[i : i + recipe.rows]]

        def evaluate() -> dict[str, Any]:
            metrics: dict[str, Any] = {}
            trainer.draft = draft if sharded is None else sharded.whole()
            if validation:
                values = numbers(trainer.validate(batches()))
                metrics = {f"unseen_{name}": value for name, value in values.items()}
            if held_out:
                prompts, stop = held_out[: recipe.eval_prompts], frozenset(target.config.eos_token_ids)
                request = Request(max_new_tokens=recipe.eval_new_tokens, stop=stop)
                metrics["tau"] = generate(target, prompts, request, trainer.bind()).trace.tau
            trainer.draft = draft
            return metrics

        other = folder / ("checkpoint.pt" if recipe.shard else "checkpoint")
        if other.exists():
            is_now, was = ("true", "false") if recipe.shard else ("false", "true")
            raise ValueError(
                f"{other} is of a run with shard={was}, and this one has shard={is_now}: give that, another "
                "folder, or delete it to begin again"
            )
        checkpoint: Checkpoint = OneFile(folder, {"draft": draft, **learners, **trainer.states()})
        if recipe.shard:
            checkpoint = ShardedCheckpoint(folder, draft, learners, trainer.states())
        log = fit(
            folder,
            recipe,
            update,
            checkpoint,
            title=trainer.title,
            evaluate=evaluate,
            eval_every=recipe.eval_every,
            stop_after=stop_after,
        )
        if sharded is not None:
            trainer.draft = draft = sharded.whole()
        if len(log) == recipe.steps:
            if validation:
                trainer.finish(batches())
            if ranks.leads():
                values = provenance(recipe, trainer.config, target, cache, log)
                with published(folder / "draft") as new:
                    trainer.save(new)
                    write_provenance(new, values | {"started_from": started_from})
    return draft.requires_grad_(False)


def optimizers(
    draft: nn.Module, recipe: DraftRecipe, by_adam: tuple[str, ...]
) -> dict[str, torch.optim.Optimizer]:
    """AdamW for everything, or for all but the matrices, which are Muon's then. `by_adam`: ends of the names
    of matrices that stay AdamW's, such as tables of rows."""
    matrices = [
        p
        for name, p in draft.named_parameters()
        if p.dim() == 2 and recipe.muon_lr and not name.endswith(by_adam)
    ]
    ids = {id(p) for p in matrices}
    rest = [p for p in draft.parameters() if id(p) not in ids]
    adam = torch.optim.AdamW(
        rest, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=True
    )
    if not matrices:
        return {"adam": adam}
    return {"adam": adam, "muon": Muon(matrices, recipe.muon_lr, weight_decay=recipe.weight_decay)}


def aux_indices(wanted: tuple[int, ...], target: Decoder, cache: TeacherCache) -> list[int] | None:
    """Indices into the cache's aux of the layers that a draft reads; None for all, in order. Raises
    ValueError for the cache of another target, and for a layer that it lacks."""
    cached, width = tuple(cache.meta.target_layer_ids), cache.meta.hidden_size
    if width != target.config.hidden_size:
        raise ValueError(
            f"the cache holds states of width {width}, this target's are {target.config.hidden_size} "
            "wide: build a cache of this target"
        )
    missing = [i for i in wanted if i not in cached]
    if missing:
        raise ValueError(
            f"the cache holds the layers {list(cached)}, the draft also reads {missing}: build a cache with "
            f"target_layer_ids {list(wanted)}"
        )
    return None if wanted == cached else [cached.index(i) for i in wanted]


def responses(cache: TeacherCache, samples: int) -> Iterator[Tensor]:
    """The response tokens of the first `samples`; their states are not read."""
    for i in range(samples):
        tokens, prompt_length = cache.text(i)
        yield tokens[prompt_length:]


def most_frequent(texts: Iterable[Tensor], size: int, vocab_size: int, kept: Iterable[int]) -> Tensor:
    """d2t [size] int64: offsets to the `size` most frequent tokens of the texts, `kept` among them at any
    frequency; ties in the order of their ids."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(text, minlength=vocab_size)
    counts[list(kept)] = counts.max() + 1
    ids = counts.sort(descending=True, stable=True).indices[:size].sort().values
    return ids - torch.arange(size)


def accuracy(hits: Tensor, valid: Tensor) -> dict[str, Mean]:
    """hits and valid [A, n]: the share of hits at each position, and accept_len, the mean number of leading
    hits of a block: its accepted draft tokens where the labels are the target's output."""
    share = Mean(hits.sum(0).float(), valid.sum(0).float())
    return {"accept_len": leading_hits(hits), "accuracy": share}


def leading_hits(hits: Tensor) -> Mean:
    counts = hits.long().cumprod(1).sum(1).float()
    return Mean.of(counts, torch.ones_like(counts))


def provenance(
    recipe: DraftRecipe, config: Any, target: Decoder, cache: TeacherCache, log: Log
) -> dict[str, Any]:
    """Contents of provenance.json: enough to make this draft again, and to know what it was made from."""
    return {
        "recipe": asdict(recipe),
        "config": asdict(config),
        **origin(target, cache),
        "seed": recipe.seed,
        "steps": recipe.steps,
        "products": str(recipe.dtype(target.device)).removeprefix("torch."),
        "training_tokens": sum(record.get("tokens", 0) for record in log),  # of rows, prompts too
        "training_hours": round(sum(record["seconds"] for record in log) / 3600, 3),
        "losses": [record["loss"] for record in log[-20:]],
        "tau": [[record["step"], record["tau"]] for record in log if "tau" in record],
        "unseen": [[r["step"], r["unseen_accuracy"]] for r in log if "unseen_accuracy" in r],
    }


def origin(target: Decoder, cache: TeacherCache) -> dict[str, Any]:
    """The target, cache and code that a draft was made from."""
    meta = asdict(cache.meta) if is_dataclass(cache.meta) else vars(cache.meta)
    return {
        "target_fingerprint": fingerprint(target),
        "cache_sha256": hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest(),
        "cache_samples": len(cache),
        "git": _git_describe(),
        "torch": torch.__version__,
    }


def write_provenance(folder: Path, values: dict[str, Any]) -> None:
    write_json(folder / "provenance.json", values)


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """None where there is none."""
    path = folder / "provenance.json"
    return read_object(path) if path.is_file() else None


def _git_describe() -> str | None:
    """Of this file's checkout; None for an installed package."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
