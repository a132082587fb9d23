"""Losses of a draft's rows over a large vocabulary, in chunks; and how the rows of a block are weighed.

    rows = block_losses("lk", states, head, labels, target_states, target_head)
    weights = block_weights("dpace", rows, valid)
    loss = (weights * rows.loss.view(valid.shape)).sum() / weights.sum()

p is the target's distribution, softmax(target_states @ target_head^T), q the draft's, softmax(states @
head^T), alpha = sum_v min(p_v, q_v) the chance that a token drawn from q is accepted (1 - TV). Per row:

    ce    -log q(label)
    kl    sum_v p_v log(p_v / q_v)
    tv    1 - alpha                                                 arXiv 2602.23881 (LK losses), and ..
    nla   -log alpha                                                .. its L_alpha
    lk    w kl + (1 - w) tv, w = exp(-ETA alpha), no gradient through w       .. its L_lambda

A draft that knows only some tokens is given those rows of both heads: p is then the target's restricted to
them and renormalised. Labels are rows of `head`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from outpace.ops import candidates

CHUNK_LOGITS = 2**20  # a chunk of float32 logits of this many entries stays in cache
DEVICE_LOGITS = 2**26  # on a GPU, where launches cost more than memory
LEAST_ROWS = 128  # of a chunk: fewer, and reading the head costs more than the product
LOSSES = ("ce", "kl", "tv", "nla", "lk")
WEIGHTS = ("dpace", "dpace-soft", "decay", "auf", "flat")
ETA = 3.0  # of lk: where alpha is near 0 it is KL, at alpha 1 nearly TV
LEAST_ALPHA = 1e-30  # under it the logarithm, and the gradient of nla, are still


@dataclass(frozen=True)
class LossRows:
    """Losses of the rows of a forward; only `loss`, or `total` of weighted rows, has a gradient."""

    loss: Tensor  # float32
    nll: Tensor  # float32: -log q(label); 0 without a label
    hits: Tensor  # bool: no logit of the row exceeds the label's
    accept: Tensor | None  # float32: alpha; None without target_states
    top: Tensor | None = None  # int64 [n, k]: rows of `head` with the largest logits, descending
    total: Tensor | None = None  # scalar: the sum of weighted losses


def block_losses(
    kind: str,
    states: Tensor,
    head: Tensor,
    labels: Tensor,
    target_states: Tensor | None = None,
    target_head: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    of: Tensor | None = None,
    chunk: int | None = None,
    top: int = 0,
) -> LossRows:
    """states [n, C], head [V, C], labels [m] int64 (-1: none), target_states [m, C'], target_head [V, C'] ->
    LossRows of [n]. `kind` is one of LOSSES, or a sum of them: "0.1*ce+0.9*tv". Row i belongs to label and
    target i, or of[i] where `of` [n] int64, ascending, is given: rows that share a target share the work.
    `weights` [n], if they are known beforehand: `total` then is sum_i weights[i] * loss[i] with a gradient,
    instead of `loss`; a trained head costs a third less, as all gradients are formed in one pass. `top`: how
    many of each row's largest logits are named.

    Row t of a teacher's final states predicts token t + 1: for the label at position t, give row t - 1.
    Products in the states' dtype, softmax and losses in float32; logits exist for `chunk` rows at a time.
    Gradients reach `states`, and `head` if it requires one. Raises ValueError for an unknown kind, and for
    one that needs target_states where there are none.
    """
    mix = parse_loss(kind)
    if target_states is None and set(mix) - {"ce"}:
        raise ValueError(f"loss {kind!r} compares with the target's distribution: give its final states")
    assert (target_states is None) == (target_head is None)
    most = CHUNK_LOGITS if states.device.type == "cpu" else DEVICE_LOGITS
    chunk = chunk or max(LEAST_ROWS, most // len(head))
    tensors = (states, head, labels, target_states, target_head, of)
    if not torch.is_grad_enabled():  # a Function's forward cannot see that
        tensors = tuple(None if x is None else x.detach() for x in tensors)  # type: ignore[assignment]
    total, loss, nll, hits, accept, best = _Chunked.apply(*tensors, weights, mix, chunk, top)  # type: ignore[no-untyped-call]
    return LossRows(loss, nll, hits, accept, best, total)


@cache
def parse_loss(kind: str) -> dict[str, float]:
    """A sum such as 0.1*ce+0.9*tv -> {"ce": 0.1, "tv": 0.9}. Raises ValueError for what is none."""
    mix: dict[str, float] = {}
    for term in kind.split("+"):
        share, star, name = term.strip().rpartition("*")
        try:
            weight = float(share) if star else 1.0
        except ValueError:
            weight = -1.0
        if name.strip() not in LOSSES or not 0 < weight < float("inf") or name.strip() in mix:
            raise ValueError(
                f"loss {kind!r}: give one of {', '.join(LOSSES)}, or a sum such as 0.1*ce+0.9*tv, each once "
                "and by a positive factor"
            )
        mix[name.strip()] = weight
    return mix


def needs_target(kind: str) -> bool:
    """Whether the loss compares with the target's distribution, and so needs its final states."""
    return set(parse_loss(kind)) != {"ce"}


