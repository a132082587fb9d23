"""Which guesses live: the exact-match rule.

The target draws its own token at every node, and a guess is accepted while it equals that draw, so
what is emitted is always the target's own.
"""

import torch
from torch import Tensor


def exact_match(candidates: Tensor, predict: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """candidates [B,N] (column 0: the last verified token), predict [B,N] (the target's token after
    each column) -> accept_len [B], bonus [B]. Row b offers counts[b] - 1 guesses.

    Lossless at temperature 0, and at any temperature in distribution: predict is drawn from the
    target's own distribution given a prefix that equals the emitted text.
    """
    matches = candidates[:, 1:] == predict[:, :-1]
    offered = torch.tensor(counts, device=candidates.device)[:, None] - 1
    matches &= torch.arange(matches.shape[1], device=candidates.device) < offered
    accept_len = matches.long().cumprod(1).sum(1)
    bonus = predict.gather(1, accept_len[:, None]).squeeze(1)
    return accept_len, bonus
