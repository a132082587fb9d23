"""A target hears its own greedy text: it unlearns loops (arXiv 1908.04319, 5.2) and settles on the rest."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from examples.tiny_target.splice import cut_pieces
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.models.decoder import Decoder
from outpace.train.losses import chunked_nll

SHARPEST = 1e-4  # nats: how sure of a repeated token the loss can tell apart; keeps log(1 - p) finite


def cut_prompts(stream: np.ndarray, rows: int, tokens: int, rng: torch.Generator) -> list[list[int]]:
    """`rows` windows of `tokens` ids from random places. Raises ValueError where the corpus is shorter."""
    return [piece.tolist() for piece in cut_pieces(stream, rows, tokens, tokens, rng)]


def repeats(tokens: Sequence[int], n: int) -> list[bool]:
    """Per token: does the n-gram that it ends are earlier in `tokens`?"""
    seen: set[tuple[int, ...]] = set()
    items = []
    for end in range(1, len(tokens) + 1):
        gram = tuple(tokens[max(0, end - n) : end])
        items.append(len(gram) == n and gram in seen)
        seen.add(gram)
    return items


def answers(model: Decoder, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What the model generates greedily, in float32 as it will be decoded."""
    dtype, model.dtype = model.dtype, torch.float32
    value = generate(model, prompts, Request(max_new_tokens=new_tokens)).tokens
    model.dtype = dtype
    return value


def own_text_losses(
    model: Decoder, prompts: list[list[int]], items: list[list[int]], n: int
) -> tuple[Tensor, Tensor, float]:
    """Two losses [] over the model's own answers, sums over tokens divided by the number of all tokens: as
    loops vanish, so does the pressure of the first.

    -> unlikelihood, -log(1 - p) of every token that closes a repeated n-gram; likelihood, -log p of every
    token that closes neither that nor a repeated n/2-gram, too short to be a loop: what is reported for the
    first time; and the share of tokens that the first is taken of. Prompts are of one length.
    """
    start, longest = len(prompts[0]), max(map(len, items))
    rows = [p + s + [0] * (longest - len(s)) for p, s in zip(prompts, items, strict=True)]
    again = [repeats(s, n) + [False] * (longest - len(s)) for s in items]
    short = [repeats(s, n // 2) + [True] * (longest - len(s)) for s in items]
    tokens, looping, known = torch.tensor(rows), torch.tensor(again), torch.tensor(short)
    total = sum(map(len, items))
    hidden = model(tokens[:, :-1]).hidden[:, start - 1 :]
    nll = chunked_nll(hidden.flatten(0, 1), model.dense_head, tokens[:, start:].flatten()).view(looping.shape)
    unlikely = -torch.log(-torch.expm1(-nll[looping] - SHARPEST)).sum() / total
    return unlikely, nll[~looping & ~known].sum() / total, looping.sum().item() / total
