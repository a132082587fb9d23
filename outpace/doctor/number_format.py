"""Are the experts' numbers read in the right format? Statistics of the weights alone.

Training leaves marks that tie an expert's columns to things in an order that no number format touches:

- A neuron that reads strongly also writes strongly. So the norms of `down`'s columns follow the norms of
  the gate and up rows of the same neurons - if `down`'s columns lie in the right order.
- The tokens that a router row calls are those the expert learns from. So the mean of an expert's gate rows
  points the way of its router row - if the columns of gate and up lie in the right order.
- Gate and up rows of one neuron are about equally long - if they are paired rightly.

All three are taken within blocks of 32 columns, since another nibble order moves nothing further, and are
correlations of many independent pairs: their error is 1 / sqrt(pairs), and an order counts as known when it
leads the next best by DECIDED errors. Random weights have no such marks, and then nothing is reported.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.doctor.check import Check
from outpace.doctor.reference import Matrix, MlpWeights, Nibbles, mlp_weights, reordered
from outpace.models.blocks import ExpertMatrix, Experts
from outpace.models.decoder import Decoder, DecoderBlock
from outpace.ops import mxfp4
from outpace.ops.quant import Quant, reference_dense

DECIDED = 5.0
MOST_EXPERTS = 8  # of a layer that are looked at
BLOCK = 32
ORDERS: tuple[Nibbles, ...] = ("as stored", "from split", "to split")
ORDER_SAYS = {
    "as stored": "as stored",
    "from split": "the bytes hold split nibbles (GGML's order) that are read as interleaved ones",
    "to split": "the bytes hold interleaved nibbles that are read as split ones",
}


@dataclass
class BlockEvidence:
    """Correlations of one statistic under several hypotheses, gathered over layers (Fisher's z)."""

    sums: dict[str, float] = field(default_factory=dict)
    weight: float = 0.0

    def add(self, correlations: Mapping[str, float], pairs: int) -> None:
        for name, r in correlations.items():
            self.sums[name] = self.sums.get(name, 0.0) + pairs * math.atanh(max(min(r, 0.999999), -0.999999))
        self.weight += pairs

    def correlation(self, name: str) -> float:
        return math.tanh(self.sums[name] / self.weight)

    def ranked(self) -> tuple[str, float]:
        """The best hypothesis, and by how many errors it leads the next best."""
        order = sorted(self.sums, key=lambda name: -self.sums[name])
        lead = (self.sums[order[0]] - self.sums[order[1]]) / self.weight
        return order[0], lead / math.sqrt(2 / self.weight)


def correlation(a: Tensor, b: Tensor) -> float:
    a, b = a.flatten().double(), b.flatten().double()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else 0.0


def within_blocks(x: Tensor) -> Tensor:
    """[..., K] -> what is left when each block of 32 loses its mean."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    return (blocks - blocks.mean(-1, keepdim=True)).flatten(-2)


def row_norms(weight: Tensor) -> Tensor:
    """[N, C] -> log of each row's mean square, [N]."""
    return weight.square().mean(-1).clamp(min=1e-30).log()


@dataclass(frozen=True, kw_only=True)
class Neurons:
    """One expert: log norms of what each neuron reads and writes, [F]; its mean gate row, [C]."""

    gate: Tensor
    up: Tensor
    down: dict[Nibbles, Tensor]  # by order of `down`'s columns
    mean_gate: Tensor


def neurons(w: MlpWeights, e: int, *, interleaved: bool) -> Neurons:
    expert = w.expert(e)
    gate, up = parts(expert.gate_up.weight, interleaved)
    columns = row_norms(expert.down.weight.mT)
    down = {order: reordered(columns, order) for order in ORDERS} if _blocked(columns) else {}
    return Neurons(gate=row_norms(gate), up=row_norms(up), down=down, mean_gate=gate.mean(0))


def parts(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """[2F, ...] -> gate and up, [F, ...] each."""
    if interleaved:
        return gate_up[::2], gate_up[1::2]
    gate, up = gate_up.chunk(2)
    return gate, up


def _blocked(x: Tensor) -> bool:
    return x.shape[-1] % BLOCK == 0


def sampled(count: int) -> list[int]:
    """Experts spread over all of them."""
    step = max(count / MOST_EXPERTS, 1.0)
    return [int(i * step) for i in range(min(count, MOST_EXPERTS))]


@dataclass
class Marks:
    """The three statistics, gathered layer by layer."""

    down: BlockEvidence = field(default_factory=BlockEvidence)
    gate_up: BlockEvidence = field(default_factory=BlockEvidence)
    pairing: BlockEvidence = field(default_factory=BlockEvidence)

    def add(self, w: MlpWeights, *, interleaved: bool) -> None:
        chosen = sampled(w.count)
        entries = [neurons(w, e, interleaved=interleaved) for e in chosen]
        reads = torch.stack([n.gate + n.up for n in entries])
        F = reads.shape[-1]
        if entries[0].down:
            columns = {o: torch.stack([n.down[o] for n in entries]) for o in ORDERS}
            r: dict[str, float] = {
                o: correlation(within_blocks(reads), within_blocks(c)) for o, c in columns.items()
            }
            self.down.add(r, reads.numel() * (BLOCK - 1) // BLOCK)
        self.pairing.add(self._pairings(entries, F, interleaved), reads.numel())
        if w.router is not None and len(chosen) > 1 and _blocked(w.norm):
            self._add_directions(w, torch.stack([n.mean_gate for n in entries]), w.router, chosen)

    def _pairings(self, items: Sequence[Neurons], F: int, interleaved: bool) -> dict[str, float]:
        """Gate with up as the family pairs them, and as the other family would."""
        right = [(n.gate - n.gate.mean(), n.up - n.up.mean()) for n in items]
        rows = [_as_stored(n.gate, n.up, interleaved) for n in items]
        other = [(a - a.mean(), b - b.mean()) for a, b in (parts(r, not interleaved) for r in rows)]
        names = ("interleaved", "halves") if interleaved else ("halves", "interleaved")
        return {
            name: correlation(torch.cat([a for a, _ in both]), torch.cat([b for _, b in both]))
            for name, both in zip(names, (right, other), strict=True)
        }

    def _add_directions(self, w: MlpWeights, gates: Tensor, router: Matrix, chosen: list[int]) -> None:
        calls = router.weight[chosen] * w.norm
        calls = calls / calls.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        calls = within_blocks(calls - calls.mean(0))
        r: dict[str, float] = {}
        for order in ORDERS:
            gate = reordered(gates, order) * w.norm
            gate = gate / gate.norm(dim=-1, keepdim=True).clamp(min=1e-30)
            r[order] = correlation(within_blocks(gate - gate.mean(0)), calls)
        free = (len(chosen) - 1) * len(w.norm) * (BLOCK - 1) // BLOCK
        self.gate_up.add(r, free)


def _as_stored(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((gate, up), dim=1).flatten() if interleaved else torch.cat((gate, up))


def gather_marks(model: Decoder) -> Marks | None:
    """Over all layers with experts; None for a model without any."""
    marks = Marks()
    blocks = [b for b in model.layers if isinstance(b, DecoderBlock) and isinstance(b.mlp, Experts)]
    with torch.inference_mode():
        for block in blocks:
            marks.add(mlp_weights(block), interleaved=model.config.swiglu_limit is not None)
    return marks if blocks else None


def check_orders(marks: Marks | None) -> Iterable[Check]:
    """Column order of down, of gate and up, and the pairing of gate with up."""
    if marks is None:
        yield Check(name="column order", status="skipped", message="the model has no experts")
        return
    yield _order_check("column order of down", marks.down, "down's columns with the rows of their neurons")
    text = "mean gate rows with the router's rows"
    yield _order_check("column order of gate and up", marks.gate_up, text)
    yield _pairing_check(marks.pairing)


def _order_check(name: str, evidence: BlockEvidence, what: str) -> Check:
    if not evidence.weight:
        reason = f"its columns do not come in blocks of {BLOCK}, or there is one expert only"
        return Check(name=name, status="skipped", message=reason)
    best, lead = evidence.ranked()
    figures = _figures(evidence, lead)
    text = f"correlation of {what}: {_list(evidence)} ({lead:.0f} standard errors ahead)"
    if lead < DECIDED or evidence.correlation(best) < 0:
        return Check(
            name=name,
            status="skipped",
            message=f"undecided, the statistics do not separate (z = {lead:.1f}); {_list(evidence)}",
            evidence=figures,
        )
    if best == ORDERS[0]:
        return Check(name=name, status="pass", message=text, evidence=figures)
    return Check(name=name, status="fail", message=f"{ORDER_SAYS[best]}: {text}", evidence=figures)


def _pairing_check(evidence: BlockEvidence) -> Check:
    name = "pairing of gate and up rows"
    right, other = evidence.sums
    best, lead = evidence.ranked()
    figures = _figures(evidence, lead)
    text = f"correlation of their norms: {_list(evidence)} ({lead:.0f} standard errors ahead)"
    if lead < DECIDED or evidence.correlation(best) < 0:
        reason = f"undecided, the statistics do not separate (z = {lead:.1f}); {_list(evidence)}"
        return Check(name=name, status="skipped", message=reason, evidence=figures)
    if best == right:
        return Check(name=name, status="pass", message=text, evidence=figures)
    wrong = f"the rows lie as {other} where the format wants {right}: {text}"
    return Check(name=name, status="fail", message=wrong, evidence=figures)


def _list(evidence: BlockEvidence) -> str:
    return ", ".join(f"{evidence.correlation(name):.2f} {name}" for name in evidence.sums)


def _figures(evidence: BlockEvidence, lead: float) -> dict[str, float]:
    return {name: round(evidence.correlation(name), 4) for name in evidence.sums} | {"z": round(lead, 2)}


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
class MXFP4Blocks:
    """codes uint8 [blocks, 32] in storage order, scales uint8 [blocks]: MXFP4, as either file holds it."""

    codes: Tensor
    scales: Tensor


def nibbles(matrix: ExpertMatrix) -> MXFP4Blocks | None:
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
    return MXFP4Blocks(codes=torch.cat((blocks & 15, blocks >> 4), dim=-1).cpu(), scales=scales.cpu())


def check_decoding(model: Decoder) -> Check:
    """Some rows of every packed format, decoded by the engine and by the book."""
    name = "decoding of packed blocks"
    apart: dict[str, float] = {}
    for form, ours, book in _decoded(model):
        if form not in apart:
            apart[form] = float((ours - book).abs().max())
    if not apart:
        return Check(name=name, status="skipped", message="no weight is packed in blocks")
    wrong = sorted(form for form, by in apart.items() if by != 0)
    text = f"{', '.join(sorted(apart))}: every value is what the format states"
    if wrong:
        text = f"{', '.join(wrong)}: what the engine makes of them is off by up to {apart[wrong[0]]:.3g}"
    return Check(name=name, status="fail" if wrong else "pass", message=text, evidence=apart)


def _decoded(model: Decoder) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(format, what the engine makes of some rows, what the format means)."""
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
        return Check(name=name, status="skipped", message="no expert is stored as MXFP4")
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
        return Check(name=name, status="pass", message=text, evidence=evidence)
    return Check(name=name, status="fail", message=text, evidence=evidence)


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
