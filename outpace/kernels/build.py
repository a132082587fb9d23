"""Builds the C kernels of cpu.c with the machine's compiler at first use, and loads them."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from outpace.kernels.layouts import SOURCE, kernels, sources

FLAGS = ["-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC"]
# gcc for some CPUs leaves a lone chain of products and sums unfused: a row would then depend on its company
FLAGS += ["--param=avoid-fma-max-bits=0"]
log = logging.getLogger("outpace")  # the command line shows it


def _flags_of_this_cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return next(lines, platform.machine())


def _cache() -> Path:
    return Path(os.environ.get("OUTPACE_CACHE") or Path.home() / ".cache" / "outpace")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _build(compiler: str) -> ctypes.CDLL:
    version = _run(compiler, "--version")
    flags = [*FLAGS, *os.environ.get("OUTPACE_CFLAGS", "").split()]
    parts = [sources(), version, _flags_of_this_cpu(), *flags]
    target = _cache() / f"cpu-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:24]}.so"
    if not target.exists():
        log.info("compiling the CPU kernels: once on this machine, about ten seconds")
        target.parent.mkdir(parents=True, exist_ok=True)
        # under a temporary name, then renamed: no other process may load half a library
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            library = Path(folder, "cpu.so")
            _run(compiler, *flags, "-shared", "-pthread", str(SOURCE), "-lm", "-o", str(library))
            ctypes.CDLL(str(library))
            library.replace(target)
    return ctypes.CDLL(str(target))


def _none(reason: str) -> tuple[None, str]:
    log.warning("no CPU kernels: %s; PyTorch's operators do the same, several times slower", reason)
    return None, reason


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("OUTPACE_KERNELS") == "0":
        return None, "switched off by OUTPACE_KERNELS=0"
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return _none("no C compiler (cc, gcc or clang) on the PATH")
    try:
        library = _build(compiler)
    except subprocess.CalledProcessError as error:
        return _none(f"{' '.join(error.cmd)} failed: {error.stderr[:500]}")
    except (OSError, RuntimeError) as error:  # no place to write to; no home
        return _none(str(error))
    for name in kernels(sources()):
        getattr(library, name).argtypes = [ctypes.c_char_p]
        getattr(library, name).restype = None
    return library, None


def available() -> bool:
    return load()[0] is not None


def built() -> str:
    """Which library is loaded, by its source, compiler and flags; "none" where there is none."""
    library = load()[0]
    return "none" if library is None else Path(library._name).stem


def _has(what: str) -> bool:
    library = load()[0]
    return library is not None and bool(ctypes.c_int.in_dll(library, f"has_{what}"))


def tiles() -> bool:
    """Whether large matrices in bfloat16 are multiplied by matrix tiles (AMX)."""
    return _has("tiles")


def bfloat16() -> bool:
    """Whether the kernels multiply numbers of bfloat16 as such."""
    return _has("bfloat16")


def pairs() -> bool:
    """Whether activations that are rounded to bfloat16 meet weights in pairs."""
    return _has("pairs")


def whole() -> bool:
    """Whether MXFP4 experts are multiplied in whole numbers."""
    return _has("whole")


def why_not() -> str | None:
    """Why the kernels are not available; None if they are."""
    return load()[1]
