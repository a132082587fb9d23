"""Provenance of a measurement: machine, versions, commit, command line; sizes of models; memory bandwidth."""

import importlib.metadata
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outpace.drafts.dflash import DFlash
from outpace.models.blocks import ExpertMatrix
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint, named_tensors
from outpace.ops.dispatch import cpu_capability
from outpace.ops.quant import Quant

PACKAGES = ("outpace", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, vector width, cores available to this process, threads, memory, current load,
    accelerator."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    values: dict[str, Any] = {
        "processor": _processor(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "vector": cpu_capability(),
        "device": str(device.type),
    }
    if hasattr(os, "getloadavg"):
        values["load_1min"] = round(os.getloadavg()[0], 2)
    if device.type == "cuda":
        values["accelerator"] = torch.cuda.get_device_name(device)
    return values


def versions() -> dict[str, str]:
    """Versions of Python and of the packages in use; packages that are not installed are left out."""
    values = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            values[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return values


def provenance() -> dict[str, Any]:
    """{"date", "command", "commit", "not_for_publication"}; the last is the reason, or None. A report counts
    as reproducible only from a commit without uncommitted changes; reports/ and docs/ may change, since they
    do not influence a measurement."""
    changes = _git("status", "--porcelain", "--", ":/", ":(top,exclude)reports", ":(top,exclude)docs")
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    commit = _git("rev-parse", "HEAD") if tracked else None
    reason = None
    if commit is None:
        reason = "not measured in a git checkout"
    elif changes != "":
        reason = f"measured with uncommitted changes: {', '.join(_paths(changes or '')) or 'unknown'}"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit,
        "not_for_publication": reason,
    }


def unpublishable(report: dict[str, Any]) -> str | None:
    """The reason why documentation must not show this report; None where it may."""
    chip = report.get("machine")
    if report.get("not_for_publication"):
        return str(report["not_for_publication"])
    if str(report.get("commit")).endswith("+"):  # how reports before this field marked it
        return "measured with uncommitted changes"
    missing = [f"its {name}" for name in ("commit", "date") if not report.get(name)]
    keys = ("processor", "vector", "cores", "threads", "load_1min")
    missing += [f"the machine's {name}" for name in keys if not isinstance(chip, dict) or name not in chip]
    return f"the report does not state {', '.join(missing)}" if missing else None


def _paths(changes: str, most: int = 3) -> list[str]:
    """The first paths of `git status --porcelain`, and how many more there are."""
    paths = [line[2:].strip() for line in changes.splitlines()]
    return paths[:most] + ([f"{len(paths) - most} more"] if len(paths) > most else [])


def _git(*arguments: str) -> str | None:
    """Standard output; None where git fails or is not there."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip("\n")


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
    """Number of weights, packed ones included."""
    packed = (math.prod(part.shape) for part in module.modules() if isinstance(part, Quant))
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
        "kv_cache_dtype": target.kv_cache_dtype_name,
        "activation_dtype": target.activation_dtype_name,
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
    """Bytes of weights, as stored, that a forward through the layers reads, without embedding and head.
    `experts`: experts read per layer; None: those of one token."""
    config = target.config
    touched = config.experts_per_token if experts is None else experts
    share = touched / config.num_experts if config.num_experts else 0.0
    packed = tuple(path for path, module in target.named_modules() if isinstance(module, ExpertMatrix))
    idle = {".latent.": not config.use_mla_kv, ".indexer.": not config.use_dsa}
    named = ((n, t) for n, t in named_tensors(target) if not any(off and x in n for x, off in idle.items()))
    layers = ((n, t.nbytes) for n, t in named if n.startswith("layers."))
    return round(sum(size * (share if n.rpartition(".")[0] in packed else 1.0) for n, size in layers))


def read_bandwidth(gib: float = 1.0, repeats: int = 5) -> float:
    """Memory bandwidth of all threads together in bytes/s, measured by sums over a large tensor."""
    numbers = torch.ones(int(gib * 2**28))
    return numbers.nbytes / _fastest(numbers.sum, repeats)


def multiply_rate(size: int = 2048, repeats: int = 5) -> float:
    """Floating-point operations/s of a square float32 product with all threads."""
    a, b = torch.ones(size, size), torch.ones(size, size)
    return 2 * size**3 / _fastest(lambda: a @ b, repeats)


def _fastest(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the best of a few."""
    best = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
