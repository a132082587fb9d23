"""What the numbers were measured on: the machine, the versions, the commit, the command line."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

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
