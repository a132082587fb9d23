"""The gates: five proofs that target, cache, draft and verifier agree, before any number is believed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from outpace.bench.metrics import LosslessCheck, compare, compare_token, in_float32
from outpace.bench.run import Prompts
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.drafts.base import Draft, Proposal
from outpace.drafts.dflash import DFlash
from outpace.drafts.sampler import DraftSampler
from outpace.kv.base import KVCache
from outpace.models.config import FULL
from outpace.models.decoder import Decoder, Output
from outpace.teacher.store import TeacherCache, TeacherSample

# Aux states are compared with what the cache stored: relative rounding of the format, and a floor as a
# share of the row's rms for what the arithmetic itself rounds (another order of summation).
STORED = {"bfloat16": 2.0**-8, "fp8": 2.0**-3}
AUX_FLOOR = {torch.float32: 1e-3}
LOW_PRECISION_FLOOR = 0.1
# Of the largest logit. Later tokens change how many rows an expert's product has, and with it the last
# bits of the sum; what leaks through a wrong mask is larger by orders of magnitude.
CAUSAL = 1e-5


@dataclass(frozen=True)
class CheckResult:
    """passed None: it could not run, and `message` has the reason; that is no failure."""

    name: str
    passed: bool | None
    figures: dict[str, Any] = field(default_factory=dict)
    message: str = ""


@torch.inference_mode()
def cached_targets(target: Decoder, cache: TeacherCache | None, block: int, samples: int) -> CheckResult:
    """Replay cached texts through a KV cache, the response in blocks of `block`: the hidden states must be
    the stored ones, the tokens of temperature-0 responses the argmax of the verify."""
    name = "cached targets equal the multi-token verify"
    if cache is None:
        return CheckResult(name, None, message="not run: no teacher cache was given")
    shuffled = torch.randperm(len(cache), generator=torch.Generator().manual_seed(1))
    chosen = shuffled[:samples].tolist()  # an even stride could meet one offset alone
    layers = cache.meta.target_layer_ids
    worst, total, off_layers = 0.0, LosslessCheck(), set()
    for i in chosen:
        sample = cache.sample(i)
        aux, logits = _replay(target, sample, layers, block)
        excess = _aux_excess(aux, sample.aux.to(aux.device).float(), cache.meta.dtype, target.dtype)
        worst = max(worst, float(excess.max()))
        off_layers |= {layers[n] for n in range(len(layers)) if float(excess[n].max()) > 1}
        if sample.temperature == 0:
            total += _labels(target, sample, logits.argmax(-1).tolist())
    passed = worst <= 1 and total.violations == 0
    figures = {
        "samples": len(chosen),
        "aux_worst_of_tolerance": round(worst, 4),
        "aux_wrong_layers": sorted(off_layers),
        "stored_as": cache.meta.dtype,
        "labels_checked": total.checked,
        "label_violations": total.violations,
        "label_ties": total.ties,
    }
    text = (
        f"{len(chosen)} texts; hidden states at most {worst:.2g} of the tolerance of {cache.meta.dtype}; "
        f"{total.violations} of {total.checked} labels differ, {total.ties} ties"
    )
    if off_layers:
        text += f"; wrong layers: {sorted(off_layers)} (is the order of target_layer_ids the target's?)"
    return CheckResult(name, passed, figures, text)


def _replay(
    target: Decoder, sample: TeacherSample, layers: Sequence[int], block: int
) -> tuple[Tensor, Tensor]:
    """-> aux [n,T,C], and the logits [R,V] that predict the response's R tokens."""
    tokens, start = sample.tokens.to(target.device), sample.prompt_length
    T = len(tokens)
    memory = target.make_cache(1, T, slack=block, offset=sample.offset)
    cuts = [0, *range(start, T, block), T]
    aux, hidden = [], []
    for begin, end in pairwise(cuts):
        out = target(tokens[None, begin:end], memory, aux=layers)
        assert out.aux is not None
        aux.append(out.aux[:, 0])
        hidden.append(out.hidden[0])
    return torch.cat(aux, dim=1), target.logits(torch.cat(hidden)[start - 1 : T - 1])


def _aux_excess(ours: Tensor, stored: Tensor, kind: str, compute: torch.dtype) -> Tensor:
    """|difference| in units of what rounding allows, [n,T,C]."""
    floor = AUX_FLOOR.get(compute, LOW_PRECISION_FLOOR)
    rms = ours.float().square().mean(-1, keepdim=True).sqrt()
    allowed = STORED[kind] * ours.float().abs() + floor * rms
    return (ours.float() - stored).abs() / allowed.clamp(min=1e-12)


