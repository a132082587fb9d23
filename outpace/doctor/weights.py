"""Checks of the stored numbers: embedding, head, sinks, packed blocks, the order of the experts' values.

Training leaves correlations between tensors that no number format touches:

- Neurons that read strongly also write strongly: the norms of `down`'s columns follow the norms of the gate
  and up rows of the same neurons, if `down`'s columns are in the right order.
- An expert learns from the tokens that its router row selects: the mean of its gate rows points in the
  direction of that row, if the columns of gate and up are in the right order; the mean of its up rows does
  not.
- Gate and up rows of one neuron have about equal norms, if they are paired rightly.

The first two are taken within blocks of 32 columns. All are correlations of many independent pairs, with an
error of 1 / sqrt(pairs); an order counts as known when it leads by DECIDED errors. Random weights show none
of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outpace.checkpoint.base import Checkpoint
from outpace.doctor.check import Check, check_of, skipped
from outpace.doctor.mistakes import (
    AS_IS,
    DOWN_ALONE,
    GATE_UP_ALONE,
    HALF_ROWS,
    INTERLEAVED_ROWS,
    LONGER,
    NIBBLE_MISTAKES,
    REVERSED,
    REVERSED_ALONE,
    SHORTER,
    SINKS_DROPPED,
    SWAPPED,
    YARN_FACTOR,
    ZERO_SINKS,
    Names,
)
from outpace.doctor.reference import (
    BLOCK,
    BlockOrder,
    Matrix,
    MlpWeights,
    block_order,
    concentration,
    mlp_weights,
    reordered,
)
from outpace.models.attention import DecoderBlock
from outpace.models.blocks import ExpertMatrix, Experts
from outpace.models.config import ModelConfig
from outpace.models.decoder import Decoder
from outpace.ops import mxfp4
from outpace.ops.quant import Joined, Quant, Weight, reference_dense

# ---- embedding, head, sinks, config ---------------------------------------------------------------

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MOST_ROWS = 2048  # that statistics are taken over
FAR = 100.0  # times the median norm: not the row of a trained token


def stored_rows(checkpoint: Checkpoint, name: str, ids: list[int]) -> Tensor:
    """Rows of a tensor as the file has them, [n, C] float32; blocks unpacked by the gguf package."""
    tensor = checkpoint.get(name)
    if isinstance(tensor, Quant):
        return reference_dense(tensor.data[ids], tensor.format)
    return tensor[ids].float()


def weight_rows(weight: Weight, ids: list[int]) -> Tensor:
    assert not isinstance(weight, Joined), "embedding and head are one matrix"
    if isinstance(weight, Quant):
        return weight[torch.tensor(ids)].dense().float()
    return weight[ids].float()


def spread_rows(vocab: int) -> list[int]:
    return list(range(0, vocab, max(vocab // MOST_ROWS, 1)))


def check_embedding(model: Decoder, checkpoint: Checkpoint, tokens: list[int]) -> Check:
    """The rows of the text's tokens, looked up and read from the file."""
    ids = sorted(set(tokens))
    rows = stored_rows(checkpoint, EMBEDDING, ids)
    with torch.inference_mode():
        seen = model.embed(torch.tensor([ids], device=model.device))[0].float().cpu()
    norms = rows.norm(dim=-1)
    median, least, most = float(norms.median()), float(norms.min()), float(norms.max())
    odd = [i for i, n in zip(ids, norms.tolist(), strict=True) if not median / FAR <= n <= median * FAR]
    apart = float((seen - rows).abs().max())
    errors = []
    if not bool(rows.isfinite().all()):
        errors = ["the file's rows contain NaN or Inf"]
    elif not apart <= 1e-6 * float(rows.abs().max()):
        errors = [f"the model's rows differ from the file's rows by {apart:.2g}"]
    text = f"{len(ids)} rows are the file's; norms {least:.3g} to {most:.3g}, median {median:.3g}"
    warnings = [f"{text}; tokens {odd[:5]} have rows of a norm that no trained token has"] if odd else []
    evidence: dict[str, Any] = {"largest_difference": apart, "median_norm": median, "smallest_norm": least}
    evidence |= {"largest_norm": most, "odd": odd[:20]}
    return check_of("embedding rows", text, errors=errors, warnings=warnings, evidence=evidence)


