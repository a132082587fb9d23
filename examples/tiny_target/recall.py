"""Rows that can be gone on with only by looking back: pieces of text scattered in it, then repeated."""

from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.tiny_target.splice import UNTAUGHT, cut_pieces
from outpace.text.corpus import note
from outpace.text.tokenizer import encode

SHORTEST, LONGEST = 16, 64  # tokens of a piece of the corpus
CUE = 6  # its first tokens, which say which piece it is
SHARE = 0.4  # most of a row that is reported again
ECHO, ECHO_PIECE, ECHO_CUE = 64, 10, 2  # of random tokens: a passage at least, a piece on average, its cue


def recall_rows(
    tokenizer: Tokenizer, stream: np.ndarray, rows: int, row_tokens: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """-> inputs and labels [rows, row_tokens] int64. Every other piece is a note, `name = value`.

    At least a twentieth of a row and at most SHARE of it is given twice, the second time at its end and in
    another order; between the first ones is other text. The loss counts what of the second ones follows
    from the first: a piece after its first CUE tokens, a note's value. Raises ValueError for rows that are
    too short for two pieces.
    """
    if row_tokens * SHARE < 2 * LONGEST:
        raise ValueError(
            f"row_tokens {row_tokens}: rows to recall from need at least {round(2 * LONGEST / SHARE)}"
        )
    return _with_labels([_row(tokenizer, stream, row_tokens, rng) for _ in range(rows)])


def echo_rows(vocab_size: int, rows: int, row_tokens: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """-> as `recall_rows`, of random tokens: what is reported, in pieces, is reported again in another
    order; a row has few long passages or many short ones of that kind. Nothing but what stood before states
    what comes, so looking back is learnt first, and soon. Raises ValueError for rows shorter than a
    passage."""
    if row_tokens < ECHO:
        raise ValueError(f"row_tokens {row_tokens}: rows of random tokens need at least {ECHO}")
    return _with_labels([_echoes(vocab_size, row_tokens + 1, rng) for _ in range(rows)])


def _with_labels(items: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor]:
    """Rows, each its tokens [row_tokens + 1] and which of them are trained on -> inputs and labels."""
    tokens, training = (np.stack(x) for x in zip(*items, strict=True))
    labels = np.where(training, tokens, UNTAUGHT)[:, 1:]
    return torch.from_numpy(tokens[:, :-1].astype(np.int64)), torch.from_numpy(labels.astype(np.int64))


def _echoes(vocab_size: int, length: int, rng: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
    """tokens [length], and which of them are trained on."""
    tokens, training = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
    while len(tokens) < length:
        half = int(ECHO * (length / ECHO) ** float(torch.rand((), generator=rng))) // 2
        value = torch.randint(vocab_size, (half,), generator=rng)
        edges = torch.randint(1, half, (half // ECHO_PIECE - 1,), generator=rng)
        pieces = value.tensor_split(edges.unique())
        again = [pieces[i] for i in torch.randperm(len(pieces), generator=rng)]
        tokens = torch.cat([tokens, value, *again])
        items = [torch.arange(len(piece)) >= ECHO_CUE for piece in again]
        training = torch.cat([training, torch.zeros(half, dtype=torch.bool), *items])
    return tokens[:length].numpy(), training[:length].numpy()


def _row(
    tokenizer: Tokenizer, stream: np.ndarray, row_tokens: int, rng: torch.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """tokens [row_tokens + 1], and which of them are trained on."""
    share = 0.05 + (SHARE - 0.05) * float(torch.rand((), generator=rng))
    pieces = _pieces(tokenizer, stream, max(row_tokens * share, 2 * LONGEST), rng)
    again = [pieces[i] for i in torch.randperm(len(pieces), generator=rng)]
    value = sum(len(tokens) for tokens, _ in pieces)
    parts = [(tokens, len(tokens)) for tokens, _ in pieces]
    parts += _other_text(stream, row_tokens + 1 - 2 * value, len(pieces), rng)
    parts = [parts[i] for i in torch.randperm(len(parts), generator=rng)] + again
    tokens = np.concatenate([tokens for tokens, _ in parts])
    training = np.concatenate([np.arange(len(tokens)) >= cue for tokens, cue in parts])
    return tokens, training


def _pieces(
    tokenizer: Tokenizer, stream: np.ndarray, headroom: float, rng: torch.Generator
) -> list[tuple[np.ndarray, int]]:
    """Of at most `room` tokens in all: each with how many of its tokens are its cue."""
    items: list[tuple[np.ndarray, int]] = []
    while True:
        if len(items) % 2:
            name, value = note(rng)
            cue = encode(tokenizer, f"\n{name} = ")
            piece = np.asarray([*cue, *encode(tokenizer, f"{value}\n")], dtype=np.int32), len(cue)
        else:
            piece = cut_pieces(stream, 1, SHORTEST, LONGEST, rng)[0], CUE
        headroom -= len(piece[0])
        if headroom < 0:
            return items
        items.append(piece)


def _other_text(
    stream: np.ndarray, headroom: int, parts: int, rng: torch.Generator
) -> Sequence[tuple[np.ndarray, int]]:
    """`room` tokens of one place of the stream, in `parts` parts of random sizes, none of which is trained
    on."""
    text = cut_pieces(stream, 1, headroom, headroom, rng)[0]
    edges = sorted(torch.randint(headroom + 1, (parts - 1,), generator=rng).tolist())
    sizes = zip([0, *edges], [*edges, headroom], strict=True)
    return [(text[a:b], b - a) for a, b in sizes if a < b]
