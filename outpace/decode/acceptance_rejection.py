"""Acceptance rules for sampled draft tokens: rejection (chains, trees), block (chains)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.decode.acceptance import Match, VerifyResult
from outpace.drafts.base import Proposal
from outpace.drafts.sampler import DraftSampler, Sampled
from outpace.ops.sampling import Sampling, draw, probabilities


class Rejection(Match):
    """A draft token x that was drawn from q is accepted with probability min(1, p(x) / q(x)); the first
    rejected one is replaced by a draw from max(p - q, 0), normalised (arXiv 2211.17192, section 2.3). A
    node's children are tried in the order of their positions, the target's distribution being what is left
    after each rejection (SpecInfer, arXiv 2305.09781).

    q must be what each draft token was drawn from, given all positions before it. Draft tokens that nobody
    drew (q None) are judged by exact match, which for them is the same rule.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        rng: torch.Generator | None,
        draft_temperature: float | None = None,
    ) -> None:
        super().__init__(sampling, prompts, rng)
        self.draft_sampling = sampling.for_draft(draft_temperature)

    @property
    def choice(self) -> DraftSampler:
        return Sampled(self.draft_sampling, self.rng)

    def verdict(self, proposal: Proposal, logits: Tensor) -> VerifyResult:
        if proposal.q is None:
            return super().verdict(proposal, logits)
        p = probabilities(logits, self.sampling, self.state.seen_at(proposal, logits))
        tokens = proposal.tokens
        u = torch.rand(tokens.shape, generator=self.rng, device=p.device)
        taken, left = self.judge(p, proposal.q, proposal, u)
        bonus = draw(left, self.rng)
        result = _verdict(torch.stack((tokens, taken.long())), bonus)
        self.state.add(result.tokens)
        return result

    def judge(self, p: Tensor, q: Tensor, proposal: Proposal, u: Tensor) -> tuple[Tensor, Tensor]:
        """p, q [B, N, V], u [B, N] uniform in [0, 1) -> taken [B, N] bool, which positions were accepted
        (position 0 among them), and left [B, V], in proportion to which the next token is drawn."""
        if proposal.parents is None:
            return reject_chain(p, q, proposal.tokens, _counts(proposal), u)
        return reject_tree(p, q, proposal.tokens, proposal.parents, _counts(proposal), u)


class BlockVerification(Rejection):
    """Block verification (arXiv 2403.10444): the draft tokens of a chain are judged together, and the
    longest prefix that passes is kept; never fewer in the mean than by rejection."""

    def judge(self, p: Tensor, q: Tensor, proposal: Proposal, u: Tensor) -> tuple[Tensor, Tensor]:
        """Raises ValueError for a tree."""
        if proposal.parents is not None:
            raise ValueError(
                "block verification judges chains, and this draft draws a tree of draft tokens: "
                "use the rule rejection, match or gumbel, or let the draft propose a chain"
            )
        return verify_block(p, q, proposal.tokens, _counts(proposal), u)


def _counts(proposal: Proposal) -> Tensor:
    return torch.tensor(proposal.counts, device=proposal.tokens.device)


def _verdict(columns: Tensor, bonus: Tensor) -> VerifyResult:
    """positions [2, B, N]: tokens, and 1 where accepted; bonus [B]."""
    table = torch.cat((columns, bonus.expand(2, -1)[:, :, None]), dim=2)
    path, items = [], []
    for tokens, taken in zip(*table.tolist(), strict=True):  # the round's one wait for the device
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
    """Rejection along a chain, all positions at once: see `Rejection.judge`; counts [B]."""
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
    """Rejection down a tree: see `Rejection.judge`. One pass over the positions, all rows together: a node's
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
    """Block verification of a chain: see `Rejection.judge`; counts [B]."""
    w, h = block_chances(p, q, tokens, counts)
    column = torch.arange(tokens.shape[1], device=tokens.device)
    passed = (u < h) | (column == 0)
    length = torch.where(passed, column, 0).amax(1)
    at_length = w.gather(1, length[:, None])[:, 0].float()
    return column <= length[:, None], _after(p, q, length, counts, at_length)