def _labels(target: Decoder, sample: TeacherSample, predicted: list[int]) -> LosslessCheck:
    """Every label against the argmax after its own prefix: a difference does not end the comparison."""
    text, start = sample.tokens.tolist(), sample.prompt_length
    pairs = enumerate(zip(predicted, text[start:], strict=True), start)
    checks = (compare_token(target, text[:at], value, label, sample.offset) for at, (value, label) in pairs)
    return sum(checks, LosslessCheck())


@torch.inference_mode()
def later_slots(target: Decoder, prompts: Prompts, block: int) -> CheckResult:
    """Slot 0 of a block must not see the slots behind it, on any attention path: over a cache before and
    after the window ring has wrapped, in a batch of different lengths, and without a cache."""
    name = "slot 0 does not change when later slots do"
    text = [token for prompt in prompts for token in prompt]
    window = target.config.sliding_window if any(_windows(target)) else 0
    long = 2 * (window + block) + 1
    if len(text) < long + block or len(text) < 3 * block:
        return CheckResult(
            name, None, message=f"not run: it needs prompts of {long + block} tokens in all, past the window"
        )
    paths: dict[str, list[list[int]]] = {"cache, window wrapped" if window else "cache": [text[:long]]}
    if window > 2:
        paths["cache, before the window"] = [text[: max(1, window - 2)]]
    paths["cache, rows of different lengths"] = [text[:long], text[: block + 1]]
    with in_float32(target):
        values = {path: _cached_difference(target, rows, block) for path, rows in paths.items()}
        values["no cache"] = _uncached_difference(target, text[: long + block], block)
    figures: dict[str, Any] = {}
    passed = True
    for path, (difference, largest, layer) in values.items():
        ok = difference <= CAUSAL * max(1.0, largest)
        passed = passed and ok
        figures[path] = {"max_difference": difference, "bit_equal": difference == 0}
        if not ok:
            kind = "window" if _windows(target)[layer] else "dense"
            figures[path]["first_wrong_layer"] = f"{layer} ({kind})"
    description = "; ".join(
        f"{path}: {'bit-equal' if f['bit_equal'] else format(f['max_difference'], '.1e')}"
        + (f" from layer {f['first_wrong_layer']} on" if "first_wrong_layer" in f else "")
        for path, f in figures.items()
    )
    return CheckResult(name, passed, figures, description)


def _windows(target: Decoder) -> list[bool]:
    return [kind != FULL for kind in target.config.layer_types]


def _variants(target: Decoder, last: list[int], block: int) -> tuple[Tensor, Tensor]:
    """Two blocks [B, block] that share position 0 alone."""
    rng = torch.Generator().manual_seed(5)
    vocab = target.config.vocab_size
    first = torch.tensor(last)[:, None]
    one = torch.randint(vocab, (len(last), block - 1), generator=rng)
    other = (one + torch.randint(1, vocab, one.shape, generator=rng)) % vocab
    return torch.cat((first, one), 1).to(target.device), torch.cat((first, other), 1).to(target.device)


def _cached_difference(target: Decoder, rows: list[list[int]], block: int) -> tuple[float, float, int]:
    """-> max |logit difference| at slot 0, the largest logit, the first layer where the output changed."""
    cache = _prefilled(target, [row[:-1] for row in rows], block, block)
    lengths = list(cache.lengths)
    layers = range(target.config.num_layers)
    outs = []
    for tokens in _variants(target, [row[-1] for row in rows], block):
        outs.append(target(tokens, cache, aux=layers))
        cache.rewind(lengths)
    return _difference(target, outs, 0)


def _uncached_difference(target: Decoder, text: list[int], block: int) -> tuple[float, float, int]:
    past = torch.tensor([text[:-block]], device=target.device)
    texts = (torch.cat((past, tokens), dim=1) for tokens in _variants(target, [text[-block]], block))
    layers = range(target.config.num_layers)
    return _difference(target, [target(tokens, aux=layers) for tokens in texts], past.shape[1])


def _difference(target: Decoder, outs: list[Output], slot: int) -> tuple[float, float, int]:
    a, b = (target.logits(out.hidden[:, slot].contiguous()) for out in outs)
    aux_a, aux_b = (out.aux[:, :, slot] for out in outs if out.aux is not None)
    by_layer = (aux_a - aux_b).abs().amax((1, 2)) / aux_a.abs().amax((1, 2)).clamp(min=1.0)
    wrong = (by_layer > CAUSAL).nonzero().flatten().tolist()
    return float((a - b).abs().max()), float(a.abs().max()), wrong[0] if wrong else len(by_layer) - 1


