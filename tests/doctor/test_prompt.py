"""Prompts that a model was not trained on: begin tokens twice, empty blocks, open channels, split marks."""

import dataclasses
import json

import pytest
import tiny
from tokenizers import Tokenizer, models, processors

from outpace.doctor.sample import TEXT
from outpace.doctor.text_checks import check_beginning, check_harmony, check_template
from outpace.text.template import ChatTemplate
from outpace.text.tokenizer import SPECIAL, train_bpe

CONFIG = tiny.config("gpt_oss", vocab_size=300, eos_token_ids=(3,), pad_token_id=None)
PLAIN = dataclasses.replace(CONFIG, sinks=False, bos_token_id=0)
TURNS = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
SYSTEM = "<|start|>system<|message|>Reasoning: low<|end|>"
ASK = "{% if add_generation_prompt %}<|start|>assistant{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([TEXT], 290)


def opened(tokenizer, count):
    copy = Tokenizer.from_str(tokenizer.to_str())
    single = " ".join([SPECIAL[0]] * count + ["$A"])
    copy.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(SPECIAL[0], 0)])
    return copy


def test_beginnings(tokenizer):
    assert "nothing in front" in check_beginning(tokenizer, PLAIN).message
    assert check_beginning(opened(tokenizer, 1), PLAIN).status == "pass"
    assert check_beginning(opened(tokenizer, 2), PLAIN).status == "fail"
    other = dataclasses.replace(PLAIN, bos_token_id=5)
    assert check_beginning(opened(tokenizer, 1), other).status == "warn"


def test_harmony(tokenizer):
    assert check_harmony(tokenizer, CONFIG).status == "pass"
    assert check_harmony(tokenizer, PLAIN).status == "skipped"
    bare = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    check = check_harmony(bare, CONFIG)
    assert check.status == "warn" and "<|channel|>" in check.message


def test_a_mark_that_is_split_into_pieces(tokenizer):
    """In the vocabulary, but not added as a token of its own: a prompt's text is not read as it."""
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] != "<|channel|>"]
    check = check_harmony(Tokenizer.from_str(json.dumps(data)), CONFIG)
    assert check.status == "fail" and "<|channel|> is" in check.message


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (SYSTEM + TURNS + ASK, None),
        (SYSTEM + "<|start|>developer<|message|><|end|>" + TURNS + ASK, "a developer block although"),
        (SYSTEM + TURNS + ASK + "<|channel|>final<|message|>", "channel is already open"),
        (SYSTEM + TURNS + ASK + "<|message|>", "is already started"),
        (TURNS + ASK, "2 messages, not three"),
        (SYSTEM + TURNS + ASK + "<|im_start|>", "<|im_start|> is"),
        ("{{ raise_exception('no') }}", "no"),
        ("{% for %}", "not valid in line 1"),
    ],
)
def test_templates_of_gpt_oss(source, text, tokenizer):
    check = check_template(tokenizer, CONFIG, ChatTemplate(source=source), {3})
    assert check.status == ("pass" if text is None else "fail"), check.message
    assert text is None or text in check.message


def test_templates_of_others(tokenizer):
    """What ends an answer must be a stop token, and somebody must ask for the answer."""
    turns = TURNS.replace("<|end|>", "<|return|>")
    assert check_template(tokenizer, PLAIN, None, {3}).status == "skipped"
    assert check_template(tokenizer, PLAIN, ChatTemplate(source=turns + ASK), {3}).status == "pass"
    result = check_template(tokenizer, PLAIN, ChatTemplate(source=turns + ASK), {1})
    assert result.status == "warn" and "ends with <|return|>, which is no stop token" in result.message
    result = check_template(tokenizer, PLAIN, ChatTemplate(source=turns), {3})
    assert result.status == "warn" and "add_generation_prompt adds nothing" in result.message
    begins = ChatTemplate(source="{{ bos_token }}" + turns + ASK, bos_token=SPECIAL[0])
    assert (
        "do not let the tokenizer add another"
        in check_template(opened(tokenizer, 1), PLAIN, begins, {3}).message
    )
