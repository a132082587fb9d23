"""Rows of training text: the corpus as one stream of tokens, cut at other places in every epoch."""

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from outpace.ops.sampling import seeded
from outpace.text.corpus import Document
from outpace.text.tokenizer import END_OF_TEXT, encode, token_id


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
