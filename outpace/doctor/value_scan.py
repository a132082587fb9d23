"""Every value of a checkpoint looked at, a piece at a time: NaN, Inf, zeros, absurd sizes, bad scales."""

from collections.abc import Callable, Iterator
from math import inf

import torch
from torch import Tensor

from outpace.checkpoint.base import Checkpoint
from outpace.checkpoint.hf import HFCheckpoint
from outpace.doctor.checkpoint import Finding
from outpace.ops.mxfp4 import SCALE_BIAS
from outpace.ops.quant import Quant

PIECE = 2**24  # bytes looked at together
EXPANSION = 8  # blocks take this much more room as float32
ABSURD = 1e5  # no trained weight is near; a flipped exponent bit is far beyond
NAN_SCALE = 255  # of E8M0
LARGEST_CODE = 6.0  # of E2M1
WHOLE = (torch.float64, torch.float32, torch.bfloat16)  # dtypes that know their extremes
SHOWN = 4
# an untrained index weighs its heads alike; a frequency may be the first
MAY_BE_ZERO = ("bias", "dsa_w.weight", "dsa_frequencies")


def deep_findings(checkpoint: Checkpoint, on_bytes: Callable[[int], None] = lambda n: None) -> list[Finding]:
    """Reads every byte once; pages of a mapped file are given back as it goes. `on_bytes` hears of every
    piece.

    NaN and Inf, tensors that are zero throughout (MAY_BE_ZERO aside), values beyond 1e5, and of MXFP4 scales
    that mean NaN or for values beyond that.
    """
    faults: dict[str, list[str]] = {}
    for name in checkpoint.names():
        for kind, value in _look(name, _pieces(checkpoint, name, on_bytes)):
            faults.setdefault(kind, []).append(f"{name} ({value})" if value else name)
    mends = {
        "not_finite": "the file is damaged or the training was: fetch it again, or go back to an older step",
        "nan_scales": "MXFP4 scales of 255 mean NaN: the file is damaged, or was packed from NaN",
        "zero": "a tensor that was never written, or a part of the model that does nothing",
        "absurd": "a damaged file, a wrong dtype or byte order: fetch it again",
    }
    return [
        Finding(name=kind, message=_listed(rows), fix=mends[kind]) for kind, rows in sorted(faults.items())
    ]


def _listed(rows: list[str]) -> str:
    return ", ".join(rows[:SHOWN]) + (f", .. ({len(rows)} tensors)" if len(rows) > SHOWN else "")


def _look(name: str, pieces: Iterator[Tensor]) -> Iterator[tuple[str, str]]:
    """-> (kind of fault, detail) of one tensor."""
    zero, bad, largest, scales = True, 0, 0.0, False
    for values in pieces:
        scales = values.dtype == torch.uint8 and name.endswith("_scales")
        if scales:
            size, faults = _of_scales(values)
        elif values.dtype.is_floating_point:
            size, faults = _of_floats(values)
        else:
            size, faults = float(values.any()), 0
        largest, bad = max(largest, size), bad + faults
        zero &= size == 0
    if bad:
        yield ("nan_scales", f"{bad:,} scales") if scales else ("not_finite", f"{bad:,} values")
    if largest > ABSURD:
        yield "absurd", f"up to {largest:.3g}"
    if zero and not bad and not name.endswith(MAY_BE_ZERO):
        yield "zero", ""


def _of_floats(values: Tensor) -> tuple[float, int]:
    """The largest finite magnitude, and how many values are not finite."""
    if not values.numel():
        return 0.0, 0
    values = values if values.dtype in WHOLE else values.float()
    low, high = map(float, values.aminmax())
    if -inf < low and high < inf:  # false of NaN, which aminmax hands on
        return max(-low, high), 0
    finite = values[values.isfinite()]
    return _of_floats(finite)[0], values.numel() - finite.numel()


def _of_scales(values: Tensor) -> tuple[float, int]:
    """The largest magnitude that E8M0 bytes allow in their blocks, and how many mean NaN."""
    numbers = values[values != NAN_SCALE]
    largest = LARGEST_CODE * 2.0 ** (int(numbers.amax()) - SCALE_BIAS) if numbers.numel() else 0.0
    return largest, values.numel() - numbers.numel()


def _pieces(checkpoint: Checkpoint, name: str, on_bytes: Callable[[int], None]) -> Iterator[Tensor]:
    """A tensor's values, some at a time; blocks unpacked. What has been seen leaves memory."""
    weight = checkpoint.get(name)
    stored = weight.data if isinstance(weight, Quant) else weight
    rows = stored.reshape(-1, stored.shape[-1]) if isinstance(weight, Quant) else stored.reshape(-1)
    row_bytes = rows[:1].nbytes * (EXPANSION if isinstance(weight, Quant) else 1)
    for piece in rows.split(max(PIECE // max(row_bytes, 1), 1)):
        yield Quant(piece, weight.format).dense() if isinstance(weight, Quant) else piece
        on_bytes(piece.nbytes)
        if isinstance(checkpoint, HFCheckpoint):
            checkpoint.release(name)