def check_head(model: Decoder, checkpoint: Checkpoint) -> Check:
    """Tied or not, as the config specifies and as the file has it."""
    ids = spread_rows(model.config.vocab_size)
    embedding, used = stored_rows(checkpoint, EMBEDDING, ids), weight_rows(model.head, ids).cpu()
    stored, tied = HEAD in checkpoint.names(), model.config.tie_word_embeddings
    alike = float(torch.nn.functional.cosine_similarity(embedding, used, dim=-1).mean())
    errors, warnings = [], []
    if not bool(used.isfinite().all()):
        errors = ["the head contains NaN or Inf"]
    elif tied and stored and not torch.equal(stored_rows(checkpoint, HEAD, ids), embedding):
        text = "config.json ties the head to the embedding, but the file has another head, which is not read"
        errors = [f"{text}: set tie_word_embeddings to false"]
    elif not tied and torch.equal(used, embedding):
        text = "config.json has an untied head, but it equals the embedding"
        warnings = [f"{text}: a converter may have copied one over the other"]
    text = "tied to the embedding" if tied else f"a separate matrix (cosine with the embedding {alike:.2f})"
    evidence = {"tied": tied, "file_has_a_head": stored, "cosine_with_embedding": round(alike, 4)}
    return check_of("head", text, errors=errors, warnings=warnings, evidence=evidence)


def check_sinks(model: Decoder) -> Check:
    """Trained sinks differ between heads; sinks that are all alike were lost on the way."""
    name = "sinks"
    rows = [a.sinks.detach().float().cpu() for a in model.attentions if a.sinks is not None]
    if not rows:
        return skipped(name, "the model has no sinks")
    sinks = torch.cat(rows)
    low, high = float(sinks.min()), float(sinks.max())
    text = f"{low:.3g} to {high:.3g} in {len(rows)} layers"
    evidence = {"least": low, "most": high}
    if high > low and high > LOST_SINK:
        return check_of(name, text, evidence=evidence)
    mistake = ZERO_SINKS if low == high == 0 else SINKS_DROPPED
    fix = "copy self_attn.sinks from the original checkpoint"
    text = f"{mistake}: all {len(sinks)} are {low:.3g}, trained ones differ between heads. Fix: {fix}"
    return Check(name=name, status="fail", message=text, evidence=evidence, mistakes=(mistake,))


LOST_SINK = -1e3  # exp(-1000) adds nothing to any denominator
LEAST_WINDOW = 16  # from here on, windows are powers of two in all published models of our families


def check_config_values(config: ModelConfig) -> Check:
    """Values of config.json that a converter gets wrong by a known slip: a warning, since a model may have
    been trained so."""
    window, warnings, mistakes = config.sliding_window, [], []
    for by, name in ((1, LONGER), (-1, SHORTER)):
        right = window + by
        if right >= LEAST_WINDOW and right & (right - 1) == 0:
            mistakes.append(name)
            warnings.append(
                f"window off by one: `sliding_window` is {window}. It counts the query's own key, and is a "
                f"power of two in every published model. Fix: set it to {right}"
            )
    rope = config.rope
    default = concentration(replace(rope, attention_factor=None))
    if not math.isclose(concentration(rope), default, rel_tol=1e-6):
        mistakes.append(YARN_FACTOR)
        warnings.append(
            f"{YARN_FACTOR}: config.json sets {concentration(rope):.4g}, YaRN's for factor {rope.factor:g} "
            f"is {default:.4g}. Fix: remove `attention_factor`, unless the model was trained with it"
        )
    text = "window and YaRN's factor are as in published models"
    return check_of("config values", text, warnings=warnings, mistakes=tuple(mistakes))


# ---- order of the experts' values -----------------------------------------------------------------

DECIDED = 5.0
MOST_EXPERTS = 8  # of a layer that are looked at


