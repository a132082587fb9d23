"""A GPU without contents: what runs there cannot ask for a number, and fails where it tries."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("meta")  # no CPU, and its tensors have no contents to be asked for


class NoHost(TorchDispatchMode):
    """Fails on operators that read a number on the host, make a shape of the contents, or take in a tensor
    that lies there."""

    ASKS = ("_local_scalar_dense", "item", "nonzero", "bincount", "unique", "masked_select", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name.lstrip("_") not in [ask.lstrip("_") for ask in self.ASKS], f"{name} asks the host"
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        assert not any(x.device.type == "cpu" and x.dim() for x in tensors), f"{name} reads the host's memory"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def host_watched(monkeypatch):
    """From the call on, no tensor may be made of a list."""

    def tensor(*_, **__):
        raise AssertionError("a tensor is made of numbers of the host")

    with torch.no_grad():
        yield lambda: monkeypatch.setattr(torch, "tensor", tensor)
