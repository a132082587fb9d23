"""Training of a retrofit on raw text: its parameters alone learn, the backbone is hashed before and after."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from tokenizers import Tokenizer
from torch import nn

from outpace.checkpoint.base import LoadError
from outpace.checkpoint.publish import published
from outpace.checkpoint.save import write_json
from outpace.checkpoint.strict_json import read_object
from outpace.config import Ranges, check_ranges
from outpace.formats.convert import write_folder
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.ops import ranks
from outpace.retrofit.evaluate import evaluate, texts_of
from outpace.text.corpus import Document
from outpace.text.template import ChatTemplate
from outpace.train.checkpoint import OneFile
from outpace.train.trainer import StepLoss, backward, fit, take_step, training_folder, warmup_linear

MOST: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class RetrofitRecipe:
    """Common fields of the recipes of retrofits."""

    NAME: ClassVar[str]
    RANGES: ClassVar[Ranges] = (
        dict.fromkeys(("steps", "rows", "micro_batches", "queries"), (1.0, MOST))
        | dict.fromkeys(("validation_texts", "save_every"), (1.0, MOST))
        | dict.fromkeys(("lr", "warmup", "kl", "mse", "seed"), (0.0, MOST))
        | dict.fromkeys(("decay", "layer_share", "sparse_share"), (0.0, 1.0))
        | {"row_tokens": (2.0, MOST)}
    )
    steps: int = 200
    rows: int = 1  # of a step
    micro_batches: int = 1  # of a process's rows of a step: less memory, a third more work
    row_tokens: int = 1024
    lr: float = 1e-3
    warmup: int = 10
    decay: float = 0.6
    validation_texts: int = 8  # held-out texts of row_tokens
    save_every: int = 20
    seed: int = 1

    def __post_init__(self) -> None:
        check_ranges(self, self.RANGES, f"train {self.NAME}: ")


class RetrofitTrainer(Protocol):
    """The part of training that depends on the kind of retrofit."""

    @property
    def recipe(self) -> RetrofitRecipe: ...

    @property
    def target(self) -> Decoder: ...

    @property
    def modules(self) -> list[nn.Module]: ...  # of the target; their parameters learn

    def loss(self, step: int, rows: list[int]) -> StepLoss:
        """Of these rows of the step, by their numbers in the whole training."""
        ...

    def switch(self, on: bool) -> None: ...

    def metrics(self, texts: list[list[int]]) -> dict[str, Any]:
        """For the report, besides the held-out losses."""
        ...


def train_retrofit(
    trainer: RetrofitTrainer,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    held_out: list[Document],
    folder: Path,
    *,
    stop_after: int | None = None,
) -> dict[str, Any] | None:
    """Train the parameters of `trainer` in place with AdamW, resuming from folder/checkpoint.pt, and publish
    folder/model, a checkpoint with its report recipe.NAME.json; -> the report, None if stopped early. Memory
    for training does not depend on the backbone's size. Processes that torchrun started train together, each
    on its share of every step's rows. Raises ValueError if the backbone changed."""
    recipe, target = trainer.recipe, trainer.target
    texts = texts_of(tokenizer, held_out, recipe.validation_texts, recipe.row_tokens, recipe.seed)
    with ranks.joined(), training_folder(folder):
        backbone = fingerprint(target, retrofits=False)
        untrained = _untrained(folder, lambda: _evaluate(trainer, texts)) if ranks.leads() else {}
        parameters = trainable(target, trainer.modules)
        adam = torch.optim.AdamW(parameters, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)

        def update(step: int) -> dict[str, Any]:
            for group in adam.param_groups:  # looked up again: loading a checkpoint replaces them
                group["lr"] = recipe.lr * warmup_linear(step, recipe.steps, recipe.warmup, recipe.decay)
            rows = range(step * recipe.rows, (step + 1) * recipe.rows)
            parts = ranks.own(rows, recipe.micro_batches)
            metrics = backward([partial(trainer.loss, step, part) for part in parts])
            return metrics | take_step(parameters, [adam], 1.0)

        checkpoint = OneFile(folder, {"parts": nn.ParameterList(parameters), "adam": adam})
        log = fit(folder, recipe, update, checkpoint, title=recipe.NAME, stop_after=stop_after)
        for parameter in parameters:
            parameter.requires_grad_(False)
        if fingerprint(target, retrofits=False) != backbone:
            raise ValueError("the backbone changed while its retrofit was trained: nothing is saved")
        if len(log) < recipe.steps:
            return None
        if not ranks.leads():
            return ranks.gathered([{}])[0]
        values = _evaluate(trainer, texts)
        values["held_out"]["untrained"] = untrained.pop("held_out")["after"]
        report = {
            "recipe": asdict(recipe),
            "backbone": backbone,
            "steps": len(log),
            "training_hours": round(sum(record["seconds"] for record in log) / 3600, 3),
            "loss_curve": [[r["step"], round(r["loss"], 5)] for r in log[:: max(1, len(log) // 100)]],
            **values,
            **{f"{name}_untrained": value for name, value in untrained.items()},
        }
        with published(folder / "model") as new:
            write_folder(target, new, tokenizer, template)
            write_json(new / f"{recipe.NAME}.json", report)
        return ranks.gathered([report])[0]


def trainable(target: Decoder, modules: list[nn.Module]) -> list[nn.Parameter]:
    """The parameters of `modules`, which require gradients from now on; no other of the target's does."""
    target.requires_grad_(False)
    parameters = [p for part in modules for name, p in part.named_parameters() if name != "frequencies"]
    for parameter in parameters:
        parameter.requires_grad_(True)
    return parameters


def _evaluate(trainer: RetrofitTrainer, texts: list[list[int]]) -> dict[str, Any]:
    """Held-out loss of the original and of the retrofit as it is now."""
    trainer.switch(False)
    values, original = trainer.metrics(texts), evaluate(trainer.target, texts)
    trainer.switch(True)
    after = evaluate(trainer.target, texts, original.pop("log_probabilities"))
    del after["log_probabilities"]
    return values | {"held_out": {"texts": len(texts), "original": original, "after": after}}


def _untrained(folder: Path, evaluate: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """folder/untrained.json: the evaluation before training, which a run that resumes need not repeat."""
    path = folder / "untrained.json"
    try:
        values = read_object(path)
        if values["held_out"]["after"]["kl"] >= 0:
            return values
    except (LoadError, KeyError, TypeError):  # not there, or damaged
        pass
    values = evaluate()
    write_json(path, values)
    return values
