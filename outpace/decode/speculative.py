"""propose -> verify -> commit: one forward of the target checks a whole proposal."""

from collections.abc import Sequence

import torch

from outpace.decode.request import Generation, OnLogits, OnTokens, Request, Rows, check_prompts, prefill
from outpace.decode.rules import exact_match
from outpace.decode.trace import Trace
from outpace.drafts.proposal import Draft
from outpace.models.decoder import Decoder
from outpace.ops.sampling import sample


@torch.inference_mode()
def generate(
    target: Decoder,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    request: Request,
    *,
    rng: torch.Generator | None = None,
    on_tokens: OnTokens | None = None,
    on_logits: OnLogits | None = None,
) -> Generation:
    """The tokens `plain.generate` would emit (temperature 0), or draws from the same distribution, in
    fewer forwards of the target. Rows accept different lengths and end on their own.

    Raises ValueError for prompts the model cannot take.
    """
    check_prompts(target, prompts, request)
    B, block, wanted = len(prompts), draft.block_size, draft.target_layer_ids
    longest = max(len(p) for p in prompts) + request.max_new_tokens + block
    cache = target.make_cache(B, longest, slack=block, offset=request.offset)
    session = draft.begin(B, longest, request.offset)
    trace, rows = Trace(), Rows(B, request, on_tokens)
    with trace.timed("prefill"):
        last = prefill(target, cache, prompts, request, rng, session, wanted, on_logits)
    for b, token in enumerate(last.tolist()):
        rows.emit(b, [token])

    alive = list(range(B))
    while left := rows.still(alive):
        if len(left) < len(alive):  # finished rows leave the batch
            cache.keep(left)
            session.keep(left)
            last, alive = last[left], [alive[i] for i in left]
        with trace.timed("draft"):
            proposal = session.propose(last)
        with trace.timed("verify"):
            out = target(proposal.tokens, cache, counts=proposal.counts, aux=wanted)
            logits = target.logits(out.hidden)
            predict = sample(logits, request.sampling, rng)
            accept_len, last = exact_match(proposal.tokens, predict, proposal.counts)
            accepted = accept_len.tolist()  # the round's one wait for the device
        with trace.timed("rest"):
            ids = predict.tolist()
            kept = [a + 1 for a in accepted]
            cache.commit([list(range(k)) for k in kept])
            for i, b in enumerate(alive):
                if on_logits is not None:
                    on_logits(b, logits[i, : kept[i]])
                rows.emit(b, ids[i][: kept[i]])
            trace.add(B, alive, [c - 1 for c in proposal.counts], accepted)
        with trace.timed("draft"):
            session.observe(proposal.tokens, out.aux, kept)
    return Generation(rows.emitted, trace)
