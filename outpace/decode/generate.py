"""The decoding loop: propose, verify, commit; without a draft, autoregressive decoding."""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outpace.decode.acceptance import AcceptanceRule, VerifyResult
from outpace.decode.controller import Controller, Fixed
from outpace.decode.deferred import Deferred, verified
from outpace.decode.partial import Partial, PartialSession, Trusting
from outpace.decode.request import (
    BatchRows,
    Generation,
    OnLogits,
    OnTokens,
    Request,
    acceptance_rule,
    check_prompts,
    prefill,
)
from outpace.decode.trace import Prediction, Trace
from outpace.drafts.base import Draft, DraftSession, Proposal
from outpace.kv.partial import INDEX
from outpace.models.decoder import Decoder


def generate(
    target: Decoder,
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
    target: Decoder,
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
) -> Iterator[None]:
    """The loop behind `generate`, a step at a time: yields after the prefill and after every step, with the
    tokens in `rows` and the measurements in `trace`."""
    check_prompts(target, prompts, request)
    if partial is not None and (controller is not None or draft is None):
        raise ValueError(
            "partial KV needs a draft; a controller knows the costs of full passes only: leave it out"
        )
    B, aux = len(prompts), () if draft is None else draft.target_layer_ids
    rule: AcceptanceRule = acceptance_rule(request, prompts, rng)
    longest = max(len(p) for p in prompts) + request.max_new_tokens
    headroom = slack = 0  # positions of the longest proposal; provisional tokens that may be rewound
    if partial is not None and draft is not None:
        headroom = slack = partial.config.buffer_size(draft.block_size)
    elif draft is not None:
        headroom = draft.block_size
    by_index = partial is not None and partial.config.selector == INDEX
    longest += headroom
    cache = target.make_cache(B, longest, slack=max(headroom, 1), offset=request.offset, index=by_index)
    session: DraftSession | None = None
    if draft is not None:
        inner = session = draft.begin(B, longest, request.offset, slack)
        if partial is not None:
            session = PartialSession(partial, target, cache, draft, inner, rule, trace, request.stop)
            rule = Trusting(rule) if partial.mode == "lossy" else rule
    controller = Fixed(1) if draft is None else controller or Fixed(headroom)
    controller.begin(max(headroom, 1))
    with trace.timed("prefill"):
        last = prefill(target, cache, prompts, request, rule, session, aux, on_logits)
    for b, token in enumerate(last.tolist()):
        rows.emit(b, [token])
    yield

    deferred = None if session is None else Deferred(session)
    alive = list(range(B))
    while left := rows.still(alive):
        if len(left) < len(alive):  # finished rows leave the batch
            for part in (cache, rule, deferred):
                if part is not None:
                    part.select(left)
            last, alive = last[left], [alive[i] for i in left]
        began = time.perf_counter()
        with trace.timed("rest"):
            n = controller.width(cache.lengths)
        if n > 1 and deferred is not None:
            with trace.timed("draft"):
                proposal = deferred.propose(last, n, rule.sampler)
            with trace.timed("rest"):
                proposal = controller.cut(proposal)
        else:
            proposal = Proposal(last[:, None], [1] * len(last))
        with trace.timed("verify"):
            counts = None if draft is None else proposal.counts
            out = target(proposal.tokens, cache, counts=counts, tree=proposal.tree, aux=aux)
            logits = target.logits(out.hidden)
            if n > 1:
                result = rule.verify(proposal, logits)
            else:
                result, last = next_token(rule, logits)
        with trace.timed("rest"):
            if n > 1:
                cache.commit(result.path)
                last = torch.tensor([tokens[-1] for tokens in result.tokens], device=target.device)
            for i, b in enumerate(alive):
                if on_logits is not None:
                    on_logits(b, logits[i, result.path[i]])
                rows.emit(b, result.tokens[i])
            accepted = [len(path) - 1 for path in result.path]
            trace.add(B, alive, proposal.deepest, accepted, proposal.counts, proposal.provisional)
            controller.learn(proposal, result.path)
        if deferred is not None:
            with trace.timed("draft"):
                deferred.add(verified(proposal, out.aux, result.path))
        if controller.predicted is not None:
            committed = sum(map(len, result.path))
            trace.predicted.append(Prediction(*controller.predicted, committed, time.perf_counter() - began))
        yield


def next_token(rule: AcceptanceRule, logits: Tensor) -> tuple[VerifyResult, Tensor]:
    """A step without a proposal: logits [B, 1, V] -> its result and the tokens [B]."""
    drawn = rule.draw(logits[:, 0])
    return VerifyResult([[0]] * len(drawn), [[token] for token in drawn.tolist()]), drawn
