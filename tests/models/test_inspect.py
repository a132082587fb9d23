"""Gate A: a fault planted in a copy of a tiny checkpoint is named, with what to do; a sound one passes."""

import json
import math
import random
import shutil

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from outpace.cli.main import main
from outpace.models.inspect import gate
from outpace.models.load import load_target
from outpace.models.save import save_target
from outpace.weights.save import save_checkpoint

GPT_OSS_EXPERTS = "model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for family in tiny.FAMILIES:
        model = tiny.target(family, window=family not in ("llama", "qwen3_moe"))
        save_target(model, folder / family, pack=family == "gpt_oss")
    save_target(tiny.target("gpt_oss"), folder / "gpt_oss_dense")
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """copy(family, tensors=change, **config): a copy of a checkpoint with a fault planted in it."""

    def make(family, tensors=None, **config):
        folder = shutil.copytree(saved / family, tmp_path / "copy")
        if tensors is not None:
            held = load_file(folder / "model.safetensors")
            held = tensors(held) or held
            save_file({name: t.contiguous() for name, t in held.items()}, folder / "model.safetensors")
        tiny.write_config(folder, **config)
        return folder

    return make


def findings(folder, **options):
    return {finding.name: finding for finding in gate(folder, **options).findings}


def only(folder, name, mend="", said="", **options):
    """The one finding there is."""
    report = gate(folder, **options)
    assert [f.name for f in report.findings] == [name], report.findings
    finding = report.findings[0]
    assert mend in finding.mend and said in finding.said, finding
    assert report.passed is not finding.fault
    assert report.as_json()["findings"][0]["name"] == name
    return finding


def renamed(change):
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


def without(pattern):
    return lambda tensors: {name: t for name, t in tensors.items() if pattern not in name}


def test_a_sound_checkpoint_passes(saved):
    for folder in saved.iterdir():
        for deep in (False, True):
            report = gate(folder, deep=deep)
            assert report.passed and report.findings == () and report.inspection.comparison.clean


def test_deep_reads_every_byte(saved):
    heard = []
    gate(saved / "gpt_oss", deep=True, on_bytes=lambda n, total: heard.append((n, total)))
    total = heard[0][1]
    assert sum(n for n, _ in heard) == total == gate(saved / "gpt_oss").inspection.nbytes


# ---- config.json of another model -----------------------------------------------------------------


def test_a_dense_config_over_experts(copy):
    """Trap 12: it would build a dense MLP on random weights."""
    folder = copy("qwen3_moe", architectures=["Qwen3ForCausalLM"])
    only(folder, "dense_mlp_over_experts", "Qwen3MoeForCausalLM", "layers 0, 2, 3")


def test_a_dense_config_over_gpt_oss(copy):
    folder = copy("gpt_oss", architectures=["LlamaForCausalLM"], layer_types=None)
    found = findings(folder)
    assert "GptOssForCausalLM" in found["dense_mlp_over_experts"].mend
    assert "gpt-oss" in found["sinks"].mend


def test_dense_layers_that_hold_experts(copy):
    folder = copy("qwen3_moe", mlp_only_layers=[1, 3])
    only(folder, "dense_mlp_over_experts", "take 3 out of `mlp_only_layers`")


def test_experts_over_a_dense_checkpoint(copy, saved):
    moe = {k: tiny.QWEN3_MOE[k] for k in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}
    folder = copy("qwen3", architectures=["Qwen3MoeForCausalLM"], **moe)
    only(folder, "experts_over_dense_mlp", "`architectures` should name a dense one")


def test_some_dense_layers_that_the_config_forgot(copy):
    only(copy("qwen3_moe", mlp_only_layers=[]), "experts_over_dense_mlp", "set `mlp_only_layers` to [1]")


@pytest.mark.parametrize("family", ["gpt_oss", "gpt_oss_dense", "qwen3_moe"])
def test_another_number_of_experts(copy, family):
    key = "num_experts" if family == "qwen3_moe" else "num_local_experts"
    only(copy(family, **{key: 4}), "num_experts", f"set `{key}` to 5")


@pytest.mark.parametrize(
    ("layers", "mend"), [(3, "set `num_hidden_layers` to 4"), (6, "fetch the files with layers 4, 5")]
)
def test_another_number_of_layers(copy, layers, mend):
    kinds = (tiny.GPT_OSS["layer_types"] * 2)[:layers]
    only(copy("gpt_oss", num_hidden_layers=layers, layer_types=kinds), "num_hidden_layers", mend)


def test_a_layer_that_is_not_there(copy):
    only(copy("llama", without("layers.1.")), "missing_layers", said="layers 1")


def test_latent_attention(copy):
    folder = copy("llama", kv_lora_rank=512, qk_rope_head_dim=64, q_lora_rank=None)
    only(folder, "latent_attention", said="`kv_lora_rank` 512, `qk_rope_head_dim` 64")
    tiny.write_config(folder, architectures=["DeepseekV3ForCausalLM"])
    assert set(findings(folder)) == {"latent_attention", "architecture"}


