"""The byte-level BPE: exact size, special tokens first, every text comes back, clear refusals."""

import json

import pytest
from tokenizers import Tokenizer, models, processors

from outpace.checkpoint.shipped import EMBEDDED
from outpace.text import tokenizer as module
from outpace.text.tokenizer import (
    END_OF_TEXT,
    MASK,
    SPECIAL,
    check_vocabulary,
    encode,
    encode_prompt,
    parse_tokenizer,
    read_tokenizer,
    surroundings,
    token_id,
    train_bpe,
    wrapped_errors,
)

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


def test_an_unknown_token(tokenizer):
    assert token_id(tokenizer, END_OF_TEXT) == 1
    with pytest.raises(ValueError, match=r"has no <\|nothing\|> token"):
        token_id(tokenizer, "<|nothing|>")


def test_a_file_too_large_to_be_one(tokenizer, tmp_path, monkeypatch):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(module, "MAX_BYTES", 2**10)
    with pytest.raises(ValueError, match="the limit is 0: it is no tokenizer"):
        read_tokenizer(tmp_path)


def test_a_prompt_is_never_cut_in_silence(tokenizer):
    short = parse_tokenizer(tokenizer.to_str(), "a copy")
    short.enable_truncation(4)
    short.enable_padding(length=9)
    assert len(encode(short, TEXT)) == 9
    assert encode(parse_tokenizer(short.to_str(), "it"), TEXT) == encode(tokenizer, TEXT)


def test_ids_out_of_order_and_with_holes(tokenizer):
    data = json.loads(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    data["model"]["vocab"] = {t: i + 1000 * (i >= len(SPECIAL)) for t, i in sorted(vocab.items())}
    moved = parse_tokenizer(json.dumps(data), "it")
    assert moved.decode(encode(moved, TEXT)) == TEXT
    check_vocabulary(moved, 1000 + SIZE)
    with pytest.raises(
        ValueError, match=rf"the id {999 + SIZE} \(1 tokens are past the end\), the model has a vocab"
    ):
        check_vocabulary(moved, 999 + SIZE)
    with pytest.raises(ValueError, match=r"the tokenizer gives .* the id 1010 "):
        check_vocabulary(moved, SIZE)


def test_a_panic_of_the_library_is_a_plain_error(tokenizer):
    class PanicException(BaseException):
        """As pyo3 derives it."""

    with (
        pytest.raises(ValueError, match="the thing is broken: index out of range"),
        wrapped_errors("the thing is broken"),
    ):
        raise PanicException("index out of range")
    with pytest.raises(KeyboardInterrupt), wrapped_errors("not used"):
        raise KeyboardInterrupt


def changed(tokenizer, **model):
    data = json.loads(tokenizer.to_str())
    normalizer = model.pop("normalizer", data["normalizer"])
    return json.dumps(data | {"model": data["model"] | model, "normalizer": normalizer})


def doubling(times, replace=None):
    step = {"type": "Replace", "pattern": {"String": "q"}, "content": "qq"}
    return {"type": "Sequence", "normalizers": [replace or step] * times}


def test_a_block_that_an_interrupt_leaves_unfinished_ends_in_silence():
    """Ctrl-C just after the block was entered: its generator is closed, not resumed."""
    context = wrapped_errors("not used")
    context.__enter__()
    context.gen.close()


@pytest.mark.parametrize("prefix", ["x", "longer than every token", "\u0120"])
def test_a_file_that_aborts_the_process_of_the_library(tokenizer, prefix):
    with pytest.raises(ValueError, match=r"it is not a tokenizer.json that can be read: "):
        parse_tokenizer(changed(tokenizer, continuing_subword_prefix=prefix), "it")


@pytest.mark.parametrize(
    "normalizer",
    [
        doubling(30),
        {"type": "Sequence", "normalizers": [doubling(15), doubling(15)]},
        doubling(9, {"type": "Replace", "pattern": {"Regex": ""}, "content": "\u4e00"}),
        doubling(9, {"type": "Prepend", "prepend": "ab"}),
    ],
)
def test_a_normalizer_that_fills_the_memory(tokenizer, normalizer):
    with pytest.raises(ValueError, match=r"its normalizer makes up to .* characters of one; the limit"):
        parse_tokenizer(changed(tokenizer, normalizer=normalizer), "it")
    assert parse_tokenizer(changed(tokenizer, normalizer=doubling(8)), "it")


def test_a_file_too_slow_or_too_large_to_load(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "CHECK_MEMORY", 2**27)
    large = json.loads(tokenizer.to_str())
    large["model"]["vocab"] |= {f"token {i}": i + 9999 for i in range(400_000)}
    with pytest.raises(ValueError, match=r"it is not a tokenizer.json .* needs more than 128 MiB of memory"):
        parse_tokenizer(json.dumps(large), "it")
    monkeypatch.setattr(module, "CHECK_MEMORY", 2**31)
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.05)
    with pytest.raises(ValueError, match=r"it is not a tokenizer.json .* takes more than 0.05 seconds"):
        parse_tokenizer(json.dumps(large), "it")


def test_a_file_is_checked_once(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "new")
    text = tokenizer.to_str()
    parse_tokenizer(text, "it")
    monkeypatch.setattr(module.SANDBOX, "run", None)  # a second check would fail
    assert encode(parse_tokenizer(text.encode(), "it"), TEXT) == encode(tokenizer, TEXT)
    with pytest.raises(ValueError, match="not a tokenizer"):
        parse_tokenizer(text + " ", "it")
    assert read_tokenizer(EMBEDDED / "target")  # the package's own needs none


def test_errors_of_encoding_are_wrapped(tokenizer):
    unknown = Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    for text, broken in (("b", unknown), ("\ud800", tokenizer)):
        for attempt in (encode, encode_prompt):
            with pytest.raises(ValueError, match="the tokenizer cannot encode"):
                attempt(broken, text)


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        ("<|start|> $A", [6], []),
        ("$A <|end|>", [], [7]),
        ("<|start|> <|message|> $A <|end|>", [6, 8], [7]),
    ],
)
def test_what_comes_before_a_prompt(tokenizer, template, before, after):
    made = parse_tokenizer(tokenizer.to_str(), "a copy")
    special = [(t, token_id(made, t)) for t in ("<|start|>", "<|end|>", "<|message|>")]
    made.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    assert surroundings(made) == (before, after)
    for text in ("def area", "", "   "):
        assert encode_prompt(made, text) == before + encode(made, text)
    if before:
        marked = "".join(made.id_to_token(i) for i in before)
        assert encode_prompt(made, marked + "def") == before + encode(made, "def")  # not twice
    assert encode_prompt(tokenizer, "def") == encode(tokenizer, "def")