@dataclass
class Correlations:
    """Correlations of one statistic under several hypotheses, summed over layers (Fisher's z)."""

    sums: dict[Names, float] = field(default_factory=dict)
    weight: float = 0.0

    def add(self, correlations: Mapping[Names, float], pairs: int) -> None:
        for name, r in correlations.items():
            self.sums[name] = self.sums.get(name, 0.0) + pairs * math.atanh(max(min(r, 0.999999), -0.999999))
        self.weight += pairs

    def of(self, name: Names) -> float:
        return math.tanh(self.sums[name] / self.weight)

    def ranked(self) -> list[tuple[Names, float]]:
        """Hypotheses, best first, with the standard errors that the best leads by."""
        order = sorted(self.sums, key=lambda name: -self.sums[name])
        error = self.weight * math.sqrt(2 / self.weight)
        return [(name, (self.sums[order[0]] - self.sums[name]) / error) for name in order]


Marks = dict[str, Correlations]  # "down", "gate_up", "pairing"


def gather_marks(model: Decoder) -> Marks:
    """The three statistics over all layers with experts; {} for a model without any."""
    marks: Marks = {}
    with torch.inference_mode():
        for block in model.layers:
            if isinstance(block, DecoderBlock) and isinstance(block.mlp, Experts):
                _add_layer(marks, mlp_weights(block), interleaved=model.config.swiglu_limit is not None)
    return marks


