"""Anchors of a training step: drawn at random, sorted, and packed with their rows into one forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from outpace.ops.blocks import Layout
from outpace.ops.sampling import seeded
from outpace.text.corpus import Document
from outpace.text.tokenizer import END_OF_TEXT, encode, token_id


class AnchorSample(Protocol):
    """One row of a teacher cache: a prompt, the target's response, and what the target thought."""

    @property
    def tokens(self) -> Tensor: ...  # [T] int64

    @property
    def prompt_length(self) -> int: ...

    @property
    def aux(self) -> Tensor: ...  # [n, T, C]

    @property
    def offset(self) -> int: ...  # position of token 0

    @property
    def final(self) -> Tensor | None: ...  # [T, C]: what the head reads at t to predict t + 1


@dataclass(frozen=True)
class Packed:
    """A blocks of all rows of a step, and their context; letters as in ops/attention.py, n = B - 1."""

    anchors: Tensor  # [A] int64, token ids
    positions: Tensor  # [A, B] int64
    labels: Tensor  # [A, n] int64: the token at each MASK, 0 past the row's end
    valid: Tensor  # [A, n] bool: False past the row's end
    aux: Tensor  # [features, S, C], strided as [S, features, C]
    context_positions: Tensor  # [S] int64
    layout: Layout
    row_tokens: int  # of all rows, prompts included
    final: Tensor | None = None  # [A, n, C]: of the token before each label, where it was asked for


def draw_anchors(
    prompt_length: int, length: int, count: int, rng: torch.Generator, first: Tensor | None = None
) -> Tensor:
    """Up to `count` positions, ascending, without repetition, [A] int64: an anchor and its successor are
    both of the response, prompt_length <= anchor <= length - 2. Empty where the row has none. Those in
    `first` that may be anchors are taken before any other."""
    headroom = max(0, length - 1 - prompt_length)
    drawn = prompt_length + torch.randperm(headroom, generator=rng)
    if first is not None:
        early = torch.isin(drawn, first)
        drawn = torch.cat((drawn[early], drawn[~early]))
    return drawn[:count].sort().values


def pack(
    rows: Sequence[AnchorSample],
    block_size: int,
    count: int,
    cut: int | None,
    rng: torch.Generator,
    features: Sequence[int] | None = None,
    *,
    final: bool = False,
    items: Sequence[Tensor] | None = None,
) -> Packed:
    """Draw `count` anchors a row, from its first `cut` tokens, and pack what one step needs.

    The context of a row ends before its last anchor: nothing sees more. `features` are the indices into
    aux that are wanted, None for all; `final`: the target's final states are wanted too; `begun`: for each
    row the positions to take as anchors before any is drawn (train/data.py). Raises ValueError
    where no row has two tokens of response, and where a row holds no final states.
    """
    within = torch.arange(block_size)
    pieces: list[tuple[Tensor, ...]] = []
    states: list[Tensor] = []
    first, starts = [0], [0]
    for i, row in enumerate(rows):
        tokens = row.tokens[:cut]
        early = None if items is None else items[i]
        anchors = draw_anchors(row.prompt_length, len(tokens), count, rng, early)
        if not len(anchors):
            continue
        end = int(anchors[-1])
        at = anchors[:, None] + within
        valid = at[:, 1:] < len(tokens)
        labels = tokens[at[:, 1:].clamp(max=len(tokens) - 1)].masked_fill(~valid, 0)
        aux = row.aux[:, :end] if features is None else row.aux[list(features), :end]
        context = torch.arange(end) + row.offset
        # the anchors once more, as Layout.seen: a block sees what is before its anchor
        pieces.append(
            (tokens[anchors], at + row.offset, labels, valid, aux.transpose(0, 1), context, anchors)
        )
        if final:
            if row.final is None:
                raise ValueError(
                    "the cache holds no final states, with which this loss compares: build one with "
                    "`teacher build --final`"
                )
            states.append(row.final[at[:, :-1].clamp(max=len(tokens) - 1)])
        first.append(first[-1] + len(anchors))
        starts.append(starts[-1] + end)
    if not pieces:
        raise ValueError(
            f"none of {len(rows)} cached rows has an anchor: that takes a response of at least two tokens"
            + (f" within row_tokens {cut}" if cut else "")
        )
    tokens, positions, labels, valid, aux, context, seen = (torch.cat(x) for x in zip(*pieces, strict=True))
    layout = Layout(torch.tensor(first), torch.tensor(starts), seen, block_size)
    size = sum(len(row.tokens[:cut]) for row in rows)
    kept = torch.cat(states) if final else None
    return Packed(tokens, positions, labels, valid, aux.transpose(0, 1), context, layout, size, kept)


class Rounds:
    """A step begins at the token that the one before proposed wrong, or at the bonus: at hard places, seldom
    those that anchors drawn anywhere in a text fall on. So whenever a text is seen again, its blocks are
    where those of the last time ended; two that met become one, and the place of the other is drawn again.
    """

    def __init__(self, samples: int, count: int) -> None:
        self.begins = torch.full((samples, count), -1, dtype=torch.int32)  # -1: none yet

    def of(self, sample: int, prompt_length: int) -> Tensor:
        """Positions [n] int64, repetitions included: decoding's first step begins with the response."""
        value = self.begins[sample]
        return torch.cat((value[value >= 0].long(), torch.tensor([prompt_length])))

    def ended(self, samples: Sequence[int], layout: Layout, hits: Tensor) -> None:
        """hits [A, n] of a step's blocks, those of samples[i] being layout.first[i] to layout.first[i + 1]:
        the next begin behind what was accepted, and the token that decoding puts after it."""
        nexts = (layout.seen + hits.long().cumprod(1).sum(1) + 1).int()
        for i, sample in enumerate(samples):
            value = nexts[layout.first[i] : layout.first[i + 1]]
            self.begins[sample] = -1
            self.begins[sample, : len(value)] = value

    def state_dict(self) -> dict[str, Any]:
        return {"begins": self.begins}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins = state["begins"]


def token_stream(tokenizer: Tokenizer, documents: list[Document], seed: int) -> np.ndarray:
    """All documents in one shuffled row of ids, each closed by <|endoftext|>; int32 [n]."""
    end = token_id(tokenizer, END_OF_TEXT)
    order = torch.randperm(len(documents), generator=seeded(seed)).tolist()
    ids: list[int] = []
    for i in order:
        ids += [*encode(tokenizer, documents[i].text), end]
    return np.asarray(ids, dtype=np.int32)


def rows_of_step(
    stream: np.ndarray, row_tokens: int, rows: int, first: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Rows `first` .. first+rows of an endless walk over shuffled, non-overlapping windows; its cut
    points move every epoch. -> inputs and labels [rows, row_tokens] int64."""
    per_epoch = (len(stream) - 1) // row_tokens - 1
    if per_epoch < 1:
        raise ValueError(
            f"the corpus has {len(stream)} tokens: too few for rows of {row_tokens}; shorten row_tokens"
        )
    items = []
    for n in range(first, first + rows):
        epoch, i = divmod(n, per_epoch)
        rng = seeded(seed, epoch)
        shift = int(torch.randint(row_tokens, (1,), generator=rng))
        window = int(torch.randperm(per_epoch, generator=rng)[i])
        begin = shift + window * row_tokens
        items.append(stream[begin : begin + row_tokens + 1])
    tokens = torch.from_numpy(np.stack(items).astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]
