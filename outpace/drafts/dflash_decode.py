"""From a block's hidden states to draft tokens: each by itself, or each after the one before it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outpace.drafts.dflash_heads import ConfidenceHead, MarkovHead, Selector
from outpace.drafts.quantize import pack, packs
from outpace.drafts.sampler import DraftSampler, Greedy, GumbelCoupled, RowSamplers, Sampled
from outpace.models.decoder import Decoder
from outpace.ops.candidates import all_pairs, by_kernel, coupled_walk, share, top_k, walk
from outpace.ops.linear import linear
from outpace.ops.quant import Joined, Weight
from outpace.ops.quant import rows as rows_of
from outpace.ops.sampling import shaped


@dataclass(frozen=True)
class Head:
    """What the draft can say. weight [N, C], rows of the target's head; ids [N] int64, the target's token of
    each, ascending; None: all of its vocabulary."""

    weight: Weight
    ids: Tensor | None
    vocab_size: int  # the target's
    rounded: bool = False  # as the draft, see `NativeDraft.use_activation_dtype`

    @staticmethod
    def of(target: Decoder, d2t: Tensor | None, packed: bool = False, rounded: bool = False) -> "Head":
        """d2t [N]: offsets, row i means the token i + d2t[i]. `packed`: rows of the draft's own are
        kept in 8-bit blocks."""
        weight, V = target.head, target.config.vocab_size
        if d2t is None:
            return Head(weight, None, V, rounded)
        assert not isinstance(weight, Joined), "a head is one matrix"
        ids = (d2t + torch.arange(len(d2t), device=d2t.device)).to(target.device)
        rows = weight[ids]
        return Head(pack(rows) if packed and packs(rows) else rows, ids, V, rounded)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., C] -> [..., N]."""
        return linear(hidden, self.weight, None, self.rounded)

    def tokens(self, rows: Tensor) -> Tensor:
        """Rows of this head -> the target's tokens."""
        return rows if self.ids is None else self.ids[rows]

    def rows(self, tokens: Tensor) -> Tensor:
        """The target's tokens -> rows of this head; some row for a token it does not have."""
        if self.ids is None:
            return tokens
        return torch.searchsorted(self.ids, tokens).clamp_(max=len(self.ids) - 1)

    def spread(self, logits: Tensor) -> Tensor:
        """[..., N] -> over the target's vocabulary [..., V], -inf outside the draft's."""
        if self.ids is None:
            return logits
        return spread(self.ids.expand(logits.shape), logits, self.vocab_size)


@dataclass(frozen=True)
class BigramBias:
    """What one draft token adds to the logits of the next: a selector's products, or a Markov head's bias."""

    head: Head
    selector: Selector | None
    markov: MarkovHead | None
    hidden: Tensor  # [B, n, C] of the n places

    def __call__(self, previous: Tensor, ids: Tensor) -> Tensor:
        """previous [B, n, a], ids [B, n, k], tokens at the places before and at these -> [B, n, a, k]
        float32; ids that the draft has no word for have some number."""
        if self.selector is not None:
            left = self.selector.predecessor_codebook[previous].float()
            left = left * self.selector.hidden_projection(self.hidden).float()[:, :, None]
            right = self.selector.successor_codebook[ids]
        else:
            assert self.markov is not None
            left = self.markov.embed(previous, self.hidden[:, :, None].expand(-1, -1, previous.shape[2], -1))
            right = rows_of(self.markov.markov_w2.weight, self.head.rows(ids), torch.float32)
        return left.float() @ right.float().transpose(-1, -2)


def spread(ids: Tensor, values: Tensor, vocab_size: int) -> Tensor:
    """ids and values [..., k] -> [..., V], -inf at the others."""
    empty = values.new_full((*values.shape[:-1], vocab_size), -torch.inf)
    return empty.scatter_(-1, ids, values)


@dataclass(frozen=True)
class DraftTokens:
    """tokens [B, n] int64; q [B, n, V] where they were drawn from it; sure [B, n] float32: how likely the
    draft's best token at that place is, the ones chosen before it given. It never looks at what was
    drawn at its own place: what is verified later may not decide how much is verified."""

    tokens: Tensor
    q: Tensor | None
    sure: Tensor


def guess(
    head: Head,
    selector: Selector | None,
    markov: MarkovHead | None,
    hidden: Tensor,
    last: Tensor,
    sampler: DraftSampler,
) -> DraftTokens:
    """hidden [B, n, C] of the n places after `last` [B]."""
    logits = head.logits(hidden)
    if not isinstance(sampler, RowSamplers):
        return _chosen(head, selector, markov, logits, hidden, last, sampler)
    rows = [
        _chosen(head, selector, markov, logits[b : b + 1], hidden[b : b + 1], last[b : b + 1], own)
        for b, own in enumerate(sampler.samplers)
    ]
    assert all(row.q is None for row in rows)
    return DraftTokens(torch.cat([row.tokens for row in rows]), None, torch.cat([row.sure for row in rows]))


def _chosen(
    head: Head,
    selector: Selector | None,
    markov: MarkovHead | None,
    logits: Tensor,
    hidden: Tensor,
    last: Tensor,
    sampler: DraftSampler,
) -> DraftTokens:
    if selector is not None:
        return _selected(head, selector, logits, hidden, last, sampler)
    if markov is not None:
        return _corrected(head, markov, logits, hidden, last, sampler)
    rows, values, lse = top_k(logits, 1)
    sure = (values[..., 0] - lse).exp()
    if isinstance(sampler, Greedy):
        return DraftTokens(head.tokens(rows[..., 0]), None, sure)
    tokens, q = sampler.tokens(head.spread(logits), 1)
    return DraftTokens(tokens, q, sure)


