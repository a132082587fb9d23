"""The vocabulary that problems are tokenised with: digits, brackets and quotes stay single tokens."""

import random

import pytest

from outpace.tasks.families import FAMILIES
from outpace.text import harmony
from outpace.text.tokenizer import encode, train_bpe

ALONE = "0123456789[]{}()\"'"


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(1)
    drawn = [family.draw(rng, held_out=False) for family in FAMILIES.values() for _ in range(25)]
    return [harmony.render(problem.conversation(), generation_prompt=False) for problem in drawn]


@pytest.fixture(scope="module")
def tokenizer(texts):
    return train_bpe(texts, 700, alone=ALONE)


def test_no_token_joins_a_character_that_stands_alone(texts, tokenizer):
    joined = [t for t in tokenizer.get_vocab() if len(t) > 1 and "<|" not in t and set(t) & set(ALONE)]
    assert joined == []
    usual = train_bpe(texts, 700).get_vocab()
    assert any(len(t) > 1 and "<|" not in t and set(t) & set(ALONE) for t in usual)


def test_texts_come_back_and_words_are_still_joined(texts, tokenizer):
    for text in texts:
        assert tokenizer.decode(encode(tokenizer, text), skip_special_tokens=False) == text
    tokens = tokenizer.encode('{"city": 4217}').tokens
    assert tokens[:2] == ["{", '"'] and tokens[-5:] == [*"4217", "}"] and len(tokens) < len('{"city": 4217}')
