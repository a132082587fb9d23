"""Checkpoint folders: what is written is read back, and what is wrong is refused by name."""

import json
import os
import shutil

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from outpace.checkpoint.open import LoadError, open_checkpoint
from outpace.checkpoint.save import save_checkpoint, write_atomically, write_json
from outpace.models.load import fingerprint, load_target, named_tensors, parse_config
from outpace.models.save import save_target


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_target(tiny.target("gpt_oss"), folder / "gpt_oss")
    save_target(tiny.target("qwen3"), folder / "qwen3")
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(saved / "gpt_oss", tmp_path / "copy")


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_same(a, b):
    ours, theirs = dict(named_tensors(a)), dict(named_tensors(b))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_round_trip(family, tmp_path):
    model = tiny.target(family, window=family not in ("llama", "qwen3_moe"))
    save_target(model, tmp_path)
    again = load_target(tmp_path)
    assert again.config == model.config and fingerprint(again) == fingerprint(model)
    assert_same(again, model)


def test_packed_round_trips(tmp_path):
    model = tiny.target("gpt_oss")
    save_target(model, tmp_path / "packed", pack=True)
    packed = load_target(tmp_path / "packed")
    assert packed.layers[0].mlp.up.weight is None and packed.layers[0].mlp.up.blocks.dtype == torch.uint8
    save_target(packed, tmp_path / "again")
    assert_same(load_target(tmp_path / "again"), packed)
    save_target(packed, tmp_path / "dense", unpack=True)
    dense = load_target(tmp_path / "dense")
    tokens = tiny.tokens(2, 30)
    with torch.inference_mode():
        a, b = (m.logits(m(tokens).hidden) for m in (packed, dense))
    assert (a - b).abs().max() < 1e-4
    save_target(dense, tmp_path / "repacked", pack=True)
    save_target(load_target(tmp_path / "repacked"), tmp_path / "dense again", unpack=True)
    assert_same(load_target(tmp_path / "dense again"), dense)  # values of the grid stay on it
    assert "quantization_config" not in open_checkpoint(tmp_path / "dense").config


def test_bfloat16_is_kept(tmp_path):
    save_target(tiny.target("llama", window=False), tmp_path, dtype=torch.bfloat16)
    model = load_target(tmp_path)
    assert model.embed_tokens.weight.dtype == torch.bfloat16
    assert model(tiny.tokens(1, 5)).hidden.dtype == torch.float32


def test_fingerprint_sees_every_weight(saved):
    model = load_target(saved / "gpt_oss")
    before = fingerprint(model)
    with torch.no_grad():
        model.layers[2].mlp.down.bias[4, 3] += 1e-3
    assert fingerprint(model) != before


# ---- refusals ---------------------------------------------------------------------------------


def test_missing_tensor(folder):
    edit(folder, lambda t: t.pop("model.layers.1.self_attn.sinks"))
    with pytest.raises(LoadError, match=r"missing in the checkpoint: model\.layers\.1\.self_attn\.sinks"):
        load_target(folder)


def test_left_over_tensor(folder):
    edit(folder, lambda t: t.update({"model.layers.0.mlp.gate_proj.weight": torch.zeros(3, 4)}))
    with pytest.raises(LoadError, match=r"left over in the checkpoint: model\.layers\.0\.mlp\.gate_proj"):
        load_target(folder)


def test_wrong_shape(folder):
    edit(folder, lambda t: t.update({"model.norm.weight": torch.zeros(95)}))
    with pytest.raises(LoadError, match=r"model\.norm\.weight: shape \(95,\), the config wants \(96,\)"):
        load_target(folder)


def test_swapped_shape_of_the_same_size(folder):
    """As many elements, other axes: a reshape would take it."""
    edit(folder, lambda t: t.update({"model.embed_tokens.weight": torch.zeros(96, 97)}))
    with pytest.raises(LoadError, match=r"embed_tokens"):
        load_target(folder)


def test_another_number_of_layers(folder):
    tiny.write_config(folder, num_hidden_layers=3, layer_types=tiny.GPT_OSS["layer_types"][:3])
    with pytest.raises(LoadError, match=r"left over in the checkpoint: model\.layers\.3"):
        load_target(folder)


def test_dense_config_over_experts(saved, tmp_path):
    """The classic silent one: names of another architecture."""
    copy = shutil.copytree(saved / "gpt_oss", tmp_path / "copy")
    (copy / "config.json").write_text(json.dumps(tiny.LLAMA))
    with pytest.raises(LoadError, match=r"missing in the checkpoint"):
        load_target(copy)


@pytest.mark.parametrize("left", [0, 4, 100, 100_000])
def test_truncated_file(folder, left):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(LoadError, match=r"model\.safetensors cannot be read"):
        load_target(folder)


def test_no_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(LoadError, match=r"holds no config\.json"):
        load_target(folder)


