"""Gumbel-coupled text against autoregressive decoding with the same seed, ties counted."""

from collections.abc import Sequence

import torch

from outpace.bench import lossless
from outpace.bench.lossless import LosslessCheck, first_difference, in_float32, same
from outpace.decode.acceptance import coupled, key_of
from outpace.decode.request import Request
from outpace.models.decoder import Decoder
from outpace.ops import sampling as noise


@torch.inference_mode()
def compare_coupled(
    target: Decoder,
    prompt: Sequence[int],
    tokens: list[int],
    answer: list[int],
    request: Request,
    rng: torch.Generator,
    row: int,
) -> LosslessCheck:
    """The `tokens` of row `row` against `answer`, autoregressive decoding's; `rng` as the generations got
    it, freshly seeded. The first difference is a tie if both tokens' scores, in float32, the noise added,
    lie within TIE / temperature of the largest, and neither was cut; else a violation."""
    i = first_difference(tokens, answer)
    if i is None:
        return same(tokens, answer)
    text, how = [*prompt, *answer[:i]], request.sampling
    with in_float32(target):
        hidden = target(torch.tensor([text], device=target.device), offset=request.offset).hidden
        logits = target.logits(hidden[:, -1])
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[0, torch.tensor(text, device=seen.device)] = True
    stream = torch.tensor([(request.streams or range(row + 1))[row]], device=seen.device)
    keys = noise.keys(key_of(rng), stream, torch.full_like(stream, i))
    scores = coupled(logits, how, seen, keys)[0]
    lower = torch.minimum(scores[tokens[i]], scores[answer[i]])
    tie = bool(scores.max() - lower <= lossless.TIE / how.temperature)
    return LosslessCheck(checked=i + 1, violations=int(not tie), ties=int(tie))
