"""`inspect --scan`, and random faults: the gate passes what can be loaded and nothing else."""

import json
import math
import random

import planting
import pytest
import torch
from indexers import indexed_target
from planting import GPT_OSS_EXPERTS, findings, only, plant
from safetensors.torch import load_file, save_file

from outpace.doctor.checkpoint import validate_checkpoint
from outpace.models.load import load_target
from outpace.models.save import save_target


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return planting.save_all(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def copy(saved, tmp_path):
    return lambda family, *change, **config: plant(saved / family, tmp_path / "copy", *change, **config)


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
    report = validate_checkpoint(tmp_path, deep=True)
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
    ("change", "name", "message"),
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
def test_values(copy, change, name, message):
    folder = copy("gpt_oss", change)
    assert validate_checkpoint(folder).findings == ()
    only(folder, name, text=message, deep=True)


def test_a_bias_may_be_zero(copy):
    folder = copy("gpt_oss", zeroed("model.layers.1.self_attn.k_proj.bias"))
    assert validate_checkpoint(folder, deep=True).findings == ()


def test_an_index_may_begin_with_equal_weights(tmp_path):
    """As `outpace retrofit dsa` makes it."""
    model = indexed_target("gpt_oss")[1]
    for attention in model.attentions:
        if attention.indexer is not None:
            with torch.no_grad():
                attention.indexer.proj.weight[-attention.indexer.heads :] = 0
    save_target(model, tmp_path)
    assert not [f for f in validate_checkpoint(tmp_path, deep=True).findings if f.name == "zero"]


def test_many_faults_are_counted(copy):
    def change(tensors):
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor.view(-1)[0] = math.nan

    value = findings(copy("llama", change), deep=True)["not_finite"].message
    assert value.count("model.") < 6 and "tensors)" in value
