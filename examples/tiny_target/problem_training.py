"""Training of a target that solves problems: generated ones, new at every step."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer

from examples.tiny_target.model import Learner, TargetShape, balance_loss, first_model
from examples.tiny_target.problem_rows import UNSUPERVISED, Batch, Example, Lessons, Mix, batches
from outpace.models.decoder import Decoder
from outpace.tasks.families import FAMILIES
from outpace.text.harmony import HarmonyTokens
from outpace.text.sft_rows import rows
from outpace.text.tokenizer import END_OF_TEXT, token_id
from outpace.train.losses import chunked_nll
from outpace.train.trainer import fit, training_folder


@dataclass(frozen=True, kw_only=True)
class ProblemRecipe(TargetShape):
    """How to train a target on problems of all families. Fields of solver.toml."""

    MAY_BE_0: ClassVar[tuple[str, ...]] = (*TargetShape.MAY_BE_0, "echo_steps")

    decay: float = 0.3
    steps: int = 2500
    step_tokens: int = 8192
    batch_tokens: int = 4096  # at once in memory, unless one row is longer
    echo_steps: int = 0  # the first, of echoes alone
    mix: Mix = field(default_factory=Mix)
    save_every: int = 50
    eval_every: int = 100
    eval_problems: int = 16  # of each family, held out; ..
    judged_problems: int = 100  # .. and when the trained model is saved


def _learn(model: Decoder, some: Sequence[Batch], recipe: ProblemRecipe, pad: int) -> dict[str, Any]:
    """Adds the gradients of the mean loss on the supervised tokens of all batches; -> metrics."""
    supervised = sum(int((batch.labels != UNSUPERVISED).sum()) for batch in some)
    fed = sum(int((batch.inputs != pad).sum()) for batch in some)
    total, balances = 0.0, 0.0
    by_family: dict[str, list[float]] = defaultdict(list)
    for batch in some:
        real, training = batch.inputs != pad, batch.labels != UNSUPERVISED
        out = model(batch.inputs, routing=True)
        nll = chunked_nll(out.hidden[training], model.dense_head, batch.labels[training])
        loss = nll.sum() / supervised
        total += loss.item()
        if out.routing:
            routing = [logits[real.flatten()] for logits in out.routing]
            balance = balance_loss(routing, recipe.experts_per_token) * (int(real.sum()) / fed)
            balances += balance.item()
            loss = loss + recipe.balance * balance
        loss.backward()
        for name, part in zip(batch.families, nll.detach().split(training.sum(1).tolist()), strict=True):
            by_family[name].append(part.mean().item())
    families = {name: round(sum(v) / len(v), 4) for name, v in sorted(by_family.items())}
    return {"loss": total, "balance": balances, "tokens": fed, "supervised": supervised, "families": families}


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
        best = model.logits(model(batch.inputs).hidden).argmax(-1)
        good = ((best == batch.labels) | (batch.labels == UNSUPERVISED)).all(1)
        for name, hit in zip(batch.families, good.tolist(), strict=True):
            right[name] += hit
    return {name: count / problems for name, count in right.items()}


def train_solver(
    recipe: ProblemRecipe,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    init: Decoder | None = None,
    stop_after: int | None = None,
) -> Decoder:
    """Train, resuming from folder/checkpoint.pt where there is one, and return the model (dense).

    `init`: a trained target whose weights are the start, with optimizers that remember nothing. Raises
    ValueError where its config is not the recipe's.
    """
    pad, tokens = token_id(tokenizer, END_OF_TEXT), HarmonyTokens(tokenizer)
    model = first_model(recipe, pad, init)
    learner = Learner(model, recipe, recipe.steps)
    lessons = Lessons(tokens, recipe.mix)

    def update(step: int) -> dict[str, Any]:
        learner.begin(step)
        rng = random.Random(f"{recipe.seed} {step}")
        echoes = step / recipe.echo_steps if step < recipe.echo_steps else None
        drawn = lessons.step(rng, recipe.step_tokens, echoes)
        metrics = _learn(model, list(batches(drawn, recipe.batch_tokens, pad)), recipe, pad)
        learner.update()
        return metrics

    def evaluate() -> dict[str, Any]:
        exact = exact_share(model, tokens, recipe.eval_problems, recipe.batch_tokens)
        return {"exact": sum(exact.values()) / len(exact), "exact_by_family": exact}

    with training_folder(folder):
        fit(
            folder,
            recipe,
            update,
            learner.parts(),
            title="solver",
            evaluate=evaluate,
            eval_every=recipe.eval_every,
            stop_after=stop_after,
        )
    model.dtype = torch.float32
    return model