def test_latent_attention_by_its_tensors(copy):
    folder = copy(
        "llama", lambda t: t.update({"model.layers.0.self_attn.kv_b_proj.weight": torch.ones(4, 3)})
    )
    assert "kv_b_proj" in findings(folder)["latent_attention"].said


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_quantisations_that_are_not_read(copy, method):
    folder = copy("llama", quantization_config={"quant_method": method, "bits": 4})
    only(folder, "quantised", "bfloat16", f"quantised by {method}")


def test_mlx(copy):
    only(copy("llama", quantization={"group_size": 64, "bits": 4}), "quantised", said="by mlx")


def test_experts_that_are_dense_already(copy):
    folder = copy("gpt_oss_dense", quantization_config={"quant_method": "mxfp4"})
    assert not only(folder, "dequantised_experts", "remove `quantization_config`").fault


def test_packed_experts_that_the_config_is_silent_about(copy):
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
    assert gate(folder).findings == ()


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
    ("family", "config", "name", "mend"),
    [
        ("gpt_oss", {"attention_bias": False}, "attention_bias", "set `attention_bias` to true"),
        ("llama", {"attention_bias": True}, "attention_bias", "set `attention_bias` to false"),
        ("llama", {"mlp_bias": True}, "mlp_bias", "set `mlp_bias` to false"),
        ("llama", {"architectures": ["Qwen3ForCausalLM"]}, "qk_norm", "mind `architectures`"),
        ("qwen3", {"architectures": ["LlamaForCausalLM"]}, "qk_norm", "mind `architectures`"),
    ],
)
def test_parts_that_a_config_switches(copy, family, config, name, mend):
    only(copy(family, **config), name, mend)


# ---- names and dtypes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "mend"),
    [
        (lambda name: f"language_model.{name}", "multimodal"),
        (lambda name: f"base_model.model.{name}", "merge"),
        (lambda name: f"module.{name}", "parallel"),
        (lambda name: f"_orig_mod.{name}", "torch.compile"),
        (lambda name: name.replace("model.", "model.language_model.", 1), "multimodal"),
        (lambda name: name.removeprefix("model."), "ForCausalLM"),
    ],
)
def test_prefixes(copy, change, mend):
    only(copy("llama", renamed(change)), "prefix", mend)


def test_adapter_weights(copy):
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert "merge" in findings(copy("llama", lambda t: t.update({name: torch.ones(4, 42)})))["adapter"].mend


def test_dtypes_that_are_no_weights(copy):
    def change(tensors):
        name = "model.layers.1.mlp.down_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    only(copy("llama", change), "dtype", "bfloat16", "F8_E4M3")


def test_blocks_that_are_no_bytes(copy):
    def change(tensors):
        tensors[GPT_OSS_EXPERTS + "down_proj_scales"] = tensors[GPT_OSS_EXPERTS + "down_proj_scales"].float()

    only(copy("gpt_oss", change), "dtype", said="where U8 belongs")


def test_what_no_check_knows(copy):
    def change(tensors):
        tensors["model.layers.0.surprise"] = torch.ones(2)
        tensors["model.norm.weight"] = torch.ones(41)
        del tensors["model.layers.2.input_layernorm.weight"]

    found = findings(copy("llama", change))
    assert set(found) == {"missing", "left_over", "shape"}
    assert "surprise" in found["left_over"].said and "(41,)" in found["shape"].said


@pytest.mark.parametrize("value", ["42", -1, 0, 2.5, [4], {}, True, 1e30])
def test_a_config_value_of_the_wrong_kind(copy, value):
    only(copy("llama", hidden_size=value), "config", said="`hidden_size`")


def test_another_architecture(copy):
    only(copy("llama", architectures=["MambaForCausalLM"]), "architecture", "GPT-OSS, Llama")


# ---- files ----------------------------------------------------------------------------------------


def test_shards(tmp_path, saved):
    tensors = load_file(saved / "gpt_oss" / "model.safetensors")
    config = json.loads((saved / "gpt_oss" / "config.json").read_text())
    save_checkpoint(tmp_path, config, sorted(tensors.items()), shard_bytes=100_000)
    assert gate(tmp_path).findings == ()
    index = tmp_path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["metadata"]["total_size"] += 2
    index.write_text(json.dumps(said))
    assert not only(tmp_path, "index_total", said="bytes in all").fault
    shard = sorted(tmp_path.glob("model-*"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-4])
    assert shard.name in only(tmp_path, "unreadable", said="cut off").said
    shard.write_bytes(data + b"more")
    only(tmp_path, "unreadable", said="goes on past its last tensor")
    shard.unlink()
    assert shard.name in only(tmp_path, "missing_shards", said="fetch").said


# ---- any fault ------------------------------------------------------------------------------------

