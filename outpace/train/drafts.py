"""What training any draft shares: optimizers, the walk over a teacher cache, judging, provenance."""

import hashlib
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outpace.checkpoint.save import write_json
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.base import Draft
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.ops.dispatch import product_dtype
from outpace.ops.sampling import seeded
from outpace.train.data import AnchorSample
from outpace.train.trainer import Muon, fit, warmup_cosine

MOST_JUDGED = 128  # samples kept from training: they are read again every time


class TargetMeta(Protocol):
    @property
    def target_layer_ids(self) -> tuple[int, ...]: ...

    @property
    def hidden_size(self) -> int: ...


class Teacher(Protocol):
    """What training reads of a teacher cache."""

    @property
    def meta(self) -> TargetMeta: ...

    def __len__(self) -> int: ...

    def sample(self, index: int) -> AnchorSample: ...

    def text(self, index: int) -> tuple[Tensor, int]: ...  # its tokens and prompt_length, no states


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """How a draft of any kind is trained. Raises ValueError for what no run can honour."""

    rows: int = 4  # of a step
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
    held_out_share: float = 0.02  # of the cache, never trained on: what is learnt by heart shows there
    eval_prompts: int = 8
    eval_new_tokens: int = 128

    def __post_init__(self) -> None:
        for name in ("rows", "steps", "save_every", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: it must be at least 1")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)}: it must be above 0, and finite")
        for name in ("muon_lr", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)}: it must be at least 0, and finite")
        if not 0 <= self.warmup_share <= 1:
            raise ValueError(f"warmup_share {self.warmup_share} is outside 0..1")
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share {self.held_out_share} is outside 0..1: some must be trained on")

    def dtype(self, device: torch.device) -> torch.dtype:
        return product_dtype(device) if self.bfloat16 else torch.float32

    def trained(self, cache: Teacher) -> int:
        """The samples before this one are trained on; it and those behind are kept for judging."""
        return len(cache) - int(len(cache) * self.held_out_share)

    def validation_samples(self, cache: Teacher) -> list[int]:
        """Of those kept, the samples that are evaluated every time."""
        return self._with_guesses(cache, range(self.trained(cache), len(cache))[:MOST_JUDGED])

    def training_samples(self, cache: Teacher) -> list[int]:
        """The samples that are trained on. Raises ValueError where there is none."""
        trained = self.trained(cache)
        result = self._with_guesses(cache, range(trained))
        if not result:
            within = f" within row_tokens {self.row_tokens}" if self.row_tokens else ""
            raise ValueError(
                f"none of {trained} cached rows has a draft token to learn from: that takes a response of "
                f"at least "
                f"two tokens{within}"
            )
        return result

    def _with_guesses(self, cache: Teacher, samples: range) -> list[int]:
        """A step of none but rows without a draft token would end a long run."""
        items = []
        for i in samples:
            tokens, prompt_length = cache.text(i)
            if len(tokens[: self.row_tokens]) >= max(prompt_length, 1) + 2:
                items.append(i)
        return items


@dataclass(frozen=True)
class StepLoss:
    loss: Tensor  # scalar, with its gradient to come
    tokens: int  # of the rows it was made from
    metrics: dict[str, Any]  # for the log


def learn(
    draft: nn.Module,
    recipe: TrainingRecipe,
    folder: Path,
    title: str,
    loss_of: Callable[[int], StepLoss],
    evaluate: Callable[[], dict[str, Any]],
    more: dict[str, Any] | None = None,
    *,
    by_adam: Sequence[str] = (),
    stop_after: int | None = None,
) -> bool:
    """Train `draft` in place on loss_of(step) of every step, from folder/checkpoint.pt where there is one;
    -> whether the last step is done. `evaluate` runs every `eval_every` steps and at the end. `more`: what a
    checkpoint holds besides the draft and its optimizers. `by_adam`: as in `optimizers`."""
    learners = optimizers(draft, recipe, by_adam)
    warmup = max(1, round(recipe.steps * recipe.warmup_share))

    def update(step: int) -> dict[str, Any]:
        began = time.perf_counter()
        factor = warmup_cosine(step, recipe.steps, warmup)
        for optimizer, lr in learners.values():
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
        result = loss_of(step)
        result.loss.backward()  # type: ignore[no-untyped-call]
        norm = float(nn.utils.clip_grad_norm_(draft.parameters(), recipe.clip))
        if not math.isfinite(norm):  # the step would spoil the weights
            return {"loss": result.loss.item(), "grad_norm": norm}
        for optimizer, _ in learners.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        metrics = {"loss": result.loss.item(), **result.metrics, "lr": recipe.lr * factor}
        metrics["tokens"] = result.tokens
        metrics["tokens_per_s"] = round(result.tokens / (time.perf_counter() - began), 1)
        if (step + 1) % recipe.eval_every == 0 or step + 1 == recipe.steps:
            metrics |= evaluate()
        return metrics

    parts = {"draft": draft, **{name: optimizer for name, (optimizer, _) in learners.items()}, **(more or {})}
    return fit(folder, recipe, update, parts, title=title, stop_after=stop_after) == recipe.steps


