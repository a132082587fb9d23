"""Provisional verification on partial KV, between draft and target, confirmed by full passes.

SpecPV (arXiv 2512.02337) with the full verification that it leaves out: as published, what was accepted on
partial KV stays.
"""

import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outpace.decode.acceptance import AcceptanceRule, VerifyResult
from outpace.decode.deferred import verified
from outpace.decode.trace import Trace
from outpace.drafts.base import Draft, Proposal, RewindableSession
from outpace.drafts.sampler import DraftSampler
from outpace.drafts.tree import assembled
from outpace.kv.base import KVCache
from outpace.kv.metadata import FEW
from outpace.kv.partial import PartialCache, PartialConfig
from outpace.models.decoder import Decoder

MODES = ("lossless", "lossy")
LONGEST_REST = 64  # steps


@dataclass(frozen=True, kw_only=True)
class Partial:
    """What is asked of partial KV. `lossy`: what was accepted on it is never verified, as published. Raises
    ValueError for a mode that is none of MODES."""

    config: PartialConfig = field(default_factory=PartialConfig)
    mode: str = "lossless"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"partial KV: mode {self.mode!r}: it must be one of {', '.join(MODES)}")


class PartialSession:
    """Wraps a draft's session: the target verifies draft tokens on partial KV, step after step, until the
    buffer is full. The decoding loop gets a chain of these provisional tokens with the draft's next tokens
    at its end, and verifies it like any proposal.

    While the context fits the budget, the draft's own proposals are passed on. Beyond it, the number of
    tokens to buffer follows what the full passes accepted: it doubles after a chain that was accepted
    whole, and falls to what was accepted after one that was not; after a chain of which nothing was
    accepted, partial KV rests for more and more steps.
    """

    def __init__(
        self,
        partial: Partial,
        target: Decoder,
        full: KVCache,
        draft: Draft,
        inner: RewindableSession,
        rule: AcceptanceRule,
        trace: Trace,
        stop: frozenset[int] = frozenset(),
    ) -> None:
        """`inner`: the draft's session; `rule`: the loop's. Nothing is proposed after a token of `stop`."""
        self.cache = PartialCache(full, partial.config, partial.config.buffer_size(draft.block_size))
        self.target, self.draft, self.inner, self.rule = target, draft, inner, rule
        self.trace, self.stop = trace, stop
        self.observed = [0] * full.batch  # tokens of full passes
        self.provisional: list[int] | None = (
            None  # draft tokens of the last proposal that partial KV let pass
        )
        self.most = partial.config.n_spec_tokens_buf
        self.trusted = self.most  # tokens worth buffering
        self.rest, self.next_rest = 0, 1

    def observe(self, tokens: Tensor, aux: Tensor | None, counts: list[int]) -> None:
        """Of a full pass: its states replace those of the partial ones."""
        if self.provisional is not None:
            self.inner.rewind(self.observed)
            self._learn(self.provisional, counts)
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
        """`width` bounds the draft's draft tokens; the line before them comes on top."""
        width = min(width, self.draft.block_size)
        if self.rest or max(self.cache.full.lengths) <= self.cache.config.static_size:
            self.rest = max(self.rest - 1, 0)
            return replace(self.inner.propose(last, width, sampler), provisional=[0] * len(last))
        self.cache.refresh()
        rule, lines = self.rule.fork(), [[token] for token in last.tolist()]
        while self._worthwhile(lines, width):
            proposal = self.inner.propose(last, width, rule.sampler)
            for line, value in zip(lines, self._go_over(proposal, rule), strict=True):
                line += value
            last = torch.tensor([line[-1] for line in lines], device=last.device)
        space = self.cache.headroom - max(self.cache.buffered)
        tail = self.inner.propose(last, min(width, space), rule.sampler) if space > 1 else None
        result = appended(lines, tail, last.device)
        self.provisional = result.provisional
        return result

    def _worthwhile(self, lines: list[list[int]], width: int) -> bool:
        held = max(self.cache.buffered)
        ended = all(self.stop.intersection(line[1:]) for line in lines)
        return held < self.trusted and held + width <= self.cache.headroom and not ended

    def _go_over(self, proposal: Proposal, rule: AcceptanceRule) -> list[list[int]]:
        """One step on partial KV; -> the tokens of each row."""
        began = time.perf_counter()
        wanted = self.draft.target_layer_ids
        out = self.target(proposal.tokens, self.cache, counts=proposal.counts, tree=proposal.tree, aux=wanted)
        result = rule.verify(proposal, self.target.logits(out.hidden))
        self.cache.commit(result.path)
        self.trace.spent("partial", time.perf_counter() - began, within="draft")
        self.trace.partial_forwards += 1
        part = verified(proposal, out.aux, result.path)
        self.inner.observe(part.tokens, part.aux, part.counts)
        return result.tokens

    def _learn(self, provisional: list[int], counts: list[int]) -> None:
        items = [min(m, count - 1) for m, count in zip(provisional, counts, strict=True)]
        if items == provisional:
            self.trusted, self.next_rest = min(2 * self.trusted, self.most), 1
            return
        self.trusted = max(1, sum(items) // len(items))
        if not any(items):
            self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, LONGEST_REST)


def appended(lines: list[list[int]], tail: Proposal | None, device: torch.device) -> Proposal:
    """lines: the last verified token of each row and the provisional ones after it; tail: what was proposed
    after the last of these -> both as one proposal."""
    rows = []
    for b, line in enumerate(lines):
        guesses, above = [], []
        if tail is not None:
            real = slice(1, tail.counts[b])
            guesses, above = tail.tokens[b, real].tolist(), tail.above[b][real]
        m = len(line) - 1
        parents = [*(max(i - 1, 0) for i in range(m + 1)), *(m + parent for parent in above)]
        rows.append(([*line, *guesses], parents, [1.0] * len(parents)))
    result = assembled(rows, device)
    one_line = tail is None or tail.parents is None
    return replace(
        result,
        # wider than FEW, a chain would be computed in another order than autoregressive decoding's
        parents=None if one_line and result.tokens.shape[1] <= FEW else result.parents,
        survival=None,
        provisional=[len(line) - 1 for line in lines],
    )


class Trusting:
    """The lossy mode: provisional tokens pass unseen, and the rule goes on behind them. What is emitted is
    NOT the target's output."""

    def __init__(self, rule: AcceptanceRule) -> None:
        self.rule = rule

    @property
    def sampler(self) -> DraftSampler:
        return self.rule.sampler

    def draw(self, logits: Tensor) -> Tensor:
        return self.rule.draw(logits)

    def verify(self, proposal: Proposal, logits: Tensor) -> VerifyResult:
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
