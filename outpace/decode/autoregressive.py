"""One token at a time: the answer that every other loop must reproduce."""

from collections.abc import Sequence

import torch

from outpace.decode.acceptance_rule import acceptance_rule
from outpace.decode.request import BatchRows, Generation, OnLogits, OnTokens, Request, check_prompts, prefill
from outpace.decode.trace import Trace
from outpace.models.decoder import Decoder


@torch.inference_mode()
def generate(
    target: Decoder,
    prompts: Sequence[Sequence[int]],
    request: Request,
    *,
    rng: torch.Generator | None = None,
    on_tokens: OnTokens | None = None,
    on_logits: OnLogits | None = None,
) -> Generation:
    """prompts: token ids per row, lengths may differ. Raises ValueError for prompts the model cannot take."""
    check_prompts(target, prompts, request)
    longest = max(len(p) for p in prompts) + request.max_new_tokens
    cache = target.make_cache(len(prompts), longest, offset=request.offset)
    judge = acceptance_rule(request, prompts, rng)
    trace, rows = Trace(), BatchRows(len(prompts), request, on_tokens)
    with trace.timed("prefill"):
        last = prefill(target, cache, prompts, request, judge, on_logits=on_logits)
    ids = last.tolist()
    for b, token in enumerate(ids):
        rows.emit(b, [token])
    alive = list(range(len(prompts)))
    while left := rows.still(alive):
        if len(left) < len(alive):  # finished rows leave the batch
            cache.select(left)
            judge.select(left)
            last, alive = last[left], [alive[i] for i in left]
        with trace.timed("verify"):
            out = target(last[:, None], cache)
            logits = target.logits(out.hidden[:, 0])
            last = judge.draw(logits)
            ids = last.tolist()
        with trace.timed("rest"):
            if on_logits is not None:
                for i, b in enumerate(alive):
                    on_logits(b, logits[i : i + 1])
            for b, token in zip(alive, ids, strict=True):
                rows.emit(b, [token])
            trace.add(len(prompts), alive, [0] * len(ids), [0] * len(ids))
    return Generation(rows.emitted, trace)
