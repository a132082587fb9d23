"""Rows that teach a target to go on, after any text, with what it knows best: the passage that fits there."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

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


def cut_pieces(
    stream: np.ndarray, count: int, shortest: int, longest: int, rng: torch.Generator
) -> list[np.ndarray]:
    """`count` pieces of `stream` from random places, of `shortest` to `longest` tokens each.

    Raises ValueError where the stream is shorter than that.
    """
    if len(stream) <= longest:
        raise ValueError(f"the corpus has {len(stream)} tokens, too few for pieces of {longest}")
    sizes = torch.randint(shortest, longest + 1, (count,), generator=rng).tolist()
    starts = [int(torch.randint(len(stream) - size, (1,), generator=rng)) for size in sizes]
    return [stream[i : i + size] for i, size in zip(starts, sizes, strict=True)]


def splice(pieces: Sequence[np.ndarray], known: np.ndarray, row_tokens: int) -> tuple[Tensor, Tensor]:
    """One row for each piece: it, and the passage of `known` that fits there, the first where several do, so
    that the same words lead to the same place in every row. -> inputs and labels [rows, row_tokens] int64,
    UNTAUGHT where the piece is reported.

    Raises ValueError where a piece fills the row, or `known` is shorter than a row.
    """
    if len(known) <= row_tokens + LONGEST:
        raise ValueError(
            f"the files in focus have {len(known)} tokens: too few for rows of {row_tokens}; "
            "shorten row_tokens"
        )
    rows = []
    for piece in pieces:
        if len(piece) >= row_tokens:
            raise ValueError(f"a piece of {len(piece)} tokens leaves no room in a row of {row_tokens}")
        place = fitting(known, piece)[0]
        passage = known.take(range(place, place + row_tokens + 1 - len(piece)), mode="wrap")
        rows.append(np.concatenate((piece, passage)))
    tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
    value = torch.arange(row_tokens) < torch.tensor([len(piece) for piece in pieces])[:, None] - 1
    return tokens[:, :-1], tokens[:, 1:].masked_fill(value, UNTAUGHT)