def _prefilled(target: Decoder, rows: list[list[int]], block: int, headroom: int) -> KVCache:
    """A cache that holds the rows and `room` more, filled in chunks so that a ring wraps as in decoding."""
    longest = max(len(row) for row in rows)
    cache = target.make_cache(len(rows), longest + headroom, slack=block)
    for begin in range(0, longest, block):
        counts = [min(max(len(row) - begin, 0), block) for row in rows]
        part = [
            [*row[begin : begin + c], *[0] * (max(counts) - c)] for row, c in zip(rows, counts, strict=True)
        ]
        target(torch.tensor(part, device=target.device), cache, counts=counts)
    return cache


@torch.inference_mode()
def one_token(target: Decoder, prompts: Prompts, block: int, positions: int) -> CheckResult:
    """At every position of a text: one token decoded alone, and the same token as slot 0 of a block."""
    name = "one-token decode equals slot 0 of a block"
    total, equal, worst = LosslessCheck(), 0, 0.0
    for prompt, share in _shares(prompts, positions, block):
        text = list(prompt)
        begin = len(text) - block - share
        cache = _prefilled(target, [text[:begin]], block, share + block)
        for at in range(begin, begin + share):
            alone = _slot_0(target, cache, text[at : at + 1])
            cache.rewind([at])
            beside = _slot_0(target, cache, text[at : at + block])
            cache.commit([[0]])
            equal += bool(torch.equal(alone, beside))
            worst = max(worst, float((alone - beside).abs().max()))
            total += compare_token(target, text[: at + 1], int(alone.argmax()), int(beside.argmax()))
    if not total.checked:
        return CheckResult(name, None, message=f"not run: it needs prompts of more than {2 * block} tokens")
    figures = {**asdict(total), "bit_equal": equal, "max_difference": worst}
    description = (
        f"{total.violations} of {total.checked} argmaxes differ, {total.ties} ties; {equal} bit-equal, "
        f"largest difference {worst:.1e}"
    )
    return CheckResult(name, total.violations == 0, figures, description)


def _slot_0(target: Decoder, cache: KVCache, tokens: list[int]) -> Tensor:
    """Logits [V] after the first of `tokens`."""
    return target.logits(target(torch.tensor([tokens], device=target.device), cache).hidden[0, 0])


def _shares(prompts: Prompts, positions: int, block: int) -> Iterator[tuple[Sequence[int], int]]:
    """Positions to walk in each prompt, at its end."""
    able = [p for p in prompts if len(p) > 2 * block]
    for n, prompt in enumerate(able):
        share = positions // len(able) + (n < positions % len(able))
        yield prompt, min(share, len(prompt) - 2 * block)


@dataclass(frozen=True)
class OracleDraft:
    """A draft that knows the answers: `texts` are prompts with what autoregressive decoding stated after
    them."""

    texts: list[list[int]]
    block_size: int
    target_layer_ids: tuple[int, ...] = ()

    def begin(self, batch: int, length: int, offset: int = 0, slack: int = 0) -> "OracleSession":
        return OracleSession(self.texts, self.block_size, [0] * batch)


@dataclass
class OracleSession:
    texts: list[list[int]]
    block_size: int
    seen: list[int]  # verified tokens per row, the last one (the next block's anchor) not among them

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        for b, count in enumerate(counts):
            self.seen[b] += count

    def propose(self, last: Tensor, width: int, choice: DraftSampler) -> Proposal:
        N = width
        rows = [t[n + 1 : n + N] for t, n in zip(self.texts, self.seen, strict=True)]
        counts = [1 + len(row) for row in rows]
        padded = [
            [anchor, *row, *[0] * (N - 1 - len(row))] for anchor, row in zip(last.tolist(), rows, strict=True)
        ]
        return Proposal(torch.tensor(padded, device=last.device), counts)

    def rewind(self, lengths: list[int]) -> None:
        self.seen = list(lengths)

    def select(self, batch_indices: list[int]) -> None:
        self.texts = [self.texts[b] for b in batch_indices]
        self.seen = [self.seen[b] for b in batch_indices]


