"""Several processes at one job, which `torchrun` starts: a training's rows or a teacher cache's shards.

In a training all hold the same weights and do the same steps, each on its share of the rows. What a step adds
up is added up over all processes, so that its loss, its gradients and its metrics are those of one process
with all rows.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
TINY = torch.finfo(torch.float32).tiny


@contextmanager
def joined() -> Iterator[None]:
    """One of torchrun's processes joins the others until the end of the block; a process alone does not."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
        wait()  # whoever leaves early would break off what the others still send
    finally:
        dist.destroy_process_group()


def size() -> int:
    """How many processes work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if size() > 1 else 0


def leads() -> bool:
    """Whether this process writes the files and talks to people."""
    return int(os.environ.get("RANK", "0")) == 0


def wait() -> None:
    """Until all processes are here."""
    if size() > 1:
        dist.barrier()


def own(items: Sequence[T]) -> list[T]:
    """This process's share of a step's rows. Raises ValueError where one process would get none."""
    if len(items) < size():
        raise ValueError(f"rows {len(items)}: {size()} processes train, and each takes one at least")
    return list(items[rank() :: size()])


def total(x: Tensor) -> Tensor:
    """The sum over the processes."""
    if size() > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


def mean(x: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean over the rows of all processes, as this one's part of it: what the parts average to
    is the mean."""
    return size() * (weights * x).sum() / total(weights.sum()).clamp(min=TINY)


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """In place, over the processes, in one message for each dtype."""
    if size() == 1:
        return
    gradients: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            gradients.setdefault(p.grad.dtype, []).append(p.grad)
    for some in gradients.values():
        flat = torch.cat([g.flatten() for g in some])
        dist.all_reduce(flat)
        flat /= size()
        for g, part in zip(some, flat.split([g.numel() for g in some]), strict=True):
            g.copy_(part.view_as(g))


def averaged(metrics: dict[str, Any]) -> dict[str, Any]:
    """Numbers and lists of numbers, averaged over the processes."""
    if size() == 1:
        return metrics
    every = gathered([metrics])
    return {name: np.mean([own[name] for own in every], axis=0).tolist() for name in metrics}


def gathered(items: list[T]) -> list[T]:
    """Of all processes, one after the other."""
    if size() == 1:
        return items
    lists: list[list[T]] = [[] for _ in range(size())]
    dist.all_gather_object(lists, items)
    return [item for some in lists for item in some]
