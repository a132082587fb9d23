"""GGUF vocabularies: the tokens of the tokenizer.json they came from, there and back; refusals; speed."""

import functools
import json
import time

import nasty
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from vocabularies import KEY, RULES, trained

from outpace.checkpoint.shipped import EMBEDDED
from outpace.text.gguf_tokenizer import WHOLE, SpecialIds, gguf_vocabulary, special_ids, tokenizer_from_gguf
from outpace.text.pre_tokenizers import NAMED, O200K, QWEN2
from outpace.text.tokenizer import SPECIAL, encode, encode_prompt, read_tokenizer, train_bpe


def assert_same(ours, theirs, texts=nasty.TEXTS):
    for text in texts:
        assert encode(ours, text) == encode(theirs, text), text


# ---- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_a_trained_tokenizer_survives_gguf(name):
    before = trained(name)
    metadata = gguf_vocabulary(before, before.get_vocab_size() + 7)
    assert NAMED[metadata[f"{KEY}pre"]].splits == NAMED[name].splits and WHOLE not in metadata
    after = tokenizer_from_gguf(metadata)
    assert_same(after, before)
    assert after.get_vocab() == before.get_vocab()
    for text in nasty.TEXTS:
        assert after.decode(encode(after, text), skip_special_tokens=False) == before.decode(
            encode(before, text), skip_special_tokens=False
        )
    assert gguf_vocabulary(after, after.get_vocab_size() + 7) == metadata


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "gpt-4o", "deepseek-llm"])
@settings(max_examples=60)
@given(text=st.text(max_size=60))
def test_any_text_gets_the_same_tokens(name, text):
    before = trained(name)
    after = read_back(name)
    assert encode(after, text) == encode(before, text)


@functools.cache
def read_back(name):
    return tokenizer_from_gguf(gguf_vocabulary(trained(name), trained(name).get_vocab_size()))


def test_padding_gets_unused_names_and_no_token():
    size = trained("gpt-2").get_vocab_size()
    metadata = gguf_vocabulary(trained("gpt-2"), size + 2)
    assert metadata[f"{KEY}tokens"][-2:] == [f"[PAD{size}]", f"[PAD{size + 1}]"]
    assert metadata[f"{KEY}token_type"][-2:] == [5, 5]
    after = tokenizer_from_gguf(metadata)
    assert after.id_to_token(size) is None and after.get_vocab_size() == size


def test_the_embedded_tokenizer_goes_along_whole_and_is_cut_by_the_nearest_rule_elsewhere():
    before = read_tokenizer(EMBEDDED / "target")
    metadata = gguf_vocabulary(before, 4096)
    assert metadata[f"{KEY}pre"] == "llama-bpe" and not metadata[f"{KEY}add_bos_token"]
    assert_same(tokenizer_from_gguf(metadata), before)
    nearest = tokenizer_from_gguf({k: v for k, v in metadata.items() if k != WHOLE})
    differ = [text for text in nasty.TEXTS if encode(nearest, text) != encode(before, text)]
    assert differ == [nasty.QUOTES]  # an apostrophe after a letter opens a word: r'test'
    for text in ("it's we're", "x = 'self' + b['data']", "print('test')"):
        assert encode(nearest, text) == encode(before, text)


def test_whole_word_tokens_do_not_matter_where_merges_lead_to_every_token():
    data = json.loads(trained("llama-bpe").to_str())
    data["model"]["ignore_merges"] = False
    other = Tokenizer.from_str(json.dumps(data))
    metadata = gguf_vocabulary(other, 2000)
    assert metadata[f"{KEY}pre"] == "smaug-bpe"  # the same rule by merges alone
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = O200K
    metadata = gguf_vocabulary(Tokenizer.from_str(json.dumps(data)), 2000)
    assert metadata[f"{KEY}pre"] == "gpt-4o" and WHOLE not in metadata
    del data["model"]["merges"][3]  # now a token is out of the merges' reach
    metadata = gguf_vocabulary(Tokenizer.from_str(json.dumps(data)), 2000, pre="gpt-4o")
    assert WHOLE in metadata