NAMES = (
    "model.layers.0.mlp.experts.gate_proj.weight",
    "model.layers.0.mlp.experts.gate_up_proj_blocks",
    "model.layers.0.mlp.experts.0.gate_proj.weight",
    "model.layers.99999999999999999999.mlp.gate_proj.weight",
    "model.layers.0.self_attn.q_norm.weight",
    "layers.0.input_layernorm.weight",
    "lm_head.weight",
    "x",
)


def mutate(tensors, config, rng):
    """One random change of the tensors or of the config."""
    name = rng.choice(sorted(tensors))
    match rng.randrange(7):
        case 0:
            del tensors[name]
        case 1:
            tensors[rng.choice(NAMES)] = tensors.pop(name)
        case 2:
            tensors[rng.choice(NAMES)] = torch.ones([rng.randrange(3) for _ in range(rng.randrange(4))])
        case 3:
            tensors[name] = tensors[name][:-1]
        case 4:
            tensors[name] = tensors[name].mT if tensors[name].dim() > 1 else tensors[name][None]
        case 5:
            tensors[name] = tensors[name].to(rng.choice([torch.int8, torch.float8_e5m2, torch.uint8]))
        case 6:
            key = rng.choice([k for k, v in config.items() if type(v) in (int, bool, list)])
            config[key] = rng.choice([1, 2, 5, 8, 64, True, False, [], ["LlamaForCausalLM"], None])


@pytest.mark.parametrize("seed", range(80))
def test_the_gate_passes_what_can_be_loaded_and_nothing_else(saved, tmp_path, seed):
    rng = random.Random(seed)
    source = saved / rng.choice(sorted(p.name for p in saved.iterdir()))
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    mutate(tensors, config, rng)
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = gate(tmp_path, deep=True)
    try:
        load_target(tmp_path)
        loaded = True
    except ValueError as error:
        loaded = False
        assert str(tmp_path) in str(error) or "config" in str(error)
    shallow = [f.name for f in report.findings if f.fault and f.name not in ("zero", "tied_head_differs")]
    assert loaded is not bool(shallow), report.findings


# ---- values ---------------------------------------------------------------------------------------


def zeroed(name):
    return lambda tensors: tensors | {name: torch.zeros_like(tensors[name])}


def spoiled(name, value, index=0):
    def change(tensors):
        tensors[name].view(-1)[index] = value

    return change


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        (spoiled("model.norm.weight", math.nan, 3), "not_finite", "model.norm.weight (1 values)"),
        (spoiled("lm_head.weight", -math.inf, -1), "not_finite", "lm_head.weight (1 values)"),
        (spoiled("lm_head.weight", 3e38, -1), "absurd", "lm_head.weight (up to 3e+38)"),
        (spoiled(f"{GPT_OSS_EXPERTS}gate_up_proj_scales", 255, 5), "nan_scales", "scales (1 scales)"),
        (spoiled(f"{GPT_OSS_EXPERTS}gate_up_proj_scales", 200, 5), "absurd", "gate_up_proj_scales"),
        (zeroed("model.layers.1.self_attn.k_proj.weight"), "zero", "k_proj.weight"),
        (zeroed(f"{GPT_OSS_EXPERTS}down_proj_blocks"), "zero", "down_proj_blocks"),
    ],
)
def test_values(copy, change, name, said):
    folder = copy("gpt_oss", change)
    assert gate(folder).findings == ()
    only(folder, name, said=said, deep=True)


def test_a_bias_may_be_zero(copy):
    folder = copy("gpt_oss", zeroed("model.layers.1.self_attn.k_proj.bias"))
    assert gate(folder, deep=True).findings == ()


def test_many_faults_are_counted(copy):
    def change(tensors):
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor.view(-1)[0] = math.nan

    said = findings(copy("llama", change), deep=True)["not_finite"].said
    assert said.count("model.") < 6 and "tensors)" in said


# ---- the command ----------------------------------------------------------------------------------


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["outpace", "inspect", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return ended.value.code or 0, said.out


def test_the_command(monkeypatch, capsys, copy):
    folder = copy("llama", tie_word_embeddings=True)
    code, out = run(monkeypatch, capsys, folder, "--deep")
    assert code == 1 and "tied_head_differs" in out and "-> set `tie_word_embeddings` to false" in out
    code, out = run(monkeypatch, capsys, folder, "--json")
    said = json.loads(out)
    assert code == 1 and not said["passed"] and said["findings"][0]["name"] == "tied_head_differs"
    tiny.write_config(folder, tie_word_embeddings=False)
    code, out = run(monkeypatch, capsys, folder)
    assert code == 0 and "what config.json describes" in out


def test_the_command_on_what_cannot_be_opened(monkeypatch, capsys, tmp_path):
    code, out = run(monkeypatch, capsys, tmp_path, "--json")
    said = json.loads(out)
    assert code == 1 and said["findings"][0]["name"] == "no_config" and said["folder"] == str(tmp_path)
