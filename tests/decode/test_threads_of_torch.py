"""Native calls leave torch's own threads asleep: they would spin on the cores that the next call needs."""

import pytest
import torch
from questions import PROMPT
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.api import load, load_draft
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.kernels import bindings

pytestmark = pytest.mark.skipif(not bindings.available(), reason=f"no CPU kernels: {bindings.why_not()}")
WAKES = 32768  # elements of an operator from which torch shares them with its threads


class Watched(TorchDispatchMode):
    """Operators that compute or copy at least so many elements."""

    def __init__(self):
        super().__init__()
        self.large = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= WAKES and "empty" not in str(func):
            given = [x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)]
            if func._schema.is_mutable or result.untyped_storage().data_ptr() not in given:
                self.large.append((str(func), tuple(result.shape)))
        return result


def test_they_are_left_asleep():
    """Of a prompt that is read in several chunks, plain and with the default draft."""
    model = load()
    draft = load_draft(None, model)
    prompt = (PROMPT * 3)[:300]
    with torch.inference_mode(), Watched() as watched:
        torch.zeros(WAKES)
    assert watched.large == [("aten.zeros.default", (WAKES,))]
    for own in (None, draft):
        generate(model.target, [prompt], Request(max_new_tokens=20), own)
        with Watched() as watched:
            generate(model.target, [prompt], Request(max_new_tokens=20), own)
        assert watched.large == []
