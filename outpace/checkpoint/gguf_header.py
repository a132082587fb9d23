"""The header of a GGUF file -> its metadata and tensor table, in bounded time and memory.

The gguf package's own reader makes several numpy views of every vocabulary entry (half a minute for gpt-oss)
and trusts every count it meets; its constants and number formats are used all the same.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from outpace.checkpoint.base import LoadError

MOST_FIELDS, MOST_TENSORS, MOST_ITEMS = 16_384, 65_536, 4_000_000
MOST_VALUES = 2**46  # of a tensor
MOST_NAME = 256  # characters
NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies: `shape` is torch's order (GGUF's reversed), `start` an offset into the file."""

    shape: tuple[int, ...]
    format: str  # GGML's name: F32, BF16, Q8_0, ..
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    path: Path
    data: mmap.mmap  # the whole file, a private mapping
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Raises LoadError for what is no GGUF file of version 2 or 3, or is cut off or damaged."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise LoadError(f"{path} cannot be read: {error}") from error
    cursor = _Cursor(path, data)
    if data[:4] != b"GGUF":
        raise LoadError(f"{path} is no GGUF file: it begins with {data[:4]!r}")
    cursor.at = 4
    (version,) = cursor.take("<I")
    if version not in (2, 3):
        odd = " (a big-endian file?)" if version >= 2**16 else ""
        raise LoadError(f"{path} is GGUF version {version}{odd}; versions 2 and 3 are read")
    tensors, fields = cursor.take("<QQ")
    if tensors > MOST_TENSORS or fields > MOST_FIELDS:
        raise LoadError(
            f"{path} claims {tensors:,} tensors and {fields:,} metadata fields; no model has more than "
            f"{MOST_TENSORS:,} and {MOST_FIELDS:,}: the file is damaged"
        )
    metadata: dict[str, Any] = {}
    for _ in range(fields):
        key = cursor.name("a metadata key")
        if key in metadata:
            raise LoadError(f"{path}: the metadata key {key!r} is twice")
        metadata[key] = cursor.value(f"metadata {key!r}")
    return Header(path, data, metadata, _tensor_table(cursor, tensors, metadata))


def _tensor_table(cursor: "_Cursor", count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
    path = cursor.path
    fields: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
    for _ in range(count):
        name = cursor.name("a tensor's name")
        (dims,) = cursor.take("<I")
        if name in fields:
            raise LoadError(f"{path}: the tensor {name!r} is twice")
        if not 1 <= dims <= 4:
            raise LoadError(f"{path}: {name!r} has {dims} dimensions; 1 to 4 are possible")
        shape = cursor.take(f"<{dims}Q")
        code, offset = cursor.take("<IQ")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise LoadError(f"{path}: {name!r} is of type {code}, which this gguf package lacks") from None
        fields[name] = shape, kind, offset
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise LoadError(f"{path}: general.alignment is {alignment!r}, not a power of two")
    begin = -(-cursor.at // alignment) * alignment
    tensors, expected = {}, 0
    for name, (shape, kind, offset) in fields.items():
        values, size = GGML_QUANT_SIZES[kind]
        if 0 in shape or prod(shape) > MOST_VALUES or shape[0] % values:
            raise LoadError(
                f"{path}: {name!r} has the shape {shape[::-1]}, impossible for {kind.name} "
                f"(rows are multiples of {values})"
            )
        if offset != expected:
            relation = "overlaps" if offset < expected else "leaves a gap after"
            raise LoadError(
                f"{path}: {name!r} begins at byte {offset:,} of the tensors, not at {expected:,}, and "
                f"{relation} the one before it: a type, a shape or an offset is damaged; fetch the file again"
            )
        nbytes, start = prod(shape) // values * size, begin + offset
        if start + nbytes > len(cursor.data):
            raise LoadError(
                f"{path}: {name!r} would end at byte {start + nbytes:,} of {len(cursor.data):,}: "
                "the file is cut off or damaged; fetch it again"
            )
        tensors[name] = TensorInfo(shape=shape[::-1], format=kind.name, start=start, nbytes=nbytes)
        expected = -(-(offset + nbytes) // alignment) * alignment
    if tensors and len(cursor.data) > begin + expected:
        rest = len(cursor.data) - begin - expected
        raise LoadError(
            f"{path}: {rest:,} bytes follow the last tensor, {name!r}: a type or a shape is damaged; fetch "
            "the file again"
        )
    return tensors


class _Cursor:
    """Reads on from `at`; whatever would pass the file's end raises."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, format: str) -> tuple[Any, ...]:
        size = struct.calcsize(format)
        self.need(size, "its header")
        values = struct.unpack_from(format, self.data, self.at)
        self.at += size
        return values

    def need(self, size: int, what: str) -> None:
        if size > len(self.data) - self.at:
            raise LoadError(
                f"{self.path} ends at byte {len(self.data):,}, in the middle of {what}: "
                "it is cut off or damaged; fetch it again"
            )

    def text(self, what: str) -> str:
        (size,) = self.take("<Q")
        self.need(size, what)
        value = self.data[self.at : self.at + size]
        self.at += size
        return value.decode("utf-8", errors="replace")

    def name(self, what: str) -> str:
        result = self.text(what)
        if len(result) > MOST_NAME:
            raise LoadError(f"{self.path}: {what} of {len(result):,} characters; it is damaged")
        return result

    def value(self, what: str) -> Any:
        kind = self.kind(what)
        if kind == GGUFValueType.STRING:
            return self.text(what)
        if kind == GGUFValueType.FLOAT32:  # as the decimal it was: 1e-05, not 9.999999747378752e-06
            return float(str(np.float32(self.numbers(kind, 1, what)[0])))
        if kind != GGUFValueType.ARRAY:
            return self.numbers(kind, 1, what)[0]
        kind = self.kind(what)
        (count,) = self.take("<Q")
        if count > MOST_ITEMS:
            raise LoadError(f"{self.path}: {what} claims {count:,} items; the limit is {MOST_ITEMS:,}")
        if kind == GGUFValueType.ARRAY:
            raise LoadError(f"{self.path}: {what} is an array of arrays, which no known model has")
        if kind != GGUFValueType.STRING:
            return self.numbers(kind, count, what)
        self.need(8 * count, what)
        return self.texts(count, what)

    def kind(self, what: str) -> GGUFValueType:
        (code,) = self.take("<I")
        try:
            return GGUFValueType(code)
        except ValueError:
            raise LoadError(f"{self.path}: {what} is of the unknown type {code}: damaged?") from None

    def numbers(self, kind: GGUFValueType, count: int, what: str) -> list[Any]:
        dtype = np.dtype(NUMBERS[kind])
        self.need(count * dtype.itemsize, what)
        items = np.frombuffer(self.data, dtype, count, self.at).tolist()
        self.at += count * dtype.itemsize
        return items

    def texts(self, count: int, what: str) -> list[str]:
        """A vocabulary has a quarter of a million: one unpack each, no call."""
        data, at, end, size = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        items = []
        for _ in range(count):
            if at + 8 > end:
                self.at = at
                self.need(8, what)
            begin = at + 8
            at = begin + size(data, at)[0]
            if at > end:
                self.at = begin
                self.need(at - begin, what)
            items.append(data[begin:at].decode("utf-8", errors="replace"))
        self.at = at
        return items
