"""Acceptance rules: which draft tokens are kept; by exact match, rejection, block verification, coupling."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from outpace.drafts.base import HostProposal, Proposal
from outpace.drafts.sampler import DraftSampler, Greedy, GumbelCoupled, Sampled
from outpace.kv.tree import Tree
from outpace.ops import sampling as noise
from outpace.ops.sampling import IN_PROMPT, OUTPUT, Sampling, draw, probabilities, sample, shaped

RULES = ("match", "rejection", "block", "gumbel")


class SamplingState:
    """The tokens of every row's text, for the penalties; without any it remembers nothing, and `seen` is
    None. Histories are those of `ops.sampling.penalised`."""

    def __init__(self, sampling: Sampling, prompts: Sequence[Sequence[int]]) -> None:
        self.sampling = sampling
        self.listens = sampling.penalises
        self._prompts = [list(set(p)) for p in prompts] if self.listens else []
        self._seen: Tensor | None = None

    def seen(self, logits: Tensor) -> Tensor | None:
        """logits [B, V] -> the history [B, V] of prompt and output."""
        if not self.listens:
            return None
        if self._seen is None:
            self._seen = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
            held = [(b, token) for b, row in enumerate(self._prompts) for token in row]
            at = torch.tensor(held, device=logits.device)
            self._seen[at[:, 0], at[:, 1]] = IN_PROMPT
        return self._seen

    def seen_at(self, proposal: Proposal, logits: Tensor) -> Tensor | None:
        """logits [B, N, V] after each position -> the history [B, N, V] there: what was emitted before, and
        the tokens on the way from the root to the position, itself included."""
        if not self.listens:
            return None
        seen, tokens = self.seen(logits[:, 0]), proposal.tokens
        assert seen is not None
        N = tokens.shape[1]
        tree = proposal.tree or Tree(
            (torch.arange(N, device=tokens.device) - 1).clamp(min=0).expand_as(tokens)
        )
        way = tree.sees.int() * OUTPUT
        way[..., 0] = 0  # the last verified token is in the history
        return seen[:, None].repeat(1, N, 1).scatter_add_(2, tokens[:, None].expand_as(way), way)

    def add(self, tokens: Tensor | list[list[int]]) -> None:
        """What every row has emitted since: [B, n], or lists."""
        if self._seen is None:
            return
        if isinstance(tokens, list):
            most = max(map(len, tokens))
            real = [[OUTPUT] * len(row) + [0] * (most - len(row)) for row in tokens]
            added = torch.tensor(real, dtype=torch.int32, device=self._seen.device)
            padded = [row + [0] * (most - len(row)) for row in tokens]
            tokens = torch.tensor(padded, device=self._seen.device)
        else:
            added = torch.full_like(tokens, OUTPUT, dtype=torch.int32)
        self._seen.scatter_add_(1, tokens, added)

    def fork(self) -> "SamplingState":
        """One that goes on from here by itself."""
        forked = copy(self)
        forked._seen = None if self._seen is None else self._seen.clone()
        return forked

    def select(self, batch_indices: list[int]) -> None:
        if self._seen is not None:
            self._seen = self._seen[batch_indices]


@dataclass(frozen=True)
class VerifyResult:
    """Per row: path, the accepted positions in order, position 0 first; tokens, what the row emits: the
    accepted draft tokens and then the target's own next token, as many as the path has positions."""

    path: list[list[int]]
    tokens: list[list[int]]


class AcceptanceRule(Protocol):
    """One generation's rule. `sampler`: how the draft must choose its draft tokens in the coming step."""

    @property
    def sampler(self) -> DraftSampler: ...

    def draw(self, logits: Tensor, best: Tensor | None = None) -> Tensor:
        """[B, V] -> the next token of every row [B] int64, as autoregressive decoding draws it; `best` [B],
        the argmax, where it is known. Each call goes one token on in every row's text."""
        ...

    def verify(self, proposal: Proposal, logits: Tensor, best: Tensor | None = None) -> VerifyResult:
        """logits [B, N, V], the target's after each position of the proposal; `best` [B, N], their argmax,
        where it is known. The tokens of the result count as emitted."""
        ...

    def fork(self) -> "AcceptanceRule":
        """Goes on from here by itself, over text that may yet be taken back: what it lets pass is what this
        one is most likely to let pass. It draws nothing."""
        ...

    def select(self, batch_indices: list[int]) -> None:
        """Keep only these batch indices, in this order."""
        ...


