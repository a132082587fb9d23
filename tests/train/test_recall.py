"""Rows to recall from: what is taught stands further up in its row, and nothing else is taught."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from outpace.chat.tokenizer import train_bpe
from outpace.corpus import note
from outpace.ops.sampling import seeded
from outpace.train.recall import CUE, LONGEST, SHARE, SHORTEST, recall_rows
from outpace.train.splice import UNTAUGHT

TEXT = "".join(f"def f_{i}(x, y):\n    return {i * i} * x + y_{i % 7}\n" for i in range(900))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([TEXT], 320)


@pytest.mark.parametrize("row_tokens", [400, 1024])
def test_what_is_taught_stood_there_before(tokenizer, row_tokens):
    stream = np.asarray(tokenizer.encode(TEXT).ids, dtype=np.int32)
    inputs, labels = recall_rows(tokenizer, stream, 12, row_tokens, seeded(1))
    assert inputs.shape == labels.shape == (12, row_tokens)
    taught = labels != UNTAUGHT
    assert torch.equal(labels[:, :-1][taught[:, :-1]], inputs[:, 1:][taught[:, :-1]])  # the next token
    shares = taught.float().mean(1)
    assert (shares > 0).all() and (shares < SHARE).all() and len(set(shares.tolist())) > 3
    notes = 0
    for row, said in zip(inputs, labels, strict=True):
        text, places = [*row.tolist(), int(said[-1])], (said != UNTAUGHT).nonzero()[:, 0].tolist()
        starts = [p for p in places if p - 1 not in places]
        for p in starts:
            end = p
            while end in places:
                end += 1
            cue = text[p + 1 - 4 : p + 1]
            found = text[p + 1 : end + 1]
            whole = cue + found[: min(len(found), 8)]
            earlier = [i for i in range(p - 4) if text[i : i + len(whole)] == whole]
            assert earlier, tokenizer.decode(whole)
            notes += "= " in tokenizer.decode(text[p - 3 : p + 1])
    assert notes > 6
    assert SHORTEST > CUE


def test_the_same_numbers_give_the_same_rows(tokenizer):
    stream = np.asarray(tokenizer.encode(TEXT).ids, dtype=np.int32)
    one, two, other = (recall_rows(tokenizer, stream, 2, 500, seeded(n)) for n in (3, 3, 4))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]) and not torch.equal(one[0], other[0])


def test_rows_that_are_too_short(tokenizer):
    least = round(2 * LONGEST / SHARE)
    with pytest.raises(ValueError, match=f"rows to recall from need at least {least}"):
        recall_rows(tokenizer, np.zeros(900), 1, least - 1, seeded(1))


def test_notes():
    found = [note(seeded(n)) for n in range(200)]
    assert all(len(value) == 6 and value.isdigit() and name.count("_") == 1 for name, value in found)
    assert len(set(found)) == 200
