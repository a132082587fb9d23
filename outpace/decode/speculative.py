"""propose -> verify -> commit: one forward of the target checks a whole proposal."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.decode.acceptance import AcceptanceRule, VerifyResult
from outpace.decode.acceptance_rule import acceptance_rule
from outpace.decode.controller import Controller, Fixed
from outpace.decode.partial import Partial, PartialSession, Trusting
from outpace.decode.pending import PendingStates, verified
from outpace.decode.request import BatchRows, Generation, OnLogits, OnTokens, Request, check_prompts, prefill
from outpace.decode.trace import Prediction, Trace
from outpace.drafts.base import Draft, DraftSession, Proposal
from outpace.kv.partial import INDEX
from outpace.models.decoder import Decoder


@torch.inference_mode()
def generate(
    target: Decoder,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    request: Request,
    *,
    controller: Controller | None = None,
    partial: Partial | None = None,
    rng: torch.Generator | None = None,
    on_tokens: OnTokens | None = None,
    on_logits: OnLogits | None = None,
) -> Generation:
    """The tokens `plain.generate` would emit (temperature 0), or draws from the same distribution, in
    fewer forwards of the target. Rows accept different lengths and end on their own. The controller says
    how many columns a round has; without one, as many as the draft proposes. With `partial`, the target on
    partial KV stands between the draft and the full pass.

    Raises ValueError for prompts the model cannot take, and for a controller where there is partial KV.
    """
    check_prompts(target, prompts, request)
    if partial is not None and controller is not None:
        raise ValueError("a controller knows the costs of full passes alone: with partial KV, leave it out")
    B, block, wanted = len(prompts), draft.block_size, draft.target_layer_ids
    trace, rows, unseen = Trace(), BatchRows(B, request, on_tokens), PendingStates()
    judge: AcceptanceRule = acceptance_rule(request, prompts, rng)
    room, slack = block, 0  # columns of the widest round; provisional tokens that may be taken back
    if partial is not None:
        room = slack = partial.config.buffer_size(block)
    longest = max(len(p) for p in prompts) + request.max_new_tokens + room
    by_index = partial is not None and partial.config.selector == INDEX
    cache = target.make_cache(B, longest, slack=room, offset=request.offset, index=by_index)
    inner = draft.begin(B, longest, request.offset, slack)
    session: DraftSession = inner
    if partial is not None:
        session = PartialSession(partial, target, cache, draft, inner, judge, trace, request.stop)
        judge = Trusting(judge) if partial.mode == "lossy" else judge
    pace = controller or Fixed(room)
    pace.begin(room)
    with trace.timed("prefill"):
        last = prefill(target, cache, prompts, request, judge, session, wanted, on_logits)
    for b, token in enumerate(last.tolist()):
        rows.emit(b, [token])

    alive = list(range(B))
    while left := rows.still(alive):
        if len(left) < len(alive):  # finished rows leave the batch
            for part in (cache, session, judge, unseen):
                part.select(left)
            last, alive = last[left], [alive[i] for i in left]
        began = time.perf_counter()
        with trace.timed("rest"):
            width = pace.width(cache.lengths)
        if width > 1:
            with trace.timed("draft"):
                unseen.show(session)
                proposal = session.propose(last, width, judge.choice)
            with trace.timed("rest"):
                proposal = pace.cut(proposal)
        else:  # a plain step
            proposal = Proposal(last[:, None], [1] * len(last))
        with trace.timed("verify"):
            out = target(proposal.tokens, cache, counts=proposal.counts, tree=proposal.tree, aux=wanted)
            logits = target.logits(out.hidden)
            if width > 1:
                found = judge.verdict(proposal, logits)
            else:
                found, last = root_alone(judge, logits)
        with trace.timed("rest"):
            if width > 1:
                cache.commit(found.path)
                last = torch.tensor([tokens[-1] for tokens in found.tokens], device=target.device)
            for i, b in enumerate(alive):
                if on_logits is not None:
                    on_logits(b, logits[i, found.path[i]])
                rows.emit(b, found.tokens[i])
            taken = [len(columns) - 1 for columns in found.path]
            trace.add(B, alive, proposal.deepest, taken, proposal.counts, proposal.provisional)
            pace.learn(proposal, found.path)
            unseen.add(verified(proposal, out.aux, found.path))
        if unseen.full:
            with trace.timed("draft"):
                unseen.show(session)
        if pace.foreseen is not None:
            brought = sum(map(len, found.path))
            trace.foreseen.append(Prediction(*pace.foreseen, brought, time.perf_counter() - began))
    return Generation(rows.emitted, trace)


def root_alone(judge: AcceptanceRule, logits: Tensor) -> tuple[VerifyResult, Tensor]:
    """The verdict on a proposal without guesses, logits [B, 1, V], and its tokens [B]: what plain decoding
    does."""
    drawn = judge.draw(logits[:, 0])
    said = drawn.tolist()
    return VerifyResult([[0]] * len(said), [[token] for token in said]), drawn