def test_whole_word_tokens_come_before_merges():
    """Llama 3's rule: `ab` is a token though no merge makes it."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    metadata = {f"{KEY}model": "gpt2", f"{KEY}pre": "llama-bpe", f"{KEY}tokens": tokens, f"{KEY}merges": []}
    assert encode(tokenizer_from_gguf(metadata), "ab") == [256]
    assert len(encode(tokenizer_from_gguf(metadata | {f"{KEY}pre": "qwen2"}), "ab")) == 2


def test_what_stands_around_a_text():
    made = train_bpe(["hello world " * 20], len(SPECIAL) + 260)
    begin = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 6)])
    made.post_processor = begin
    metadata = gguf_vocabulary(made, 300, pre="gpt-2") | {WHOLE: None}
    assert metadata[f"{KEY}add_bos_token"] and metadata[f"{KEY}bos_token_id"] == 6
    after = tokenizer_from_gguf(metadata)
    assert after.encode("hello").ids == made.encode("hello").ids
    assert encode_prompt(after, "hello") == [6, *encode(after, "hello")]
    named = {f"{KEY}pre": "llama3", f"{KEY}add_bos_token": None}
    assert encode_prompt(tokenizer_from_gguf(metadata | named), "a")[0] == 6  # where a file states nothing


def test_qwen_normalises_and_its_distillates_do_not():
    composed, apart = "\u00e9t\u00e9", "e\u0301te\u0301"
    qwen = read_back("qwen2")
    assert encode(qwen, apart) == encode(qwen, composed)
    plain = Tokenizer.from_str(trained("qwen2").to_str())
    plain.normalizer = normalizers.Sequence([])
    metadata = gguf_vocabulary(plain, 2000)
    assert metadata[f"{KEY}pre"] == "deepseek-r1-qwen"
    assert encode(tokenizer_from_gguf(metadata), apart) == encode(plain, apart) != encode(plain, composed)


def test_special_tokens_are_detected_in_text_and_hidden_in_output():
    after = read_back("qwen2")
    ids = encode(after, "a<|im_start|><tool>b")
    start, tool = after.token_to_id("<|im_start|>"), after.token_to_id("<tool>")
    assert start in ids and tool in ids
    assert after.decode(ids) == "a<tool>b"


# ---- what cannot be written ------------------------------------------------------------------------


def test_an_unknown_rule_needs_the_nearest():
    made = Tokenizer.from_str(trained("qwen2").to_str())
    split = pre_tokenizers.Split(Regex(QWEN2 + "|x"), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    with pytest.raises(ValueError, match=r"has no GGUF name: give the nearest, pre= one of"):
        gguf_vocabulary(made, 2000)
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre is 'nonsense'; known: "):
        gguf_vocabulary(made, 2000, pre="nonsense")
    metadata = gguf_vocabulary(made, 2000, pre="qwen2")
    assert_same(tokenizer_from_gguf(metadata), made)


def test_what_gguf_has_no_words_for():
    size = trained("gpt-2").get_vocab_size()
    with pytest.raises(ValueError, match=f"'<tool>' the id {size - 1} .* vocab_size of {size - 1}"):
        gguf_vocabulary(trained("gpt-2"), size - 1)
    made = Tokenizer.from_str(trained("gpt-2").to_str())
    made.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match=r"normalizers \['Lowercase'\]; only byte-level BPE"):
        gguf_vocabulary(made, 2000)
    made = Tokenizer.from_str(trained("gpt-2").to_str())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    with pytest.raises(ValueError, match=r"has the step .*Metaspace.*, for which GGUF has no name"):
        gguf_vocabulary(made, 2000)
    data = json.loads(trained("gpt-2").to_str())
    data["model"]["vocab"] |= {" ": 5000, " a": 5001}
    data["model"]["merges"].append([" ", "a"])
    with pytest.raises(ValueError, match="merges tokens with spaces in them"):
        gguf_vocabulary(Tokenizer.from_str(json.dumps(data)), 6000)
    made = Tokenizer.from_str(trained("gpt-2").to_str())
    made.add_tokens([AddedToken("<a>", normalized=True)])
    assert WHOLE not in gguf_vocabulary(made, 2000)  # there is no normalizer
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert WHOLE in gguf_vocabulary(made, 2000)


# ---- special ids, refusals, speed ------------------------------------------------------------------


def vocabulary(**changes):
    tokens = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "<|return|>",
        "<|call|>",
        "<|end|>",
        "he",
        "<|eot_id|>",
    ]
    values = {
        f"{KEY}model": "gpt2",
        f"{KEY}pre": "gpt-4o",
        f"{KEY}tokens": tokens,
        f"{KEY}token_type": [1] * 256 + [3, 3, 3, 1, 1],
        f"{KEY}merges": ["h e"],
        f"{KEY}eos_token_id": 256,
        f"{KEY}padding_token_id": 0,
    }
    return values | {f"{KEY}{key}": value for key, value in changes.items()}


def test_special_ids():
    result = special_ids(vocabulary())
    assert result == SpecialIds(bos=None, eos=256, pad=0, stop=(256, 257))  # <|end|> ends a message only
    phi = vocabulary(eot_token_id=5, eom_token_id=256)
    phi[f"{KEY}tokens"] = ["<|phi|>" if t == "<|return|>" else t for t in phi[f"{KEY}tokens"]]
    assert special_ids(phi).stop == (256, 5, 257, 258)
    with pytest.raises(
        ValueError, match=r"tokenizer\.ggml\.eot_token_id is 999, the vocabulary has 261 tokens"
    ):
        special_ids(vocabulary(eot_token_id=999))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "model is 'bert'; of GGUF vocabularies .* use the safetensors folder"),
        ({"model": None}, "model is 'None'"),
        (
            {"pre": "unheard-of"},
            "pre is 'unheard-of'; known: .*llama-bpe.* Use the model's safetensors folder",
        ),
        ({"pre": 7}, "pre is '7', not of type str"),
        ({"tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokens": ["a", 3] * 10, "token_type": None}, "must be strings"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "has 'a' twice, as 0 and 2"),
        ({"token_type": [1]}, "token_type has 1 entries for 261 tokens"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"merges": ["he"]}, r"merges\[0\] is 'he', not two tokens"),
        ({"merges": ["h e", 5]}, r"merges\[1\] is '5', not two tokens"),
        ({"merges": ["x y"]}, "GGUF vocabulary cannot be read: .*out of vocabulary"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes', not of type bool"),
        ({"tokens": ["\ud800"], "token_type": [1]}, "(?s)GGUF vocabulary cannot be read: .*surrogates"),
        ({"model": "llama"}, "scores must be a number for each of the 261 tokens"),
        (
            {"model": "llama", "tokens": ["a" * 600], "token_type": [1], "scores": [0.0]},
            "one of 600 characters",
        ),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(vocabulary(**changes))


def test_a_whole_tokenizer_that_belongs_to_another_vocabulary():
    other = train_bpe(["hello " * 20], len(SPECIAL) + 258).to_str()
    with pytest.raises(ValueError, match="are not one vocabulary: "):
        tokenizer_from_gguf(vocabulary() | {WHOLE: other})
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json that can be read"):
        tokenizer_from_gguf(vocabulary() | {WHOLE: "{"})
    with pytest.raises(ValueError, match="of type int, not a string"):
        tokenizer_from_gguf(vocabulary() | {WHOLE: 5})


def test_empty_tokens_get_names():
    metadata = vocabulary()
    metadata[f"{KEY}tokens"][3] = ""
    assert tokenizer_from_gguf(metadata).id_to_token(3) == "[EMPTY_3]"


def test_a_vocabulary_of_gpt_oss_size_is_built_in_seconds():
    """201,088 tokens, about as many merges as two for each."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [a + b for a in letters for b in letters]
    triples = [a + b for a in pairs[:2100] for b in letters[:64]]
    tokens = [*letters, *pairs, *triples][:201_000]
    merges = [f"{p[0]} {p[1]}" for p in pairs]
    merges += [f"{t[0]} {t[1:]}" for t in tokens[len(letters) + len(pairs) :]]
    merges += [f"{t[:2]} {t[2]}" for t in tokens[len(letters) + len(pairs) :]]
    control = [f"<|{i}|>" for i in range(201_088 - len(tokens))]
    metadata = vocabulary(
        tokens=tokens + control,
        token_type=[1] * len(tokens) + [3] * len(control),
        merges=merges,
        eos_token_id=None,
    )
    began = time.process_time()
    made = tokenizer_from_gguf(metadata)
    assert time.process_time() - began < 10
    assert made.get_vocab_size() == len(metadata[f"{KEY}tokens"])
