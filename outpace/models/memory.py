"""The memory that a target takes on a GPU, known before it is loaded, and what would fit."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outpace.kv.metadata import FEW
from outpace.models.blocks import Layout
from outpace.models.config import ModelConfig
from outpace.models.cuda_graphs import GraphTarget
from outpace.models.load import empty_target, first_layers, named_tensors
from outpace.models.static_step import StaticStep

SPARE = 1 << 30  # bytes: CUDA's context, workspaces of libraries, a draft
ALIKE = 4  # layers, after which a target repeats itself
CHUNK = 512  # tokens of a prompt in one forward


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of weights, of the keys and values of `sequences` of `length` tokens, and of what the largest
    forward holds at once: smaller graphs lie in the memory of the largest."""

    weights: int
    kv: int
    step: int
    sequences: int
    length: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.step + SPARE

    def __str__(self) -> str:
        """Without its last words: how much there is."""
        parts = {"weights": self.weights, "KV": self.kv, "steps": self.step, "spare": SPARE}
        sizes = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
        return f"{self.sequences:,} x {self.length:,} tokens take {self.total / 1e9:.2f} GB ({sizes})"


@torch.no_grad()
def plan_memory(
    config: ModelConfig,
    layout: Layout,
    sequences: int,
    length: int,
    dtype: torch.dtype = torch.bfloat16,
    kv_cache_dtype: torch.dtype | None = None,
) -> MemoryPlan:
    """Weights and cache are made without contents, forwards run over them, and the bytes of all tensors are
    counted: of the first layers, as the others are like them."""
    empty = empty_target(config, layout, dtype)
    weights = sum(t.nbytes for _, t in named_tensors(empty))
    empty.kv_cache_dtype = kv_cache_dtype
    kv = GraphTarget(empty).make_cache(sequences, length, FEW).nbytes
    few = empty_target(first_layers(config, min(ALIKE, config.num_layers)), layout, dtype)
    few.kv_cache_dtype = kv_cache_dtype
    cache = GraphTarget(few).make_cache(sequences, length, FEW)
    static = StaticStep(few, cache)

    def ids(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device="meta")

    step = peak_bytes(lambda: static(ids(sequences, FEW), ids(sequences), ids(sequences)))
    chunk = min(CHUNK, cache.length - 1)  # behind a token: a first chunk goes through the flash kernel
    cache.lengths = [cache.length - chunk] * sequences
    prompt = peak_bytes(lambda: few(ids(sequences, chunk), cache))
    return MemoryPlan(weights, kv, max(step, prompt), sequences, length)


def check_memory(
    config: ModelConfig,
    layout: Layout,
    free: int,
    sequences: int,
    length: int,
    dtype: torch.dtype = torch.bfloat16,
    kv_cache_dtype: torch.dtype | None = None,
) -> MemoryPlan:
    """Raises ValueError, with what would fit, for more than `free` bytes."""
    plan = plan_memory(config, layout, sequences, length, dtype, kv_cache_dtype)
    if plan.total <= free:
        return plan

    def fits(n: int, tokens: int) -> bool:
        return plan_memory(config, layout, n, tokens, dtype, kv_cache_dtype).total <= free

    if many := _most(sequences, lambda n: fits(n, length)):
        advice = f"{many} of this length would fit"
    elif tokens := _most(length, lambda n: fits(1, n)):
        advice = f"one of {tokens:,} tokens would fit"
    else:
        advice = "not even one token would fit"
    raise ValueError(f"{plan}, and {free / 1e9:.2f} GB are free: {advice}")


def _most(n: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to n that fits, 0 where 1 does not."""
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that tensors made within `run` take at once."""
    with _Held() as held:
        run()
    return held.most


class _Held(TorchDispatchMode):
    """Counts the storages that operators make until nobody has them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage() not in self.known:
                storage = x.untyped_storage()
                if id(storage) not in given:
                    self.known.add(storage)
                    self._add(storage.nbytes())
                    weakref.finalize(storage, self._add, -storage.nbytes())
        return out

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)
