"""The byte-level BPE: exact size, special tokens first, every text comes back, clear refusals."""

import pytest

from outpace.chat.tokenizer import END_OF_TEXT, MASK, SPECIAL, encode, read_tokenizer, token_id, train_bpe

TEXT = (
    "def area(width, height):\n    return width * height  # größer als 1024?\r\n\n\n\tx = [0xFF, 3.14159]\n"
    * 20
)
SIZE = len(SPECIAL) + 256 + 30


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([TEXT], SIZE)


def test_size_and_special_tokens(tokenizer):
    assert tokenizer.get_vocab_size() == SIZE
    assert [tokenizer.id_to_token(i) for i in range(len(SPECIAL))] == list(SPECIAL)
    assert token_id(tokenizer, MASK) == SPECIAL.index(MASK)


@pytest.mark.parametrize(
    "text", [TEXT, "日本語 🙂 \x00 \u200b", "", "   \n \n", "a\u0301 NFC é", "\r\n\r\r\n"]
)
def test_every_text_comes_back(tokenizer, text):
    assert tokenizer.decode(encode(tokenizer, text), skip_special_tokens=False) == text


def test_it_learned_something_and_is_deterministic(tokenizer):
    assert len(encode(tokenizer, TEXT)) < 0.75 * len(TEXT.encode())
    assert train_bpe([TEXT], SIZE).to_str() == tokenizer.to_str()


def test_pieces_do_not_cross_lines_or_long_numbers(tokenizer):
    for wanted in ("1024?", "31415926"):
        for token in encode(tokenizer, wanted):
            assert sum(c.isdigit() for c in tokenizer.id_to_token(token)) <= 3


def test_text_too_poor_for_the_size():
    with pytest.raises(ValueError, match="not 4096: ask for a smaller one"):
        train_bpe(["ab"], 4096)


def test_reading(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        read_tokenizer(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert encode(read_tokenizer(tmp_path), TEXT) == encode(tokenizer, TEXT)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="not a tokenizer"):
        read_tokenizer(tmp_path)


def test_a_token_nobody_knows(tokenizer):
    assert token_id(tokenizer, END_OF_TEXT) == 1
    with pytest.raises(ValueError, match=r"knows no <\|nothing\|>"):
        token_id(tokenizer, "<|nothing|>")
