"""Which rule a request names: the one place where a judge is chosen."""

from collections.abc import Sequence

import torch

from outpace.decode.acceptance import AcceptanceRule, Match
from outpace.decode.acceptance_gumbel import Gumbel
from outpace.decode.acceptance_rejection import BlockVerification, Rejection
from outpace.decode.request import Request


def acceptance_rule(
    request: Request, prompts: Sequence[Sequence[int]], rng: torch.Generator | None
) -> AcceptanceRule:
    """The judge of one generation. At temperature 0 nothing is drawn and all rules are exact match."""
    how, own = request.sampling, request.draft_temperature
    if how.temperature == 0:
        return Match(how, prompts, rng)
    match request.rule:
        case "match":
            return Match(how, prompts, rng)
        case "rejection":
            return Rejection(how, prompts, rng, own)
        case "block":
            return BlockVerification(how, prompts, rng, own)
        case "gumbel":
            return Gumbel(how, prompts, rng, request.streams, own)
    raise AssertionError(f"Request lets no rule pass that is not in RULES: {request.rule}")
