"""Rows that teach a target to go on, after any text, with what it knows best: the passage that fits there."""

import numpy as np
import torch
from torch import Tensor

from outpace.ops.sampling import seeded

LONGEST = 32  # tokens: what two texts share before a place is not compared further back
UNTAUGHT = -1  # label of a token that no loss is taken of


def fitting(known: np.ndarray, text: np.ndarray) -> np.ndarray:
    """The places of `known` before which it agrees with the end of `text` for longest (at most LONGEST
    tokens); all of them where it nowhere does."""
    places = np.arange(LONGEST, len(known))
    for back in range(1, min(LONGEST, len(text)) + 1):
        further = places[known[places - back] == text[-back]]
        if not len(further):
            break
        places = further
    return places


def spliced_rows(
    stream: np.ndarray, known: np.ndarray, row_tokens: int, rows: int, first: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Rows `first` .. first+rows of an endless series: each begins with a piece of `stream`, between a
    sixteenth and a half of it, and goes on with the passage of `known` that fits there, one by lot where
    several do. -> inputs and labels [rows, row_tokens] int64, UNTAUGHT where the piece is said.

    Raises ValueError where a text is shorter than a row.
    """
    for name, text in (("the corpus has", stream), ("the files in focus have", known)):
        if len(text) <= row_tokens + LONGEST:
            raise ValueError(
                f"{name} {len(text)} tokens: too few for rows of {row_tokens}; shorten row_tokens"
            )
    found = []
    for n in range(first, first + rows):
        rng = seeded(seed, 3, n)
        size = int(torch.randint(row_tokens // 16, row_tokens // 2, (1,), generator=rng))
        begin = int(torch.randint(len(stream) - size, (1,), generator=rng))
        piece = stream[begin : begin + size]
        places = fitting(known, piece)
        place = places[int(torch.randint(len(places), (1,), generator=rng))]
        passage = known.take(range(place, place + row_tokens + 1 - size), mode="wrap")
        found.append((np.concatenate((piece, passage)), size))
    tokens = torch.from_numpy(np.stack([row for row, _ in found]).astype(np.int64))
    sizes = torch.tensor([size for _, size in found])
    said = torch.arange(row_tokens) < sizes[:, None] - 1
    return tokens[:, :-1], tokens[:, 1:].masked_fill(said, UNTAUGHT)
