"""Teach a small target not to loop: penalise the confidence that repetition breeds (DITTO, 2206.02369)."""

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

MOST_LINES = 4  # of one repeated passage
LEAST_TOKENS = 4


def line_starts(stream: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Indices at which a line of the stream begins: those after a token that ends in a line feed."""
    ends = [tokenizer.decode([i]).rstrip(" \t").endswith("\n") for i in range(tokenizer.get_vocab_size())]
    return np.flatnonzero(np.asarray(ends)[stream]) + 1


def repeated_rows(
    stream: np.ndarray, starts: np.ndarray, row_tokens: int, rows: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Passages of one to four lines, each repeated until its row is full -> tokens [rows, row_tokens+1]
    int64, periods [rows]."""
    found, periods = [], []
    while len(found) < rows:
        first = int(torch.randint(len(starts) - MOST_LINES, (1,), generator=rng))
        lines = int(torch.randint(1, MOST_LINES + 1, (1,), generator=rng))
        passage = stream[starts[first] : starts[first + lines]]
        if LEAST_TOKENS <= len(passage) <= row_tokens // 3:
            found.append(np.resize(passage, row_tokens + 1))
            periods.append(len(passage))
    return torch.from_numpy(np.stack(found).astype(np.int64)), torch.tensor(periods)


def repetition_loss(nll: Tensor, periods: Tensor, decay: float = 0.5) -> Tensor:
    """nll [R, T] of rows that repeat with `periods` [R] -> scalar.

    With p the probability of a token and p' that of the same token one repetition earlier (detached),
    -log(1 - |p - decay * p'|): each repetition is to be believed less than the one before (eq. 3).
    """
    p = (-nll).exp()
    at = torch.arange(nll.shape[1], device=nll.device)
    before = at - periods[:, None]
    earlier = p.detach().gather(1, before.clamp(min=0))
    loss = -torch.log1p(-(p - decay * earlier).abs().clamp(max=1 - 1e-6))
    return loss[before >= 0].mean()