def reference_losses(
    kind: str,
    states: Tensor,
    head: Tensor,
    labels: Tensor,
    target_states: Tensor | None = None,
    target_head: Tensor | None = None,
    of: Tensor | None = None,
) -> LossRows:
    """`block_losses` by its definitions, all logits at once."""
    if of is not None:
        labels, target_states = labels[of], None if target_states is None else target_states[of]
    z = (states @ head.to(states.dtype).T).float()
    known, at = labels >= 0, labels.clamp(min=0)
    value = z.gather(-1, at[..., None])[..., 0]
    nll = -z.log_softmax(-1).gather(-1, at[..., None])[..., 0] * known
    hits = (value == z.amax(-1)) & known
    losses = {"ce": nll}
    accept = None
    if target_states is not None and target_head is not None:
        log_p = (target_states @ target_head.to(target_states.dtype).T).float().log_softmax(-1)
        log_q = z.log_softmax(-1)
        accept = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        w = torch.exp(-ETA * accept.detach())
        losses |= {"kl": kl, "tv": 1 - accept, "nla": -accept.clamp(min=LEAST_ALPHA).log()}
        losses["lk"] = w * kl + (1 - w) * (1 - accept)
    loss = sum((share * losses[name] for name, share in parse_loss(kind).items()), torch.zeros(()))
    return LossRows(loss, nll.detach(), hits, None if accept is None else accept.detach())


def chunked_nll(hidden: Tensor, head: Tensor, labels: Tensor, chunk: int | None = None) -> Tensor:
    """hidden [n, C], head [V, C], labels [n] -> negative log-likelihood per row [n], float32."""
    return block_losses("ce", hidden, head, labels, chunk=chunk).loss