def _add_layer(marks: Marks, w: MlpWeights, *, interleaved: bool) -> None:
    chosen = sampled(w.count)
    experts = [w.expert(e) for e in chosen]
    norms = torch.stack([_log_norms(e.gate_up.weight) for e in experts])  # [n, 2F]
    gate, up = _gate_up(norms, interleaved)
    F, C = gate.shape[-1], len(w.norm)
    pairing: dict[Names, float] = {}
    other = HALF_ROWS if interleaved else INTERLEAVED_ROWS
    for names, how in ((AS_IS, interleaved), ((other,), not interleaved)):
        a, b = (x - x.mean(-1, keepdim=True) for x in _gate_up(norms, how))
        pairing[names] = _correlation(a, b)
    marks.setdefault("pairing", Correlations()).add(pairing, gate.numel())
    if F % BLOCK == 0:
        reads = _within_blocks(gate + up)
        columns = _by_order([e.down for e in experts], lambda weight: _log_norms(weight.mT))
        r = {names: _correlation(reads, _within_blocks(x)) for names, x in columns.items()}
        marks.setdefault("down", Correlations()).add(r, reads.numel() * (BLOCK - 1) // BLOCK)
    if w.router is not None and len(chosen) > 1 and C % BLOCK == 0:
        calls = _directions(w.router.weight[chosen] * w.norm)
        r = {}
        for part, swapped in ((0, AS_IS), (1, (SWAPPED,))):
            means = _by_order([e.gate_up for e in experts], _mean_rows(part, interleaved))
            for names, x in means.items():
                r[names + swapped] = _correlation(_directions(x * w.norm), calls)
        marks.setdefault("gate_up", Correlations()).add(r, (len(chosen) - 1) * C * (BLOCK - 1) // BLOCK)


def _by_order(matrices: list[Matrix], vector: Callable[[Tensor], Tensor]) -> dict[Names, Tensor]:
    """Mistakes in the order of packed values -> `vector` of each matrix, one value per column, [n, K]."""
    blocks: dict[Names, BlockOrder] = {AS_IS: "as stored"}
    if matrices[0].weight.shape[-1] > BLOCK:
        blocks[REVERSED,] = "reversed"
        if matrices[0].exponents is not None:
            blocks[REVERSED_ALONE,] = "reversed, scales in place"
    nibbles: dict[Names, str] = {AS_IS: "as stored"} | {(n,): o for n, (o, _) in NIBBLE_MISTAKES.items()}
    values: dict[Names, Tensor] = {}
    for names, order in blocks.items():
        x = torch.stack([vector(block_order(m, order).weight) for m in matrices])
        values |= {more + names: reordered(x, nibble) for more, nibble in nibbles.items()}
    return values


def _mean_rows(part: int, interleaved: bool) -> Callable[[Tensor], Tensor]:
    """Of the gate rows (0) or the up rows (1) of [2F, C]."""
    return lambda weight: _gate_up(weight.mT, interleaved)[part].mean(-1)


def _gate_up(rows: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """[.., 2F] -> gate and up, [.., F] each."""
    if interleaved:
        return rows[..., ::2], rows[..., 1::2]
    gate, up = rows.chunk(2, dim=-1)
    return gate, up


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = a.flatten().double(), b.flatten().double()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else 0.0


def _within_blocks(x: Tensor) -> Tensor:
    """[.., K] less the mean of each block of 32."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    return (blocks - blocks.mean(-1, keepdim=True)).flatten(-2)


def _directions(x: Tensor) -> Tensor:
    """[n, C] -> of length 1, less the mean of all, within blocks."""
    x = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return _within_blocks(x - x.mean(0))


def _log_norms(weight: Tensor) -> Tensor:
    """[N, C] -> log of each row's mean square, [N]."""
    return weight.square().mean(-1).clamp(min=1e-30).log()


def sampled(count: int) -> list[int]:
    """Experts spread over all of them."""
    step = max(count / MOST_EXPERTS, 1.0)
    return [int(i * step) for i in range(min(count, MOST_EXPERTS))]


ORDER_CHECKS = {  # statistic -> name of the check, tensors correlated
    "down": ("column order of down", "down's columns with the rows of their neurons"),
    "gate_up": ("column order of gate and up", "mean gate rows with the router's rows"),
    "pairing": ("pairing of gate and up rows", "the norms of paired rows"),
}


def check_orders(marks: Marks) -> Iterator[Check]:
    """Column order of down, of gate and up, and the pairing of gate with up."""
    if not marks:
        yield skipped("column order", "the model has no experts")
        return
    down = decided_orders(marks["down"]) if "down" in marks else []
    for key, (name, tensors) in ORDER_CHECKS.items():
        if key in marks:
            yield _order_check(name, tensors, marks[key], down if key == "gate_up" else [])
        else:
            yield skipped(name, f"its columns are not in blocks of {BLOCK}, or there is one expert only")


def _order_check(name: str, tensors: str, marks: Correlations, other: list[Names]) -> Check:
    """`other`: the orders of the other matrix, which decide between those that this one leaves open."""
    ranked, alike = marks.ranked(), decided_orders(marks)
    orders = [o for o in alike if tuple(n for n in o if n != SWAPPED) in other] or alike
    z = next(lead for names, lead in ranked if names not in (alike or [ranked[0][0]]))
    shown = dict.fromkeys([names for names, _ in ranked[:3]] + [AS_IS])
    figures = ", ".join(f"{marks.of(names):.2f} {_label(names)}" for names in shown)
    evidence = {_label(n): round(marks.of(n), 4) for n in marks.sums} | {"z": round(z, 2)}
    if not orders:
        return skipped(name, f"undecided, the statistics do not separate (z = {z:.1f}); {figures}", evidence)
    text = f"correlation of {tensors}: {figures} ({z:.0f} standard errors ahead)"
    if orders == [AS_IS]:
        return check_of(name, text, evidence=evidence)
    text = f"{' or '.join(map(_label, orders))}: {text}"
    mistakes = tuple(dict.fromkeys(n for names in orders for n in names))
    return Check(name=name, status="fail", message=text, evidence=evidence, mistakes=mistakes)


def decided_orders(marks: Correlations) -> list[Names]:
    """The hypotheses that the statistic does not separate from the best one, itself included, two at most; []
    where it does not decide between the order as stored and another."""
    ranked = marks.ranked()
    alike = [names for names, lead in ranked if lead < DECIDED]
    undecided = len(alike) > 2 or (AS_IS in alike and len(alike) > 1) or marks.of(alike[0]) < 0
    return [] if undecided else alike


def mistakes_in_order(marks: Marks) -> list[Names]:
    """The mistakes that the statistics decide on, to be tried first on a text; several where they leave a
    choice."""
    down, gate_up, pairing = (
        decided_orders(marks[key]) if key in marks else [] for key in ("down", "gate_up", "pairing")
    )
    swapped = (SWAPPED,) if gate_up and all(SWAPPED in names for names in gate_up) else AS_IS
    orders = [tuple(n for n in names if n != SWAPPED) for names in gate_up]
    shared = [names for names in orders if names in down]
    if not shared:
        shared = [
            tuple(n + DOWN_ALONE for n in a) + tuple(n + GATE_UP_ALONE for n in b)
            for a in down or [AS_IS]
            for b in orders or [AS_IS]
        ]
    return [names for names in (a + swapped + b for a in shared for b in pairing or [AS_IS]) if names]


def _label(names: Names) -> str:
    return " + ".join(names) or "as stored"


# ---- packed blocks --------------------------------------------------------------------------------

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP MX v1.0, table 6
ROWS = 64  # of an expert's matrix that are looked at
NAN_SCALE = 255  # E8M0 has one NaN
GGML_BLOCK = 17  # bytes: a scale, then 16 bytes of two nibbles
# Counts of a code and of its negative differ by this share of the counts at most, in every file of trained
# or random weights; read as another format they differ by several times as much.
ASYMMETRY = 0.05
# A block's scale brings its largest value near the top of the range, 6: a block that stays below 2 was scaled
# for another format.
FULL_CODE, FULL_SHARE = 5, 0.9


def check_decoding(model: Decoder) -> Check:
    """Some rows of every packed format, decoded by the engine and by the format's definition."""
    name = "decoding of packed blocks"
    apart: dict[str, float] = {}
    for form, ours, right in _decoded(model):
        if form not in apart:
            apart[form] = float((ours - right).abs().max())
    if not apart:
        return skipped(name, "no weight is packed in blocks")
    wrong = sorted(form for form, by in apart.items() if by != 0)
    errors = (
        [f"{', '.join(wrong)}: the engine's values are off by up to {apart[wrong[0]]:.3g}"] if wrong else []
    )
    text = f"{', '.join(sorted(apart))}: every value equals the format's definition"
    return check_of(name, text, errors=errors, evidence=apart)


def _decoded(model: Decoder) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(format, some rows as the engine decodes them, the same by definition)."""
    for module in model.modules():
        if isinstance(module, Quant):
            few = Quant(module.data.flatten(0, -2)[:4], module.format)
            yield module.format, few.dense().cpu(), reference_dense(few.data, few.format).cpu()
        elif isinstance(module, ExpertMatrix) and module.weight is None:
            blocks, scales = module.blocks[0, :2], module.scales[0, :2]
            yield "mxfp4 (safetensors)", mxfp4.unpack(blocks, scales).cpu(), decode_mxfp4(blocks, scales)


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
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


def _mxfp4_codes(matrix: ExpertMatrix) -> tuple[Tensor, Tensor] | None:
    """Codes uint8 [blocks, 32] and scales uint8 [blocks] of some rows of some experts; None for other
    formats."""
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
    return torch.cat((blocks & 15, blocks >> 4), dim=-1).cpu(), scales.cpu()


def check_codes(model: Decoder) -> Check:
    """MXFP4 only: the histogram of codes, the top code of a block, the scale bytes."""
    name = "codes and scales of MXFP4 blocks"
    parts = [_mxfp4_codes(m) for m in model.modules() if isinstance(m, ExpertMatrix)]
    packed = [part for part in parts if part is not None]
    if not packed:
        return skipped(name, "no expert is stored as MXFP4")
    codes, scales = (torch.cat(tensors) for tensors in zip(*packed, strict=True))
    counts = torch.bincount(codes.flatten().int(), minlength=16)
    unlike = asymmetry(counts)
    best = min(unlike, key=lambda k: unlike[k])
    used = codes[(codes & 7).amax(-1) > 0] & 7
    full = float((used.amax(-1) >= FULL_CODE).float().mean()) if len(used) else 0.0
    low, high = int(scales.min()), int(scales.max())
    errors = []
    if high == NAN_SCALE:
        errors = [f"{int((scales == NAN_SCALE).sum())} blocks have the scale 255, which means NaN: damaged"]
    elif best != "sign and magnitude" and unlike["sign and magnitude"] > ASYMMETRY:
        errors = [f"the nibbles look like {best}, not like E2M1's sign and magnitude: another 4-bit format"]
    elif full < FULL_SHARE:
        errors = [f"only {full:.0%} of the blocks reach a magnitude of 3 of 6: scaled for another format"]
    evidence: dict[str, Any] = {
        "counts": counts.tolist(),
        "asymmetry": {k: round(v, 4) for k, v in unlike.items()},
        "blocks_that_reach_3": round(full, 4),
        "scale_bytes": [low, high],
    }
    text = (
        f"codes are as often positive as negative (E2M1), {full:.1%} of the blocks use the range, "
        f"scale bytes {low} to {high}"
    )
    return check_of(name, text, errors=errors, evidence=evidence)


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
