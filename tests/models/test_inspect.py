"""Gate A: a fault planted in a copy of a tiny checkpoint is named, with what to do; a sound one passes."""

import ast
import json
from pathlib import Path

import planting
import pytest
import tiny
import torch
from planting import GPT_OSS_EXPERTS, findings, only, plant
from safetensors.torch import load_file

from outpace.checkpoint.save import save_checkpoint
from outpace.cli.main import main
from outpace.doctor.checkpoint import PARTS, validate_checkpoint
from outpace.formats.convert import write_gguf


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return planting.save_all(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def copy(saved, tmp_path):
    """copy(family, tensors=change, **config): a copy of a checkpoint with a fault planted in it."""
    return lambda family, *change, **config: plant(saved / family, tmp_path / "copy", *change, **config)


def renamed(change):
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


def without(pattern):
    return lambda tensors: {name: t for name, t in tensors.items() if pattern not in name}


def test_a_sound_checkpoint_passes(saved):
    for folder in saved.iterdir():
        for deep in (False, True):
            report = validate_checkpoint(folder, deep=deep)
            assert report.passed and report.findings == () and report.inspection.comparison.clean


def test_deep_reads_every_byte(saved):
    items = []
    validate_checkpoint(saved / "gpt_oss", deep=True, on_bytes=lambda n, total: items.append((n, total)))
    total = items[0][1]
    assert sum(n for n, _ in items) == total == validate_checkpoint(saved / "gpt_oss").inspection.nbytes


@pytest.mark.parametrize("type", ["f32", "q8_0"])
def test_a_gguf_file(tmp_path, type):
    write_gguf(tiny.target("gpt_oss"), tmp_path / "x.gguf", type=type)
    report = validate_checkpoint(tmp_path / "x.gguf", deep=True)
    assert report.passed and report.findings == ()
    assert report.inspection.parameters == validate_checkpoint(tmp_path / "x.gguf").inspection.parameters
    held = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(held[:-64] + b"\xff\xff\xff\x7f" * 16)  # NaN, in float32
    assert "not_finite" in findings(tmp_path / "x.gguf", deep=True) or type != "f32"


# ---- config.json of another model -----------------------------------------------------------------


def test_a_dense_config_over_experts(copy):
    """Trap 12: it would build a dense MLP on random weights."""
    folder = copy("qwen3_moe", architectures=["Qwen3ForCausalLM"])
    only(folder, "dense_mlp_over_experts", "Qwen3MoeForCausalLM", "layers 0, 2, 3")


def test_a_dense_config_over_gpt_oss(copy):
    folder = copy("gpt_oss", architectures=["LlamaForCausalLM"], layer_types=None)
    result = findings(folder)
    assert "GptOssForCausalLM" in result["dense_mlp_over_experts"].fix
    assert "gpt-oss" in result["sinks"].fix


def test_dense_layers_that_hold_experts(copy):
    folder = copy("qwen3_moe", mlp_only_layers=[1, 3])
    only(folder, "dense_mlp_over_experts", "take 3 out of `mlp_only_layers`")


def test_experts_over_a_dense_checkpoint(copy, saved):
    moe = {k: tiny.QWEN3_MOE[k] for k in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}
    folder = copy("qwen3", architectures=["Qwen3MoeForCausalLM"], **moe)
    only(folder, "experts_over_dense_mlp", "`architectures` should name a dense one")


def test_some_dense_layers_that_the_config_forgot(copy):
    folder = copy("qwen3_moe", mlp_only_layers=[])
    only(folder, "experts_over_dense_mlp", "set `mlp_only_layers` to [1]")
    tiny.write_config(folder, mlp_only_layers=[3])
    assert set(findings(folder)) == {"dense_mlp_over_experts", "experts_over_dense_mlp"}


@pytest.mark.parametrize("family", ["gpt_oss", "gpt_oss_dense", "qwen3_moe"])
def test_another_number_of_experts(copy, family):
    key = "num_experts" if family == "qwen3_moe" else "num_local_experts"
    only(copy(family, **{key: 4}), "num_experts", f"set `{key}` to 5")


@pytest.mark.parametrize(
    ("layers", "fix"), [(3, "set `num_hidden_layers` to 4"), (6, "fetch the files with layers 4, 5")]
)
def test_another_number_of_layers(copy, layers, fix):
    kinds = (tiny.GPT_OSS["layer_types"] * 2)[:layers]
    only(copy("gpt_oss", num_hidden_layers=layers, layer_types=kinds), "num_hidden_layers", fix)


def test_a_layer_that_is_not_there(copy):
    only(copy("llama", without("layers.1.")), "missing_layers", text="layers 1")


def test_layers_with_a_hole(copy):
    far = {"model.layers.7.input_layernorm.weight": torch.ones(42)}
    only(copy("llama", lambda t: t | far), "missing_layers", text="layers 3-6 is there; config.json has 3")


def test_no_layers_at_all(copy):
    folder = copy("llama", without("layers."))
    only(folder, "missing_layers", text="layers 0-2 is there")


def test_a_vocabulary_without_its_embedding(copy):
    folder = copy("gpt_oss", without("embed_tokens"), vocab_size=50)
    assert "set `vocab_size` to 97" in findings(folder)["vocab_size"].fix


def test_latent_attention(copy):
    folder = copy("llama", kv_lora_rank=512, qk_rope_head_dim=64, q_lora_rank=None)
    only(folder, "latent_attention", text="`kv_lora_rank` 512, `qk_rope_head_dim` 64")
    tiny.write_config(folder, architectures=["DeepseekV3ForCausalLM"])
    assert set(findings(folder)) == {"latent_attention", "architecture"}


def test_latent_attention_by_its_tensors(copy):
    folder = copy(
        "llama", lambda t: t.update({"model.layers.0.self_attn.kv_b_proj.weight": torch.ones(4, 3)})
    )
    assert "kv_b_proj" in findings(folder)["latent_attention"].message


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_quantisations_that_are_not_read(copy, method):
    folder = copy("llama", quantization_config={"quant_method": method, "bits": 4})
    only(folder, "quantised", "bfloat16", f"quantised by {method}")


def test_mlx(copy):
    only(copy("llama", quantization={"group_size": 64, "bits": 4}), "quantised", text="by mlx")


def test_experts_that_are_dense_already(copy):
    folder = copy("gpt_oss_dense", quantization_config={"quant_method": "mxfp4"})
    assert not only(folder, "dequantised_experts", "remove `quantization_config`").fault


def test_packed_experts_that_the_config_is_quiet_about(copy):
    assert not only(copy("gpt_oss", quantization_config=None), "unmarked_mxfp4", '"mxfp4"').fault


@pytest.mark.parametrize(
    ("lost", "name"), [("_scales", "blocks_without_scales"), ("_blocks", "scales_without_blocks")]
)
def test_half_of_a_packed_matrix(copy, lost, name):
    only(copy("gpt_oss", without(f"layers.2.mlp.experts.down_proj{lost}")), name, "fetch", "layers.2.mlp")


# ---- head and vocabulary --------------------------------------------------------------------------


def test_a_tied_head_that_differs(copy):
    folder = copy("llama", tie_word_embeddings=True)
    only(folder, "tied_head_differs", "`tie_word_embeddings` to false")


def test_a_tied_head_that_is_the_embedding(copy):
    folder = copy("qwen3", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert validate_checkpoint(folder).findings == ()


def test_an_untied_head_that_is_not_there(copy):
    only(copy("qwen3", tie_word_embeddings=False), "missing_head", "`tie_word_embeddings` to true")


def test_a_padded_vocabulary(copy):
    only(copy("gpt_oss", vocab_size=tiny.VOCAB - 7), "vocab_size", f"set `vocab_size` to {tiny.VOCAB}")


def test_embedding_and_head_of_different_length(copy):
    folder = copy("gpt_oss", lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-3]}))
    only(folder, "vocab_size", "resize_token_embeddings", "lm_head.weight has 94 rows")