class _Chunked(torch.autograd.Function):
    """A row's gradient d @ head (d: of its logits) is linear in the row's weight, so with a frozen head it is
    formed in the forward and only scaled in the backward. The gradient of a head that learns mixes the rows:
    it is formed in the forward where the weights are known, else it costs the logits once more."""

    @staticmethod
    def forward(ctx, states, head, labels, target_states, target_head, of, weights, mix, chunk, top):  # type: ignore[no-untyped-def]
        theirs = None if target_head is None else target_head.to(target_states.dtype)
        rows = _SumRows(states, head.to(states.dtype), labels, target_states, theirs, of, mix, chunk)
        loss = torch.empty(len(states), dtype=torch.float32, device=states.device)
        nll, hits = torch.empty_like(loss), torch.empty_like(loss, dtype=torch.bool)
        accept = None if target_states is None else torch.empty_like(loss)
        best = labels.new_empty(len(states), min(top, len(head))) if top else None
        by_row, learns = ctx.needs_input_grad[:2]
        at_once = (by_row or learns) and (weights is not None or not learns)
        d_states = torch.empty_like(states) if at_once else None
        d_head = torch.zeros_like(head, dtype=torch.float32) if at_once and learns else None
        for part in rows.parts():
            result = rows.chunk(part, best)
            loss[part], nll[part], hits[part] = result.loss, result.nll, result.hits
            if accept is not None and result.accept is not None:
                accept[part] = result.accept
            if d_states is not None:
                rows.back(result, part, None if weights is None else weights[part], d_states, d_head)
        total = None if weights is None else (weights * loss).sum()
        ctx.rows, ctx.weighted = rows, weights is not None
        ctx.save_for_backward(d_states, d_head)
        fixed = (nll, hits, accept, best, None if weights is None else loss)
        ctx.mark_non_differentiable(*(x for x in fixed if x is not None))
        return total, loss, nll, hits, accept, best

    @staticmethod
    def backward(ctx, total, loss, *_):  # type: ignore[no-untyped-def]
        d_states, d_head = ctx.saved_tensors
        if ctx.weighted:
            d_head = None if d_head is None else d_head * total
            return d_states * total.to(d_states.dtype), d_head, *[None] * 8
        if d_states is not None:
            return d_states * loss[:, None].to(d_states.dtype), None, *[None] * 8
        rows = ctx.rows
        d_states = torch.empty_like(rows.states)
        d_head = torch.zeros_like(rows.head, dtype=torch.float32)
        for part in rows.parts():
            rows.back(rows.chunk(part), part, loss[part], d_states, d_head)
        return d_states, d_head, *[None] * 8


@dataclass(frozen=True)
class _SumRows:
    """The inputs of `_Chunked`, heads in the dtype of their states, and its work on one chunk of rows."""

    states: Tensor
    head: Tensor
    labels: Tensor
    target_states: Tensor | None
    target_head: Tensor | None
    of: Tensor | None
    mix: dict[str, float]
    size: int  # rows of a chunk

    def parts(self) -> Iterator[slice]:
        return (slice(i, i + self.size) for i in range(0, len(self.states), self.size))

    def chunk(self, part: slice, best: Tensor | None = None) -> "_Chunk":
        """`best` [n, k]: where the k most probable of these rows are written."""
        z = (self.states[part] @ self.head.T).float()
        if best is not None:
            best[part] = candidates.top_k(z, best.shape[1])[0]
        labels = self.labels[part] if self.of is None else self.labels[self.of[part]]
        if self.target_states is None or self.target_head is None:
            return _of_logits(z, None, None, labels, self.mix)
        targets, index = part, None
        if self.of is not None:
            index = self.of[part]
            targets = slice(int(index[0]), int(index[-1]) + 1)
            index = index - targets.start
        target_z = (self.target_states[targets] @ self.target_head.T).float()
        p = target_z.softmax(-1)
        top, most = target_z.amax(-1), p.amax(-1)
        entropy = top - most.log() - (p * target_z).sum(-1)
        if index is not None:
            p, entropy = p[index], entropy[index]
        return _of_logits(z, p, entropy, labels, self.mix)

    def back(
        self, result: "_Chunk", part: slice, weights: Tensor | None, d_states: Tensor, d_head: Tensor | None
    ) -> None:
        """The chunk's gradients, by rows of `weights`: into d_states, and added to d_head."""
        d = result.gradient(weights).to(self.states.dtype)
        torch.mm(d, self.head, out=d_states[part])
        if d_head is not None:
            d_head += d.T @ self.states[part]


