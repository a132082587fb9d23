"""Which remembered tokens a query looks at: a learned index scores them all, and few are read (DSA-lite).

    I[t, s] = sum_j w[t, j] max(q[t, j] . k[s], 0)          DeepSeek-V3.2's indexer

Letters: H heads and D dimensions of the index, one key k for a token, shared by its heads.
"""

import math
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.kernels import bindings
from outpace.kernels.bindings import use_kernel
from outpace.kv.tree import Tree

Lists = tuple[Tensor, Tensor]  # storage indices [B, T, N] int64, ascending, and how many count [B, T]
PIECE = 2**24  # scores that are in memory at once


@dataclass(frozen=True, kw_only=True)
class TopKConfig:
    """How many tokens a query looks at, itself included. Raises ValueError for what leaves no choice."""

    top_k: float = 2048  # number in all; below 1: share of what it could see
    top_p: float = 0.0  # fewer, where fewer hold this share of the index's softmax over the choice; 0: no
    least_mass: float = 0.0  # all, where what is chosen holds less of that softmax: the index knows no better
    min_context: int = 2048  # up to this length all of them
    sinks: int = 4  # the first ones, always ..
    recent: int = 64  # .. and the last ones

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or value != value:
                raise ValueError(f"sparse attention: {field.name} {value}: it must be at least 0")
        fixed = self.sinks + self.recent
        if self.recent < 1:
            raise ValueError("sparse attention: recent 0: a token sees itself, so it must be at least 1")
        for name in ("top_p", "least_mass"):
            if getattr(self, name) >= 1:
                raise ValueError(f"sparse attention: {name} {getattr(self, name)}: below 1, or 0 for none")
        if self.top_k >= 1 and (self.top_k != int(self.top_k) or self.top_k <= fixed):
            raise ValueError(
                f"sparse attention: top_k {self.top_k}: a whole number above sinks and recent, {fixed}, or a "
                "share below 1"
            )
        if not self.top_k:
            raise ValueError("sparse attention: top_k 0: a number of tokens, or a share of the context")

    @property
    def by_count(self) -> "TopKConfig":
        """The same by top_k alone."""
        return replace(self, top_p=0.0, least_mass=0.0)

    def most(self, length: int) -> int:
        """Tokens that a query sees which is the length-th of its text."""
        if length <= self.min_context:
            return length
        k = math.ceil(self.top_k * length) if self.top_k < 1 else int(self.top_k)
        return min(length, max(k, self.sinks + self.recent))

    def sees_all(self, length: int) -> bool:
        """Whether nothing is left out of texts of up to this length."""
        least = self.sinks + self.recent if self.top_p else self.most(length)
        return length <= max(least, self.min_context)

    def width(self, length: int) -> int:
        """The most of all queries up to the length-th."""
        return max(self.most(length), min(length, self.min_context))

    def wanted(self, lengths: Tensor) -> Tensor:
        """`most`, of int64 of any shape."""
        k = torch.ceil(self.top_k * lengths.double()).long() if self.top_k < 1 else int(self.top_k)
        k = torch.as_tensor(k, device=lengths.device).clamp(min=self.sinks + self.recent)
        return torch.where(lengths <= self.min_context, lengths, torch.minimum(k, lengths))


@dataclass(frozen=True)
class Index:
    """What a layer's indexer makes of T tokens: q [B,T,H,D], k [B,T,D], both rotated, w [B,T,H]."""

    q: Tensor
    k: Tensor
    w: Tensor


@dataclass(frozen=True)
class QueryPositions:
    """Where T new tokens are: after start [B] others, counts [B] of them real; a chain, or nodes of a tree.
    Both int64. `longest`: no row has more tokens with them."""

    start: Tensor
    counts: Tensor
    T: int
    tree: Tree | None
    longest: int

    def lengths(self) -> Tensor:
        """[B, T]: the index of its text each is."""
        depth = torch.arange(self.T, device=self.start.device) if self.tree is None else self.tree.depth
        return self.start[:, None] + depth + 1


