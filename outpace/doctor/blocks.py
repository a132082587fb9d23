"""Quantised blocks as bytes: are they decoded as their format states, and are they of that format at all?"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.doctor.check import Check
from outpace.doctor.number_format import sampled
from outpace.models.blocks import ExpertMatrix
from outpace.models.decoder import Decoder
from outpace.ops import mxfp4
from outpace.ops.quant import Quant, reference_dense

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP MX v1.0, table 6
ROWS = 64  # of an expert's matrix that are looked at
NAN_SCALE = 255  # E8M0 has one NaN
GGML_BLOCK = 17  # bytes: a scale, then 16 bytes of two nibbles
# Counts of a code and of its negative differ by this share of the counts at most, in every file of trained
# or random weights; read as another format they differ by several times as much.
ASYMMETRY = 0.05
# A block's scale is there to bring its largest value near the top of the range, 6: a block that stays
# below 2 was scaled for another format.
FULL_CODE, FULL_SHARE = 5, 0.9


@dataclass(frozen=True, kw_only=True)
class Nibbles:
    """codes uint8 [blocks, 32] in storage order, scales uint8 [blocks]: MXFP4, as either file holds it."""

    codes: Tensor
    scales: Tensor


def nibbles(matrix: ExpertMatrix) -> Nibbles | None:
    """Some rows of some experts; None where the matrix is not MXFP4."""
    weight = matrix.weight
    if weight is None:
        chosen = sampled(len(matrix.blocks))
        blocks = matrix.blocks[chosen, :ROWS].flatten(0, -2)
        scales = matrix.scales[chosen, :ROWS].flatten()
    elif isinstance(weight, Quant) and weight.format == "MXFP4":
        data = weight.data[sampled(len(weight.data)), :ROWS].unflatten(-1, (-1, GGML_BLOCK)).flatten(0, -2)
        scales, blocks = data[:, 0], data[:, 1:]
    else:
        return None
    return Nibbles(codes=torch.cat((blocks & 15, blocks >> 4), dim=-1).cpu(), scales=scales.cpu())


def check_decoding(model: Decoder) -> Check:
    """Some rows of every packed format, decoded by the engine and by the book."""
    name = "decoding of packed blocks"
    apart: dict[str, float] = {}
    for form, ours, book in _decoded(model):
        if form not in apart:
            apart[form] = float((ours - book).abs().max())
    if not apart:
        return Check(name=name, verdict="skipped", message="no weight is packed in blocks")
    wrong = sorted(form for form, by in apart.items() if by != 0)
    text = f"{', '.join(sorted(apart))}: every value is what the format states"
    if wrong:
        text = f"{', '.join(wrong)}: what the engine makes of them is off by up to {apart[wrong[0]]:.3g}"
    return Check(name=name, verdict="fail" if wrong else "pass", message=text, evidence=apart)


def _decoded(model: Decoder) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(format, what the engine makes of some rows, what the format states)."""
    for module in model.modules():
        if isinstance(module, Quant):
            few = Quant(module.data.flatten(0, -2)[:4], module.format)
            yield module.format, few.dense().cpu(), reference_dense(few.data, few.format).cpu()
        elif isinstance(module, ExpertMatrix) and module.weight is None:
            blocks, scales = module.blocks[0, :2], module.scales[0, :2]
            yield "mxfp4 (safetensors)", mxfp4.unpack(blocks, scales).cpu(), by_the_book(blocks, scales)


def by_the_book(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [rows, G, 16], scales uint8 [rows, G] -> [rows, G*32], one value at a time: low nibble
    first, bit 3 the sign, times 2 to the (scale - 127)."""
    rows = []
    for row, powers in zip(blocks.tolist(), scales.tolist(), strict=True):
        values: list[float] = []
        for block, power in zip(row, powers, strict=True):
            codes = [code for byte in block for code in (byte & 15, byte >> 4)]
            values += [(-1) ** (code >> 3) * E2M1[code & 7] * 2.0 ** (power - 127) for code in codes]
        rows.append(values)
    return torch.tensor(rows)


def check_codes(model: Decoder) -> Check:
    """MXFP4 only: the histogram of codes, the top code of a block, the scale bytes."""
    name = "codes and scales of MXFP4 blocks"
    parts = [nibbles(m) for m in model.modules() if isinstance(m, ExpertMatrix)]
    entries = [n for n in parts if n is not None]
    if not entries:
        return Check(name=name, verdict="skipped", message="no expert is stored as MXFP4")
    codes, scales = torch.cat([n.codes for n in entries]), torch.cat([n.scales for n in entries])
    counts = torch.bincount(codes.flatten().int(), minlength=16)
    unlike = asymmetry(counts)
    best = min(unlike, key=lambda k: unlike[k])
    used = codes[(codes & 7).amax(-1) > 0] & 7
    full = float((used.amax(-1) >= FULL_CODE).float().mean()) if len(used) else 0.0
    lowest, highest = int(scales.min()), int(scales.max())
    evidence: dict[str, Any] = {
        "counts": counts.tolist(),
        "asymmetry": {k: round(v, 4) for k, v in unlike.items()},
        "blocks_that_reach_3": round(full, 4),
        "scale_bytes": [lowest, highest],
    }
    if highest == NAN_SCALE:
        text = f"{int((scales == NAN_SCALE).sum())} blocks have the scale 255, which means NaN: damaged"
    elif best != "sign and magnitude" and unlike["sign and magnitude"] > ASYMMETRY:
        text = f"the nibbles look like {best}, not like E2M1's sign and magnitude: another 4-bit format"
    elif full < FULL_SHARE:
        text = f"only {full:.0%} of the blocks reach a magnitude of 3 of 6: scaled for another format"
    else:
        text = (
            f"codes are as often positive as negative (E2M1), {full:.1%} of the blocks use the range, "
            f"scale bytes {lowest} to {highest}"
        )
        return Check(name=name, verdict="pass", message=text, evidence=evidence)
    return Check(name=name, verdict="fail", message=text, evidence=evidence)


def asymmetry(counts: Tensor) -> dict[str, float]:
    """Weights are as often negative as positive. Under each way to write signed 4-bit numbers: the share by
    which the counts of c and -c differ, over the seven magnitudes that both signs have. Two's complement and
    an offset of 8 pair the same codes; small values are the common ones, and tell which it would be."""
    total = counts.double()
    c = torch.arange(1, 8)
    around_zero = bool(total[1] + total[15] >= total[7] + total[9])
    mirrored = "two's complement" if around_zero else "an offset of 8"
    negatives = {"sign and magnitude": c + 8, mirrored: 16 - c}
    return {
        name: float((total[c] - total[n]).abs().sum() / (total[c] + total[n]).sum().clamp(min=1))
        for name, n in negatives.items()
    }