@dataclass(frozen=True)
class _Chunk:
    """Losses of [m] rows, and what their gradients are made of: with s = sum_v q_v [q_v < p_v] the gradient
    of alpha by the logits is q ([q < p] - s), those of ce and kl are q - onehot and q - p."""

    loss: Tensor
    nll: Tensor
    hits: Tensor
    accept: Tensor | None
    q: Tensor  # [m, V]
    p: Tensor | None  # [m, V]
    at: Tensor  # [m, 1]: the labels
    ce: Tensor  # [m, 1]: what each row's loss holds of -log q(label),
    kl: Tensor | float  # of kl,
    tv: Tensor | float  # and of -alpha

    def gradient(self, weights: Tensor | None) -> Tensor:
        """[m, V], of weights * loss by the logits; q is used up."""
        coefficient = self.ce + self.kl
        if isinstance(self.tv, Tensor) and self.p is not None:
            # 1.0 and 0.0: a where(), or a product with bools, takes longer than all else here
            below = torch.lt(self.q, self.p, out=torch.empty_like(self.q))
            s = (self.q * below).sum(-1, keepdim=True)
            coefficient = below.mul_(-self.tv).add_(coefficient + self.tv * s)
        d = self.q.mul_(coefficient)
        if isinstance(self.kl, Tensor) and self.p is not None:
            d.addcmul_(self.p, -self.kl)
        d.scatter_add_(-1, self.at, -self.ce)
        return d if weights is None else d.mul_(weights[:, None])


def _of_logits(
    z: Tensor, p: Tensor | None, entropy: Tensor | None, labels: Tensor, mix: dict[str, float]
) -> _Chunk:
    """z [m, V] logits of the draft, p [m, V] and its entropy [m] of the target, labels [m]."""
    known = labels >= 0
    at = labels.clamp(min=0)[:, None]
    top, value = z.amax(-1), z.gather(-1, at)[:, 0]
    q = z.softmax(-1)  # one fused pass, where logsumexp and exp would be five
    lse = top - q.amax(-1).log()
    nll, hits = (lse - value) * known, (value == top) & known
    ce = mix.get("ce", 0.0) * known.float()
    loss = mix.get("ce", 0.0) * nll
    if p is None or entropy is None:
        return _Chunk(loss, nll, hits, None, q, None, at, ce[:, None], 0.0, 0.0)
    accept = torch.minimum(p, q).sum(-1)
    if not set(mix) - {"ce"}:
        return _Chunk(loss, nll, hits, accept, q, p, at, ce[:, None], 0.0, 0.0)
    w = torch.exp(-ETA * accept) if "lk" in mix else torch.zeros_like(accept)
    kl = mix.get("kl", 0.0) + mix.get("lk", 0.0) * w
    tv = mix.get("tv", 0.0) + mix.get("lk", 0.0) * (1 - w)
    safe = accept.clamp(min=LEAST_ALPHA)
    loss = loss + tv * (1 - accept) - mix.get("nla", 0.0) * safe.log()
    if "kl" in mix or "lk" in mix:
        loss = loss + kl * (lse - (p * z).sum(-1) - entropy)
    tv = tv + mix.get("nla", 0.0) / safe
    return _Chunk(loss, nll, hits, accept, q, p, at, ce[:, None], kl[:, None], tv[:, None])