def exact_match(
    candidates: list[list[int]],
    parents: list[list[int]],
    predict: list[list[int]],
    counts: list[int],
) -> list[list[int]]:
    """candidates (position 0: the last verified token), predict (the target's token after each position) ->
    the accepted path of each row: from the root on to the child that equals the target's token, while
    one does.
    Row b offers counts[b] - 1 draft tokens.
    """
    items = []
    for tokens, above, value, count in zip(candidates, parents, predict, counts, strict=True):
        path = [0]
        for column in range(1, count):
            parent = above[column]
            if parent == path[-1] and tokens[column] == value[parent]:
                path.append(column)
        items.append(path)
    return items


def follow(proposal: Proposal, predict: Tensor) -> VerifyResult:
    """predict [B, N], the target's token after each position: draft tokens live while they equal it."""
    if isinstance(proposal, HostProposal):
        tokens, value = proposal.host_tokens, predict.tolist()
    else:
        tokens, value = torch.stack((proposal.tokens, predict)).tolist()  # the step's one wait for the device
    path = exact_match(tokens, proposal.above, value, proposal.counts)
    return VerifyResult(path, [[row[i] for i in columns] for columns, row in zip(path, value, strict=True)])


def key_of(rng: torch.Generator | None) -> int:
    """One draw: what all noise of a generation comes from."""
    return int(torch.randint(2**63 - 1, (), generator=rng, device="cpu" if rng is None else rng.device))


def coupled(logits: Tensor, how: Sampling, seen: Tensor | None, keys: Tensor) -> Tensor:
    """logits [..., V], keys [...] -> [..., V] float32 of which the target's token is the argmax."""
    return noise.perturbed(shaped(logits, how, seen), keys)