def optimizers(
    draft: nn.Module, recipe: TrainingRecipe, by_adam: Sequence[str] = ()
) -> dict[str, tuple[torch.optim.Optimizer, float]]:
    """AdamW for everything, or for all but the matrices, which are Muon's then; each with its peak rate.
    `by_adam`: ends of the names of matrices that stay AdamW's, such as tables of rows."""
    matrices = [
        p
        for name, p in draft.named_parameters()
        if p.dim() == 2 and recipe.muon_lr and not name.endswith(tuple(by_adam))
    ]
    known = {id(p) for p in matrices}
    rest = [p for p in draft.parameters() if id(p) not in known]
    how = {"betas": (0.9, 0.95), "weight_decay": recipe.weight_decay, "fused": True}
    values: dict[str, tuple[torch.optim.Optimizer, float]] = {}
    values["adam"] = torch.optim.AdamW(rest, lr=recipe.lr, **how), recipe.lr  # type: ignore[arg-type]
    if matrices:
        values["muon"] = Muon(matrices, recipe.muon_lr, weight_decay=recipe.weight_decay), recipe.muon_lr
    return values


def rows_of_step(step: int, recipe: TrainingRecipe, size: int) -> list[int]:
    """The step's rows of an endless walk over `size` samples, shuffled again every epoch."""
    items = []
    for n in range(step * recipe.rows, (step + 1) * recipe.rows):
        epoch, i = divmod(n, size)
        items.append(int(torch.randperm(size, generator=seeded(recipe.seed, 0, epoch))[i]))
    return items


def features(
    wanted: tuple[int, ...], target: Decoder, held: tuple[int, ...], hidden_size: int
) -> list[int] | None:
    """Indices of the layers `wanted` by the draft among those the cache holds; None where they are all, in
    order. Raises ValueError where it is another target's cache, or a layer is not held."""
    if hidden_size != target.config.hidden_size:
        raise ValueError(
            f"the cache holds states of width {hidden_size}, this target's are {target.config.hidden_size} "
            "wide: build a cache of this target"
        )
    missing = [i for i in wanted if i not in held]
    if missing:
        raise ValueError(
            f"the cache holds the layers {list(held)}, the draft also reads {missing}: build a cache with "
            f"target_layer_ids {list(wanted)}"
        )
    return None if wanted == held else [held.index(i) for i in wanted]


def responses(cache: Teacher, samples: int) -> Iterator[Tensor]:
    """The responses of the first `samples`, their states left unread."""
    for i in range(samples):
        tokens, prompt_length = cache.text(i)
        yield tokens[prompt_length:]


def commonest(texts: Iterable[Tensor], wanted: int, vocab_size: int, kept: Iterable[int]) -> Tensor:
    """d2t [wanted] int64: offsets to the `wanted` commonest tokens of the texts, and to those `kept` however
    rare they are; equals in the order of their ids."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(text, minlength=vocab_size)
    counts[list(kept)] = counts.max() + 1
    ids = counts.sort(descending=True, stable=True).indices[:wanted].sort().values
    return ids - torch.arange(wanted)


def accuracy(hits: Tensor, valid: Tensor) -> dict[str, Any]:
    """hits and valid [A, n]: the share right at each position, and the mean over blocks of the count of
    leading right ones: the accept_len that these blocks would have had, labels being the target's."""
    right = hits.sum(0) / valid.sum(0).clamp(min=1)
    leading = hits.long().cumprod(1).sum(1).float().mean()
    return {"accept_len": leading.item(), "accuracy": [round(x, 4) for x in right.tolist()]}


def measure_tau(draft: Draft, target: Decoder, prompts: list[list[int]], new_tokens: int) -> float:
    """Real decoding at temperature 0 with a draft bound to its target: tokens per forward of the target,
    bonus included."""
    stop = frozenset(target.config.eos_token_ids)
    request = Request(max_new_tokens=new_tokens, stop=stop)
    return generate(target, prompts, request, draft).trace.tau


def provenance(
    recipe: TrainingRecipe, config: Any, target: Decoder, cache: Teacher, folder: Path
) -> dict[str, Any]:
    """What provenance.json states: enough to make this draft again, and to know what it was made from."""
    lines = [json.loads(line) for line in log_lines(folder)]
    return {
        "recipe": asdict(recipe),
        "config": asdict(config),
        **origin(target, cache),
        "seed": recipe.seed,
        "steps": recipe.steps,
        "products": str(recipe.dtype(target.device)).removeprefix("torch."),
        "training_tokens": sum(line["tokens"] for line in lines if "tokens" in line),  # of rows, prompts too
        "training_hours": round(sum(line["seconds"] for line in lines) / 3600, 3),
        "losses": [line["loss"] for line in lines[-20:]],
        "tau": [[line["step"], line["tau"]] for line in lines if "tau" in line],
        "unseen": [[line["step"], line["unseen_accuracy"]] for line in lines if "unseen_accuracy" in line],
    }


def origin(target: Decoder, cache: Teacher) -> dict[str, Any]:
    """Where the draft it is, and from what it was made by what."""
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


def log_lines(folder: Path) -> list[str]:
    return (folder / "log.jsonl").read_text().splitlines()


def _git_describe() -> str | None:
    """Of the checkout this file lies in; None for an installed package."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """What is next to a published target; None where nothing does."""
    path = folder / "provenance.json"
    return json.loads(path.read_text()) if path.is_file() else None
