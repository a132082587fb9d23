"""Checkpoints of a training: a protocol, and the one file that a process alone or a leader writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.checkpoint.publish import written
from outpace.ops import ranks
from outpace.ops.shards import local

Log = list[dict[str, Any]]  # one record per step
OTHER = "{path} is of another run ({why}): give this one another folder, or delete it to begin again"


class Checkpoint(Protocol):
    """All processes of a training make the same calls."""

    def resume(self, steps: int) -> tuple[dict[str, Any], Log] | None:
        """Load what is there, of a run of at most so many steps; -> its recipe and its log, None: nothing.
        Raises ValueError for a checkpoint that is damaged or of another run."""
        ...

    def states(self) -> dict[str, Any]:
        """The contents of the next checkpoint."""
        ...

    def save(self, states: dict[str, Any], recipe: dict[str, Any], log: Log) -> None: ...

    def poll(self) -> None:
        """Between steps."""

    def close(self) -> None:
        """After the last."""


class OneFile:
    """folder/checkpoint.pt, replaced whole. `stateful`: its contents by name, anything with state_dict and
    load_state_dict."""

    def __init__(self, folder: Path, stateful: dict[str, Any]) -> None:
        self.path, self.stateful = folder / "checkpoint.pt", stateful

    def resume(self, steps: int) -> tuple[dict[str, Any], Log] | None:
        return _resume(self.path, self.stateful, steps) if self.path.exists() else None

    def states(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.stateful.items()}

    def save(self, states: dict[str, Any], recipe: dict[str, Any], log: Log) -> None:
        if ranks.leads():
            contents = {"step": len(log), "recipe": recipe, "log": log_text(log), **states}
            with written(self.path, _nbytes(contents)) as temporary:
                torch.save(contents, temporary)

    def poll(self) -> None: ...

    def close(self) -> None: ...


def log_text(log: Log) -> str:
    return "".join(json.dumps(record) + "\n" for record in log)


def read_log(text: str, step: int) -> Log:
    """Raises ValueError, KeyError or TypeError for another number of steps, or no such log."""
    log: Log = [json.loads(line) for line in text.splitlines()]
    if [record["step"] for record in log] != list(range(step)):
        raise ValueError("its log does not end at its step")
    _ = [(record.get("loss", 0.0) + 0.0, record["seconds"] + 0.0) for record in log]
    return log


def _nbytes(value: Any) -> int:
    """Of the tensors and the text in a checkpoint's contents; the file is some percent larger at most."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    return len(value) if isinstance(value, str) else 0


def not_finite(value: Any, name: str = "") -> Iterator[str]:
    """Names of the tensors in a state that hold NaN or Inf."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from not_finite(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Tensor) and value.is_floating_point() and not local(value).isfinite().all():
        yield name


def _resume(path: Path, stateful: dict[str, Any], steps: int) -> tuple[dict[str, Any], Log]:
    """Load `stateful`; -> the recipe as it was, and the log up to the checkpoint."""
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
        fields, step = dict(saved["recipe"]), int(saved["step"])
        log = read_log(saved["log"], step)
    except Exception as error:  # of a damaged file torch.load raises nearly anything, with advice of its own
        cause = f"{error!r}" if type(error) in (KeyError, ValueError) else type(error).__name__
        raise ValueError(
            f"{path} is not a whole training checkpoint ({cause[:200]}): delete it to begin this run again"
        ) from error
    if step > steps:
        why = f"it is at step {step}, and this recipe has {steps} steps"
        raise ValueError(OTHER.format(path=path, why=why))
    try:
        for name, part in stateful.items():
            _load(part, saved[name])
    except Exception as error:
        why = "its weights or optimizers have other shapes"
        raise ValueError(OTHER.format(path=path, why=why)) from error
    for name in not_finite({name: saved[name] for name in stateful}):
        raise ValueError(f"{path}: {name} is not finite: delete it to begin this run again")
    return fields, log


def _load(part: Any, state: Any) -> None:
    """An optimizer keeps its own settings, which are the recipe's as it is now. Raises for other shapes."""
    if not isinstance(part, torch.optim.Optimizer):
        part.load_state_dict(state)
        return
    settings = [{k: v for k, v in group.items() if k != "params"} for group in part.param_groups]
    part.load_state_dict(state)
    for group, own in zip(part.param_groups, settings, strict=True):
        group |= own
    for parameter, values in part.state.items():
        for value in values.values():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise ValueError(f"shape {list(value.shape)}, not {list(parameter.shape)}")
