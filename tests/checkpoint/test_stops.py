"""Stop tokens of generation_config.json, and that a target opened by path has them."""

import json

import pytest

from outpace.checkpoint.open import LoadError
from outpace.checkpoint.shipped import EMBEDDED
from outpace.checkpoint.tokenizer import generation_stops
from outpace.loading import open_target
from outpace.text.tokenizer import SPECIAL, train_bpe


def say(folder, value):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value, "top_k": 20}))


def test_one_several_or_none(tmp_path):
    assert generation_stops(tmp_path) == ()
    say(tmp_path, None)
    assert generation_stops(tmp_path) == ()
    say(tmp_path, 7)
    assert generation_stops(tmp_path) == (7,)
    say(tmp_path, [200002, 199999, 200012])
    assert generation_stops(tmp_path) == (200002, 199999, 200012)


@pytest.mark.parametrize("value", ["7", [7, "8"], -1, True, {"a": 1}, [[7]], 1.5])
def test_what_is_no_id(tmp_path, value):
    say(tmp_path, value)
    with pytest.raises(LoadError, match=r"generation_config\.json: eos_token_id is .*, not a token's id"):
        generation_stops(tmp_path)


@pytest.fixture
def folder(tmp_path):
    """The embedded target, by links."""
    for path in (EMBEDDED / "target").iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def test_a_target_has_them_after_its_own(folder):
    assert open_target(str(folder))[0].config.eos_token_ids == (3, 1, 9)
    say(folder, [7, 1, 3])
    assert open_target(str(folder))[0].config.eos_token_ids == (3, 1, 9, 7)


def test_a_tokenizer_with_more_ids_than_the_model_has_rows(folder):
    (folder / "tokenizer.json").unlink()
    text = (EMBEDDED / "target" / "tokenizer.json").read_text()
    data = json.loads(text)
    size = open_target("default")[0].config.vocab_size
    data["model"]["vocab"]["far"] = size
    (folder / "tokenizer.json").write_text(json.dumps(data))
    expected = rf"'far' the id {size} \(1 tokens .* vocab_size of {size}: they are not of one"
    with pytest.raises(ValueError, match=expected):
        open_target(str(folder))
    train_bpe(["hello " * 20], len(SPECIAL) + 258).save(str(folder / "tokenizer.json"))
    assert (
        open_target(str(folder))[1].get_vocab_size() == len(SPECIAL) + 258
    )  # fewer ids than rows are common
