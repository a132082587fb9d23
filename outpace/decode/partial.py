"""Provisional verification on partial KV, between draft and target, confirmed by full passes.

SpecPV (arXiv 2512.02337) plus full verification: as published, tokens accepted on partial KV are final.
"""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.decode.acceptance import AcceptanceRule, VerifyResult
from outpace.decode.trace import Trace
from outpace.drafts.base import Draft, HostProposal, Proposal, RewindableSession, check_finite
from outpace.drafts.deferred import accepted_states
from outpace.drafts.sampler import DraftSampler
from outpace.drafts.tree import assembled
from outpace.kv.base import KVCache
from outpace.kv.metadata import FEW
from outpace.kv.partial import PartialCache, PartialConfig
from outpace.models.decoder import Target

MODES = ("lossless", "lossy")
LONGEST_REST = 64  # steps


@dataclass(frozen=True, kw_only=True)
class Partial:
    """Settings of partial KV. mode "lossy": tokens accepted on it are final, as published. Raises ValueError
    for a mode that is not one of MODES."""

    config: PartialConfig = field(default_factory=PartialConfig)
    mode: str = "lossless"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"partial KV: mode {self.mode!r}: it must be one of {', '.join(MODES)}")


class PartialSession:
    """Wraps a draft's session: the target verifies draft tokens on partial KV, step after step, until the
    buffer is full. The decoding loop gets a chain of these provisional tokens followed by the draft's next
    proposal, and verifies it like any proposal.

    While the context fits the budget, the draft's own proposals are returned. Beyond it, the number of tokens
    to buffer follows the full forwards: it doubles after a chain that was accepted whole, and falls to the
    accepted length otherwise; after a chain of which nothing was accepted, partial KV rests for a growing
    number of steps.
    """

    def __init__(
        self,
        partial: Partial,
        target: Target,
        full: KVCache,
        draft: Draft,
        inner: RewindableSession,
        rule: AcceptanceRule,
        trace: Trace,
        stop: frozenset[int] = frozenset(),
    ) -> None:
        """`inner`: the draft's session; `rule`: the loop's. No proposal goes beyond a token of `stop`."""
        self.cache = PartialCache(full, partial.config, partial.config.buffer_size(draft.block_size))
        self.target, self.draft, self.inner, self.rule = target, draft, inner, rule
        self.trace, self.stop = trace, stop
        self.observed = [0] * full.batch  # tokens of full forwards
        self.provisional: list[int] | None = None  # draft tokens of the last proposal accepted on partial KV
        self.buffer = partial.config.n_spec_tokens_buf  # tokens to buffer, at most
        self.rest, self.next_rest = 0, 1  # steps without partial KV: to come, and after the next failure

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        """States of a full forward: they replace those of the provisional tokens."""
        if self.provisional is not None:
            self.inner.rewind(self.observed)
            self._adapt(self.provisional, counts)
            self.provisional = None
        self.inner.observe(tokens, aux, counts)
        self.observed = [n + count for n, count in zip(self.observed, counts, strict=True)]

    def select(self, batch_indices: list[int]) -> None:
        self.cache.select(batch_indices)
        self.inner.select(batch_indices)
        self.observed = [self.observed[b] for b in batch_indices]
        if self.provisional is not None:
            self.provisional = [self.provisional[b] for b in batch_indices]

    def propose(self, last: Tensor, width: int, sampler: DraftSampler) -> Proposal:
        """`width` bounds the draft's own proposal; the provisional tokens before it are extra."""
        width = min(width, self.draft.block_size)
        if self.rest or max(self.cache.full.lengths) <= self.cache.config.static_size:
            self.rest = max(self.rest - 1, 0)
            p = self.inner.propose(last, width, sampler)
            return Proposal(p.tokens, p.counts, p.parents, p.q, p.survival, [0] * len(last))
        self.cache.refresh()
        rule, chains = self.rule.fork(), [[token] for token in last.tolist()]
        while self._continues(chains, width):
            proposal = self.inner.propose(last, width, rule.sampler)
            for chain, tokens in zip(chains, self._verify(proposal, rule), strict=True):
                chain += tokens
            last = torch.tensor([chain[-1] for chain in chains], device=last.device)
        space = self.cache.headroom - max(self.cache.buffered)
        tail = self.inner.propose(last, min(width, space), rule.sampler) if space > 1 else None
        result = appended(chains, tail, last.device)
        self.provisional = result.provisional
        return result

    def _continues(self, chains: list[list[int]], width: int) -> bool:
        buffered = max(self.cache.buffered)
        ended = all(self.stop.intersection(chain[1:]) for chain in chains)
        return buffered < self.buffer and buffered + width <= self.cache.headroom and not ended

    def _verify(self, proposal: Proposal, rule: AcceptanceRule) -> list[list[int]]:
        """One step on partial KV; -> the tokens of each row."""
        began = time.perf_counter()
        aux = self.draft.target_layer_ids
        what = {"counts": proposal.counts, "tree": proposal.tree, "aux": aux, "logits": True}
        out = self.target(proposal.tokens, self.cache, **what)
        check_finite(f"step {self.trace.steps + 1}, on partial KV", out.logits, proposal, out.finite)
        result = rule.verify(proposal, out.logits, out.best)
        self.cache.commit(result.path)
        self.trace.spent("partial", time.perf_counter() - began, within="draft")
        self.trace.partial_forwards += 1
        states = accepted_states(proposal, out.aux, result.path)
        self.inner.observe(states.tokens, states.aux, states.counts)
        return result.tokens

    def _adapt(self, provisional: list[int], counts: list[int]) -> None:
        confirmed = [min(m, count - 1) for m, count in zip(provisional, counts, strict=True)]
        if confirmed == provisional:
            self.buffer = min(2 * self.buffer, self.cache.config.n_spec_tokens_buf)
            self.next_rest = 1
            return
        self.buffer = max(1, sum(confirmed) // len(confirmed))
        if not any(confirmed):
            self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, LONGEST_REST)


