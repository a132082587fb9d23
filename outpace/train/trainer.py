"""The loop around any training step: schedule, exact resume, log, progress bar."""

import ctypes
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from outpace.checkpoint.publish import disk, one_writer
from outpace.checkpoint.save import write_atomically
from outpace.ops import ranks
from outpace.ops.dispatch import product_dtype
from outpace.ops.ranks import Mean
from outpace.ops.shards import gathered, local, own_part, sharded
from outpace.train.checkpoint import Checkpoint, Log, log_text, not_finite

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class LoopRecipe(DataclassInstance, Protocol):
        """The recipe fields that the loop reads."""

        @property
        def steps(self) -> int: ...

        @property
        def save_every(self) -> int: ...


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
DIVERGED = (
    "step {step}: {what} is not finite. Training has diverged: lower the learning rate; the last good "
    "checkpoint is that of step {saved}"
)


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
    """Make glibc keep freed memory: returning large blocks to the system and taking them again costs up to a
    third of a CPU training step. Elsewhere, does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)):
            mallopt(option, value)


@contextmanager
def training_folder(folder: Path) -> Iterator[None]:
    """One process at a time trains in `folder`, from opening the checkpoint to publishing the result. Raises
    ValueError for a second process and for a full disk."""
    if not ranks.leads():  # the leader's processes write nothing
        yield
        return
    with one_writer(folder), disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        yield


def fit(
    folder: Path,
    recipe: "LoopRecipe",
    update: Callable[[int], dict[str, Any]],
    checkpoint: Checkpoint,
    *,
    title: str,
    evaluate: Callable[[], dict[str, Any]] | None = None,
    eval_every: int = 1,
    stop_after: int | None = None,
) -> Log:
    """Call update(step) for every step from the last checkpoint to `recipe.steps` and log the metrics that it
    returns, with those of `evaluate` every `eval_every` steps and at the end; -> the log of all steps done
    so far. Runs in a `training_folder`.

    Metrics go to folder/log.jsonl, one line a step, and states to `checkpoint`. The
    checkpoint alone decides where a run resumes; it holds the log up to there, and log.jsonl is rewritten
    from it. A recipe that changed since applies from there on, and the changed fields are named above the
    bar. `stop_after` ends this call early, with a checkpoint (for tests and time limits).
    Raises ValueError for a checkpoint that is damaged or of another run, and at the first loss, gradient or
    weight that is not finite: nothing is evaluated or saved then.
    """
    keep_heap()
    log_file = folder / "log.jsonl"
    fields = json.loads(json.dumps(asdict(recipe)))
    fields_before, log = checkpoint.resume(recipe.steps) or (fields, Log())
    first = saved = len(log)
    last = recipe.steps if stop_after is None else min(recipe.steps, first + stop_after)
    ranks.wait()  # all have read the checkpoint
    leads = ranks.leads()
    if leads:
        write_atomically(log_file, log_text(log).encode())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[metrics]}"),
    )
    with (
        Path(log_file if leads else os.devnull).open("a") as lines,
        Progress(*columns, refresh_per_second=2, disable=not leads) as bar,
        closing(checkpoint),
    ):
        task = bar.add_task(title, total=recipe.steps, completed=first, metrics="")
        for name in sorted(n for n in fields if fields[n] != fields_before.get(n, fields[n])):
            bar.console.print(
                f"from step {first} on: {name} {fields[name]}, it was {fields_before[name]}", style="dim"
            )
        for step in range(first, last):
            began = time.perf_counter()
            checkpoint.poll()
            metrics = update(step)
            for name in ("loss", "grad_norm"):
                if not math.isfinite(metrics.get(name, 0.0)):
                    what = f"the {name} ({metrics[name]})"
                    raise ValueError(DIVERGED.format(step=step, what=what, saved=saved))
            save = (step + 1) % recipe.save_every == 0 or step + 1 == last
            due = evaluate is not None and ((step + 1) % eval_every == 0 or step + 1 == recipe.steps)
            states = checkpoint.states() if save or due else {}
            for name in not_finite(states):
                raise ValueError(DIVERGED.format(step=step, what=name, saved=saved))
            if evaluate is not None and due:
                metrics |= evaluate()
            log.append({"step": step, **metrics, "seconds": round(time.perf_counter() - began, 4)})
            lines.write(log_text(log[-1:]))
            lines.flush()
            numbers = (f"{k} {v:.3f}" for k, v in metrics.items() if isinstance(v, float) and k != "lr")
            bar.update(task, advance=1, metrics="  ".join(numbers))
            if save:
                if leads:
                    os.fsync(lines.fileno())
                checkpoint.save(states, fields, log)
                saved = step + 1
    return log


def _nothing() -> None: ...


@dataclass(frozen=True)
class StepLoss:
    """Of some rows of a step. The loss is the sum of `terms`, each a scalar mean."""

    terms: list[Mean]
    tokens: int  # of the rows, prompts included
    metrics: dict[str, Mean]  # for the log
    after: Callable[[], None] = _nothing  # once the step's rows have all been seen, by all processes


def backward(parts: Sequence[Callable[[], StepLoss]]) -> dict[str, Any]:
    """Gradients of a step's loss over a process's micro-batches, one after the other, as if all processes'
    rows were one batch; -> the loss, the metrics and the number of tokens of all, for the log.

    A term's weight can hang on the draft itself (D-PACE's does), and is needed in full before the first
    backward: where there are several micro-batches, each runs once more, without a gradient.
    """
    weights: Tensor | None = None
    if len(parts) > 1:
        with torch.no_grad():
            weights = ranks.total(torch.stack([_weights(part()) for part in parts]).sum(0))
    done: list[StepLoss] = []
    for part in parts:
        result = part()
        weight = ranks.total(_weights(result)) if weights is None else weights
        loss = Mean(torch.stack([term.sum for term in result.terms]), weight).value.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        terms = [Mean(term.sum.detach(), term.weight) for term in result.terms]  # frees the graph
        done.append(replace(result, terms=terms))
    for result in done:
        result.after()
    terms = [Mean.of_all(of_parts) for of_parts in zip(*(result.terms for result in done), strict=True)]
    metrics = {name: Mean.of_all([result.metrics[name] for result in done]) for name in done[0].metrics}
    tokens = sum(ranks.gathered([result.tokens for result in done]))
    return {"loss": sum(term.value.item() for term in terms)} | numbers(metrics) | {"tokens": tokens}


def _weights(result: StepLoss) -> Tensor:
    return torch.stack([term.weight for term in result.terms])


def numbers(metrics: dict[str, Mean]) -> dict[str, Any]:
    """For the log; of vectors four places."""
    values = {name: mean.value.tolist() for name, mean in metrics.items()}
    return {k: [round(x, 4) for x in v] if isinstance(v, list) else v for k, v in values.items()}


def take_step(
    parameters: Sequence[Tensor], optimizers: Iterable[torch.optim.Optimizer], clip: float
) -> dict[str, float]:
    """One step of every optimizer by all processes' gradients; -> {}. A gradient norm that is not finite
    leaves the weights as they are; -> {"grad_norm": norm}."""
    ranks.add_gradients(p for p in parameters if not sharded(p))  # FSDP adds those of others
    norm = float(gathered(nn.utils.clip_grad_norm_(parameters, clip)))
    if not math.isfinite(norm):
        return {"grad_norm": norm}
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {}


NS = (3.4445, -4.7750, 2.0315)


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """[n, N, K] -> the nearest semi-orthogonal matrices, roughly (singular values in 0.7..1.2)."""
    a, b, c = NS
    x = g.to(product_dtype(g.device))
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return (x.mT if wide else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """For weights of two or more dimensions, the last two being the matrix. `torch.optim.Muon` takes
    matrices only; experts are [E, N, K]."""

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            like: dict[torch.Size, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                    like[p.shape].append((p, p.grad, self.state[p]["momentum"]))
            for shape, triples in like.items():  # all of a shape at once: on a GPU launches are what costs
                some, grads, momenta = zip(*triples, strict=True)
                torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
                ahead = torch._foreach_lerp(grads, momenta, group["momentum"])
                stack = torch.stack([gathered(x) for x in ahead])
                whole = ranks.shared_out(stack.flatten(0, -3), orthogonalise).view_as(stack)
                updates = [own_part(x, p) for x, p in zip(whole, some, strict=True)]
                own = [local(p) for p in some]
                torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
                size = max(1.0, shape[-2] / shape[-1]) ** 0.5
                torch._foreach_add_(own, updates, alpha=-group["lr"] * size)