def oracle_labels(target: Decoder, prompts: Prompts, block: int, new_tokens: int) -> CheckResult:
    """Autoregressive decoding's own tokens as drafts: every step must accept all block - 1 of them, in a
    batch and alone. A row that leaves the answer at a tie is counted, and compared up to there."""
    answers = generate(target, prompts, Request(max_new_tokens=new_tokens + 2 * block)).tokens
    texts = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
    total, short, rounds = LosslessCheck(), 0, 0
    for rows in [list(range(len(texts))), [0]] if len(texts) > 1 else [[0]]:
        gold = OracleDraft([texts[i] for i in rows], block)
        out = generate(target, [prompts[i] for i in rows], Request(max_new_tokens=new_tokens), gold)
        for b, i in enumerate(rows):
            check = compare(target, prompts[i], out.tokens[b], answers[i][:new_tokens])
            total += check
            lens = [row[b] for row in out.trace.accepted if row[b] >= 0]
            if check.ties:  # the step that holds the tie cannot accept all, nor can any after it
                lens = lens[: max(0, (check.checked - 2) // block)]
            rounds += len(lens)
            short += sum(n != block - 1 for n in lens)
    figures = {"rounds": rounds, "rounds_not_all_accepted": short, **asdict(total)}
    message = (
        f"{rounds - short} of {rounds} rounds accept all {block - 1}; "
        f"{total.violations} of {total.checked} tokens differ, {total.ties} ties"
    )
    passed = short == 0 and total.violations == 0 and rounds > 0
    return CheckResult("gold labels as drafts are all accepted", passed, figures, message)


def position_offsets(
    target: Decoder,
    draft: Draft | None,
    prompts: Prompts,
    offsets: Sequence[int],
    new_tokens: int,
    limit: float,
) -> CheckResult:
    """Decode the same prompts as if they began at each offset. An offset at which the model's positions
    would run out is replaced by the last one that fits."""
    name = "acceptance does not move with the position"
    if draft is None:
        return CheckResult(name, None, message="not run: no draft was given")
    last = target.config.max_position_embeddings - max(len(p) for p in prompts) - new_tokens
    used = sorted({min(offset, last) for offset in offsets} | {0})
    if last < 0 or len(used) < 2:
        return CheckResult(
            name, None, message="not run: the model's positions leave no room for another offset"
        )
    tau = {}
    for offset in used:
        request = Request(max_new_tokens=new_tokens, offset=offset)
        tau[offset] = generate(target, prompts, request, draft).trace.tau
    change = {offset: tau[offset] / tau[0] - 1 for offset in used}
    worst = max((abs(c) for c in change.values()), default=0.0)
    moved = [offset for offset in offsets if offset > last]
    figures = {
        "tau": {str(o): round(t, 4) for o, t in tau.items()},
        "relative_change": {str(o): round(c, 4) for o, c in change.items()},
        "limit": limit,
        "moved": {str(o): last for o in moved},
    }
    text = ", ".join(f"tau {tau[o]:.3f} at {o:,} ({change[o]:+.1%})" for o in used)
    if moved:
        text += f"; {', '.join(f'{o:,}' for o in moved)} became {last:,}, the last offset where the text fits"
    return CheckResult(name, worst <= limit, figures, text)


OFFSETS = (0, 4096, 65536, 131072)


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    samples: int = 8  # of the teacher cache, drawn at random
    positions: int = 48  # one-token decode against slot 0
    new_tokens: int = 128  # decoded per prompt where a gate decodes
    block_size: int = 8  # where there is no draft to take it from
    offsets: tuple[int, ...] = OFFSETS
    offset_limit: float = 0.03  # largest relative change of tau


def run_checks(
    target: Decoder,
    draft: DFlash | Draft | None,
    cache: TeacherCache | None,
    prompts: Prompts,
    settings: CheckSettings | None = None,
    *,
    on_gate: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """All five, in order; `on_gate` hears of each as it ends. `prompts`: held-out text, a few of them.

    Raises ValueError for prompts the model cannot take.
    """
    s = settings or CheckSettings()
    block = draft.block_size if draft is not None else s.block_size
    bound = draft.bind(target) if isinstance(draft, DFlash) else draft
    steps: tuple[Callable[[], CheckResult], ...] = (
        lambda: cached_targets(target, cache, block, s.samples),
        lambda: later_slots(target, prompts, block),
        lambda: one_token(target, prompts, block, s.positions),
        lambda: oracle_labels(target, prompts, block, s.new_tokens),
        lambda: position_offsets(target, bound, prompts, s.offsets, s.new_tokens, s.offset_limit),
    )
    gates = []
    for step in steps:
        gates.append(step())
        if on_gate is not None:
            on_gate(gates[-1])
    return gates


def failed(gates: Sequence[CheckResult]) -> list[CheckResult]:
    return [g for g in gates if g.passed is False]