# ---- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt_oss", "llama", "qwen3"])
def test_a_head_dim_that_the_config_lost(copy, family):
    """Trap: it then falls back to C / H, or to a default."""
    right = tiny.HF[family]["head_dim"]
    folder = copy(family, head_dim=None if family != "llama" else 14)
    only(folder, "heads", f"set `head_dim` to {right}")


def test_another_number_of_kv_heads(copy):
    only(copy("llama", num_key_value_heads=3), "heads", "set `num_key_value_heads` to 2")


def test_another_number_of_heads(copy):
    only(copy("qwen3", num_attention_heads=9), "heads", "set `num_attention_heads` to 6")


@pytest.mark.parametrize(
    ("family", "config", "name", "fix"),
    [
        ("gpt_oss", {"attention_bias": False}, "attention_bias", "set `attention_bias` to true"),
        ("llama", {"attention_bias": True}, "attention_bias", "set `attention_bias` to false"),
        ("llama", {"mlp_bias": True}, "mlp_bias", "set `mlp_bias` to false"),
        ("llama", {"architectures": ["Qwen3ForCausalLM"]}, "qk_norm", "mind `architectures`"),
        ("qwen3", {"architectures": ["LlamaForCausalLM"]}, "qk_norm", "mind `architectures`"),
    ],
)
def test_parts_that_a_config_switches(copy, family, config, name, fix):
    only(copy(family, **config), name, fix)


