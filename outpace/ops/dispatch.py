"""Kernel dispatch: the predicate for the C kernels, their `Program`, the dtype of products; free memory."""

import os
import sys
from pathlib import Path

import torch

from outpace.kernels.bindings import built as built
from outpace.kernels.bindings import tiles
from outpace.kernels.bindings import use_kernel as use_kernel
from outpace.kernels.bindings import why_not as why_not
from outpace.kernels.program import Ahead as Ahead
from outpace.kernels.program import Draws as Draws
from outpace.kernels.program import Program as Program
from outpace.kernels.program import Rings as Rings
from outpace.kernels.rounds import Chain as Chain
from outpace.kernels.rounds import ChainCut as ChainCut
from outpace.kernels.rounds import Context as Context
from outpace.kernels.rounds import Made as Made
from outpace.kernels.rounds import Rounds as Rounds
from outpace.kernels.rounds import Row as Row
from outpace.kernels.rounds import VerifyPass as VerifyPass


def available_memory() -> int:
    """Bytes that processes can have without swapping, those that hold copies of files included: pages that
    are free are fewer. Without /proc, half of the machine's; no limit where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        value = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(value.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        if not hasattr(os, "sysconf"):
            return sys.maxsize
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def product_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where it is multiplied as such: on GPUs, and on CPUs that oneDNN has kernels for (AVX-512 and
    later). Elsewhere torch widens one element at a time, fifty times slower than float32: float32 there."""
    if device.type != "cpu":
        return torch.bfloat16
    supported = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if supported else torch.float32


def cpu_capability() -> str:
    """What a CPU computes with, for people: "AVX2", "AVX512", "AVX512 with AMX" .."""
    return torch.backends.cpu.get_cpu_capability() + (" with AMX" if tiles() else "")


ACTIVATION_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KV_CACHE_DTYPES = ACTIVATION_DTYPES | {"float16": torch.float16}


def find_kv_cache_dtype(name: str) -> torch.dtype | None:
    """`Decoder.kv_cache_dtype` by its name; None for "auto". Raises ValueError for another name."""
    return _find("KV cache dtype", name, KV_CACHE_DTYPES)


def find_activation_dtype(name: str, device: torch.device) -> torch.dtype:
    """`Decoder.activation_dtype` by its name. Raises ValueError for another name, and for one that a device
    does not have."""
    known = ACTIVATION_DTYPES if device.type == "cpu" else {"bfloat16": torch.bfloat16}
    return _find("activation dtype", name, known) or next(iter(known.values()))


def _find(what: str, name: str, known: dict[str, torch.dtype]) -> torch.dtype | None:
    if name != "auto" and name not in known:
        raise ValueError(f"{what} {name!r}: it must be one of auto, {', '.join(known)}")
    return known.get(name)


def find_device(name: str) -> torch.device:
    """ "cpu", "cuda", "cuda:N", or "auto": a GPU where there is one. Raises ValueError for another name, and
    for a GPU that is not there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    kind, _, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (index and not index.isdecimal()) or name.endswith(":")):
        raise ValueError(f"device {name!r}: it must be auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= count:
        built = "" if torch.version.cuda else f", and torch {torch.__version__} is built without it"
        raise ValueError(f"device {name}: there are {count} CUDA devices here{built}; use device cpu")
    return torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device(name)
