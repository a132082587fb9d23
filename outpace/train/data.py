"""Batches of a training step: anchors of blocks packed into one forward, and rows cut from raw text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from outpace.ops import ranks
from outpace.ops.blocks import Layout
from outpace.ops.sampling import seeded
from outpace.teacher.store import TeacherSample
from outpace.text.corpus import Document
from outpace.text.tokenizer import END_OF_TEXT, encode, token_id


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
    final: Tensor | None = None  # [A, n, C]: the target's states at the token before each label


def draw_anchors(
    prompt_length: int, length: int, count: int, rng: torch.Generator, first: Tensor | None = None
) -> Tensor:
    """Up to `count` positions, ascending, without repetition, [A] int64: an anchor and its successor both
    belong to the response, prompt_length <= anchor <= length - 2. Empty where the row has none. Valid
    positions in `first` are taken before any other."""
    headroom = max(0, length - 1 - prompt_length)
    drawn = prompt_length + torch.randperm(headroom, generator=rng)
    if first is not None:
        early = torch.isin(drawn, first)
        drawn = torch.cat((drawn[early], drawn[~early]))
    return drawn[:count].sort().values


def pack(
    rows: Sequence[TeacherSample],
    block_size: int,
    count: int,
    cut: int | None,
    rngs: Iterable[torch.Generator],
    features: Sequence[int] | None = None,
    *,
    final: bool = False,
    first_anchors: Sequence[Tensor] | None = None,
) -> Packed:
    """Draw `count` anchors a row, from its first `cut` tokens, and pack the inputs of one step. `rngs`: of
    each row, so that its anchors do not hang on the others.

    The context of a row ends before its last anchor: nothing sees more. `features`: indices into aux, None
    for all; `final`: with the target's final states; `first_anchors`: for each row the anchors to take
    before any is drawn. Rows without an anchor are left out. Raises ValueError where no row is left.
    """
    within = torch.arange(block_size)
    parts: list[tuple[Tensor, ...]] = []
    first, starts = [0], [0]
    for i, (row, rng) in enumerate(zip(rows, rngs, strict=False)):
        tokens = row.tokens[:cut]
        early = None if first_anchors is None else first_anchors[i]
        anchors = draw_anchors(row.prompt_length, len(tokens), count, rng, early)
        if not len(anchors):
            continue
        end = int(anchors[-1])
        at = anchors[:, None] + within
        valid = at[:, 1:] < len(tokens)
        labels = tokens[at[:, 1:].clamp(max=len(tokens) - 1)].masked_fill(~valid, 0)
        aux = row.aux[:, :end] if features is None else row.aux[list(features), :end]
        context = torch.arange(end) + row.offset
        # the anchors once more, as Layout.seen: a block sees the tokens before its anchor
        part: tuple[Tensor, ...] = (
            tokens[anchors],
            at + row.offset,
            labels,
            valid,
            aux.transpose(0, 1),
            context,
            anchors,
        )
        if final:
            assert row.final is not None
            part = (*part, row.final[at[:, :-1].clamp(max=len(tokens) - 1)])
        parts.append(part)
        first.append(first[-1] + len(anchors))
        starts.append(starts[-1] + end)
    if not parts:
        raise ValueError(
            f"none of {len(rows)} cached rows has an anchor: that takes a response of at least two tokens"
            + (f" within row_tokens {cut}" if cut else "")
        )
    tokens, positions, labels, valid, aux, context, seen, *states = (
        torch.cat(x) for x in zip(*parts, strict=True)
    )
    layout = Layout(torch.tensor(first), torch.tensor(starts), seen, block_size)
    size = sum(len(row.tokens[:cut]) for row in rows)
    return Packed(tokens, positions, labels, valid, aux.transpose(0, 1), context, layout, size, *states)


class FollowedAnchors:
    """Anchors where the steps of decoding begin. A step begins at the correction of a wrong draft token or
    at the bonus: at hard positions, which random anchors seldom hit. So whenever a text is seen again, its
    blocks begin where those of the last time ended; two that meet become one, and another is drawn instead.
    """

    def __init__(self, samples: int, count: int) -> None:
        self.begins = torch.full((samples, count), -1, dtype=torch.int32)  # -1: none yet

    def of(self, samples: Sequence[int], rows: Sequence[TeacherSample]) -> list[Tensor]:
        """For each sample positions [n] int64, repetitions included: decoding's first step begins with the
        response."""
        return [
            torch.cat((begins[begins >= 0].long(), torch.tensor([row.prompt_length])))
            for begins, row in zip(self.begins[list(samples)], rows, strict=True)
        ]

    def update(self, samples: Sequence[int], layout: Layout, hits: Tensor) -> None:
        """hits [A, n] of a step's blocks; samples[i] has those from layout.first[i] to layout.first[i + 1].
        The next block begins behind the accepted tokens and the token that decoding adds to them."""
        nexts = (layout.seen + hits.long().cumprod(1).sum(1) + 1).int()
        begins = [nexts[layout.first[i] : layout.first[i + 1]] for i in range(len(samples))]
        for sample, places in ranks.gathered(list(zip(samples, begins, strict=True))):
            self.begins[sample] = -1
            self.begins[sample, : len(places)] = places

    def state_dict(self) -> dict[str, Any]:
        return {"begins": self.begins}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins.copy_(state["begins"])


def token_stream(tokenizer: Tokenizer, documents: list[Document], seed: int) -> np.ndarray:
    """All documents shuffled and concatenated, each followed by <|endoftext|>; int32 [n]."""
    end = token_id(tokenizer, END_OF_TEXT)
    order = torch.randperm(len(documents), generator=seeded(seed)).tolist()
    ids: list[int] = []
    for i in order:
        ids += [*encode(tokenizer, documents[i].text), end]
    return np.asarray(ids, dtype=np.int32)


def rows_of_step(
    stream: np.ndarray, row_tokens: int, rows: int, first: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Rows `first` .. first+rows of an endless pass over shuffled, non-overlapping windows; the cut points
    move every epoch. -> inputs and labels [rows, row_tokens] int64."""
    per_epoch = (len(stream) - 1) // row_tokens - 1
    if per_epoch < 1:
        raise ValueError(
            f"the corpus has {len(stream)} tokens: too few for rows of {row_tokens}; shorten row_tokens"
        )
    windows = []
    for n in range(first, first + rows):
        epoch, i = divmod(n, per_epoch)
        rng = seeded(seed, epoch)
        shift = int(torch.randint(row_tokens, (1,), generator=rng))
        window = int(torch.randperm(per_epoch, generator=rng)[i])
        begin = shift + window * row_tokens
        windows.append(stream[begin : begin + row_tokens + 1])
    tokens = torch.from_numpy(np.stack(windows).astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]