def choose(index: Index, keys: Tensor, place: QueryPositions, keep: TopKConfig) -> Lists | None:
    """keys [B, S, D] of all tokens, the new ones included -> what each new one looks at: the first `sinks`,
    the last `recent`, its ancestors in a tree, and the best of the others by the index, the later of equals.
    None where nobody leaves anything out. Rows where the scores are not finite leave nothing out.
    """
    assert place.tree is None or not place.tree.held, "a tree of one forward"
    if keep.sees_all(place.longest):
        return None
    width = keep.width(place.longest)
    if place.tree is not None and place.tree.parents.shape[1] > keep.recent:
        deepest = int(place.tree.depth.max())
        if deepest >= keep.recent:
            raise ValueError(
                f"sparse attention: a tree of depth {deepest} needs as many recent tokens that are always "
                f"seen, and there are {keep.recent}: raise dsa_recent"
            )
    piece = max(1, PIECE // (place.longest * len(keys)))
    if place.tree is None and place.T > piece:
        return _in_pieces(index, keys, place, keep, piece)
    seen = int(min(place.longest, keys.shape[1]))
    scores = score(index, keys, place, seen)
    wanted = keep.wanted(place.lengths())
    if keep.top_p or keep.least_mass:
        wanted = _until(scores, place, keep, wanted)
        width = max(width, int(wanted.max()))
    lists, lengths = pick(scores, place, wanted, width, keep)
    if keys.device.type == "cpu" and bool((lengths < 0).any()):
        wanted = torch.where(lengths < 0, place.lengths(), wanted)
        lists, lengths = pick(scores, place, wanted, place.longest, keep)
    return lists, lengths


def score(index: Index, keys: Tensor, place: QueryPositions, seen: int) -> Tensor:
    """[B, T, seen] float32; undefined where a query does not look."""
    q, w = index.q.float().contiguous(), index.w.float().contiguous()
    if _kernel(q, keys):
        return bindings.index_scores(q, w, keys, place.start, seen, place.tree is None)
    return reference_scores(q, w, keys[:, :seen].float())


def pick(scores: Tensor, place: QueryPositions, wanted: Tensor, width: int, keep: TopKConfig) -> Lists:
    if not use_kernel(wanted):
        return reference_pick(scores, place, wanted, width, keep)
    tree = place.tree
    branches = (None, None) if tree is None else (tree.sees, tree.depth)
    counts, fixed = place.counts, (keep.sinks, keep.recent)
    return bindings.choose(scores, place.start, counts, wanted.contiguous(), width, *fixed, *branches)


def reference_scores(q: Tensor, w: Tensor, keys: Tensor) -> Tensor:
    """q [B,T,H,D], w [B,T,H], keys [B,S,D] -> [B,T,S]; knows its gradients."""
    return torch.einsum("bths,bth->bts", torch.einsum("bthd,bsd->bths", q, keys).relu(), w)


def reference_pick(
    scores: Tensor, place: QueryPositions, wanted: Tensor, width: int, keep: TopKConfig
) -> Lists:
    B, T, S = scores.shape
    past, rest = _ranges(place, keep, S)
    finite = (scores.isfinite() | ~rest).all(-1)
    wanted = torch.where(finite, wanted, place.lengths())
    take = wanted - (place.lengths() - rest.sum(-1))
    # of equals the latest: sorted backwards, and stable
    order = scores.masked_fill(~rest | ~finite[..., None], -torch.inf).flip(-1)
    rank = order.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1).flip(-1)
    seen = past & (~rest | (rank < take[..., None]))
    if place.tree is not None:
        at = place.start[:, None, None] + torch.arange(place.tree.sees.shape[2], device=scores.device)
        headroom = torch.zeros(B, T, place.longest, dtype=torch.bool, device=scores.device)
        headroom[..., :S] = seen
        ours = at.expand(B, T, -1).clamp(max=place.longest - 1)
        seen = headroom.scatter(2, ours, place.tree.sees | headroom.gather(2, ours))
    seen &= (torch.arange(T, device=scores.device) < place.counts[:, None])[..., None]
    lengths = seen.sum(-1)
    lists = (~seen).to(torch.uint8).argsort(dim=-1, stable=True)
    return lists[..., : max(width, int(lengths.max()))].contiguous(), lengths


def _ranges(place: QueryPositions, keep: TopKConfig, S: int) -> tuple[Tensor, Tensor]:
    """[B, T, S] bool: what a query could see before the tree, and what of it the index chooses among."""
    s, lengths = torch.arange(S, device=place.start.device), place.lengths()[..., None]
    past = (s < lengths) if place.tree is None else (s < place.start[:, None, None]).expand(-1, place.T, -1)
    return past, past & (s >= keep.sinks) & (s < lengths - keep.recent)


def _until(scores: Tensor, place: QueryPositions, keep: TopKConfig, wanted: Tensor) -> Tensor:
    """[B, T]: as many as hold top_p of the softmax over the choice, at most `wanted`; all, where these hold
    less than least_mass."""
    _, rest = _ranges(place, keep, scores.shape[-1])
    falling = scores.masked_fill(~rest, -torch.inf).sort(-1, descending=True).values.double()
    weight = (falling - falling[..., :1]).exp().nan_to_num(0.0)
    grown = weight.cumsum(-1)  # one after the other: the sums do not depend on how many zeros follow
    lengths = place.lengths()
    fixed, long = lengths - rest.sum(-1), lengths > keep.min_context
    if keep.top_p:
        take = (grown < keep.top_p * grown[..., -1:]).sum(-1) + 1
        wanted = torch.where(long, torch.minimum(wanted, fixed + take), wanted)
    if not keep.least_mass:
        return wanted
    last = (wanted - fixed - 1).clamp(0, scores.shape[-1] - 1)[..., None]
    held = grown.gather(-1, last) * (wanted > fixed)[..., None]
    poor = (held < keep.least_mass * grown[..., -1:])[..., 0] & rest.any(-1)
    return torch.where(long & poor, lengths, wanted)


def _in_pieces(index: Index, keys: Tensor, place: QueryPositions, keep: TopKConfig, piece: int) -> Lists:
    """A long chain, some queries at a time."""
    items = []
    width = keep.width(place.longest)
    for t in range(0, place.T, piece):
        part = Index(index.q[:, t : t + piece], index.k[:, t : t + piece], index.w[:, t : t + piece])
        n = part.q.shape[1]
        longest = place.longest - place.T + t + n
        here = QueryPositions(place.start + t, (place.counts - t).clamp(0, n), n, None, longest)
        items.append(choose(part, keys, here, keep) or _everything(here, width))
    widest = max(lists.shape[2] for lists, _ in items)
    padded = [F.pad(lists, (0, widest - lists.shape[2])) for lists, _ in items]
    return torch.cat(padded, 1), torch.cat([lengths for _, lengths in items], 1)


def _everything(place: QueryPositions, width: int) -> Lists:
    lists = torch.arange(width, device=place.start.device).expand(len(place.start), place.T, -1)
    real = torch.arange(place.T, device=place.start.device) < place.counts[:, None]
    return lists, torch.where(real, place.lengths(), 0)


def _kernel(q: Tensor, keys: Tensor) -> bool:
    """Where the kernel can take them."""
    H, D = q.shape[2:]
    fits = D % 8 == 0 and D <= 256 and H <= bindings.MOST_INDEX_HEADS and keys.dtype == torch.float32
    return fits and use_kernel(q)