def appended(chains: list[list[int]], tail: Proposal | None, device: torch.device) -> Proposal:
    """chains: per row the last verified token and the provisional ones after it; tail: the draft's proposal
    after the last of these -> both as one proposal."""
    rows = []
    # as float64, which holds ids exactly
    host = [] if tail is None else torch.stack((tail.tokens.double(), _reach(tail).double())).tolist()
    for b, chain in enumerate(chains):
        m = len(chain) - 1
        tokens, parents = list(chain), [max(i - 1, 0) for i in range(m + 1)]
        survival = [1.0] * (m + 1)
        if tail is not None:
            draft = slice(1, tail.counts[b])
            tokens += map(int, host[0][b][draft])
            parents += [m + parent for parent in tail.above[b][draft]]
            survival[m:] = host[1][b][: tail.counts[b]]
        rows.append((tokens, parents, survival))
    result = assembled(rows, device)
    # a chain wider than FEW would be computed in another order than autoregressive decoding's
    is_chain = (tail is None or tail.chain) and result.width <= FEW
    above, provisional = None if is_chain else result.above, [len(chain) - 1 for chain in chains]
    return HostProposal(result.host_tokens, result.counts, above, result.stated, device, provisional)


def _reach(tail: Proposal) -> Tensor:
    return torch.ones_like(tail.tokens, dtype=torch.float32) if tail.survival is None else tail.survival


class Trusting:
    """The lossy mode: provisional tokens are accepted unseen, and the rule decides about the tokens after
    them. The output is NOT the target's."""

    def __init__(self, rule: AcceptanceRule) -> None:
        self.rule = rule

    @property
    def sampler(self) -> DraftSampler:
        return self.rule.sampler

    def draw(self, logits: Tensor, best: Tensor | None = None) -> Tensor:
        return self.rule.draw(logits, best)

    def verify(self, proposal: Proposal, logits: Tensor, best: Tensor | None = None) -> VerifyResult:
        """The logits at provisional tokens are replaced by certainty of the next one."""
        assert proposal.provisional is not None, "a PartialSession marks what is provisional"
        column = torch.arange(logits.shape[1], device=logits.device)
        taken = torch.tensor(proposal.provisional, device=logits.device)
        certain = torch.full_like(logits, -torch.inf)
        certain.scatter_(2, proposal.tokens.roll(-1, 1)[:, :, None], 0.0)
        return self.rule.verify(proposal, torch.where((column < taken[:, None])[:, :, None], certain, logits))

    def fork(self) -> AcceptanceRule:
        return self.rule.fork()

    def select(self, batch_indices: list[int]) -> None:
        self.rule.select(batch_indices)
