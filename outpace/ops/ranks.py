"""Several processes at one job, which `torchrun` starts: training rows, cache shards, or parts of a target.

In a training all hold the same weights and do the same steps, each on its share of the rows. Losses and
metrics are sums and weights until those of all processes and micro-batches are added up: the division comes
last, so that they are those of one process with all rows. Of a target too large for one device each holds a
part of the weights: see `Group`.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

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
    _begin()
    try:
        yield
        wait()  # whoever leaves early would break off what the others still send
    finally:
        dist.destroy_process_group()


def _begin() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


class Group:
    """The processes that hold one target together, each a part of its weights."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def sum(self, x: Tensor) -> Tensor:
        """x of all processes, added up in the order of their ranks, in float32: a row's sum does not hang on
        the rows next to it, as that of an all-reduce does. Raises ConnectionError where another process has
        ended."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        try:
            dist.all_gather(parts, x)
        except RuntimeError as error:
            raise ConnectionError(f"process {self.rank} lost the others: one of them has ended") from error
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def leaders(self, item: T) -> T:
        """The first process's."""
        items = [item]
        dist.broadcast_object_list(items, src=0)
        return items[0]


def join(size: int) -> Group | None:
    """All of the `size` processes that torchrun started, until they end; None: there is but one. Raises
    ValueError where it started another number."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if size != started:
        count = size if size > 1 else max(started, 2)
        raise ValueError(
            f"tensor_parallel_size {size}, and the number of processes is {started}: run "
            f"torchrun --nproc-per-node {count} -m outpace .. --tensor-parallel-size {count}"
        )
    if size == 1:
        return None
    if not dist.is_initialized():
        _begin()
        atexit.register(dist.destroy_process_group)
    return Group(dist.get_world_size(), dist.get_rank())


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


def own(items: Sequence[T], parts: int = 1) -> list[list[T]]:
    """This process's share of a step's rows, in so many micro-batches. Raises ValueError where one of all
    processes' would be empty."""
    count = size() * parts
    if len(items) < count:
        raise ValueError(
            f"rows {len(items)}: {size()} processes train, each with {parts} micro-batches of a row at least"
        )
    return [list(items[i::count]) for i in range(rank(), count, size())]


def total(x: Tensor) -> Tensor:
    """The sum over the processes."""
    if size() > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


@dataclass(frozen=True)
class Mean:
    """A weighted mean of the rows of a step, or the part that some of them have in it. `sum` and `weight`:
    float tensors of one shape, or the sum with a gradient."""

    sum: Tensor
    weight: Tensor

    @staticmethod
    def of(x: Tensor, weights: Tensor) -> "Mean":
        return Mean((weights * x).sum(), weights.sum())

    @staticmethod
    def added(parts: Sequence["Mean"]) -> "Mean":
        sums, weights = [part.sum for part in parts], [part.weight for part in parts]
        return Mean(torch.stack(sums).sum(0), torch.stack(weights).sum(0))

    @staticmethod
    def of_all(parts: Sequence["Mean"]) -> "Mean":
        """Of a process's micro-batches -> of all processes', without a gradient."""
        own = Mean.added(parts)
        return Mean(*total(torch.stack((own.sum.detach(), own.weight))))

    def times(self, factor: float) -> "Mean":
        return Mean(factor * self.sum, self.weight)

    @property
    def value(self) -> Tensor:
        """0 where there is no weight."""
        return self.sum / self.weight.clamp(min=TINY)


def add_gradients(parameters: Iterable[Tensor]) -> None:
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
        for g, part in zip(some, flat.split([g.numel() for g in some]), strict=True):
            g.copy_(part.view_as(g))


def shared_out(x: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
    """work(x) for x [n, ..] that all processes have, where `work` treats each of the n alone and keeps their
    shape: each process does its part, and all have the whole."""
    if size() == 1:
        return work(x)
    filled = torch.cat((x, x[-1:].expand(-len(x) % size(), *x.shape[1:])))
    parts = list(torch.empty_like(filled).chunk(size()))
    dist.all_gather(parts, work(filled.chunk(size())[rank()]).contiguous())
    return torch.cat(parts)[: len(x)]


def gathered(items: list[T]) -> list[T]:
    """Of all processes, one after the other."""
    if size() == 1:
        return items
    lists: list[list[T]] = [[] for _ in range(size())]
    dist.all_gather_object(lists, items)
    return [item for some in lists for item in some]
