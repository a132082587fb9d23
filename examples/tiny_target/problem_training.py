"""Training of a target on generated problems, new ones at every step."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from examples.tiny_target.model import Learner, TargetShape, balance_loss, first_model
from examples.tiny_target.problem_rows import (
    LESSONS,
    UNSUPERVISED,
    Batch,
    Example,
    Lessons,
    Mix,
    batches,
    packs,
)
from outpace.models.decoder import Decoder
from outpace.ops import ranks
from outpace.ops.moe import ROUNDED
from outpace.tasks.families import FAMILIES
from outpace.text.harmony import HarmonyTokens
from outpace.text.sft_rows import rows
from outpace.text.tokenizer import END_OF_TEXT, token_id
from outpace.train.checkpoint import OneFile
from outpace.train.losses import block_losses
from outpace.train.trainer import fit, training_folder

AHEAD = 4  # steps that each process of a training has ready


@dataclass(frozen=True, kw_only=True)
class ProblemRecipe(TargetShape):
    """How to train a target on problems of all families. Fields of examples/tiny_target/*.toml."""

    decay: float = 0.3
    steps: int = 2500
    step_tokens: int = 8192
    batch_tokens: int = 4096  # at once in memory, unless one row is longer
    mix: Mix = field(default_factory=Mix)
    save_every: int = 50
    eval_every: int = 100
    eval_problems: int = 16  # of each family, held out; ..
    test_problems: int = 100  # .. and when the trained model is saved


def _learn(model: Decoder, some: Sequence[Batch], recipe: ProblemRecipe) -> dict[str, Tensor]:
    """Adds this process's gradients of the mean loss on the supervised tokens of all packs; -> sums over all,
    on the model's device: loss, balance, and `families`, the loss and tokens of each of `LESSONS` [n,2]."""
    supervised = sum(sum(batch.supervised) for batch in some)
    fed = sum(batch.tokens for batch in some)
    device = model.device
    sizes = {"loss": (), "balance": (), "families": (len(LESSONS), 2)}
    sums = {name: torch.zeros(size, device=device) for name, size in sizes.items()}
    for batch in _own(some):
        # places are counted on the host: a mask as an index makes it wait for the device
        training = batch.labels != UNSUPERVISED
        places, labels = training.flatten().nonzero()[:, 0].to(device), batch.labels[training].to(device)
        families = torch.tensor([LESSONS.index(name) for name in batch.families])
        own = families.repeat_interleave(torch.tensor(batch.supervised)).to(device)
        packed = None if batch.packed is None else batch.packed.to(device)
        out = model(batch.inputs.to(device), routing=True, packed=packed)
        padding = (0, -len(labels) % ROUNDED)  # rows without weight
        states = out.hidden.flatten(0, 1).index_select(0, F.pad(places, padding))
        shares = F.pad(torch.full(labels.shape, 1 / supervised, device=device), padding)
        rows = block_losses("ce", states, model.dense_head, F.pad(labels, padding), weights=shares)
        assert rows.total is not None
        loss = rows.total
        sums["loss"] += loss.detach()
        if out.routing:
            routing = [logits[: batch.tokens] for logits in out.routing]
            balance = balance_loss(routing, recipe.experts_per_token) * (batch.tokens / fed)
            sums["balance"] += balance.detach()
            loss = loss + recipe.balance * balance
        loss.backward()  # type: ignore[no-untyped-call]
        nll = rows.nll[: len(labels)]
        counted = torch.stack((nll, torch.ones_like(nll)), 1)
        sums["families"].index_add_(0, own, counted)
    sums = {name: ranks.total(x) for name, x in sums.items()}
    return sums | {"tokens": torch.tensor(fed), "supervised": torch.tensor(supervised)}


def _own(some: Sequence[Batch]) -> list[Batch]:
    """This process's batches: large ones first, each to who has the fewest tokens so far."""
    shares: list[list[Batch]] = [[] for _ in range(ranks.size())]
    for batch in sorted(some, key=lambda batch: -batch.inputs.numel()):
        min(shares, key=lambda share: sum(b.inputs.numel() for b in share)).append(batch)
    return shares[ranks.rank()]


def _metrics(sums: dict[str, Tensor]) -> dict[str, Any]:
    """What `_learn` gave, on the host: the one wait of a step."""
    nll, count = sums["families"].T.tolist()
    families = {name: round(a / n, 4) for name, a, n in zip(LESSONS, nll, count, strict=True) if n}
    return {name: tensor.item() for name, tensor in sums.items() if not tensor.dim()} | {"families": families}


class Steps(Dataset[list[Batch]]):
    """The batches of every step, by its number: the same whoever makes them, and whenever."""

    def __init__(self, recipe: ProblemRecipe, lessons: Lessons) -> None:
        self.recipe, self.lessons = recipe, lessons

    def __len__(self) -> int:
        return self.recipe.steps

    def __getitem__(self, step: int) -> list[Batch]:
        recipe = self.recipe
        drawn = self.lessons.step(random.Random(f"{recipe.seed} {step}"), recipe.step_tokens)
        return list(packs(drawn, recipe.batch_tokens))

    def start(self, first: int, workers: int) -> Iterator[list[Batch]]:
        """From step `first` on, made ahead by so many processes; 0: here, when they are wanted."""
        ahead = {"num_workers": workers, "prefetch_factor": AHEAD} if workers else {}
        return iter(DataLoader(self, batch_size=None, sampler=range(first, len(self)), **ahead))  # type: ignore[arg-type]


@torch.inference_mode()
def exact_share(model: Decoder, tokens: HarmonyTokens, problems: int, batch_tokens: int) -> dict[str, float]:
    """Per family, the share of held-out problems where every token of the model's own is the most probable:
    what decoding then writes is the reference, trace and answer."""
    rng, pad = random.Random(0), token_id(tokens.tokenizer, END_OF_TEXT)
    drawn = [
        Example(name, rows(family.draw(rng, held_out=True).conversation("medium"), tokens)[-1])
        for name, family in FAMILIES.items()
        for _ in range(problems)
    ]
    right: dict[str, int] = dict.fromkeys(FAMILIES, 0)
    for batch in batches(drawn, batch_tokens, pad):
        best = model.logits(model(batch.inputs.to(model.device)).hidden).argmax(-1).cpu()
        good = ((best == batch.labels) | (batch.labels == UNSUPERVISED)).all(1)
        for name, hit in zip(batch.families, good.tolist(), strict=True):
            right[name] += hit
    return {name: count / problems for name, count in right.items()}


def train_target(
    recipe: ProblemRecipe,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    init: Decoder | None = None,
    stop_after: int | None = None,
    device: str = "cpu",
    workers: int = 0,
) -> Decoder:
    """Train, resuming from folder/checkpoint.pt where there is one, and return the model (dense, on the CPU).

    Processes that torchrun started each learn from a part of every step's batches.
    `init`: a trained target whose weights are the start, with optimizers that remember nothing. `workers`:
    processes that make problems, beside this one. Raises ValueError where its config is not the recipe's.
    """
    pad, tokens = token_id(tokenizer, END_OF_TEXT), HarmonyTokens(tokenizer)
    model = first_model(recipe, pad, init, device)
    learner = Learner(model, recipe, recipe.steps)
    if model.device.type != "cpu":
        torch.set_num_threads(1)  # the cores belong to those who make problems
    steps = Steps(recipe, Lessons(tokens, recipe.mix))
    feed: Iterator[list[Batch]] | None = None

    def update(step: int) -> dict[str, Any]:
        nonlocal feed
        feed = feed or steps.start(step, workers)
        learner.begin(step)
        sums = _learn(model, next(feed), recipe)
        learner.update()
        return _metrics(sums)

    def evaluate() -> dict[str, Any]:
        exact = exact_share(model, tokens, recipe.eval_problems, recipe.batch_tokens)
        return {"exact": sum(exact.values()) / len(exact), "exact_by_family": exact}

    with training_folder(folder):
        fit(
            folder,
            recipe,
            update,
            OneFile(folder, learner.parts()),
            title="target",
            evaluate=evaluate,
            eval_every=recipe.eval_every,
            stop_after=stop_after,
        )
    model.dtype = torch.float32
    return model.cpu()