class Match:
    """The target draws its own token at every node, and a draft token is accepted while it equals that draw.
    The token at place k of a row's text is argmax(log p + g), with noise g that depends on the key, the row's
    stream, k and the token alone.

    Lossless at temperature 0, and at any temperature in distribution: what is emitted was drawn from the
    target's own distribution given a prefix that equals the emitted text. Any draft, any tree; with one key
    all of them emit the same text, and so does autoregressive decoding.

    The key is one draw from `rng`; the streams are the rows' numbers unless the request names them.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        rng: torch.Generator | None,
        streams: Sequence[int] = (),
        draft_temperature: float | None = None,
    ) -> None:
        self.sampling, self.state, self.rng = sampling, SamplingState(sampling, prompts), rng
        self.draft_sampling = sampling.for_draft(draft_temperature)
        self.key = key_of(rng) if sampling.temperature else 0
        self.streams, self.places = list(streams or range(len(prompts))), [0] * len(prompts)
        self.device = torch.device("cpu")  # of the logits, once some were seen

    @property
    def sampler(self) -> DraftSampler:
        return Greedy(self.sampling.temperature or 1.0)

    def draw(self, logits: Tensor, best: Tensor | None = None) -> Tensor:
        self.device = logits.device
        tokens = sample(logits, self.sampling, self._keys(), self.state.seen(logits), best)
        self.places = [n + 1 for n in self.places]
        self.state.add(tokens[:, None])
        return tokens

    def verify(self, proposal: Proposal, logits: Tensor, best: Tensor | None = None) -> VerifyResult:
        tree, seen = proposal.tree, self.state.seen_at(proposal, logits)
        depth = torch.arange(logits.shape[1], device=logits.device) if tree is None else tree.depth
        result = follow(proposal, sample(logits, self.sampling, self._keys(depth), seen, best))
        self._emitted(result)
        return result

    def keys_ahead(self, steps: int) -> Tensor:
        """[steps, B] of the next tokens, for a target that draws them by itself."""
        places = self._on(self.places) + torch.arange(steps, device=self.device)[:, None]
        return noise.keys(self.key, self._on(self.streams), places)

    def went_ahead(self, steps: int) -> None:
        """Every row has made so many steps of those."""
        self.places = [n + steps for n in self.places]

    def _keys(self, depth: Tensor | None = None) -> Tensor | None:
        """[B] of the next tokens, or [B, N] of nodes so deep [N] or [B, N]; None at temperature 0."""
        if not self.sampling.temperature:
            return None
        streams, places = self._on(self.streams), self._on(self.places)
        if depth is None:
            return noise.keys(self.key, streams, places)
        return noise.keys(self.key, streams[:, None], places[:, None] + depth)

    def _emitted(self, result: VerifyResult) -> None:
        self.places = [n + len(value) for n, value in zip(self.places, result.tokens, strict=True)]
        self.state.add(result.tokens)

    def fork(self) -> "Match":
        forked = copy(self)
        forked.state = self.state.fork()
        return forked

    def select(self, batch_indices: list[int]) -> None:
        self.streams, self.places = (
            [self.streams[b] for b in batch_indices],
            [self.places[b] for b in batch_indices],
        )
        self.state.select(batch_indices)

    def _on(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self.device)


class Gumbel(Match):
    """Match with a draft that adds the same noise to its own log q, and so proposes the target's token more
    often (arXiv 2408.07978)."""

    @property
    def sampler(self) -> DraftSampler:
        return GumbelCoupled(self.draft_sampling, self.key, self._on(self.streams), self._on(self.places))


class Rejection(Match):
    """A draft token x that was drawn from q is accepted with probability min(1, p(x) / q(x)); the first
    rejected one is replaced by a draw from max(p - q, 0), normalised (arXiv 2211.17192, section 2.3). A
    node's children are tried in the order of their positions, the target's distribution being what is left
    after each rejection (SpecInfer, arXiv 2305.09781).

    q must be what each draft token was drawn from, given all positions before it. Draft tokens that nobody
    drew (q None) are verified by exact match, which for them is the same rule.
    """

    @property
    def sampler(self) -> DraftSampler:
        return Sampled(self.draft_sampling, self.rng)

    def fork(self) -> Match:
        forked = Match(replace(self.sampling, temperature=0.0), (), None)
        forked.state = self.state.fork()
        return forked

    def verify(self, proposal: Proposal, logits: Tensor, best: Tensor | None = None) -> VerifyResult:
        if proposal.q is None:
            return super().verify(proposal, logits, best)
        p = probabilities(logits, self.sampling, self.state.seen_at(proposal, logits))
        tokens = proposal.tokens
        u = torch.rand(tokens.shape, generator=self.rng, device=p.device)
        taken, left = self.accept(p, proposal.q, proposal, u)
        bonus = draw(left, self.rng)
        result = _result_of(torch.stack((tokens, taken.long())), bonus)
        self._emitted(result)
        return result

    def accept(self, p: Tensor, q: Tensor, proposal: Proposal, u: Tensor) -> tuple[Tensor, Tensor]:
        """p, q [B, N, V], u [B, N] uniform in [0, 1) -> taken [B, N] bool, which positions were accepted
        (position 0 among them), and left [B, V], in proportion to which the next token is drawn."""
        if proposal.parents is None:
            return reject_chain(p, q, proposal.tokens, _counts(proposal), u)
        return reject_tree(p, q, proposal.tokens, proposal.parents, _counts(proposal), u)


class BlockVerification(Rejection):
    """Block verification (arXiv 2403.10444): the draft tokens of a chain are verified jointly, and the
    longest prefix that passes is kept; never fewer in the mean than by rejection."""

    def accept(self, p: Tensor, q: Tensor, proposal: Proposal, u: Tensor) -> tuple[Tensor, Tensor]:
        """Raises ValueError for a tree."""
        if proposal.parents is not None:
            raise ValueError(
                "block verification is for chains, and this draft draws a tree of draft tokens: "
                "use the rule rejection, match or gumbel, or let the draft propose a chain"
            )
        return verify_block(p, q, proposal.tokens, _counts(proposal), u)


def _counts(proposal: Proposal) -> Tensor:
    return torch.tensor(proposal.counts, device=proposal.tokens.device)


def _result_of(columns: Tensor, bonus: Tensor) -> VerifyResult:
    """positions [2, B, N]: tokens, and 1 where accepted; bonus [B]."""
    table = torch.cat((columns, bonus.expand(2, -1)[:, :, None]), dim=2)
    path, items = [], []
    for tokens, taken in zip(*table.tolist(), strict=True):  # the step's one wait for the device
        columns_taken = [c for c, yes in enumerate(taken[:-1]) if yes]
        path.append(columns_taken)
        items.append([*(tokens[c] for c in columns_taken[1:]), tokens[-1]])
    return VerifyResult(path, items)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """p, q [..., V] -> max(p - q, 0), not normalised. p itself where nothing is left: the two are then equal
    up to rounding, and a draft token was rejected by rounding alone."""
    left = (p - q).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def _at(x: Tensor, tokens: Tensor) -> Tensor:
    """x [B, n, V] at tokens [B, n] -> [B, n]."""
    return x.gather(2, tokens[:, :, None])[:, :, 0]


def reject_chain(p: Tensor, q: Tensor, tokens: Tensor, counts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Rejection along a chain, all positions at once: see `Rejection.accept`; counts [B]."""
    N = tokens.shape[1]
    column = torch.arange(N, device=tokens.device)
    passed = u[:, 1:] * _at(q[:, 1:], tokens[:, 1:]) < _at(p[:, :-1], tokens[:, 1:])
    passed &= column[1:] < counts[:, None]
    length = passed.long().cumprod(1).sum(1)
    return column <= length[:, None], _after(p, q, length, counts)