@pytest.mark.parametrize("text", ["{", "[1]", "\x80"])
def test_config_that_is_not_one(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin1"))
    with pytest.raises(LoadError, match=r"config\.json"):
        load_target(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="holds neither"):
        load_target(folder)


@pytest.mark.parametrize("name", ["nowhere", "nowhere.gguf"])
def test_nothing_there(tmp_path, name):
    with pytest.raises(LoadError, match=f"{name} is not there: name a checkpoint's folder, a GGUF file"):
        load_target(tmp_path / name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM; known: GptOss"),
        ({"architectures": None}, "known: GptOss"),
        ({"num_attention_heads": 5}, "5 is not a multiple of num_key_value_heads 2"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"hidden_size": None}, "lacks `hidden_size`"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rope_parameters": {"rope_type": "dynamic"}, "rope_scaling": None}, "'dynamic' is not supported"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha 1.5"),
    ],
)
def test_configs_that_are_refused(folder, changes, message):
    tiny.write_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_target(folder)


def test_a_tied_head_may_be_present(saved, tmp_path):
    """Some writers store the head next to the embedding it equals."""
    copy = shutil.copytree(saved / "qwen3", tmp_path / "copy")
    edit(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_same(load_target(copy), load_target(saved / "qwen3"))


def test_an_untied_head_may_not_be_missing(folder):
    edit(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(LoadError, match=r"missing in the checkpoint: lm_head\.weight"):
        load_target(folder)


# ---- shards -----------------------------------------------------------------------------------

PARTS = {"a": torch.arange(6.0), "b": torch.arange(12.0).reshape(3, 4), "c": torch.ones(5)}


def test_shards_and_index(tmp_path):
    save_checkpoint(tmp_path, {"x": 1}, PARTS.items(), shard_bytes=48)
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == [
        "config.json",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    read = open_checkpoint(tmp_path)
    assert read.names() == ["a", "b", "c"] and read.shape("b") == (3, 4)
    assert {n: (s, d) for n, s, d in read.specs()} == {n: (tuple(t.shape), "F32") for n, t in PARTS.items()}
    for name, tensor in PARTS.items():
        assert torch.equal(read.get(name), tensor)
    with pytest.raises(LoadError, match="no tensor z"):
        read.get("z")


def test_a_shard_that_is_not_there(tmp_path):
    save_checkpoint(tmp_path, {}, PARTS.items(), shard_bytes=48)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(LoadError, match="model-00002-of-00003"):
        open_checkpoint(tmp_path)


def test_a_shard_that_is_cut_off(tmp_path):
    save_checkpoint(tmp_path, {}, PARTS.items(), shard_bytes=48)
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(LoadError, match=r"model-00002-of-00003\.safetensors cannot be read"):
        open_checkpoint(tmp_path)


def test_a_promise_no_shard_keeps(tmp_path):
    save_checkpoint(tmp_path, {}, PARTS.items(), shard_bytes=48)
    index = tmp_path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["d"] = data["weight_map"]["a"]
    index.write_text(json.dumps(data))
    with pytest.raises(LoadError, match="promises d"):
        open_checkpoint(tmp_path)
    index.write_text("{}")
    with pytest.raises(LoadError, match="not a safetensors index"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path):
    """All are there, but whoever reads the shard that the index names would not find them."""
    save_checkpoint(tmp_path, {}, PARTS.items(), shard_bytes=48)
    index = tmp_path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    shards = data["weight_map"]
    shards["a"], shards["b"] = shards["b"], shards["a"]
    index.write_text(json.dumps(data))
    with pytest.raises(LoadError, match=r"says that a is in model-00002\S+, and model-00001"):
        open_checkpoint(tmp_path)


def test_saving_over_an_older_checkpoint(tmp_path):
    """No shard of the old one, no index, no temporary file stays behind."""
    save_checkpoint(tmp_path, {}, PARTS.items(), shard_bytes=48)
    save_checkpoint(tmp_path, {}, [("e", torch.zeros(2))])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert open_checkpoint(tmp_path).names() == ["e"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")
    assert json.loads(path.read_text()) == {"old": 1}


def test_rope_is_read_in_both_forms():
    old = tiny.LLAMA | {"rope_theta": 50000.0}
    parameters = old.pop("rope_parameters")
    old["rope_scaling"] = {k: v for k, v in parameters.items() if k != "rope_theta"}  # type: ignore[attr-defined]
    assert parse_config(old).rope == parse_config(tiny.LLAMA).rope
    old["rope_scaling"]["type"] = old["rope_scaling"].pop("rope_type")  # type: ignore[attr-defined]
    assert parse_config(old).rope == parse_config(tiny.LLAMA).rope


def test_weights_may_be_read_by_whoever_reads_the_config(tmp_path):
    before = os.umask(0o022)
    try:
        save_checkpoint(tmp_path, {}, [("a", torch.zeros(2))])
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {0o644}
