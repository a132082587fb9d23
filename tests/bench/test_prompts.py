"""Held-out prompts: exact length, deterministic, from line starts, spread over files, never overlapping."""

import random
from itertools import pairwise

import pytest

from outpace.bench.prompts import held_out_prompts
from outpace.text.corpus import Document
from outpace.text.tokenizer import train_bpe


def document(name, lines):
    rng = random.Random(name)
    words = ["alpha", "beta", "gamma", "delta", "für", "return", "日本", "x = 1"]
    text = "".join(f"{name} {n}: {' '.join(rng.choices(words, k=rng.randint(1, 7)))}\n" for n in range(lines))
    return Document(name, text)


@pytest.fixture(scope="module")
def documents():
    return [document("a", 40), document("b", 3), document("c", 90), document("d", 60)]


@pytest.fixture(scope="module")
def tokenizer(documents):
    return train_bpe([d.text for d in documents], 300)


def test_prompts_are_stretches_of_the_text_that_begin_at_a_line_and_do_not_overlap(documents, tokenizer):
    prompts = held_out_prompts(tokenizer, documents, 13, 61)
    assert [len(p) for p in prompts] == [61] * 13
    used = []
    for ids in prompts:
        text = tokenizer.decode(ids, skip_special_tokens=False).rstrip("\ufffd")
        home = [d for d in documents if text in d.text]
        assert len(home) == 1
        at = home[0].text.index(text)
        assert at == 0 or home[0].text[at - 1] == "\n"
        used.append((home[0].name, at, at + len(text)))
    used.sort()
    for (name, _, end), (other, begin, _) in pairwise(used):
        assert name != other or end <= begin
    counts = [sum(name == n for name, _, _ in used) for n in "abcd"]
    assert counts[1] == 0  # too short a file
    assert min(counts[0], counts[2], counts[3]) >= 3


def test_the_first_prompts_come_from_different_files_and_do_not_depend_on_order(documents, tokenizer):
    prompts = held_out_prompts(tokenizer, documents, 3, 61)
    heads = {tokenizer.decode(p)[0] for p in prompts}
    assert heads == {"a", "c", "d"}
    assert held_out_prompts(tokenizer, documents[::-1], 3, 61) == prompts
    assert held_out_prompts(tokenizer, documents, 5, 61)[:3] == prompts


def test_too_little_text_is_reported(documents, tokenizer):
    with pytest.raises(ValueError, match=r"hold \d+ prompts of 61 tokens, not 500: ask for fewer"):
        held_out_prompts(tokenizer, documents, 500, 61)
    with pytest.raises(ValueError, match="hold 0 prompts"):
        held_out_prompts(tokenizer, [], 1, 4)