def _selected(
    head: Head, selector: Selector, logits: Tensor, hidden: Tensor, last: Tensor, sampler: DraftSampler
) -> DraftTokens:
    """DFlash 2's walk: at each place, one of the most probable few after the one chosen before. What would be
    drawn after every candidate is drawn at once, and the walk looks it up: one of them is used, so each
    place is drawn from the row of its own predecessor."""
    rows, values, lse = top_k(logits, selector.top_k)
    ids = head.tokens(rows)
    h = selector.hidden_projection(hidden)
    books = selector.predecessor_codebook, selector.successor_codebook
    if isinstance(sampler, Greedy):
        return DraftTokens(*_and_none(walk(last, ids, values, lse, h, *books)))
    if isinstance(sampler, GumbelCoupled) and sampler.sampling.is_softmax and by_kernel(h, ids, *books):
        keys = sampler.keys(ids.shape[1])
        walked = coupled_walk(last, ids, values, lse, h, books, keys, sampler.temperature)
        return DraftTokens(*_and_none(walked))
    previous = torch.cat((last[:, None, None].expand(-1, 1, ids.shape[-1]), ids[:, :-1]), dim=1)
    scores = all_pairs(previous, ids, values, h, *books)
    sure = share(scores.amax(-1), scores, values[:, :, None], lse[:, :, None])
    q = None
    if isinstance(sampler, Sampled):  # among the few alone: no other has a chance
        after, q = sampler.tokens(scores.flatten(1, 2), 1)
        after = after.view(scores.shape[:-1])
    else:
        assert isinstance(sampler, GumbelCoupled), "draft tokens are the most probable, drawn, or coupled"
        noise = sampler.noise(ids, head.vocab_size)
        after = (shaped(scores, sampler.sampling) + noise[:, :, None]).argmax(-1)
    before, places = _followed(after)
    sure = sure.gather(-1, before)[..., 0]
    if q is not None:
        q = q.view(scores.shape).take_along_dim(before[..., None], dim=2)[:, :, 0]
        q = q.new_zeros(*q.shape[:2], head.vocab_size).scatter_(-1, ids, q)
    return DraftTokens(ids.gather(-1, places)[..., 0], q, sure)


def _followed(after: Tensor) -> tuple[Tensor, Tensor]:
    """after [B, n, k] int64: which candidate of place t was drawn, had candidate a come before it. -> on the
    walk from candidate 0, what came before and what was drawn, [B, n, 1] each."""
    before, places = [], []
    at = torch.zeros_like(after[:, 0, :1])
    for t in range(after.shape[1]):
        before.append(at)
        at = after[:, t].gather(-1, at)
        places.append(at)
    return torch.stack(before, dim=1), torch.stack(places, dim=1)


def _corrected(
    head: Head, markov: MarkovHead, logits: Tensor, hidden: Tensor, last: Tensor, sampler: DraftSampler
) -> DraftTokens:
    """DSpark's walk: at each place, the predecessor's bias on all logits."""
    places = []
    for t in range(hidden.shape[1]):
        at = slice(t, t + 1)
        biased = logits[:, at] + markov.bias(last[:, None], hidden[:, at])
        rows, values, lse = top_k(biased, 1)
        q = None
        if isinstance(sampler, Greedy):
            tokens = head.tokens(rows[..., 0])
        else:
            tokens, q = sampler.tokens(head.spread(biased), t + 1)
        places.append((tokens, q, (values[..., 0] - lse).exp()))
        last = tokens[:, 0]
    return _joined(places)


def _and_none(items: tuple[Tensor, Tensor]) -> tuple[Tensor, None, Tensor]:
    return items[0], None, items[1]


def _joined(places: list[tuple[Tensor, Tensor | None, Tensor]]) -> DraftTokens:
    drawn = [q for _, q, _ in places if q is not None]
    q = torch.cat(drawn, dim=1) if drawn else None
    return DraftTokens(torch.cat([p[0] for p in places], dim=1), q, torch.cat([p[2] for p in places], dim=1))


def survival(sure: Tensor, temperatures: tuple[float, ...] = ()) -> Tensor:
    """The chance of each place by itself, sure [B, n], -> that it and all before it are accepted, behind a
    position of ones for the root [B, n + 1]. `temperatures` divide the log-odds, place by place (DSpark's
    sequential temperature scaling)."""
    if temperatures:
        scale = sure.new_tensor(temperatures[: sure.shape[1]])
        sure = torch.sigmoid(torch.logit(sure, eps=1e-6) / scale)
    return torch.nn.functional.pad(sure.cumprod(1), (1, 0), value=1.0)


def host_survival(sure: Sequence[float], temperatures: Sequence[float] = ()) -> list[float]:
    """`survival` of one row, the same float32 numbers, formed on the host."""
    result = [1.0]
    for i, chance in enumerate(sure):
        if temperatures:
            odds = 1 / min(max(chance, 1e-6), 1 - 1e-6) - 1
            chance = 1 / (1 + odds ** (1 / temperatures[i]))
        result.append(result[-1] * chance)
    rounded: list[float] = np.asarray(result, np.float32).tolist()
    return rounded


def confidence(
    head: ConfidenceHead,
    selector: Selector | None,
    markov: MarkovHead | None,
    hidden: Tensor,
    previous: Tensor,
) -> Tensor:
    """hidden [..., C], the predecessor of each place [...] -> w^T [h; e] [...], before the sigmoid."""
    if markov is not None:
        return head(hidden, markov.markov_w1[previous])
    return head(hidden, None if selector is None else selector.predecessor_codebook[previous])
