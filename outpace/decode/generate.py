"""The decoding loop: propose, verify, commit; without a draft, autoregressive decoding."""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outpace.decode.acceptance import AcceptanceRule, VerifyResult
from outpace.decode.ahead import RunAhead
from outpace.decode.controller import Controller, Fixed
from outpace.decode.device_rounds import DeviceRounds, device_rounds
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
from outpace.drafts.base import Draft, DraftSession, check_finite, roots
from outpace.drafts.deferred import Deferred, accepted_states
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
    B, rule = len(prompts), acceptance_rule(request, prompts, rng)
    # positions of the longest proposal, root included; positions that a draft session may have to rewind
    block = slack = 0
    if draft is not None:
        block = draft.block_size
        if partial is not None:
            block = slack = partial.config.buffer_size(draft.block_size)
    length = max(len(p) for p in prompts) + request.max_new_tokens + block
    index = partial is not None and partial.config.selector == INDEX
    controller = controller or Fixed(max(block, 1))
    session: DraftSession | None = None
    on_device: DeviceRounds | None = None
    if prefix_cache is not None:
        assert B == 1 and partial is None and prefix_cache.draft is draft and not request.offset
        cache, trace.reused = prefix_cache.begin(prompts[0], rows.emitted[0], length)
        session = prefix_cache.session()
    else:
        cache = target.make_cache(B, length, slack=max(block, 1), offset=request.offset, index=index)
        if partial is None and on_logits is None:
            on_device = device_rounds(target, cache, draft, request)
        if on_device is not None:
            session = on_device.session
        elif draft is not None:
            session = inner = draft.begin(B, length, request.offset, slack)
            if partial is not None:
                session = PartialSession(partial, target, cache, draft, inner, rule, trace, request.stop)
                rule = Trusting(rule) if partial.mode == "lossy" else rule
    controller.begin(max(block, 1), request.max_new_tokens)

    aux = () if draft is None else draft.target_layer_ids
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

    active = list(range(B))
    ahead = RunAhead(target, request.takes_argmax and partial is None and on_logits is None)
    while running := rows.running(active):
        if len(running) < len(active):  # finished rows leave the batch
            for part in (cache, rule, deferred):
                if part is not None:
                    part.select(running)
            last, active = last[running], [active[i] for i in running]
        began = time.perf_counter()
        with trace.timed("rest"):
            n = controller.width(cache.lengths)
        if n > 1 and deferred is not None:
            with trace.timed("draft"):
                offered = deferred.propose(last, n, rule.sampler)
            with trace.timed("rest"):
                proposal = controller.cut(offered)
                n = proposal.width
        else:
            proposal = offered = roots(last)
        with trace.timed("verify"):
            many = None
            if n == 1:
                left = min(rows.limits[b] - len(rows.emitted[b]) for b in active)
                many = ahead.steps(last, cache, left, controller.rest, request.stop, aux, trace.steps)
            if many is not None:
                check_finite(f"step {trace.steps + 1}", last, offered, finite=True)
                proposal, states, result = many
            else:
                counts = None if draft is None else proposal.counts
                out = target(proposal.tokens, cache, counts=counts, tree=proposal.tree, aux=aux, logits=True)
                states, logits = out.aux, out.logits  # logits [B, N, V]
                check_finite(f"step {trace.steps + 1}", logits, offered, out.finite)
                chosen = logits, out.best
                result = rule.verify(proposal, *chosen) if n > 1 else next_token(rule, *chosen)
        with trace.timed("rest"):
            if n > 1:
                cache.commit(result.path)
            last = torch.tensor([tokens[-1] for tokens in result.tokens], device=target.device)
            if on_logits is not None:
                for b, path, scores in zip(active, result.path, logits, strict=True):
                    on_logits(b, scores[path])
            emitted = list(zip(active, result.tokens, strict=True))
            if many is not None:
                trace.add_plain(B, active, [rows.emit_steps(b, tokens) for b, tokens in emitted])
            else:
                for b, tokens in emitted:
                    rows.emit(b, tokens)
                accepted = [len(path) - 1 for path in result.path]
                trace.add(B, active, proposal.deepest, accepted, proposal.counts, proposal.provisional)
            controller.learn(proposal, result.path)
        if deferred is not None:
            with trace.timed("draft"):
                deferred.add(accepted_states(proposal, states, result.path))
        if controller.predicted is not None:
            committed = sum(map(len, result.path))
            trace.predicted.append(Prediction(*controller.predicted, committed, time.perf_counter() - began))
        yield


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
