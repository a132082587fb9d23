"""The loop around any training step: schedule, checkpoints, exact resume, log, progress bar."""

import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class Run(DataclassInstance, Protocol):
        """What the loop reads of a recipe."""

        @property
        def steps(self) -> int: ...

        @property
        def save_every(self) -> int: ...


from torch import Tensor

from outpace.checkpoint.publish import disk, one_writer, written
from outpace.checkpoint.save import write_atomically
from outpace.ops.dispatch import product_dtype

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def warmup_cosine(step: int, steps: int, warmup: int, floor: float = 0.0) -> float:
    """Factor on the learning rate: linear to 1 over `warmup` steps, then a cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def warmup_linear(step: int, steps: int, warmup: int, decay: float, floor: float = 0.0) -> float:
    """Linear up, flat, and linear down to `floor` over the last `decay` share of the steps."""
    if step < warmup:
        return (step + 1) / warmup
    left = (steps - step) / max(1, round(steps * decay))
    return floor + (1 - floor) * min(1.0, left)


def keep_heap() -> None:
    """Ask glibc to keep what is freed: by default large blocks go back to the system, and the faults of
    taking them again grow to a third of a CPU training step. Elsewhere, does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)):
            mallopt(option, value)


def fit(
    folder: Path,
    recipe: "Run",
    update: Callable[[int], dict[str, Any]],
    stateful: dict[str, Any],
    *,
    title: str,
    stop_after: int | None = None,
) -> int:
    """Call update(step) for every step from the last checkpoint to `recipe.steps`, logging what it returns;
    -> the step reached.

    `stateful` names the contents of a checkpoint (anything with state_dict and load_state_dict). Metrics
    go to folder/log.jsonl, one line a step; checkpoints to folder/checkpoint.pt, replaced whole. The
    checkpoint alone decides where a run goes on, and holds the log up to it, which is written anew from
    there. A recipe that changed since is followed from there on, and the changed fields are named above the
    bar. `stop_after` ends this call early, with a checkpoint (for tests and time limits).
    Raises ValueError for a checkpoint that is damaged or of another run, for a second process in the folder,
    for a full disk, and at the first loss or weight that is not finite.
    """
    keep_heap()
    folder.mkdir(parents=True, exist_ok=True)
    with one_writer(folder), disk(folder):
        return _fit(folder, recipe, update, stateful, title, stop_after)


def _fit(
    folder: Path,
    recipe: "Run",
    update: Callable[[int], dict[str, Any]],
    stateful: dict[str, Any],
    title: str,
    stop_after: int | None,
) -> int:
    checkpoint, log = folder / "checkpoint.pt", folder / "log.jsonl"
    asked, steps = json.loads(json.dumps(asdict(recipe))), recipe.steps
    first, before = 0, asked
    records: list[str] = []  # the log
    if checkpoint.exists():
        first, before, records = _resume(checkpoint, log, stateful, steps)
    write_atomically(log, "".join(records).encode())
    last, saved = steps if stop_after is None else min(steps, first + stop_after), first
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with log.open("a") as lines, Progress(*columns, refresh_per_second=2) as bar:
        task = bar.add_task(title, total=steps, completed=first, said="")
        for name in sorted(n for n in asked if asked[n] != before.get(n, asked[n])):
            bar.console.print(
                f"from step {first} on: {name} {asked[name]}, it was {before[name]}", style="dim"
            )
        for step in range(first, last):
            began = time.perf_counter()
            metrics = update(step)
            _check_finite(metrics, step, saved)
            record = {"step": step, **metrics, "seconds": round(time.perf_counter() - began, 4)}
            records.append(json.dumps(record) + "\n")
            lines.write(records[-1])
            lines.flush()
            message = "  ".join(
                f"{k} {v:.3f}" for k, v in metrics.items() if isinstance(v, float) and k != "lr"
            )
            bar.update(task, advance=1, said=message)
            if (step + 1) % recipe.save_every == 0 or step + 1 == last:
                os.fsync(lines.fileno())
                _save(checkpoint, step + 1, saved, asked, records, stateful)
                saved = step + 1
    return last


DIVERGED = (
    "step {step}: {what} is not finite. Training has diverged: lower the learning rate; the last good "
    "checkpoint is that of step {saved}"
)


def _check_finite(metrics: dict[str, Any], step: int, saved: int) -> None:
    for name in ("loss", "grad_norm"):
        if not math.isfinite(metrics.get(name, 0.0)):
            raise ValueError(DIVERGED.format(step=step, what=f"the {name} ({metrics[name]})", saved=saved))


def _save(
    path: Path, step: int, saved: int, recipe: dict[str, Any], records: list[str], stateful: dict[str, Any]
) -> None:
    states = {k: v.state_dict() for k, v in stateful.items()}
    wrong = next(_not_finite(states), None)
    if wrong is not None:
        raise ValueError(DIVERGED.format(step=step, what=wrong, saved=saved))
    with written(path) as temporary:
        torch.save({"step": step, "recipe": recipe, "log": "".join(records), **states}, temporary)


def _not_finite(value: Any, name: str = "") -> Iterator[str]:
    """Names of the tensors in a state that hold NaN or Inf."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _not_finite(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
        yield name


def _resume(
    path: Path, log: Path, stateful: dict[str, Any], steps: int
) -> tuple[int, dict[str, Any], list[str]]:
    """-> the step to go on with, the recipe as it was, and the lines of the log up to there."""
    begin = "delete it to begin this run again"
    try:
        saved = torch.load(path, weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({error}): {begin}") from error
    if not isinstance(saved, dict) or type(saved.get("step")) is not int:
        raise ValueError(f"{path} is no checkpoint of a training: {begin}")
    step: int = saved["step"]
    other = f"{path} is of another run ({{}}): give this one another folder, or delete it to begin again"
    if step > steps:
        raise ValueError(other.format(f"it is at step {step}, and {steps} are asked for"))
    try:
        for name, part in stateful.items():
            part.load_state_dict(saved[name])
    except (KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(other.format("its weights or optimizers have other shapes")) from error
    if isinstance(saved.get("log"), str):
        return step, saved.get("recipe", {}), saved["log"].splitlines(keepends=True)
    return step, saved.get("recipe", {}), [line for line in _readable(log) if json.loads(line)["step"] < step]


def _readable(log: Path) -> Iterator[str]:
    """Whole lines of a log beside a checkpoint of before 0.2, which does not hold it."""
    for line in log.read_text().splitlines(keepends=True) if log.exists() else []:
        try:
            whole = isinstance(json.loads(line)["step"], int) and line.endswith("\n")
        except (ValueError, KeyError, TypeError):
            whole = False
        if whole:
            yield line


NS = (3.4445, -4.7750, 2.0315)


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """[..., N, K] -> the nearest semi-orthogonal matrices, roughly (singular values in 0.7..1.2)."""
    a, b, c = NS
    x = g.to(product_dtype(g.device))
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return (x.mT if wide else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """For weights of two or more dimensions, the last two being the matrix. `torch.optim.Muon` takes
    matrices only; experts are [E, N, K]."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                m = state["momentum"]
                m.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(m, group["momentum"]))
                size = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * size)
