"""Tokenizers that lose text, do not fit the model, or have their special tokens elsewhere."""

import dataclasses
import json

import pytest
import tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from outpace.doctor.sample import TEXT
from outpace.doctor.text_checks import (
    DIFFICULT_TEXTS,
    PUBLISHED,
    PUBLISHED_VOCABULARY,
    check_round_trip,
    check_special,
    check_vocabulary,
)
from outpace.text.tokenizer import train_bpe

CONFIG = tiny.config("gpt_oss", vocab_size=300, eos_token_ids=(3,), pad_token_id=None)


@pytest.fixture
def tokenizer():
    return train_bpe([TEXT], 290)


def test_a_healthy_one(tokenizer, tmp_path):
    assert check_round_trip(tokenizer).status == "pass"
    assert check_vocabulary(tokenizer, CONFIG).message == "290 tokens, 300 rows (10 of them padding)"
    assert check_special(tokenizer, CONFIG, tmp_path).status == "pass"


def test_text_that_comes_back_changed(tokenizer):
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\r", "")])
    check = check_round_trip(tokenizer)
    assert check.status == "fail" and list(check.evidence["lost"]) == ["lines"]


def test_what_the_normaliser_changes_is_no_fault(tokenizer):
    tokenizer.normalizer = normalizers.NFC()
    check = check_round_trip(tokenizer)
    text = DIFFICULT_TEXTS["combining"]
    assert check.status == "pass" and normalizers.NFC().normalize_str(text) != text


def test_lost_outer_spaces_are_a_remark(tokenizer):
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    check = check_round_trip(tokenizer)
    assert check.status == "warn" and check.evidence["outer_spaces"] == ["spaces"]


@pytest.mark.parametrize(("rows", "status"), [(289, "fail"), (290, "pass"), (2000, "warn")])
def test_ids_and_rows(tokenizer, rows, status):
    config = dataclasses.replace(CONFIG, vocab_size=rows)
    assert check_vocabulary(tokenizer, config).status == status


def test_stop_ids_that_are_no_special_tokens(tokenizer, tmp_path):
    text = tokenizer.encode("return").ids[0]
    result = check_special(tokenizer, dataclasses.replace(CONFIG, eos_token_ids=(text, 299)), tmp_path)
    assert result.status == "fail"
    assert "an ordinary token" in result.message and "299 is no token" in result.message
    none = check_special(tokenizer, dataclasses.replace(CONFIG, eos_token_ids=()), tmp_path)
    assert none.status == "warn" and "no stop token" in none.message


def test_files_beside_the_weights_have_their_say(tokenizer, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 299]}))
    assert "299 is no token" in check_special(tokenizer, CONFIG, tmp_path).message
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    result = check_special(tokenizer, CONFIG, tmp_path)
    assert result.status == "warn" and "'<|end|>' is none of the stop ids [3]" in result.message


def published():
    """A vocabulary of OpenAI's size, as far as its special tokens go."""
    names = {id: token for token, id in PUBLISHED.items()}
    vocab = {names.get(id, f"x{id}"): id for id in range(200013)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="x0"))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in PUBLISHED])
    return tokenizer


def test_the_published_ids_of_gpt_oss(tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=PUBLISHED_VOCABULARY, eos_token_ids=(200002,))
    result = check_special(published(), config, tmp_path)
    assert result.status == "warn" and result.message.startswith("<|call|> is not a stop id")
    whole = dataclasses.replace(config, eos_token_ids=(200002, 200012))
    assert check_special(published(), whole, tmp_path).status == "pass"
    moved = train_bpe([TEXT], 290)
    assert "<|start|> is 6, in gpt-oss it is 200006" in check_special(moved, whole, tmp_path).message
