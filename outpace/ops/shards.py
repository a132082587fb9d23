"""Tensors of which each process holds a part, next to ordinary ones: the whole, and a process's own part."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def sharded(x: Tensor) -> bool:
    return isinstance(x, DTensor)


def gathered(x: Tensor) -> Tensor:
    """Of all processes, where it is sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def local(x: Tensor) -> Tensor:
    """This process's part."""
    return x.to_local() if isinstance(x, DTensor) else x


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that all have, where `like` is sharded."""
    if not isinstance(like, DTensor):
        return whole
    every = DTensor.from_local(whole, like.device_mesh, [Replicate()], run_check=False)
    return every.redistribute(placements=like.placements).to_local()