def _after(p: Tensor, q: Tensor, length: Tensor, counts: Tensor, w: Tensor | None = None) -> Tensor:
    """What is left [B, V] after `length` [B] draft tokens of a chain: p after the last, or the residual of p
    (times w [B]) against the q of the draft token that failed."""
    row = torch.arange(len(length), device=length.device)
    target = p[row, length]
    failed = q[row, (length + 1).clamp(max=q.shape[1] - 1)]
    left = residual(target if w is None else w[:, None] * target, failed)
    return torch.where((length == counts - 1)[:, None], target, left)


def reject_tree(
    p: Tensor, q: Tensor, tokens: Tensor, parents: Tensor, counts: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """Rejection down a tree: see `Rejection.accept`. One pass over the positions, all rows together: a node's
    children are after it, so those of an accepted node are still to come."""
    row = torch.arange(len(tokens), device=tokens.device)
    taken = torch.zeros_like(tokens, dtype=torch.bool)
    taken[:, 0] = True
    here, left = torch.zeros_like(counts), p[:, 0]
    for c in range(1, tokens.shape[1]):
        tried = (parents[:, c] == here) & (c < counts)
        x = tokens[:, c]
        passed = tried & (u[:, c] * q[row, c, x] < left[row, x])
        taken[:, c] = passed
        here = torch.where(passed, c, here)
        rest = residual(left, q[:, c])
        rest = rest / rest.sum(-1, keepdim=True)
        left = torch.where(tried[:, None], torch.where(passed[:, None], p[:, c], rest), left)
    return taken, left


def block_chances(p: Tensor, q: Tensor, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """-> w [B, N], the joint weight of the first i draft tokens, w_i = min(w_{i-1} p(x_i) / q(x_i), 1), w_0
    = 1; and h [B, N], the chance that the first i are kept if no longer prefix is:
    h_i = s_i / (s_i + 1 - w_i) with s_i = sum over x of max(w_i p_{i+1}(x) - q_{i+1}(x), 0); h = w after the
    last draft token; 0 at padding."""
    N = tokens.shape[1]
    column = torch.arange(N, device=tokens.device)
    ratio = _at(p[:, :-1], tokens[:, 1:]).double() / _at(q[:, 1:], tokens[:, 1:])
    walk = torch.nn.functional.pad(ratio.nan_to_num(0.0).log().cumsum(1), (1, 0))
    w = (walk - walk.cummax(1).values).exp()  # a walk held at 0 from above: the recursion, in logarithms
    s = (w[:, :-1, None].float() * p[:, :-1] - q[:, 1:]).clamp(min=0).sum(2).double()
    rest = s + 1 - w[:, :-1]
    h = torch.nn.functional.pad(torch.where(rest > 0, s / rest, 1.0), (0, 1))
    h = torch.where(column == counts[:, None] - 1, w, h)
    return w, torch.where(column < counts[:, None], h, 0.0)


def verify_block(p: Tensor, q: Tensor, tokens: Tensor, counts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification of a chain: see `Rejection.accept`; counts [B]."""
    w, h = block_chances(p, q, tokens, counts)
    column = torch.arange(tokens.shape[1], device=tokens.device)
    passed = (u < h) | (column == 0)
    length = torch.where(passed, column, 0).amax(1)
    at_length = w.gather(1, length[:, None])[:, 0].float()
    return column <= length[:, None], _after(p, q, length, counts, at_length)
