"""outpace convert: a target in another format is the same target, and what fails leaves nothing behind."""

import json
from dataclasses import replace

import pytest
import tiny
import torch

from outpace.checkpoint.open import open_checkpoint
from outpace.checkpoint.tokenizer import open_template, open_tokenizer
from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.formats.convert import convert_target, write_gguf
from outpace.loading import open_target
from outpace.models.load import load_target, named_tensors
from outpace.models.save import save_target
from outpace.text.tokenizer import encode

TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The embedded target as a GGUF file, and that file as a folder again."""
    folder = tmp_path_factory.mktemp("convert")
    convert_target("default", folder / "it.gguf", "f32")
    convert_target(str(folder / "it.gguf"), folder / "again", "f32")
    return folder


def test_weights_go_there_and_back(files):
    ours, theirs = open_target("default")[0], open_target(str(files / "again"))[0]
    for (name, a), (_, b) in zip(named_tensors(ours), named_tensors(theirs), strict=True):
        assert torch.equal(a.float(), b.float()), name
    assert set(ours.config.eos_token_ids) <= set(theirs.config.eos_token_ids)  # and the vocabulary's own
    assert replace(theirs.config, eos_token_ids=ours.config.eos_token_ids) == ours.config


def test_the_text_is_the_same(files):
    text = "def area(self):\n    return "
    items = []
    for path in ("default", str(files / "it.gguf"), str(files / "again")):
        target, tokenizer = open_target(path)
        ids = encode(tokenizer, text)
        items.append((ids, generate(target, [ids], Request(max_new_tokens=40)).tokens[0]))
    assert items[0] == items[1] == items[2]


def test_tokenizer_template_and_stops_go_along(tmp_path, files):
    source = tmp_path / "source"
    save_target(open_target("default")[0], source, dtype=torch.float32)
    (source / "tokenizer.json").write_text((files / "again" / "tokenizer.json").read_text())
    (source / "chat_template.jinja").write_text(TEMPLATE)
    convert_target(str(source), tmp_path / "it.gguf", "bf16")
    convert_target(str(tmp_path / "it.gguf"), tmp_path / "back", "bf16")
    checkpoints = [open_checkpoint(tmp_path / name) for name in ("source", "it.gguf", "back")]
    assert {open_template(c).source for c in checkpoints} == {TEMPLATE}
    message = "naïve\t x = 1_000  # 変数 <|end|>\r\n\r\n"
    assert len({tuple(encode(open_tokenizer(c), message)) for c in checkpoints}) == 1
    assert set(open_target(str(source))[0].config.eos_token_ids) <= set(
        open_target(str(tmp_path / "it.gguf"))[0].config.eos_token_ids
    )


def test_nothing_is_overwritten_unasked(files, tmp_path):
    with pytest.raises(ValueError, match="is there already"):
        convert_target("default", files / "it.gguf", "f32")
    with pytest.raises(ValueError, match="is there already"):
        convert_target("default", files / "again", "f32")
    before = (files / "it.gguf").stat().st_mtime_ns
    convert_target("default", files / "it.gguf", "f32", overwrite=True)
    assert (files / "it.gguf").stat().st_mtime_ns > before


@pytest.mark.parametrize(
    ("out", "type", "message"),
    [
        ("it.gguf", "q2_k", "type 'q2_k' is none of: f32, f16"),
        ("folder", "q8_0", "of safetensors is none of"),
    ],
)
def test_unknown_types(tmp_path, out, type, message):
    with pytest.raises(ValueError, match=message):
        convert_target("default", tmp_path / out, type)
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_nothing(tmp_path):
    def broken(done, total):
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        convert_target("default", tmp_path / "it.gguf", "f32", on_bytes=broken)
    assert not list(tmp_path.iterdir())


def test_progress_adds_up_to_the_tensors(tmp_path):
    seen = []
    convert_target("default", tmp_path / "it.gguf", "q8_0", on_bytes=lambda n, total: seen.append((n, total)))
    assert sum(n for n, _ in seen) == seen[0][1] == open_checkpoint(tmp_path / "it.gguf").nbytes()  # type: ignore[attr-defined]


def test_qwen3_keeps_its_tied_head(tmp_path):
    save_target(tiny.target("qwen3", window=False), tmp_path / "hf")
    data = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert data["tie_word_embeddings"] is True
    write_gguf(load_target(tmp_path / "hf"), tmp_path / "it.gguf", type="f32")
    checkpoint = open_checkpoint(tmp_path / "it.gguf")
    assert checkpoint.config["tie_word_embeddings"] and "lm_head.weight" not in checkpoint.names()