# ---- names and dtypes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        (lambda name: f"language_model.{name}", "multimodal"),
        (lambda name: f"base_model.model.{name}", "merge"),
        (lambda name: f"module.{name}", "parallel"),
        (lambda name: f"_orig_mod.{name}", "torch.compile"),
        (lambda name: name.replace("model.", "model.language_model.", 1), "multimodal"),
        (lambda name: name.removeprefix("model."), "ForCausalLM"),
    ],
)
def test_prefixes(copy, change, fix):
    only(copy("llama", renamed(change)), "prefix", fix)


def test_adapter_weights(copy):
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert "merge" in findings(copy("llama", lambda t: t.update({name: torch.ones(4, 42)})))["adapter"].fix


def test_dtypes_that_are_no_weights(copy):
    def change(tensors):
        name = "model.layers.1.mlp.down_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    only(copy("llama", change), "dtype", "bfloat16", "F8_E4M3")


def test_blocks_that_are_no_bytes(copy):
    def change(tensors):
        tensors[GPT_OSS_EXPERTS + "down_proj_scales"] = tensors[GPT_OSS_EXPERTS + "down_proj_scales"].float()

    only(copy("gpt_oss", change), "dtype", text="where U8 belongs")


def test_what_no_check_knows(copy):
    def change(tensors):
        tensors["model.layers.0.surprise"] = torch.ones(2)
        tensors["model.norm.weight"] = torch.ones(41)
        del tensors["model.layers.2.input_layernorm.weight"]

    result = findings(copy("llama", change))
    assert set(result) == {"missing", "left_over", "shape"}
    assert "surprise" in result["left_over"].message and "(41,)" in result["shape"].message


@pytest.mark.parametrize("value", ["42", -1, 0, 2.5, [4], {}, True, 1e30])
def test_a_config_value_of_the_wrong_kind(copy, value):
    only(copy("llama", hidden_size=value), "config", text="`hidden_size`")


def test_another_architecture(copy):
    only(copy("llama", architectures=["MambaForCausalLM"]), "architecture", "GPT-OSS, Llama")


# ---- files ----------------------------------------------------------------------------------------


def test_shards(tmp_path, saved):
    tensors = load_file(saved / "gpt_oss" / "model.safetensors")
    config = json.loads((saved / "gpt_oss" / "config.json").read_text())
    save_checkpoint(tmp_path, config, sorted(tensors.items()), shard_bytes=100_000)
    assert validate_checkpoint(tmp_path).findings == ()
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"]["total_size"] += 2
    index.write_text(json.dumps(content))
    assert not only(tmp_path, "index_total", text="bytes in all").fault
    shard = sorted(tmp_path.glob("model-*"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-4])
    assert shard.name in only(tmp_path, "unreadable", text="cut off").message
    shard.write_bytes(data + b"more")
    only(tmp_path, "unreadable", text="goes on past its last tensor")
    shard.unlink()
    assert shard.name in only(tmp_path, "missing_shards", text="fetch").message


# ---- the page and the command ------------------------------------------------------------------


def test_the_page_knows_every_finding():
    """docs/checkpoints.md has a row for all that the code can say."""
    root = Path(__file__).parents[2]
    given = {pattern[1] for pattern in PARTS} | {"unreadable", "nan_scales", "zero", "absurd", "not_finite"}
    for path in [p for d in ("checkpoint", "models", "doctor") for p in (root / "outpace" / d).glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="LoadError"), args=[_, ast.Constant(value=kind)]):
                    given.add(kind)
                case ast.Call(func=ast.Name(id="Finding"), keywords=keywords):
                    names = [k.value for k in keywords if k.arg == "name"]
                    given |= {n.value for n in names if isinstance(n, ast.Constant)}
    page = (root / "docs" / "checkpoints.md").read_text()
    assert len(given) > 30 and {name for name in given if f"`{name}`" not in page} == set()


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["outpace", "inspect", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    given = capsys.readouterr()
    return ended.value.code or 0, given.out


def test_the_command(monkeypatch, capsys, copy):
    folder = copy("llama", tie_word_embeddings=True)
    code, out = run(monkeypatch, capsys, folder, "--scan")
    assert code == 1 and "tied_head_differs" in out and "-> set `tie_word_embeddings` to false" in out
    code, out = run(monkeypatch, capsys, folder, "--json")
    data = json.loads(out)
    assert code == 1 and not data["passed"] and data["findings"][0]["name"] == "tied_head_differs"
    tiny.write_config(folder, tie_word_embeddings=False)
    code, out = run(monkeypatch, capsys, folder)
    assert code == 0 and "what the config describes" in out


def test_the_command_on_what_cannot_be_opened(monkeypatch, capsys, tmp_path):
    code, out = run(monkeypatch, capsys, tmp_path, "--json")
    data = json.loads(out)
    assert code == 1 and data["findings"][0]["name"] == "no_config" and data["folder"] == str(tmp_path)
