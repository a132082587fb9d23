"""One safetensors file: its header checked to the last byte, its tensors as views of a private mapping.

The format is 8 bytes (the header's length, little-endian), a JSON header and the tensors' bytes. The
`safetensors` package writes these files for us and reads them in the tests; here the header is parsed by
ourselves, because its messages, its limits (100 MB of header) and its mapping, which the kernel refuses
for a file larger than memory, are not ours to choose.
"""

import mmap
import os
import struct
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from reprlib import repr  # short, however long or deep the value
from typing import Any, BinaryIO

import torch
from torch import Tensor

from outpace.checkpoint.base import LoadError
from outpace.checkpoint.strict_json import MOST_BYTES, check_name, parse_object

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LARGEST = 2**62  # no axis and no offset is longer
MOST_AXES = 16
POINTER = b"version "  # how the text that Git LFS leaves in place of a large file begins
# A private writable mapping is charged against the memory of the machine unless it promises not to be
# written to much: without this, a file larger than memory cannot be mapped. Linux only; 3.13 names it.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies: `begin` counts bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


@dataclass(frozen=True)
class File:
    """An open file. Never close `data` by hand: tensors that were given out live in it; it goes with the
    last of them."""

    path: Path
    slots: dict[str, Slot]
    data: mmap.mmap

    def get(self, name: str) -> Tensor:
        """A view of the mapping: private, so that writing to it does not reach the file; a copy where the
        file does not align the tensor to its elements."""
        slot = self.slots[name]
        dtype = DTYPES[slot.dtype]
        if not slot.nbytes:
            return torch.empty(slot.shape, dtype=dtype)
        if slot.begin % dtype.itemsize:
            raw = torch.frombuffer(self.data, dtype=torch.uint8, count=slot.nbytes, offset=slot.begin)
            return raw.clone().view(dtype).view(slot.shape)
        count = slot.nbytes // dtype.itemsize
        return torch.frombuffer(self.data, dtype=dtype, count=count, offset=slot.begin).view(slot.shape)

    def release(self, name: str) -> None:
        """Give the pages of a tensor back to the system, which reads them again when they are wanted.
        Throws away what was written to it."""
        slot = self.slots[name]
        first = -(-slot.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (slot.begin + slot.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED, first, last - first)


def open_file(path: Path) -> File:
    """Raises LoadError for anything but a whole, consistent safetensors file. Reads the header alone."""
    if not path.is_file():
        raise LoadError(f"{path} is not a file")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            slots = _slots(*_header(file, size, path), path)
            return File(path, slots, _map(file.fileno(), path))  # the mapping keeps its own handle
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from error


def _map(descriptor: int, path: Path) -> mmap.mmap:
    try:
        if sys.platform == "win32":
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        flags = mmap.MAP_PRIVATE | NO_RESERVE
        return mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise LoadError(f"{path} cannot be mapped into memory: {error.strerror or error}") from error


def _header(file: BinaryIO, size: int, path: Path) -> tuple[dict[str, Any], int, int]:
    """-> the header, where the tensors begin, where the file ends."""
    if size < 8:
        raise damaged(path, f"it has {size} bytes, less than the length of a header")
    start = file.read(8)
    if start == POINTER:
        raise LoadError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull`", "lfs_pointer")
    (length,) = struct.unpack("<Q", start)
    if length > MOST_BYTES:
        raise damaged(path, f"its header would have {length:,} bytes, and the limit is {MOST_BYTES:,}")
    if length > size - 8:
        raise damaged(path, f"its header has {length:,} bytes, and the file ends after {size - 8:,}")
    return parse_object(file.read(length), f"the header of {path}"), 8 + length, size


def _slots(header: dict[str, Any], start: int, size: int, path: Path) -> dict[str, Slot]:
    """Every tensor's place, once it is proved that they fill the file: no gap, no overlap, no remainder."""
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not _texts(metadata):
        raise damaged(path, f"its header's __metadata__ is {repr(metadata)}, not an object of strings")
    slots = {name: _slot(name, value, start, path) for name, value in header.items()}
    end, before = start, "the header"
    for name, slot in sorted(slots.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if slot.begin != end:
            fault = "overlaps" if slot.begin < end else "leaves a gap after"
            raise damaged(path, f"{name} {fault} {before}")
        end, before = slot.begin + slot.nbytes, name
    if end != size:
        fault = "is cut off" if end > size else "goes on past its last tensor"
        raise damaged(path, f"its tensors end at byte {end:,}, the file has {size:,}: it {fault}")
    return slots


def _slot(name: str, value: Any, start: int, path: Path) -> Slot:
    """One entry of the header: {"dtype": str, "shape": [int], "data_offsets": [begin, end]}."""
    check_name(name, f"the header of {path}")
    where = f"its header's entry {name!r}"
    if not isinstance(value, dict) or not value.keys() >= {"dtype", "shape", "data_offsets"}:
        raise damaged(path, f"{where} is not an object with dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise LoadError(f"{path}: {name} is of dtype {repr(dtype)}; known: {known}")
    if not _counts(shape) or len(shape) > MOST_AXES:
        raise damaged(path, f"{where} has the shape {repr(shape)}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(path, f"{where} has the data_offsets {repr(offsets)}")
    nbytes = prod(shape) * DTYPES[dtype].itemsize
    if nbytes != offsets[1] - offsets[0]:
        spans = f"{offsets[1] - offsets[0]:,} bytes, but {dtype} {tuple(shape)} takes {nbytes:,}"
        raise damaged(path, f"{where} spans {spans}")
    return Slot(dtype, tuple(shape), start + offsets[0], nbytes)


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _counts(value: Any) -> bool:
    """True for a list of whole numbers from 0 to what a file can hold."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= LARGEST for n in value)


def damaged(path: Path, fault: str) -> LoadError:
    return LoadError(f"{path} cannot be read as safetensors: {fault}; fetch it again")
