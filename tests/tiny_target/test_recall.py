"""Rows to recall from: what is trained on is further up in its row, and nothing else is trained on."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from examples.tiny_target.recall import (
    CUE,
    ECHO,
    ECHO_CUE,
    LONGEST,
    SHARE,
    SHORTEST,
    echo_rows,
    recall_rows,
)
from examples.tiny_target.splice import UNTAUGHT
from outpace.ops.sampling import seeded
from outpace.text.corpus import note
from outpace.text.tokenizer import train_bpe

TEXT = "".join(f"def f_{i}(x, y):\n    return {i * i} * x + y_{i % 7}\n" for i in range(900))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([TEXT], 320)


@pytest.mark.parametrize("row_tokens", [400, 1024])
def test_what_is_trained_is_there_before(tokenizer, row_tokens):
    stream = np.asarray(tokenizer.encode(TEXT).ids, dtype=np.int32)
    inputs, labels = recall_rows(tokenizer, stream, 12, row_tokens, seeded(1))
    assert inputs.shape == labels.shape == (12, row_tokens)
    training = labels != UNTAUGHT
    assert torch.equal(labels[:, :-1][training[:, :-1]], inputs[:, 1:][training[:, :-1]])  # the next token
    shares = training.float().mean(1)
    assert (shares > 0).all() and (shares < SHARE).all() and len(set(shares.tolist())) > 3
    notes = 0
    for row, label in zip(inputs, labels, strict=True):
        text, places = [*row.tolist(), int(label[-1])], (label != UNTAUGHT).nonzero()[:, 0].tolist()
        starts = [p for p in places if p - 1 not in places]
        for p in starts:
            end = p
            while end in places:
                end += 1
            cue = text[p + 1 - 4 : p + 1]
            learnt = text[p + 1 : end + 1]
            whole = cue + learnt[: min(len(learnt), 8)]
            earlier = [i for i in range(p - 4) if text[i : i + len(whole)] == whole]
            assert earlier, tokenizer.decode(whole)
            notes += "= " in tokenizer.decode(text[p - 3 : p + 1])
    assert notes > 6
    assert SHORTEST > CUE


def test_the_same_numbers_give_the_same_rows(tokenizer):
    stream = np.asarray(tokenizer.encode(TEXT).ids, dtype=np.int32)
    one, two, other = (recall_rows(tokenizer, stream, 2, 500, seeded(n)) for n in (3, 3, 4))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]) and not torch.equal(one[0], other[0])


@pytest.mark.parametrize("row_tokens", [ECHO, 513])
def test_of_random_tokens_what_is_trained_follows_from_its_cue_alone(row_tokens):
    inputs, labels = echo_rows(10**6, 20, row_tokens, seeded(1))
    assert inputs.shape == labels.shape == (20, row_tokens)
    distances = []
    for row, value in zip(inputs.tolist(), labels.tolist(), strict=True):
        text = [*row, value[-1]]
        for i in (i for i, token in enumerate(value) if token != UNTAUGHT):
            assert value[i] == text[i + 1]
            cue = text[i + 1 - ECHO_CUE : i + 1]
            (before,) = [j for j in range(1, i) if text[j + 1 - ECHO_CUE : j + 1] == cue]
            assert text[before + 1] == value[i]
            distances.append(i - before)
    assert 0.25 < (labels != UNTAUGHT).float().mean() < 0.5
    assert len(set(distances)) > row_tokens / 3, "where it stood cannot be told from the place"
    if row_tokens > 2 * ECHO:
        shares, _ = np.histogram(distances, bins=[0, ECHO, 2 * ECHO, row_tokens])
        assert (shares > 0.1 * len(distances)).all(), "near and far"


def test_rows_that_are_too_short(tokenizer):
    least = round(2 * LONGEST / SHARE)
    with pytest.raises(ValueError, match=f"rows to recall from need at least {least}"):
        recall_rows(tokenizer, np.zeros(900), 1, least - 1, seeded(1))
    with pytest.raises(ValueError, match=f"rows of random tokens need at least {ECHO}"):
        echo_rows(300, 1, ECHO - 1, seeded(1))


def test_notes():
    items = [note(seeded(n)) for n in range(200)]
    assert all(len(value) == 6 and value.isdigit() and name.count("_") == 1 for name, value in items)
    assert len(set(items)) == 200
