"""Provisional verification on partial KV, between draft and target, confirmed by full passes.

SpecPV (arXiv 2512.02337) with the verdict it leaves out: as published, what was accepted on partial KV stays.
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
LONGEST_REST = 64  # rounds


@dataclass(frozen=True, kw_only=True)
class Partial:
    """What is asked of partial KV. `lossy`: what was accepted on it is never judged, as published. Raises
    ValueError for a mode that is none of MODES."""

    config: PartialConfig = field(default_factory=PartialConfig)
    mode: str = "lossless"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"partial KV: mode {self.mode!r}: it must be one of {', '.join(MODES)}")


class PartialSession:
    """A draft's session where the draft tokens the target has gone over on partial KV, round upon round,
    until the buffer is full. What the loop gets is a line of provisional tokens with the draft's next draft
    tokens at its end, to be verified like any proposal.

    Up to the budget it hands on the draft's own. Beyond, it buffers as many tokens as lately stood the full
    pass: twice as many after a line that did, no more than stood after one that did not; and where none did,
    it rests for more and more rounds.
    """

    def __init__(
        self,
        partial: Partial,
        target: Decoder,
        full: KVCache,
        draft: Draft,
        inner: RewindableSession,
        judge: AcceptanceRule,
        trace: Trace,
        stop: frozenset[int] = frozenset(),
    ) -> None:
        """`inner`: the draft's session. `judge`: the loop's. Behind a token of `stop` nothing is proposed."""
        self.cache = PartialCache(full, partial.config, partial.config.buffer_size(draft.block_size))
        self.target, self.draft, self.inner, self.judge = target, draft, inner, judge
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

    def propose(self, last: Tensor, width: int, choice: DraftSampler) -> Proposal:
        """`width` bounds the draft's draft tokens; the line before them comes on top."""
        width = min(width, self.draft.block_size)
        if self.rest or max(self.cache.full.lengths) <= self.cache.config.static_size:
            self.rest = max(self.rest - 1, 0)
            return replace(self.inner.propose(last, width, choice), provisional=[0] * len(last))
        self.cache.refresh()
        judge, lines = self.judge.fork(), [[token] for token in last.tolist()]
        while self._worthwhile(lines, width):
            proposal = self.inner.propose(last, width, judge.choice)
            for line, value in zip(lines, self._go_over(proposal, judge), strict=True):
                line += value
            last = torch.tensor([line[-1] for line in lines], device=last.device)
        space = self.cache.headroom - max(self.cache.buffered)
        tail = self.inner.propose(last, min(width, space), judge.choice) if space > 1 else None
        result = appended(lines, tail, last.device)
        self.provisional = result.provisional
        return result

    def _worthwhile(self, lines: list[list[int]], width: int) -> bool:
        held = max(self.cache.buffered)
        ended = all(self.stop.intersection(line[1:]) for line in lines)
        return held < self.trusted and held + width <= self.cache.headroom and not ended

    def _go_over(self, proposal: Proposal, judge: AcceptanceRule) -> list[list[int]]:
        """A round on partial KV; -> what each row generates."""
        began = time.perf_counter()
        wanted = self.draft.target_layer_ids
        out = self.target(proposal.tokens, self.cache, counts=proposal.counts, tree=proposal.tree, aux=wanted)
        result = judge.verdict(proposal, self.target.logits(out.hidden))
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
    """The lossy mode: provisional tokens pass unseen, and the judge goes on behind them. What is emitted is
    NOT the target's output."""

    def __init__(self, judge: AcceptanceRule) -> None:
        self.judge = judge

    @property
    def choice(self) -> DraftSampler:
        return self.judge.choice

    def draw(self, logits: Tensor) -> Tensor:
        return self.judge.draw(logits)

    def verdict(self, proposal: Proposal, logits: Tensor) -> VerifyResult:
        """The logits at provisional tokens are replaced by certainty of the next one."""
        assert proposal.provisional is not None, "a PartialSession marks what is provisional"
        column = torch.arange(logits.shape[1], device=logits.device)
        taken = torch.tensor(proposal.provisional, device=logits.device)
        certain = torch.full_like(logits, -torch.inf)
        certain.scatter_(2, proposal.tokens.roll(-1, 1)[:, :, None], 0.0)
        return self.judge.verdict(
            proposal, torch.where((column < taken[:, None])[:, :, None], certain, logits)
        )

    def fork(self) -> AcceptanceRule:
        return self.judge.fork()

    def select(self, batch_indices: list[int]) -> None:
        self.judge.select(batch_indices)
