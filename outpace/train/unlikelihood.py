"""Sequence-level unlikelihood (Welleck et al. 2020, section 5.2): a target unlearns its own loops."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outpace.decode import plain
from outpace.decode.request import Request
from outpace.models.decoder import Decoder
from outpace.ops.sampling import seeded
from outpace.train.losses import chunked_nll

SHARPEST = 1e-4  # nats: how sure of a repeated token the loss can tell apart; keeps log(1 - p) finite


def cut_prompts(stream: np.ndarray, rows: int, tokens: int, seed: int, step: int) -> list[list[int]]:
    """`rows` windows of `tokens` ids at random places of the corpus."""
    rng = seeded(seed, step)
    starts = torch.randint(len(stream) - tokens, (rows,), generator=rng).tolist()
    return [stream[i : i + tokens].tolist() for i in starts]


def repeats(tokens: Sequence[int], n: int) -> list[bool]:
    """Per token: does the n-gram that it ends stand earlier in `tokens`?"""
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(1, len(tokens) + 1):
        gram = tuple(tokens[max(0, end - n) : end])
        found.append(len(gram) == n and gram in seen)
        seen.add(gram)
    return found


def unlikelihood_loss(
    model: Decoder, prompts: list[list[int]], new_tokens: int, n: int
) -> tuple[Tensor, float]:
    """-log(1 - p) of every token that closes a repeated n-gram in the model's own greedy answer, summed
    and divided by the number of tokens said: as loops vanish, so does the pressure.

    -> the loss, and the share of tokens that closed one. Prompts are of one length.
    """
    dtype, model.dtype = model.dtype, torch.float32
    said = plain.generate(model, prompts, Request(max_new_tokens=new_tokens)).tokens
    model.dtype = dtype
    start, longest = len(prompts[0]), max(map(len, said))
    rows = [p + s + [0] * (longest - len(s)) for p, s in zip(prompts, said, strict=True)]
    again = [repeats(s, n) + [False] * (longest - len(s)) for s in said]
    tokens, mask = torch.tensor(rows), torch.tensor(again)
    total = sum(map(len, said))
    if not mask.any():
        return torch.zeros((), requires_grad=True), 0.0
    hidden = model(tokens[:, :-1]).hidden[:, start - 1 :]
    nll = chunked_nll(hidden[mask], model.head, tokens[:, start:][mask])
    return -torch.log(-torch.expm1(-nll - SHARPEST)).sum() / total, mask.sum().item() / total
