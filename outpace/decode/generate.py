"""The decoding loop: propose, verify, commit; without a draft, autoregressive decoding."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.decode.acceptance import AcceptanceRule, VerifyResult
from outpace.decode.ahead import RunAhead, Verified
from outpace.decode.controller import Controller, Fixed
from outpace.decode.device_rounds import DeviceRounds, device_rounds
from outpace.decode.native_rounds import NativeRounds, Played
from outpace.decode.partial import Partial, PartialSession, Trusting
from outpace.decode.request import (
    BatchRows,
    Generation,
    OnLogits,
    OnTokens,
    Request,
    acceptance_rule,
    check_prompts,
)
from outpace.decode.reuse import PrefixCache
from outpace.decode.trace import Prediction, Trace
from outpace.drafts.base import Draft, DraftSession, Proposal, check_finite, not_finite, roots
from outpace.drafts.deferred import Deferred
from outpace.kv.base import KVCache
from outpace.kv.partial import INDEX
from outpace.models.decoder import Target


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    request: Request,
    draft: Draft | None = None,
    *,
    controller: Controller | None = None,
    partial: Partial | None = None,
    rng: torch.Generator | None = None,
    on_tokens: OnTokens | None = None,
    on_logits: OnLogits | None = None,
) -> Generation:
    """prompts: token ids per row, of any lengths -> the tokens of every row.

    With a draft these are the tokens of autoregressive decoding (temperature 0), or draws from the same
    distribution, in fewer forwards of the target. Rows accept different lengths and end on their own.
    `controller` chooses the draft length of each step; without one it is the draft's own. With `partial`,
    proposals are extended on partial KV before a full forward verifies them.

    Raises ValueError for prompts the model cannot take, and for a controller together with partial KV.
    """
    rows, trace = BatchRows(len(prompts), request, on_tokens), Trace()
    options = {"controller": controller, "partial": partial, "rng": rng, "on_logits": on_logits}
    for _ in steps(target, prompts, request, draft, rows, trace, **options):  # type: ignore[arg-type]
        pass
    return Generation(rows.emitted, trace)


@torch.inference_mode()
def steps(
    target: Target,
    prompts: Sequence[Sequence[int]],
    request: Request,
    draft: Draft | None,
    rows: BatchRows,
    trace: Trace,
    *,
    controller: Controller | None = None,
    partial: Partial | None = None,
    rng: torch.Generator | None = None,
    on_logits: OnLogits | None = None,
    prefix_cache: PrefixCache | None = None,
) -> Iterator[None]:
    """The loop behind `generate`, a step at a time: yields after the prefill and after every step, with the
    tokens in `rows` and the measurements in `trace`. `prefix_cache`: of this target and draft, where the
    beginning of the one prompt may lie; without partial KV.

    Raises ValueError, naming the model and the step, for logits of target or draft that are not finite."""
    check_prompts(target, prompts, request)
    if partial is not None and (controller is not None or draft is None):
        raise ValueError(
            "partial KV needs a draft, and no controller: its cost table is of full forwards only"
        )
    # positions of the longest proposal, root included
    block = 0 if draft is None else draft.block_size
    if draft is not None and partial is not None:
        block = partial.config.buffer_size(block)
    controller = controller or Fixed(max(block, 1))
    rule, aux = acceptance_rule(request, prompts, rng), () if draft is None else draft.target_layer_ids
    length = max(len(p) for p in prompts) + request.max_new_tokens + block
    if prefix_cache is not None:
        assert len(prompts) == 1 and partial is None and prefix_cache.draft is draft and not request.offset
        cache, trace.reused = prefix_cache.begin(prompts[0], rows.emitted[0], length)
        opened = Opened(cache, prefix_cache.session(), rule)
    else:
        on_host = on_logits is not None
        opened = _open(target, len(prompts), length, block, request, draft, rule, trace, partial, on_host)
    cache, session, rule, on_device = opened
    controller.begin(max(block, 1), request.max_new_tokens)
    with trace.timed("prefill"):
        last = prefill(target, cache, prompts, request, rule, session, aux, on_logits, trace.reused)
    deferred = None if session is None else Deferred(session)
    if prefix_cache is not None:
        prefix_cache.deferred = deferred
    for b, token in enumerate(last.tolist()):
        rows.emit(b, [token])
    trace.step_began = time.perf_counter()
    yield
    if on_device is not None:
        yield from on_device.run(cache, last, rule, rows, trace, controller)
        return
    wanted = request.runs_ahead and partial is None and on_logits is None
    ahead = RunAhead(target, wanted, alone=len(prompts) == 1)
    native = NativeRounds(target, wanted and len(prompts) == 1)
    loop = Loop(
        target, cache, request, rule, deferred, controller, ahead, native, rows, trace, aux, on_logits, last
    )
    yield from loop.run()


class Opened(NamedTuple):
    """What a generation decodes with; `on_device`: its rounds, where a device makes them by itself."""

    cache: KVCache
    session: DraftSession | None
    rule: AcceptanceRule
    on_device: DeviceRounds | None = None


def _open(
    target: Target,
    B: int,
    length: int,
    block: int,
    request: Request,
    draft: Draft | None,
    rule: AcceptanceRule,
    trace: Trace,
    partial: Partial | None,
    on_host: bool,
) -> Opened:
    """Of B prompts that become `length` tokens long at most, the `block` of a proposal included."""
    index = partial is not None and partial.config.selector == INDEX
    cache = target.make_cache(B, length, slack=max(block, 1), offset=request.offset, index=index)
    if draft is not None and partial is not None:
        inner = draft.begin(B, length, request.offset, block)
        session = PartialSession(partial, target, cache, draft, inner, rule, trace, request.stop)
        return Opened(cache, session, Trusting(rule) if partial.mode == "lossy" else rule)
    on_device = None if on_host else device_rounds(target, cache, draft, request)
    if on_device is not None:
        return Opened(cache, on_device.session, rule, on_device)
    return Opened(cache, None if draft is None else draft.begin(B, length, request.offset), rule)


@dataclass
class Loop:
    """Propose, verify, commit, until every row has ended. `last` [B]: the newest tokens, which the cache does
    not hold yet; `active`: rows of the batch that go on."""

    target: Target
    cache: KVCache
    request: Request
    rule: AcceptanceRule
    deferred: Deferred | None
    controller: Controller
    ahead: RunAhead
    native: NativeRounds
    rows: BatchRows
    trace: Trace
    aux: Sequence[int]
    on_logits: OnLogits | None
    last: Tensor
    active: list[int] = field(init=False)
    began: float = 0.0  # when this step did

    def __post_init__(self) -> None:
        self.active = list(range(len(self.last)))

    def run(self) -> Iterator[None]:
        trace = self.trace
        while running := self.rows.running(self.active):
            if len(running) < len(self.active):
                self._keep(running)
            self.began = time.perf_counter()
            proposed = self._propose()
            if proposed is None:
                yield
                continue
            with trace.timed("verify"):
                verified = self._verify(*proposed)
            with trace.timed("rest"):
                self._commit(verified)
                self.controller.learn(verified.proposal, verified.result.path)
            if self.deferred is not None:
                with trace.timed("draft"):
                    self.deferred.add(verified.states)
            self._note(sum(map(len, verified.result.path)), time.perf_counter() - self.began)
            yield

    def _note(self, committed: int, seconds: float) -> None:
        if self.controller.predicted is not None:
            self.trace.predicted.append(Prediction(*self.controller.predicted, committed, seconds))

    def _keep(self, running: list[int]) -> None:
        """Finished rows leave the batch."""
        for part in (self.cache, self.rule, self.deferred):
            if part is not None:
                part.select(running)
        self.last, self.active = self.last[running], [self.active[i] for i in running]

    def _propose(self) -> tuple[Proposal, Proposal] | None:
        """What is to be verified, and what the draft proposed, of which that is a part. None: rounds were
        made in one native call, and there is nothing left of them."""
        with self.trace.timed("rest"):
            n = self.controller.width(self.cache.lengths)
        if n == 1 or self.deferred is None:
            return (alone := roots(self.last)), alone
        offered, played = None, self._play(n)
        if played is None:
            with self.trace.timed("draft"):
                offered = self.deferred.propose(self.last, n, self.rule.sampler)
        elif (offered := self._made(played)) is None:
            return None
        with self.trace.timed("rest"):
            if played is not None and played.rounds and self.controller.width(self.cache.lengths) == 1:
                return (alone := roots(self.last)), alone
            return self.controller.cut(offered), offered

    def _play(self, n: int) -> Played | None:
        """Rounds of the one row in one native call, where one can be."""
        if self.native.target is None or self.deferred is None:
            return None
        with self.trace.timed("draft"):
            self.deferred.flush()
        with self.trace.timed("verify"):
            text = int(self.last), self._left, self.request.stop
            given = self.cache, self.deferred.session, self.rule
            played = self.native.play(*given, *text, n, self.controller.chain_cut)
            if played is not None and played.states is not None:
                self.deferred.add(played.states)
            return played

    def _made(self, played: Played) -> Proposal | None:
        """What was drafted after those rounds."""
        trace, (b,) = self.trace, self.active
        for i, made in enumerate(played.rounds):
            if self.rows.done[b]:  # somebody who reads the text has seen enough
                return None
            if made is played.rounds[-1] and not played.finite:
                raise not_finite(f"step {trace.steps + 1}", "target")
            path, began = [list(range(len(made.tokens)))], time.perf_counter()
            with trace.timed("rest"):
                self.controller.was_cut(made.offered, made.verified, again=i > 0)
                self.rows.emit(b, made.tokens)
                trace.add(1, [b], [made.verified - 1], [len(made.tokens) - 1], seconds=sum(made.seconds))
                self.controller.learn(made.offered, path)
            trace.spent("draft", made.seconds[0], within="verify")
            self._note(len(made.tokens), sum(made.seconds) + time.perf_counter() - began)
        if played.rounds:
            self.last = torch.tensor([played.rounds[-1].tokens[-1]])
        if played.offered is None or self.rows.done[b]:
            return None
        offered, seconds = played.offered
        trace.spent("draft", seconds, within="verify")
        if played.rounds:
            self.began = time.perf_counter() - seconds
        return offered

    @property
    def _left(self) -> int:
        """Tokens that some row may still get at most."""
        return min(self.rows.limits[b] - len(self.rows.emitted[b]) for b in self.active)

    def _verify(self, proposal: Proposal, offered: Proposal) -> Verified:
        done = self.trace.steps
        if proposal.width == 1 and (ahead := self._run_ahead()) is not None:
            check_finite(f"step {done + ahead.proposal.width}", None, offered, ahead.finite)
            return ahead
        counts = None if self.deferred is None else proposal.counts
        out = self.target(
            proposal.tokens, self.cache, counts=counts, tree=proposal.tree, aux=self.aux, logits=True
        )
        check_finite(f"step {done + 1}", out.logits, offered, out.finite)
        chosen = out.logits, out.best
        result = self.rule.verify(proposal, *chosen) if proposal.width > 1 else next_token(self.rule, *chosen)
        return Verified(proposal, out.aux, result, out.logits)

    def _run_ahead(self) -> Verified | None:
        """Some steps without draft tokens in one native call, where one can be."""
        most = self.ahead.most(self._left)
        if not most:
            return None
        most, stop = self.controller.rest(most), self.request.stop
        return self.ahead.make(self.last, self.cache, most, stop, self.aux, [self.rule])

    def _commit(self, verified: Verified) -> None:
        """Accepted tokens into cache, rows and trace."""
        batch, active, result = len(self.rows.emitted), self.active, verified.result
        self.last = torch.tensor([tokens[-1] for tokens in result.tokens], device=self.target.device)
        if verified.logits is None:
            emitted = [
                self.rows.emit_steps(b, tokens) for b, tokens in zip(active, result.tokens, strict=True)
            ]
            self.trace.add_plain(batch, active, emitted)
            return
        proposal = verified.proposal
        if proposal.width > 1:
            self.cache.commit(result.path)
        if self.on_logits is not None:
            for b, path, scores in zip(active, result.path, verified.logits, strict=True):
                self.on_logits(b, scores[path])
        for b, tokens in zip(active, result.tokens, strict=True):
            self.rows.emit(b, tokens)
        accepted = [len(path) - 1 for path in result.path]
        self.trace.add(batch, active, proposal.deepest, accepted, proposal.counts, proposal.provisional)


def prefill(
    target: Target,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    request: Request,
    rule: AcceptanceRule,
    session: DraftSession | None,
    aux: Sequence[int],
    on_logits: OnLogits | None,
    reused: int = 0,
) -> Tensor:
    """Run the prompts through the target in chunks, from their token `reused` on; -> the first token of every
    row [B].

    Logits are formed for one position a row. `session` observes each chunk. Raises ValueError for logits that
    are not finite.
    """
    lengths = [len(p) for p in prompts]
    last_hidden = [torch.empty(0)] * len(prompts)
    for begin in range(reused, max(lengths), request.prefill_chunk):
        counts = [min(max(n - begin, 0), request.prefill_chunk) for n in lengths]
        width = max(counts)
        part = [[*p[begin : begin + c], *[0] * (width - c)] for p, c in zip(prompts, counts, strict=True)]
        tokens = torch.tensor(part, device=target.device)
        out = target(tokens, cache, counts=counts, aux=aux)
        if session is not None:
            session.observe(tokens, out.aux, counts)
        for b, (n, c) in enumerate(zip(lengths, counts, strict=True)):
            if c and begin + c == n:
                last_hidden[b] = out.hidden[b, c - 1]
    logits = target.logits(torch.stack(last_hidden))
    check_finite("the prompt", logits)
    if on_logits is not None:
        for b in range(len(prompts)):
            on_logits(b, logits[b : b + 1])
    return rule.draw(logits)


def next_token(rule: AcceptanceRule, logits: Tensor, best: Tensor | None = None) -> VerifyResult:
    """A step without draft tokens: logits [B, 1, V], and their argmax where it is known -> its result."""
    drawn = rule.draw(logits[:, 0], None if best is None else best[:, 0])
    return VerifyResult([[0]] * len(drawn), [[token] for token in drawn.tolist()])
