"""What is not read is recognised, wherever it lies, and refused with the command that fixes it."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from outpace.checkpoint.open import LoadError, open_checkpoint

METAL = b"GPT-OSS v1.0\0\0\0\0" + bytes(16) + struct.pack("<II", 131072, 24) + bytes(1000)


def refusal(path):
    with pytest.raises(LoadError) as caught:
        open_checkpoint(path)
    return caught.value.kind, str(caught.value)


@pytest.mark.parametrize("where", ["model.bin", "metal/model.bin", "weights.dat"])
@pytest.mark.parametrize("layers", [24, 36, 7])
def test_metal(tmp_path, where, layers):
    """As a file whatever its name, and as the contents of a folder."""
    path = tmp_path / where
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(METAL[:36] + struct.pack("<I", layers) + METAL[40:])
    name = {24: "openai/gpt-oss-20b", 36: "openai/gpt-oss-120b"}.get(layers, "openai/gpt-oss-")
    for given in (path, path.parent, tmp_path) if where != "weights.dat" else (path,):
        kind, value = refusal(given)
        assert kind == "metal" and str(path) in value
        assert f"hf download {name}" in value


def test_a_metal_file_beside_safetensors_does_not_matter(tmp_path):
    (tmp_path / "metal").mkdir()
    (tmp_path / "metal" / "model.bin").write_bytes(METAL)
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).names() == ["a"]


@pytest.mark.parametrize("cut", [0, 3, 15, 16, 39])
def test_a_metal_file_that_is_cut_off(tmp_path, cut):
    (tmp_path / "model.bin").write_bytes(METAL[:cut])
    kind, value = refusal(tmp_path / "model.bin")
    assert kind == ("metal" if cut >= 16 else "pickle") and "model.bin" in value


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickles(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x02")
    (tmp_path / "config.json").write_text("{}")
    kind, value = refusal(tmp_path)
    assert kind == "pickle" and "save_pretrained" in value and str(tmp_path) in value


def test_an_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "meta/llama"}))
    save_file({"a": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    kind, value = refusal(tmp_path)
    assert kind == "adapter" and "meta/llama" in value and "merge_and_unload" in value


@pytest.mark.parametrize("inner", [".", "original"])
def test_metas_own_files(tmp_path, inner):
    (tmp_path / inner).mkdir(exist_ok=True)
    (tmp_path / inner / "consolidated.00.pth").write_bytes(b"\x80\x02")
    kind, value = refusal(tmp_path)
    assert kind == "original" and "--exclude 'original/*'" in value


def test_openais_own_layout(tmp_path):
    inner = tmp_path / "original"
    inner.mkdir()
    (inner / "config.json").write_text('{"num_hidden_layers": 24}')
    save_file(
        {"block.0.attn.qkv.weight": torch.ones(2), "unembedding.weight": torch.ones(2)},
        inner / "model.safetensors",
    )
    for given in (inner, tmp_path):
        kind, value = refusal(given)
        assert kind == "original" and str(inner) in value and "parent folder" in value


@pytest.mark.parametrize(
    ("name", "data", "kind", "text"),
    [
        ("model.safetensors", b"x" * 20, "one_file", "name its folder"),
        ("consolidated.00.pth", b"\x80\x02", "pickle", "converts?|convert it"),
        ("notes.txt", b"hello", "no_weights", "is no checkpoint"),
        ("empty", b"", "no_weights", "is no checkpoint"),
    ],
)
def test_files(tmp_path, name, data, kind, text):
    (tmp_path / name).write_bytes(data)
    result, message = refusal(tmp_path / name)
    assert result == kind and any(part in message for part in text.split("|"))


def test_a_folder_of_gguf_files(tmp_path):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    kind, value = refusal(tmp_path)
    assert kind == "gguf_folder" and "a.gguf and 1 more" in value


def test_git_lfs(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4792272488\n"
    (tmp_path / "model.safetensors").write_bytes(pointer)
    kind, value = refusal(tmp_path)
    assert kind == "lfs_pointer" and "git lfs pull" in value


@pytest.mark.parametrize("config", [True, False])
def test_nothing(tmp_path, config):
    if config:
        (tmp_path / "config.json").write_text("{}")
    assert refusal(tmp_path)[0] == ("no_weights" if config else "no_config")
    assert refusal(tmp_path / "nowhere")[0] == "no_config"
