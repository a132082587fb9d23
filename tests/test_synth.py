"""Synthetic checkpoints: the published shapes to the parameter, the published format, and text that runs."""

import json
import shutil
from collections import namedtuple
from math import prod

import pytest
import torch
from safetensors import safe_open

from outpace.checkpoint.open import open_checkpoint
from outpace.cli.main import main
from outpace.doctor.checkpoint import inspect_target
from outpace.formats import random_weights as synth
from outpace.formats.random_weights import plan, synthesise
from outpace.models.load import load_target
from outpace.models.published import PUBLISHED
from outpace.ops.mxfp4 import unpack
from outpace.text.tokenizer import read_tokenizer

PARAMETERS = {  # as published; of gpt-oss also the bytes
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
}
NARROW = {
    "gpt_oss": {
        "vocab_size": 5003,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "experts_per_token": 3,
    },
    "qwen3": {"vocab_size": 5003, "hidden_size": 96, "intermediate_size": 56, "num_attention_heads": 6},
    "qwen3_moe": {
        "vocab_size": 5003,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
    },
    "llama": {
        "vocab_size": 5003,
        "hidden_size": 96,
        "intermediate_size": 56,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
}
NARROW["qwen3"] |= {"num_key_value_heads": 3, "head_dim": 10}


@pytest.fixture
def narrow(monkeypatch):
    """The published configs with small axes: the table is data, the code is the same."""
    for name, config in PUBLISHED.items():
        monkeypatch.setitem(PUBLISHED, name, config | NARROW[config["model_type"]])


@pytest.mark.parametrize("like", PUBLISHED)
def test_the_published_size(like):
    made = plan(like)
    assert made.parameters == PARAMETERS[like]
    scales = sum(prod(s) for specs in made.shards.values() for n, _, s in specs if n.endswith("_scales"))
    packed = 16 * scales * 2  # values: a scale has 16 bytes of them
    assert made.nbytes == 2 * (made.parameters - packed) + packed // 2 + scales
    if like == "gpt-oss-20b":
        assert made.nbytes == 13_761_264_768  # what its index states
    assert all(synth.size(specs) <= synth.SHARD_BYTES for specs in made.shards.values())


@pytest.mark.parametrize("like", PUBLISHED)
def test_it_is_read_and_runs(narrow, tmp_path, like):
    made = plan(like, layers=3)
    items = []
    written = synthesise(tmp_path, made, on_bytes=items.append)
    assert sum(items) == written.nbytes == made.nbytes
    result = inspect_target(tmp_path)
    assert result.comparison.clean and result.parameters == made.parameters == written.parameters
    model, tokenizer = load_target(tmp_path), read_tokenizer(tmp_path)
    tokens = torch.tensor([tokenizer.encode("def main():\n    return 1\n").ids])
    with torch.inference_mode():
        out = model(tokens, aux=(0, 2))
        logits = model.logits(out.hidden)
    assert logits.isfinite().all() and out.aux.abs().max() < 100
    assert (logits.argmax(-1) < synth.PRINTABLE).all()  # what it states can be printed
    assert logits.argmax(-1).unique().numel() > 2  # and hangs on what it hears
    assert logits[..., : synth.PRINTABLE].std() > 3 * logits[..., synth.PRINTABLE :].std()


def test_the_published_format(narrow, tmp_path):
    """Read by the reference library: MXFP4 as uint8, all else bfloat16, shards with an index."""
    made = plan("gpt-oss-20b", layers=4, shard_bytes=900_000)
    synthesise(tmp_path, made)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.nbytes
    assert len(made.shards) == 3 and set(index["weight_map"].values()) == set(made.shards)
    for shard in made.shards:
        with safe_open(tmp_path / shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_tensor(name)
                packed = name.endswith(("_blocks", "_scales"))
                assert tensor.dtype == (torch.uint8 if packed else torch.bfloat16)
                assert index["weight_map"].pop(name) == shard
                assert tensor.data_ptr() % tensor.itemsize == 0
    assert index["weight_map"] == {}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert len(config["layer_types"]) == config["num_hidden_layers"] == 4
    assert 200012 in json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]


def test_a_row_of_packed_experts_is_a_unit(narrow, tmp_path):
    synthesise(tmp_path, plan("gpt-oss-20b", layers=1))
    held = open_checkpoint(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weight = unpack(held.get(f"{name}_blocks"), held.get(f"{name}_scales"))
    assert weight.shape == (5, 128, 96)
    assert weight.square().sum(-1).mean().sqrt().item() == pytest.approx(1, rel=0.02)
    assert held.get(f"{name}_blocks").unique().numel() == 256


def test_layers_and_shards_change_nothing_else(narrow, tmp_path):
    """A tensor depends on the seed and its name alone."""
    synthesise(tmp_path / "a", plan("qwen3-8b", layers=1))
    synthesise(tmp_path / "b", plan("qwen3-8b", layers=2, shard_bytes=100_000))
    synthesise(tmp_path / "c", plan("qwen3-8b", layers=1, seed=1))
    a, b, c = (open_checkpoint(tmp_path / x) for x in "abc")
    for name in a.names():
        assert torch.equal(a.get(name), b.get(name)), name
        assert not torch.equal(a.get(name), c.get(name)), name


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes(narrow, tmp_path, dtype):
    synthesise(tmp_path, plan("llama-3.2-1b", layers=1, dtype=dtype))
    assert {d for _, _, d in open_checkpoint(tmp_path).specs()} == {synth.STORED[dtype]}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype


def test_a_stopped_run_goes_on(narrow, tmp_path):
    made = plan("gpt-oss-20b", layers=4, shard_bytes=900_000)
    whole = synthesise(tmp_path / "whole", made)
    first, second = list(made.shards)[:2]

    def stop(n):
        if (tmp_path / "part" / first).is_file():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesise(tmp_path / "part", made, on_bytes=stop)
    assert sorted(p.name for p in (tmp_path / "part").iterdir()) == [first, "synth.json"]
    before = (tmp_path / "part" / first).stat().st_mtime_ns
    (tmp_path / "part" / second).write_bytes(b"cut off")
    again = synthesise(tmp_path / "part", made)
    assert again.kept_shards == 1 and whole.kept_shards == 0
    assert (tmp_path / "part" / first).stat().st_mtime_ns == before
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "part" / path.name).read_bytes() == path.read_bytes(), path.name


def test_another_checkpoint_is_not_touched(narrow, tmp_path):
    synthesise(tmp_path, plan("qwen3-8b", layers=2, shard_bytes=100_000))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    other = plan("gpt-oss-20b", layers=1)
    with pytest.raises(ValueError, match=r"not empty.*--overwrite"):
        synthesise(tmp_path, other)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    synthesise(tmp_path, other, overwrite=True)
    assert load_target(tmp_path).config.architecture == "GptOssForCausalLM"
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def test_a_disk_that_is_too_small(narrow, tmp_path, monkeypatch):
    made = plan("qwen3-8b", layers=2)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1e9, 1e9, made.nbytes + synth.MARGIN - 1))
    with pytest.raises(ValueError, match="GB free"):
        synthesise(tmp_path, made)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1e9, 1e9, made.nbytes))
    with pytest.raises(ValueError, match="GB free"):
        synthesise(tmp_path, made, overwrite=True)
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"like": "gpt-5"}, "gpt-oss-20b, gpt-oss-120b"),
        ({"like": "qwen3-8b", "layers": 0}, "give 1 to 36"),
        ({"like": "qwen3-8b", "layers": 37}, "give 1 to 36"),
        ({"like": "qwen3-8b", "dtype": "int8"}, "choose bfloat16"),
        ({"like": "qwen3-8b", "seed": -1}, "--seed -1"),
    ],
)
def test_wrong_plans(given, message):
    with pytest.raises(ValueError, match=message):
        plan(**given)


def test_a_file_in_the_way(narrow, tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        synthesise(tmp_path / "x", plan("qwen3-8b", layers=1))


def test_the_command(narrow, tmp_path, monkeypatch, capsys):
    items = []
    for options in (("--json",), ()):
        arguments = ["outpace", "synth", str(tmp_path / "x"), "--like", "llama-3.1-8b", "--layers", "2"]
        monkeypatch.setattr("sys.argv", [*arguments, *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        items.append(capsys.readouterr().out)
    written = json.loads(items[0])
    assert written["nbytes"] == plan("llama-3.1-8b", layers=2).nbytes and written["kept_shards"] == 0
    assert f"{written['nbytes']:,} bytes, shards: 1 (1 kept from an earlier run)" in items[1]
