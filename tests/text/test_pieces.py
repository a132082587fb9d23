"""Where texts are cut: as llama.cpp cuts them, an engine that shares no code with us.

llama.cpp's tokens are kept in golden/llama_cpp_tokens.json, so that they are compared where it is not
installed, too. `python tests/chat/test_pieces.py` writes them again.
"""

import json
import sys
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import nasty
from vocabularies import KEY, RULES, cut_by, sentencepiece

from outpace.checkpoint.shipped import EMBEDDED
from outpace.text.gguf_tokenizer import gguf_vocabulary, tokenizer_from_gguf
from outpace.text.pre_tokenizers import NAMED
from outpace.text.tokenizer import encode, read_tokenizer

try:
    import llama_cpp
except ImportError:
    llama_cpp = None
live = pytest.mark.skipif(llama_cpp is None, reason="llama-cpp-python is not installed: make oracle")

GOLDEN = Path(__file__).parent / "golden" / "llama_cpp_tokens.json"
# Where llama.cpp does not do what the models' own tokenizers do: no NFC; letters outside ASCII are of either
# case, and marks are none; U+2028 is not in a range that holds it.
DEPARTS = {
    "qwen2": {nasty.MARKS},
    "gpt-4o": {nasty.CASES, nasty.MARKS, nasty.INDIC},
    "tekken": {nasty.CASES, nasty.MARKS, nasty.INDIC},
    "deepseek-coder": {nasty.SEPARATORS},
    "deepseek-llm": {nasty.SEPARATORS},
}


def write_vocabulary(path, metadata):
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{key}")(32)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def their_tokens(folder, metadata, texts):
    path = folder / "vocabulary.gguf"
    write_vocabulary(path, {f"{KEY}bos_token_id": 0, f"{KEY}eos_token_id": 1} | metadata)
    engine = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    items = [engine.tokenize(t.encode(), add_bos=False, special=True) if t else [] for t in texts]
    path.unlink()
    return items


def golden():
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", RULES)
def test_cuts_are_llama_cpps(name):
    theirs = golden()[name]
    ours = tokenizer_from_gguf(cut_by(name))
    differ = {text for text, ids in zip(nasty.TEXTS, theirs, strict=True) if encode(ours, text) != ids}
    assert differ == DEPARTS.get(name, set())


def test_sentencepiece_is_llama_cpps():
    ours = tokenizer_from_gguf(sentencepiece())
    assert [encode(ours, text) for text in nasty.TEXTS] == golden()["sentencepiece"]
    for text in nasty.TEXTS:
        if "<" not in text and "\u2581" not in text:
            assert ours.decode(encode(ours, text)) == text
    assert ours.encode("a").ids[0] == 1


@live
@pytest.mark.parametrize("name", NAMED)
def test_every_name_is_one_that_llama_cpp_knows(name, tmp_path):
    theirs = their_tokens(tmp_path, cut_by(name), nasty.TEXTS)
    same = next(n for n in RULES if NAMED[n] == NAMED[name])
    assert theirs == golden()[same]


@live
def test_llama_cpp_cuts_the_embedded_vocabulary_by_the_nearest_rule(tmp_path):
    ours = read_tokenizer(EMBEDDED / "target")
    theirs = their_tokens(tmp_path, gguf_vocabulary(ours, 4096), nasty.TEXTS)
    differ = [text for text, ids in zip(nasty.TEXTS, theirs, strict=True) if encode(ours, text) != ids]
    assert differ == [nasty.QUOTES]


@live
def test_any_text_is_cut_as_llama_cpp_does(tmp_path):
    ours = tokenizer_from_gguf(cut_by("llama-bpe"))
    texts = []

    @settings(max_examples=500)
    @given(text=st.text(min_size=1, max_size=60))
    def collect(text):
        texts.append(text)

    collect()
    for text, theirs in zip(texts, their_tokens(tmp_path, cut_by("llama-bpe"), texts), strict=True):
        assert encode(ours, text) == theirs, text


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        values = {name: their_tokens(Path(folder), cut_by(name), nasty.TEXTS) for name in RULES}
        values["sentencepiece"] = their_tokens(Path(folder), sentencepiece(), nasty.TEXTS)
    GOLDEN.write_text(json.dumps(values, separators=(",", ":")) + "\n")
    sys.stdout.write(f"{GOLDEN}: {len(values)} vocabularies\n")
