"""What the trainings of retrofits share: a backbone that stays as it is, rows of text, judging and saving."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from outpace.checkpoint.publish import published
from outpace.checkpoint.save import write_json
from outpace.formats.convert import write_folder
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint
from outpace.retrofit.evaluate import evaluate
from outpace.text.template import ChatTemplate
from outpace.train.data import rows_of_step
from outpace.train.trainer import fit, warmup_linear

COUNTS = ("steps", "rows", "queries", "validation_texts", "save_every")  # at least 1


@dataclass(frozen=True, kw_only=True)
class FrozenRecipe:
    """What the recipes of both trainings say."""

    NAME: ClassVar[str]
    steps: int = 200
    row_tokens: int = 1024
    lr: float = 1e-3
    warmup: int = 10
    decay: float = 0.6
    validation_texts: int = 8  # held-out texts of row_tokens
    save_every: int = 20
    seed: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            least = 2 if name == "row_tokens" else int(name in COUNTS)
            if not value >= least:
                raise ValueError(f"train {self.NAME}: {name} {value}: it must be at least {least}")
            if (name.endswith("_share") or name == "decay") and value > 1:
                raise ValueError(f"train {self.NAME}: {name} {value}: a share, up to 1, of the steps")


def learners(target: Decoder, parts: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The floating parameters of `parts`, which want gradients from now on; no other of the target's does."""
    for parameter in target.parameters():
        parameter.requires_grad_(False)
    items = [p for part in parts for name, p in part.named_parameters() if name != "frequencies"]
    for parameter in items:
        parameter.requires_grad_(True)
    return items


def row_of(stream: np.ndarray, length: int, rows: int, step: int, seed: int) -> Tensor:
    """[rows, length] int64, the step's text."""
    return rows_of_step(stream, length, rows, step * rows, seed)[0]


def train_frozen(
    target: Decoder,
    parameters: list[nn.Parameter],
    recipe: FrozenRecipe,
    losses: Callable[[int], tuple[Tensor, dict[str, Any]]],
    folder: Path,
    title: str,
    stop_after: int | None = None,
) -> None:
    """AdamW on `parameters` alone: what is remembered of the training does not depend on the backbone's size.
    Resumes from folder/checkpoint.pt. Raises ValueError if the backbone is another afterwards."""
    before = fingerprint(target, retrofits=False)
    held = nn.ParameterList(parameters)
    adam = torch.optim.AdamW(parameters, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)

    def update(step: int) -> dict[str, Any]:
        for group in adam.param_groups:  # looked up again: loading a checkpoint replaces them
            group["lr"] = recipe.lr * warmup_linear(step, recipe.steps, recipe.warmup, recipe.decay)
        loss, metrics = losses(step)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(nn.utils.clip_grad_norm_(parameters, 1.0))
        if not math.isfinite(norm):  # the step would spoil the weights
            return {"loss": loss.item(), "grad_norm": norm}
        adam.step()
        adam.zero_grad(set_to_none=True)
        return {"loss": loss.item()} | metrics

    fit(folder, recipe, update, {"parts": held, "adam": adam}, title=title, stop_after=stop_after)
    for parameter in parameters:
        parameter.requires_grad_(False)
    if fingerprint(target, retrofits=False) != before:
        raise ValueError("the backbone changed while its retrofit was trained: nothing is saved")


def once(folder: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """folder/untrained.json: how the retrofit was evaluated before training, kept for a run that resumes."""
    path = folder / "untrained.json"
    if path.is_file():
        values: dict[str, Any] = json.loads(path.read_text())
        return values
    folder.mkdir(parents=True, exist_ok=True)
    values = make()
    write_json(path, values)
    return values


def three_losses(
    target: Decoder, texts: list[list[int]], switch: Callable[[bool], None], untrained: dict[str, Any] | None
) -> dict[str, Any]:
    """Held-out loss of the original, of the retrofit before training (as evaluated then) and after it."""
    switch(False)
    original = evaluate(target, texts)
    switch(True)
    after = evaluate(target, texts, original.pop("log_probabilities"))
    del after["log_probabilities"]
    return {"texts": len(texts), "original": original, "untrained": untrained, "after": after}


def publish(
    target: Decoder,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    out: Path,
    name: str,
    recipe: FrozenRecipe,
    log: Sequence[dict[str, Any]],
    values: dict[str, Any],
) -> dict[str, Any]:
    """out/, a checkpoint, and out/NAME, its report, which is returned."""
    report = {
        "recipe": asdict(recipe),
        "backbone": fingerprint(target, retrofits=False),
        "steps": len(log),
        "training_hours": round(sum(line["seconds"] for line in log) / 3600, 3),
        "loss_curve": [[line["step"], round(line["loss"], 5)] for line in log[:: max(1, len(log) // 100)]],
        **values,
    }
    with published(out) as new:
        write_folder(target, new, tokenizer, template)
        write_json(new / name, report)
    return report
