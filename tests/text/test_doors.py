"""Damaged tokenizers, templates and vocabularies: understood, or a clear ValueError, in bounded time."""

import copy
import json
import random
import time
import warnings

import nasty
import pytest
from talks import render

from outpace.text import template as template_module
from outpace.text.gguf_tokenizer import gguf_vocabulary, special_ids, tokenizer_from_gguf
from outpace.text.template import ChatTemplate, folder_template, gguf_template
from outpace.text.tokenizer import SPECIAL, check_vocabulary, encode, encode_prompt, read_tokenizer, train_bpe

WRONG = [
    *(None, True, -1, 0, 2**31, 2**64, 1e400, "", "x", "(", "\ud83d", "a" * 5000, [], [[]], {}),
    *([1, 2], ["a", "b"], {"type": "BPE"}, {"a": {"b": []}}),
]
TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}
[{{ m['content'] | trim }}]{% else %}{{ raise_exception('no ' ~ m.role) }}{% endif %}{% endfor %}
{%- set ns = namespace(n=0) %}{% macro f(x) %}{{ x + 1 }}{% endmacro %}{{ f(2) }}{{ messages | tojson }}"""
FRAGMENTS = [
    "{{",
    "}}",
    "{%",
    "%}",
    "|",
    "'",
    "(",
    ")",
    " ~ ",
    "{% for x in y %}",
    "{% endfor %}",
    "|tojson",
    "[",
    "*",
    "\\",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(
        ["def area(width, height):\n    return width * height  # gr\u00f6\u00dfer\n" * 20], len(SPECIAL) + 280
    )


def places(value, place=()):
    """Every node of a JSON value; of long lists and objects the first few."""
    yield place
    if isinstance(value, dict):
        for key in list(value)[:12]:
            yield from places(value[key], (*place, key))
    if isinstance(value, list):
        for i in range(min(len(value), 3)):
            yield from places(value[i], (*place, i))


def swapped(value, place, other):
    if not place:
        return other
    value = copy.deepcopy(value)
    inner = value
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = other
    return value


def damaged(data, seed, cases=120):
    """Cut off, bits flipped, a part doubled or taken out."""
    rng = random.Random(seed)
    for _ in range(cases):
        broken, at = bytearray(data), rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                del broken[at:]
            case 1:
                for _ in range(rng.randrange(1, 6)):
                    broken[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 2:
                broken[at:at] = data[at : at + rng.randrange(40)]
            case 3:
                del broken[at : at + rng.randrange(1, 40)]
        yield bytes(broken)


def judge(cases, attempt):
    """-> how many were refused, how many understood. Anything but a ValueError gets out of here."""
    counts, slowest = [0, 0], 0.0
    for case in cases:
        began = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attempt(case)
            counts[1] += 1
        except ValueError as error:
            assert str(error)
            counts[0] += 1
        slowest = max(slowest, time.process_time() - began)
    assert slowest < 3
    return counts


def use(result):
    """What a program does with a tokenizer that it was given."""
    for text in ("def f(x): 'gr\u00f6\u00dfer' 123\n<|end|>", ""):
        result.decode(encode(result, text))
    encode_prompt(result, "a")
    check_vocabulary(result, 10**9)


def test_tokenizer_json_with_bytes_damaged(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"

    def attempt(data):
        path.write_bytes(data)
        use(read_tokenizer(tmp_path))

    refused, understood = judge(damaged(tokenizer.to_str().encode(), 0, 300), attempt)
    assert refused > 200 and understood > 0


def test_tokenizer_json_with_wrong_types(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    data = json.loads(tokenizer.to_str())

    def attempt(case):
        path.write_text(json.dumps(case))
        use(read_tokenizer(tmp_path))

    refused, understood = judge((swapped(data, p, w) for p in places(data) for w in WRONG), attempt)
    assert refused > 1000 and understood > 50


def test_tokenizer_config_json(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    token = {"content": "</s>", "special": True}
    values = {
        "chat_template": [{"name": "default", "template": TEMPLATE}],
        "bos_token": "<s>",
        "eos_token": token,
    }
    data = json.dumps(values).encode()

    def attempt(case):
        path.write_bytes(case if isinstance(case, bytes) else json.dumps(case).encode())
        result = folder_template(tmp_path)
        assert result is None or isinstance(result, ChatTemplate)
        if result is not None:
            result.render([{"role": "user", "content": "a"}])

    assert judge(damaged(data, 1, 200), attempt)[0] > 100
    refused, understood = judge((swapped(values, p, w) for p in places(values) for w in WRONG), attempt)
    assert refused > 20 and understood > 50


def test_chat_templates(monkeypatch):
    monkeypatch.setattr(template_module, "SECONDS", 0.5)
    rng = random.Random(2)
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": nasty.QUOTES}]

    def cases():
        for data in damaged(TEMPLATE.encode(), 3, 150):
            yield data.decode("utf-8", "replace")
        for _ in range(150):
            at = rng.randrange(len(TEMPLATE))
            yield TEMPLATE[:at] + rng.choice(FRAGMENTS) + TEMPLATE[at:]
        for _ in range(100):
            yield "".join(rng.choices([*FRAGMENTS, "messages", "x", " "], k=rng.randrange(1, 12)))

    def attempt(template):
        assert isinstance(render(template, messages, bos_token="<s>"), str)

    refused, understood = judge(cases(), attempt)
    assert refused > 100 and understood > 50


def test_messages_of_wrong_types():
    items = [{"role": "user", "content": "a", "tool_calls": [{"name": "f", "arguments": {}}]}]

    def attempt(messages):
        render(TEMPLATE, messages)

    assert sum(judge((swapped(items, p, w) for p in places(items) if p for w in WRONG), attempt)) > 100


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gguf_metadata(tokenizer, kind):
    given = gguf_vocabulary(tokenizer, tokenizer.get_vocab_size(), pre="llama-bpe")
    given |= {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    given |= {"tokenizer.chat_template": TEMPLATE, "tokenizer.ggml.add_bos_token": True}
    given |= {"tokenizer.ggml.scores": [-float(i) for i in range(tokenizer.get_vocab_size())]}

    def attempt(metadata):
        special_ids(metadata)
        gguf_template(metadata)
        use(tokenizer_from_gguf(metadata))

    use(tokenizer_from_gguf(given))
    cases = [swapped(given, p, w) for p in places(given) if p for w in WRONG]
    refused, understood = judge(cases, attempt)
    assert refused > 100 and understood > 10
    plain = {key: value for key, value in given.items() if not key.endswith("huggingface.json")}
    refused, understood = judge([swapped(plain, p, w) for p in places(plain) if p for w in WRONG], attempt)
    assert refused > 100 and understood > 10
    judge([{k: v for k, v in plain.items() if k != gone} for gone in plain], attempt)
    for name in ("tokens", "merges", "token_type", "scores"):
        key = f"tokenizer.ggml.{name}"
        lists = (plain[key][:n] for n in (0, 1, 100, len(plain[key]) - 1))
        judge([plain | {key: short} for short in lists], attempt)