def top_tokens(states: Tensor, head: Tensor, chunk: int | None = None) -> Tensor:
    """states [n, C], head [V, C] -> [n] int64, the first choice of each row, logits in chunks."""
    size = chunk or max(LEAST_ROWS, CHUNK_LOGITS // len(head))
    head = head.to(states.dtype)
    items = [(states[i : i + size] @ head.T).argmax(-1) for i in range(0, len(states), size)]
    return torch.cat(items) if items else torch.empty(0, dtype=torch.int64, device=states.device)


def block_weights(
    kind: str, rows: LossRows, valid: Tensor, *, alpha: float = 0.5, gamma: float = 4.0
) -> Tensor:
    """rows of the blocks' positions, valid [A, n] bool -> weights [A, n] float32, 0 where not valid, without
    gradient. `kind` is one of WEIGHTS; `alpha` smooths D-PACE, `gamma` is the decay's. Raises ValueError
    for an unknown kind, and for dpace-soft without the target's states."""
    match kind:
        case "dpace":
            return dpace_weights(rows.nll.view(valid.shape), valid, alpha)
        case "dpace-soft":
            if rows.accept is None:
                raise ValueError("weights dpace-soft are made of alpha: give the target's final states")
            return dpace_weights(-rows.accept.view(valid.shape).log(), valid, alpha)
        case "decay":
            return decay_weights(valid, gamma)
        case "auf":
            return auf_weights(rows.hits.view(valid.shape), valid)
        case "flat":
            return valid.float()
    raise ValueError(f"weights {kind!r}: known are {', '.join(WEIGHTS)}")


def default_gamma(block_size: int) -> float:
    """7, 5 and 4 for blocks of 16, 10 and 8 (DFlash, section 4.3); straight lines between and beyond."""
    if block_size >= 10:
        return 5 + (block_size - 10) / 3
    return max(1.0, 4 + (block_size - 8) / 2)


def decay_weights(valid: Tensor, gamma: float) -> Tensor:
    """valid [A, n] bool -> exp(-(k-1)/gamma) for k = 1..n, 0 where not valid, float32."""
    k = torch.arange(valid.shape[1], device=valid.device)
    return torch.exp(-k / gamma) * valid


def dpace_weights(nll: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): nll and valid [A, n] -> w_j = sum_{m >= j} P_m, P_m = prod_{i <= m} a~_i,
    a~ = (1 - alpha) exp(-nll) + alpha. What is not valid counts as 1 in the product and is left out of
    the sum. No gradient flows through a weight."""
    smoothed = (1 - alpha) * (-nll.detach()).exp() + alpha
    prefix = smoothed.masked_fill(~valid, 1.0).cumprod(1) * valid
    return prefix.flip(1).cumsum(1).flip(1) * valid


def auf_weights(hits: Tensor, valid: Tensor) -> Tensor:
    """Spec-AUF (arXiv 2607.01893): hits and valid [A, n] bool -> 1 up to and including the draft's first
    failure, 0 behind it and where not valid, float32. What is not valid fails nobody."""
    before = (hits | ~valid).long().cumprod(1).roll(1, dims=1)
    before[:, 0] = 1
    return (before.bool() & valid).float()


BINS = 15
GRID = tuple(2 ** (i / 8) for i in range(-16, 17))  # 1/4 .. 4


def expected_error(value: Tensor, was: Tensor) -> float:
    """The expected calibration error of predicted probabilities [S] against outcomes [S] bool: over bins of
    equal width, how far the mean chance lies from the share that came true, weighed by how many fall
    there."""
    at = (value * BINS).long().clamp(0, BINS - 1)
    gap = torch.zeros(BINS).index_add_(0, at, value.float() - was.float())
    return (gap.abs().sum() / max(1, len(value))).item()


def fit_temperatures(sure: Tensor, hits: Tensor, valid: Tensor) -> tuple[float, ...]:
    """sure [S, n], the chance of each place by itself; hits [S, n], whether it was right; valid [S, n] ->
    what to divide the log-odds of each place by, so that the product up to it is the chance that all of them
    are right. Left to right: each temperature is the one of GRID with the least expected error of that
    product, those before it being fixed; among equals the nearest to 1."""
    odds = torch.logit(sure.float(), eps=1e-6)
    all_right = hits.long().cumprod(1).bool()
    chance, items = torch.ones(len(sure)), []
    for k in range(sure.shape[1]):
        counted = valid[:, k]
        errors = []
        for t in GRID:
            value = chance * torch.sigmoid(odds[:, k] / t)
            errors.append((expected_error(value[counted], all_right[counted, k]), abs(t - 1), t))
        items.append(min(errors)[2])
        chance = chance * torch.sigmoid(odds[:, k] / items[-1])
    return tuple(items)
