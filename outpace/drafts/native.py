"""A draft's native programs: one for each size, kept with the draft, for one session after another."""

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from outpace.kv.base import KVCache
from outpace.kv.metadata import FEW
from outpace.models.blocks import Linear, use_activation_dtype
from outpace.models.native_step import MOST_ROWS
from outpace.ops.dispatch import use_kernel
from outpace.ops.quant import Joined, Quant, Weight

MOST_PROGRAMS = 64  # that a draft keeps
NativePrograms = dict[tuple[object, ...], Any]
Kind = TypeVar("Kind")


class NativeDraft(nn.Module):
    """A module that keeps the programs of its forwards. `inv`: its rotary frequencies; `fc`: what fuses the
    target's states."""

    inv: Tensor
    fc: Linear

    def __init__(self) -> None:
        super().__init__()
        self.native_programs: NativePrograms = {}

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: native programs point at the weights of this one."""
        return self.__dict__ | {"native_programs": {}}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.native_programs.clear()  # the weights become other tensors
        super()._apply(fn, recurse)
        device = next(self.parameters()).device
        if device.type != "meta":  # who gives weights to an empty draft does not know of these
            self.inv = self.inv.to(device)  # float64, whatever the weights become
        return self

    def use_activation_dtype(self, dtype: torch.dtype) -> None:
        """Of what products with the weights, and a head of the target's, multiply; see
        `blocks.use_activation_dtype`."""
        use_activation_dtype(self, dtype)
        self.native_programs.clear()

    @property
    def rounded(self) -> bool:
        return self.fc.rounded

    @property
    def in_one_piece(self) -> bool:
        """Whether each weight is one matrix, as programs take them."""
        return not any(isinstance(part, Joined) for part in self.modules())


def native(head_dim: int, cache: KVCache, T: int) -> bool:
    """Whether programs take rows of T tokens over this cache: the kernels run, and attention is theirs."""
    fits = cache.batch * T <= MOST_ROWS and T <= FEW and head_dim % 8 == 0
    return fits and use_kernel(cache.layers[0].k)


def whole(weight: Weight) -> Tensor | Quant:
    assert not isinstance(weight, Joined), "a draft's weights lie in one piece"
    return weight


def address(weight: Weight) -> int:
    return (weight if isinstance(weight, Tensor) else whole(weight).data).data_ptr()


def program_key(kind: Callable[..., Any], *size: int, foreign: tuple[int, ...] = ()) -> tuple[object, ...]:
    """Of a program in `native_programs`: see `program_of`."""
    return kind, size, foreign, torch.get_num_threads()


def program_of(
    known: NativePrograms,
    kind: Callable[..., Kind],
    parts: tuple[Any, ...],
    *size: int,
    foreign: tuple[int, ...] = (),
) -> Kind:
    """The program of this kind and size, made of `parts` at its first use; `foreign`: what else it is of, as
    addresses of weights in it that are not the draft's, and may move."""
    key = program_key(kind, *size, foreign=foreign)
    program: Any = known.get(key)
    if program is None:
        if len(known) >= MOST_PROGRAMS:
            known.pop(next(iter(known)), None)
        program = known[key] = kind(*parts, *size)
    return program  # type: ignore[no-any-return]
