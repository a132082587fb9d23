"""What the numbers were measured on: the machine, the versions, the commit, the command line."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outpace.drafts.dflash import DFlash
from outpace.models.blocks import ExpertMatrix
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint, named_tensors
from outpace.ops.quant import Quant

PACKAGES = ("outpace", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores this process may use, threads, memory, load at this moment, accelerator."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    values: dict[str, Any] = {
        "processor": _processor(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "vector": torch.backends.cpu.get_cpu_capability(),
        "device": str(device.type),
    }
    if hasattr(os, "getloadavg"):
        values["load_1min"] = round(os.getloadavg()[0], 2)
    if device.type == "cuda":
        values["accelerator"] = torch.cuda.get_device_name(device)
    return values


def versions() -> dict[str, str]:
    """Of Python and the packages that matter; those not installed are left out."""
    values = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            values[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return values


def provenance() -> dict[str, Any]:
    """{"date", "command", "commit"}; commit is None outside a git checkout, "+" marks local changes."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "commit": _commit(Path(__file__).parent),
    }


def _commit(folder: Path) -> str | None:
    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", *args], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        tracked = git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "") if tracked else None
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def parameters(module: nn.Module) -> int:
    """Weights that are packed count as well."""
    packed = (prod(part.shape) for part in module.modules() if isinstance(part, Quant))
    return sum(p.numel() for p in module.parameters()) + sum(packed)


def describe_target(target: Decoder) -> dict[str, Any]:
    c = target.config
    return {
        "architecture": c.architecture,
        "layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "experts": c.num_experts,
        "experts_per_token": c.experts_per_token,
        "vocab_size": c.vocab_size,
        "window": c.sliding_window,
        "bytes": sum(t.nbytes for _, t in named_tensors(target)),
        "compute_dtype": str(target.dtype).removeprefix("torch."),
        "fingerprint": fingerprint(target),
    }


def describe_draft(draft: DFlash) -> dict[str, Any]:
    return {
        "kind": "dflash",
        "layers": draft.config.num_layers,
        "block_size": draft.block_size,
        "target_layer_ids": list(draft.target_layer_ids),
        "parameters": parameters(draft),
        "bytes": sum(t.nbytes for _, t in named_tensors(draft)),
        "fingerprint": fingerprint(draft),  # type: ignore[arg-type]
    }


def weight_bytes(target: Decoder, experts: float | None = None) -> int:
    """Weights that a forward through the layers reads, as they are stored; neither embedding nor head.
    `experts`: how many of a layer's are touched; None: those of one token."""
    config = target.config
    touched = config.experts_per_token if experts is None else experts
    share = touched / config.num_experts if config.num_experts else 0.0
    packed = tuple(path for path, module in target.named_modules() if isinstance(module, ExpertMatrix))
    idle = {".latent.": not config.use_mla_kv, ".indexer.": not config.use_dsa}
    named = ((n, t) for n, t in named_tensors(target) if not any(off and x in n for x, off in idle.items()))
    layers = ((n, t.nbytes) for n, t in named if n.startswith("layers."))
    return round(sum(size * (share if n.rpartition(".")[0] in packed else 1.0) for n, size in layers))


def read_bandwidth(gib: float = 1.0, repeats: int = 5) -> float:
    """Bytes per second that all threads together read from memory: the best of a few sums of a large
    tensor."""
    numbers = torch.ones(int(gib * 2**28))
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - began))
    return best


def multiply_rate(size: int = 2048, repeats: int = 5) -> float:
    """Products and sums a second of a square float32 product with all threads: the best of a few."""
    a, b = torch.ones(size, size), torch.ones(size, size)
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        _ = a @ b
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best
